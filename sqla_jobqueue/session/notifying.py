"""Wake idle workers when, and only if, the transaction commits."""

from __future__ import annotations

from typing import Any, Final
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Table, event
from sqlalchemy.engine import Transaction, TwoPhaseTransaction
from sqlalchemy.orm import Mapper

from sqla_jobqueue.model import JobTable, job_table
from sqla_jobqueue.statements import channel_name, notify
from sqla_jobqueue.tasks import queue_settings

NOTIFY_OPTION: Final = "sqla_jobqueue_notify"
"""Execution option of an engine or connection; False sends no NOTIFY through it, as a transaction pooler wants."""

_sent: WeakKeyDictionary[Transaction, set[tuple[str, str]]] = WeakKeyDictionary()


def channel_of(connection: Connection, table: Table) -> str:
    """The channel of a job table as this connection finds it, its schema translated. Sends nothing."""
    schema = connection.schema_for_object(table) or connection.dialect.default_schema_name
    return channel_name(table, schema)


def send_wakeup(connection: Connection, table: Table, queue: str) -> None:
    """NOTIFY once per transaction or savepoint and queue.

    Per savepoint, since rolling it back takes its NOTIFY along. None in a two-phase transaction, which PostgreSQL
    would refuse to prepare: polling finds those jobs.
    """
    settings = queue_settings(table, queue)
    if (settings is not None and not settings.notify) or not connection.get_execution_options().get(
        NOTIFY_OPTION, True
    ):
        return
    root = connection.get_transaction()
    if connection.dialect.name != "postgresql" or root is None or isinstance(root, TwoPhaseTransaction):
        return
    wakeup = (channel_of(connection, table), queue)
    sent = _sent.setdefault(connection.get_nested_transaction() or root, set())
    if wakeup not in sent:
        sent.add(wakeup)
        connection.execute(notify(), {"channel": wakeup[0], "queue": queue})


@event.listens_for(JobTable, "after_insert", propagate=True)
def _wake(_mapper: Mapper[Any], connection: Connection, job: JobTable) -> None:
    loaded = vars(job)
    run_at, created_at = loaded.get("run_at"), loaded.get("created_at")
    if loaded.get("status", "pending") != "pending" or (run_at and created_at and run_at > created_at):
        return  # nothing to run yet: polling finds it when its time has come
    send_wakeup(connection, job_table(type(job)), loaded.get("queue") or "default")
