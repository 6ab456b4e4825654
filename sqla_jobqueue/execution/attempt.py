"""One attempt at one job, from the claimed row to its outcome. Sync bodies; async sessions run them by ``run_sync``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Event
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, inspect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Mapper, Session, make_transient_to_detached
from sqlalchemy.orm.attributes import set_committed_value

from sqla_jobqueue import lifecycle
from sqla_jobqueue.errors import ConfigurationError, JobSignal, LeaseLost
from sqla_jobqueue.execution.guard import Guard
from sqla_jobqueue.execution.outcome import Ending, Outcome, ending_of, write_for_error, write_for_result
from sqla_jobqueue.lifecycle import Verb, Write
from sqla_jobqueue.model import JobTable, job_table
from sqla_jobqueue.session import CurrentJob, set_current_job
from sqla_jobqueue.statements import Fence
from sqla_jobqueue.status import JobStatus
from sqla_jobqueue.tasks import JobQueue, Task

Invoke: TypeAlias = Callable[[Task[..., Any, Any], dict[str, Any]], object]
"""Calls a task's handler with its keyword arguments on the session at hand, and waits for what it returns."""

_SNAPSHOT_LEVELS: Final = frozenset({"REPEATABLE READ", "SERIALIZABLE"})
_isolation_levels: WeakKeyDictionary[Engine, str] = WeakKeyDictionary()


class AttemptTimeout(TimeoutError):
    """An attempt took longer than its task's timeout."""


def run_claimed(
    session: Session, task: Task[..., Any, Any], row: Mapping[str, Any], invoke: Invoke, *, lost: Event | None = None
) -> Outcome:
    """Run a job that is held under a lease.

    The handler's writes and the fenced outcome are one transaction. If the handler never used the session's database,
    there is nothing to commit together: the outcome is returned unrecorded, and can be written with others.

    Args:
        session: a session of the application's, not in a transaction.
        task: the task of the job's kind.
        row: the job as it was claimed.
        invoke: calls the handler.
        lost: set by the worker when the lease is gone.
    """
    model = task.queue.model
    fence = lifecycle.row_fence(model, row)
    guard = Guard(session)
    try:
        if _reads_from_snapshot(session.get_bind(inspect(model))):
            lifecycle.lock_held(session, model, fence)
        current = _begin(session, task, row, fence, lost)
        write = _perform(session, task, current, guard, invoke)
        if not guard.touched and not (session.new or session.deleted or session.dirty):
            return Outcome(ending_of(write), fence, row, write)
        session.flush()
        _write_here(session, model, fence, write, JobStatus.RUNNING)
        session.commit()
        return Outcome(ending_of(write), fence, row, write, recorded=True)
    except Exception as error:  # noqa: BLE001  whatever a handler raises is an outcome
        return failed(error, task, row, fence)
    finally:
        _end(session, guard)


def run_in_one_transaction(
    session: Session, queue: JobQueue[Any], kinds: Sequence[str] | None, worker: str, invoke: Invoke
) -> Outcome | None:
    """Claim one job, run it, and commit claim, work and outcome together; None when nothing is due.

    The handler runs inside a savepoint, so that its failure is recorded in the same transaction, without letting the
    row go in between. Where that transaction is lost with it, the outcome is returned unrecorded and uncounted.

    Args:
        session: a session of the application's, not in a transaction.
        queue: a one-transaction queue.
        kinds: those that `invoke` can run; None for models without kinds.
        worker: its name, for `locked_by`.
        invoke: calls the handler.
    """
    guard = Guard(session)
    try:
        rows = lifecycle.claim_rows(
            session, queue.model, queue=queue.name, kinds=kinds, limit=1, locked_by=worker, lease=None
        )
        if not rows:
            return None
        row = rows[0]
        task = queue.task_for(row)
        if task is None:
            raise ConfigurationError(f"{queue!r} has no task for the job it claimed")
        return _run_locked(session, task, row, guard, invoke)
    finally:
        _end(session, guard)


def _run_locked(
    session: Session, task: Task[..., Any, Any], row: Mapping[str, Any], guard: Guard, invoke: Invoke
) -> Outcome:
    fence = lifecycle.row_fence(task.queue.model, row)
    savepoint = session.begin_nested()
    outcome: Outcome
    try:
        current = _begin(session, task, row, fence, None)
        write = _perform(session, task, current, guard, invoke)
        session.flush()
        savepoint.commit()
        outcome = Outcome(ending_of(write), fence, row, write)
    except Exception as error:  # noqa: BLE001  whatever a handler raises is an outcome
        guard.take_back()
        outcome = failed(error, task, row, fence)
        if guard.broken or outcome.write is None or _is_disconnect(error):
            return replace(outcome, counted=False)
    try:
        if savepoint.is_active:
            savepoint.rollback()
        if outcome.write is not None and outcome.write.verb is not Verb.COMPLETE:
            _write_here(session, task.queue.model, fence, outcome.write, JobStatus.DONE)
        session.commit()
    except Exception as error:  # noqa: BLE001  the transaction is lost, and the claim with it
        if outcome.ending is Ending.FAILED:
            return replace(outcome, counted=False)  # the first error is the one to tell
        return failed(error, task, row, fence, counted=False)
    return replace(outcome, recorded=True)


