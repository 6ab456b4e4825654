"""What happens to enqueued jobs in the flush that writes them."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection, Engine, Table, event, inspect
from sqlalchemy.orm import InstanceState, Mapper, Session, UOWTransaction, object_session
from sqlalchemy.orm.attributes import set_committed_value

from sqla_jobqueue.errors import EnqueueError
from sqla_jobqueue.model import JobTable, job_table, key_columns
from sqla_jobqueue.statements import fill_payload

INFO_PENDING: Final = "sqla_jobqueue.pending_entities"
"""Key of the ``InstanceState.info`` of an enqueued job: payload key -> entity that had no key at the call.

It stays there after the flush: a job that is rolled back and added again gets the new keys.
"""
INFO_WAITING: Final = "sqla_jobqueue.waiting"
"""Key of ``Session.info`` until the next flush: jobs wait in it for keys."""
INFO_INSERTED: Final = "sqla_jobqueue.inserted"
"""Key of ``Session.info`` during a flush: jobs that wait for keys and were inserted, each with its connection."""
INFO_FILLED: Final = "sqla_jobqueue.filled"
"""Key of ``Session.info`` between the last two events of a flush: jobs and their completed payloads."""


def mark_enqueued(session: Session, job: JobTable, pending: dict[str, object]) -> None:
    """Have a job that was added to the session looked after in its flush."""
    info = inspect(job).info
    info[INFO_PENDING] = {**info.get(INFO_PENDING, {}), **pending}
    if info[INFO_PENDING]:
        session.info[INFO_WAITING] = True


def refuse_unsuitable(bind: Engine | Connection) -> None:
    """Refuse an engine or connection on which job and data cannot commit together. Sends nothing.

    Raises:
        EnqueueError: it is read-only, or commits every statement by itself.
    """
    options = bind.get_execution_options()
    if options.get("postgresql_readonly"):
        raise EnqueueError("the session's engine is read-only (postgresql_readonly): enqueue on one that can write")
    # No public name tells what create_engine(isolation_level=...) was given without asking the database.
    level = options.get("isolation_level", getattr(bind.dialect, "_on_connect_isolation_level", None))
    if level == "AUTOCOMMIT":
        raise EnqueueError(
            "the session's engine commits every statement by itself (isolation_level AUTOCOMMIT), so a job and its "
            "data could not commit together: enqueue on a transactional one"
        )


@event.listens_for(JobTable, "before_insert", propagate=True)
def _check_connection(_mapper: Mapper[Any], connection: Connection, job: JobTable) -> None:
    """The call looked at the session's engine; this is the connection that it really came to."""
    if INFO_PENDING in inspect(job).info:
        refuse_unsuitable(connection)


@event.listens_for(JobTable, "after_insert", propagate=True)
def _note(_mapper: Mapper[Any], connection: Connection, job: JobTable) -> None:
    session = object_session(job)
    if session is not None and inspect(job).info.get(INFO_PENDING):
        session.info.setdefault(INFO_INSERTED, []).append((connection, job))


@event.listens_for(Session, "before_flush")
def _check_entities(session: Session, _context: UOWTransaction, _objects: Any) -> None:
    """Refuse while the session is still usable: an error within the flush would roll its transaction back."""
    session.info.pop(INFO_INSERTED, None)
    session.info.pop(INFO_FILLED, None)
    if INFO_WAITING in session.info:
        for job in session.new:
            for name, entity in inspect(job).info.get(INFO_PENDING, {}).items():
                _check_entity(session, job, name, entity)
        del session.info[INFO_WAITING]


def _check_entity(session: Session, job: object, name: str, entity: object) -> None:
    state: InstanceState[Any] = inspect(entity)
    if state.session is not session or not (state.pending or state.persistent):
        raise EnqueueError(
            f"{type(entity).__qualname__} left the session after {type(job).__qualname__} was enqueued with it as "
            f"{name}: add it again, or expunge the job"
        )


@event.listens_for(Session, "after_flush")
def _fill_keys(session: Session, _context: UOWTransaction) -> None:
    """Put the keys that this flush gave into the payloads of the jobs that it wrote."""
    inserted: list[tuple[Connection, JobTable]] = session.info.pop(INFO_INSERTED, [])
    if not inserted:
        return
    from sqla_jobqueue.payload import key_of  # noqa: PLC0415  brings pydantic

    rows: dict[tuple[Connection, Table], tuple[type[JobTable], list[dict[str, Any]]]] = {}
    filled: list[tuple[JobTable, dict[str, Any]]] = []
    for connection, job in inserted:
        state: InstanceState[Any] = inspect(job)
        keys: dict[str, Any] = {}
        for name, entity in state.info[INFO_PENDING].items():
            _check_entity(session, job, name, entity)
            keys[name] = key_of(entity)
        table = job_table(type(job))
        attributes = [state.mapper.get_property_by_column(column).key for column in key_columns(table)]
        row = {f"id_{n}": state.dict[attribute] for n, attribute in enumerate(attributes)}
        rows.setdefault((connection, table), (type(job), []))[1].append({**row, "keys": keys})
        filled.append((job, keys))
    for (connection, _), (model, parameters) in rows.items():
        connection.execute(fill_payload(model), parameters)
    session.info[INFO_FILLED] = filled


@event.listens_for(Session, "after_flush_postexec")
def _show_keys(session: Session, _context: UOWTransaction) -> None:
    """What was written is what the instance shows, without a SELECT."""
    for job, keys in session.info.pop(INFO_FILLED, ()):
        payload = inspect(job).dict.get("payload")
        if isinstance(payload, dict):
            set_committed_value(job, "payload", {**payload, **keys})
        else:  # computed by SQL, so the row alone knows
            session.expire(job, ["payload"])
