"""Queues and tasks: what runs which kind of job, and how.

A `JobQueue` is a named part of a job table with its own settings. `@queue.task` registers a handler under a kind; the
result is a `Task`, which can be called like the handler, and says how a job of it is enqueued::

    mail = JobQueue(Job, "mail", lease=timedelta(minutes=2), max_attempts=10)

    @mail.task(backoff=exponential(cap=timedelta(hours=1)), timeout=timedelta(seconds=30))
    async def send_receipt(session: AsyncJobSession[Job], order: Order) -> None: ...

    send_receipt.options(delay=timedelta(minutes=5))      # the same task, other options
    send_receipt.call(order=order)                        # task and checked payload, for the plural verbs
    mail.kind("send_receipt")                             # for a producer that does not import the handler

There is no global registry: a queue knows its tasks, a worker is given queues. Options are immutable and checked at
once. The model's table remembers which queues were declared for it, so that two declarations of one queue that differ
are an error instead of a surprise.
"""

from __future__ import annotations

from sqla_jobqueue.tasks.options import MAX_KIND, MAX_QUEUE_NAME, Options, checked_name
from sqla_jobqueue.tasks.queue import (
    DEFAULT_BACKOFF,
    DEFAULT_KEEP,
    DEFAULT_LEASE,
    JobQueue,
    QueueSettings,
    declared_queues,
    has_kinds,
    queue_settings,
    queues_with_tasks,
)
from sqla_jobqueue.tasks.task import Call, Kind, Producer, Task

__all__ = [
    "DEFAULT_BACKOFF",
    "DEFAULT_KEEP",
    "DEFAULT_LEASE",
    "MAX_KIND",
    "MAX_QUEUE_NAME",
    "Call",
    "JobQueue",
    "Kind",
    "Options",
    "Producer",
    "QueueSettings",
    "Task",
    "checked_name",
    "declared_queues",
    "has_kinds",
    "queue_settings",
    "queues_with_tasks",
]
