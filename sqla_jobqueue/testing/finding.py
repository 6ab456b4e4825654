"""Which session, which job models and which queues a test is about."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

from sqlalchemy import Connection, Table, inspect
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.orm import Mapper, Session, scoped_session

from sqla_jobqueue.errors import ConfigurationError
from sqla_jobqueue.model import JobTable, job_mapper, job_table
from sqla_jobqueue.session import AnySession, sync_session_of
from sqla_jobqueue.tasks import JobQueue, queues_with_tasks

R = TypeVar("R")


def given(session: AnySession) -> Session | AsyncSession:
    """The session itself, where a scoped registry was given."""
    found: Any = session() if isinstance(session, scoped_session | async_scoped_session) else session
    return found if isinstance(found, AsyncSession) else sync_session_of(found)


def on(session: AnySession, body: Callable[[Session], R]) -> Any:
    """Run a sync body on a session: at once, or for an async session as an awaitable."""
    found = given(session)
    return found.run_sync(body) if isinstance(found, AsyncSession) else body(found)


def connection_of(session: Session, mapper: Mapper[Any] | None, **arguments: Any) -> Connection:
    """The connection on which the test's transaction is.

    Raises:
        ConfigurationError: it has no transaction, so that what runs on it would be committed.
    """
    bind = session.get_bind(mapper, **arguments)
    if not isinstance(bind, Connection):
        return session.connection(bind_arguments={"mapper": mapper, **arguments})
    if not bind.in_transaction():
        raise ConfigurationError(
            "the session is bound to a connection without a transaction, so that its commits would be real: begin one "
            "on the connection, and roll it back after the test; sqla_jobqueue.testing.rolled_back does both"
        )
    return bind


def models_of(session: Session, *queues: JobQueue[Any]) -> list[type[JobTable]]:
    """The job models of the queues; without queues, of all that have tasks and whose table the database has.

    Raises:
        ConfigurationError: two of them are mapped to tables of the same name.
    """
    if queues:
        return list({queue.table: queue.model for queue in queues}.values())
    found: dict[tuple[str | None, str], type[JobTable]] = {}
    for model in _subclasses(JobTable):
        table = _table_with_tasks(model)
        if table is None or not _has_table(session, model, table):
            continue
        known = found.setdefault((table.schema, table.name), model)
        if job_table(known) is not table:
            raise ConfigurationError(
                f"two job models with tasks are mapped to {table.fullname!r}: say which queues the test is about"
            )
    return list(found.values())


def queues_of(session: Session, queues: Sequence[JobQueue[Any]]) -> list[JobQueue[Any]]:
    """The queues; without any, all that have tasks and whose table the database has."""
    return list(queues) or [queue for model in models_of(session) for queue in queues_with_tasks(job_table(model))]


def job_connections(session: Session, queues: Sequence[JobQueue[Any]]) -> set[Connection]:
    """The connections that a session is bound to for job tables. Sends nothing."""
    models = [queue.model for queue in queues] or [
        each for each in _subclasses(JobTable) if _table_with_tasks(each) is not None
    ]
    found: set[Connection] = set()
    for model in models:
        try:
            bind = session.get_bind(job_mapper(model))
        except UnboundExecutionError:
            continue
        if isinstance(bind, Connection):
            found.add(bind)
    return found


def _subclasses(model: type[JobTable]) -> Iterator[type[JobTable]]:
    for each in model.__subclasses__():
        yield each
        yield from _subclasses(each)


def _table_with_tasks(model: type[JobTable]) -> Table | None:
    if not isinstance(inspect(model, raiseerr=False), Mapper):
        return None
    table = job_mapper(model).local_table
    return cast("Table", table) if isinstance(table, Table) and queues_with_tasks(table) else None


def _has_table(session: Session, model: type[JobTable], table: Table) -> bool:
    try:
        connection = connection_of(session, job_mapper(model))
    except UnboundExecutionError:
        return False
    return inspect(connection).has_table(table.name, schema=connection.schema_for_object(table))
