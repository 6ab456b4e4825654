"""Wake idle workers when, and only if, the transaction commits."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final, TypeGuard
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Table, event
from sqlalchemy.engine import Transaction, TwoPhaseTransaction
from sqlalchemy.orm import Mapper

from sqla_jobqueue.model import DEFAULT_QUEUE, JobTable, job_table
from sqla_jobqueue.statements import channel_name, notify
from sqla_jobqueue.status import JobStatus
from sqla_jobqueue.tasks import queue_settings

NOTIFY_OPTION: Final = "sqla_jobqueue_notify"
"""Execution option of an engine or connection; False sends no NOTIFY through it, as a transaction pooler wants."""

_sent: WeakKeyDictionary[Transaction, set[tuple[str, str]]] = WeakKeyDictionary()
"""By transaction and savepoint, what it has sent. Weak, so that it ends with them."""


def channel_of(connection: Connection, table: Table) -> str:
    """The channel of a job table as this connection finds it, its schema translated. Sends nothing."""
    schema = connection.schema_for_object(table) or connection.dialect.default_schema_name
    return channel_name(table, schema)


def send_wakeup(connection: Connection, table: Table, queue: str) -> None:
    """NOTIFY once per transaction or savepoint and queue.

    Per savepoint, since rolling it back takes its NOTIFY along; not in a savepoint whose transaction has sent one.
    None in a two-phase transaction, which PostgreSQL would refuse to prepare: polling finds those jobs.

    An error of NOTIFY is one of the transaction, as PostgreSQL has it: a role without the right to call pg_notify
    needs ``notify=False`` or the execution option. A savepoint around it would cost every commit two round trips.
    """
    root = connection.get_transaction()
    if connection.dialect.name != "postgresql" or root is None or isinstance(root, TwoPhaseTransaction):
        return
    settings = queue_settings(table, queue)
    if settings is not None and not settings.notify:
        return
    if not connection.get_execution_options().get(NOTIFY_OPTION, True):
        return
    wakeup = (channel_of(connection, table), queue)
    sent = _sent.setdefault(connection.get_nested_transaction() or root, set())
    if wakeup not in sent and wakeup not in _sent.get(root, ()):
        connection.execute(notify(), {"channel": wakeup[0], "queue": queue})
        sent.add(wakeup)


@event.listens_for(JobTable, "after_insert", propagate=True)
def _wake(_mapper: Mapper[Any], connection: Connection, job: JobTable) -> None:
    loaded = vars(job)
    if loaded.get("status") in {None, JobStatus.PENDING} and not _is_ahead(loaded):
        send_wakeup(connection, job_table(type(job)), loaded.get("queue") or DEFAULT_QUEUE)


def _is_ahead(loaded: dict[str, Any]) -> bool:
    """Whether the job has to wait for its time, which only polling sees. False where the INSERT did not tell."""
    run_at, created_at = loaded.get("run_at"), loaded.get("created_at")
    return _is_instant(run_at) and _is_instant(created_at) and run_at > created_at


def _is_instant(value: object) -> TypeGuard[datetime]:
    return isinstance(value, datetime) and value.utcoffset() is not None
