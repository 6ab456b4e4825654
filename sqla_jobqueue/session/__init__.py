"""Enqueue on the application's own Session.

`enqueue` is `session.add` for jobs: synchronous on every kind of Session, without I/O. The row is written by the
application's next flush, inside its savepoints, and exists if and only if its transaction commits::

    make_session = sessionmaker(engine, class_=JobSession)
    with make_session.begin() as session:
        order = Order(customer="dave", total_cents=2500)
        session.add(order)
        session.enqueue(send_receipt, order=order)        # no flush, and no key needed yet

A plain Session, an AsyncSession, a scoped_session or an application's own class does the same with
``enqueue(session, send_receipt, order=order)``, or mixes in `EnqueueMixin`.

An entity that has no key yet is filled in at the flush: the job is inserted with a null in its place, and one UPDATE
in the same flush puts the key there. Idle workers are woken by NOTIFY at commit, also for a plain
``session.add(Job(...))``.
"""

from __future__ import annotations

from sqla_jobqueue.session.classes import AsyncJobSession, EnqueueMixin, JobSession
from sqla_jobqueue.session.current import (
    AnySession,
    CurrentJob,
    async_session_of,
    current_attempt,
    current_job,
    set_current_job,
    sync_session_of,
)
from sqla_jobqueue.session.enqueueing import enqueue, enqueue_all
from sqla_jobqueue.session.notifying import NOTIFY_OPTION, channel_of

__all__ = [
    "NOTIFY_OPTION",
    "AnySession",
    "AsyncJobSession",
    "CurrentJob",
    "EnqueueMixin",
    "JobSession",
    "async_session_of",
    "channel_of",
    "current_attempt",
    "current_job",
    "enqueue",
    "enqueue_all",
    "set_current_job",
    "sync_session_of",
]