def _begin(
    session: Session, task: Task[..., Any, Any], row: Mapping[str, Any], fence: Fence, lost: Event | None
) -> CurrentJob:
    deadline = None if task.timeout is None else time.monotonic() + task.timeout.total_seconds()
    current = CurrentJob(attach_row(session, task.queue.model, row), fence, row, lost or Event(), deadline)
    set_current_job(session, current)
    return current


def _perform(session: Session, task: Task[..., Any, Any], current: CurrentJob, guard: Guard, invoke: Invoke) -> Write:
    arguments = task.codec.decode(vars(current.job).get("payload"), session) if task.queue.has_kinds else {}
    guard.hand_over(session)
    try:
        result = invoke(task, arguments)
        guard.check(session)
    except Exception as error:
        if current.lost.is_set():
            raise LeaseLost(current.fence.key, current.fence.attempt) from error
        if current.is_late and not isinstance(error, JobSignal):
            raise _too_late(task) from error
        raise
    finally:
        guard.take_back()
    if current.lost.is_set():
        raise LeaseLost(current.fence.key, current.fence.attempt)
    if current.is_late:
        raise _too_late(task)
    return write_for_result(result)


def _too_late(task: Task[..., Any, Any]) -> AttemptTimeout:
    return AttemptTimeout(f"the attempt took longer than its timeout of {task.timeout}")


def _write_here(session: Session, model: type[JobTable], fence: Fence, write: Write, held: JobStatus) -> None:
    if fence not in lifecycle.record(session, model, [(fence, write)], held=held):
        raise LeaseLost(fence.key, fence.attempt)


def failed(
    error: BaseException, task: Task[..., Any, Any], row: Mapping[str, Any], fence: Fence, *, counted: bool = True
) -> Outcome:
    """The outcome of an attempt that ended with an exception, not yet recorded."""
    write = write_for_error(error, task, fence)
    if write is None:
        return Outcome(Ending.LOST, fence, row, None, counted=counted, error=error)
    ending = ending_of(write)
    return Outcome(ending, fence, row, write, counted=counted, error=error if ending is Ending.FAILED else None)


def _end(session: Session, guard: Guard) -> None:
    guard.take_back()
    with suppress(DBAPIError):  # a dead connection cannot roll back, and need not
        session.rollback()
    set_current_job(session, None)
    guard.close()


def _is_disconnect(error: BaseException) -> bool:
    return isinstance(error, DBAPIError) and error.connection_invalidated


def _reads_from_snapshot(bind: Engine | Connection) -> bool:
    """Whether the application's transactions are REPEATABLE READ or above; asked once per engine."""
    level: str | None = bind.get_execution_options().get("isolation_level")
    if level is None and isinstance(bind, Connection):
        level = bind.get_isolation_level()
    elif level is None and isinstance(bind, Engine):
        level = _isolation_levels.get(bind)
        if level is None:
            with bind.connect() as connection:
                level = connection.get_isolation_level()
            _isolation_levels[bind] = level
    return level in _SNAPSHOT_LEVELS


def attach_row(session: Session, model: type[JobTable], row: Mapping[str, Any]) -> JobTable:
    """Make the job instance of a table row and attach it to the session, without a SELECT."""
    mapper = _mapper_for(model, row)
    identity = tuple(row[column.name] for column in mapper.primary_key)
    known = session.identity_map.get(mapper.identity_key_from_primary_key(identity))
    job: Any = known if known is not None else mapper.class_manager.new_instance()
    table = job_table(model)
    for attribute in mapper.column_attrs:
        column = next((column for column in attribute.columns if column.table is table), None)
        if column is not None:
            set_committed_value(job, attribute.key, row[column.name])
    if known is None:
        make_transient_to_detached(job)
        session.add(job)
        if mapper.local_table is not table:
            session.refresh(job)  # a joined subclass has columns elsewhere
    attached: JobTable = job
    return attached


def _mapper_for(model: type[JobTable], row: Mapping[str, Any]) -> Mapper[Any]:
    mapper: Mapper[Any] = inspect(model)
    if mapper.polymorphic_on is None:
        return mapper
    found: Mapper[Any] = mapper.polymorphic_map.get(row.get(str(mapper.polymorphic_on.key)), mapper)
    return found
