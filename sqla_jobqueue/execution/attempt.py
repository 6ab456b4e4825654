"""One attempt at one job, from the claimed row to its outcome. Sync bodies; async sessions run them by ``run_sync``."""

from __future__ import annotations

import inspect as python_inspect
import time
from asyncio import CancelledError
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from threading import Event
from typing import Any, Final, TypeAlias

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import Session

from sqla_jobqueue import lifecycle
from sqla_jobqueue.errors import ConfigurationError, JobSignal, LeaseLost
from sqla_jobqueue.execution.attaching import attacher
from sqla_jobqueue.execution.guard import Guard
from sqla_jobqueue.execution.isolation import SNAPSHOT_LEVELS, first_statement, isolation_of
from sqla_jobqueue.execution.outcome import (
    Ending,
    Outcome,
    delay_after,
    describe_error,
    ending_of,
    sqlstate_of,
    write_for_error,
    write_for_result,
)
from sqla_jobqueue.lifecycle import Verb, Write
from sqla_jobqueue.model import JobTable, job_mapper
from sqla_jobqueue.session import CurrentJob, set_current_job
from sqla_jobqueue.statements import Fence
from sqla_jobqueue.status import JobStatus
from sqla_jobqueue.tasks import JobQueue, Task

Invoke: TypeAlias = Callable[[Task[..., Any, Any], dict[str, Any]], object]
"""Calls a task's handler with its keyword arguments on the session at hand, and waits for what it returns."""

_NO_OUTCOME: Final = (KeyboardInterrupt, GeneratorExit, CancelledError)
"""What ends the caller along with the attempt. Anything else that a handler raises, SystemExit too, is an outcome."""
_NEVER_LOST: Final = Event()
"""Of a job whose row lock is its lease: that goes with the transaction, not before."""
_NO_CONNECTION: Final = frozenset({"08", "53", "57"})
"""Classes of SQLSTATE, for what asyncpg raises while it connects."""


class AttemptTimeout(TimeoutError):
    """An attempt took longer than its task's timeout."""


def run_claimed(
    session: Session, task: Task[..., Any, Any], row: Mapping[str, Any], invoke: Invoke, *, lost: Event | None = None
) -> Outcome:
    """Run a job that is held under a lease.

    The handler's writes and the fenced outcome are one transaction. If the handler never used the session's database,
    there is nothing to commit together: the outcome is returned unrecorded, and can be written with others.

    Args:
        session: a session of the application's, not in a transaction, used for nothing else.
        task: the task of the job's kind.
        row: the job as it was claimed.
        invoke: calls the handler.
        lost: set by the worker when the lease is gone.
    """
    model = task.queue.model
    fence = lifecycle.row_fence(model, row)
    bind = session.get_bind(job_mapper(model))
    guard = Guard(session, bind)
    try:
        if isolation_of(bind) in SNAPSHOT_LEVELS:
            first_statement(session, lambda: lifecycle.lock_held(session, model, fence))
        current = _begin(session, task, row, fence, lost or _NEVER_LOST)
        write = _perform(session, task, current, guard, invoke)
        if not guard.touched and not (session.new or session.deleted or session.dirty):
            return Outcome(ending_of(write), fence, row, write)
        session.flush()
        _write_here(session, model, fence, write, JobStatus.RUNNING)
        session.commit()
        guard.close()
        return Outcome(ending_of(write), fence, row, write, recorded=True)
    except _NO_OUTCOME:
        raise
    except BaseException as error:  # noqa: BLE001  whatever a handler raises is an outcome
        return failed(error, task, row, fence, started=guard.started)
    finally:
        _end(session, guard)


def run_in_one_transaction(
    session: Session,
    queue: JobQueue[Any],
    kinds: tuple[str, ...] | None,
    worker: str,
    invoke: Invoke,
    *,
    key: tuple[Any, ...] | None = None,
) -> Outcome | None:
    """Claim one job, run it, and commit claim, work and outcome together; None when nothing is due.

    The handler runs inside a savepoint, so that its failure is recorded in the same transaction, without letting the
    row go in between. Where that transaction is lost with it, the failure is counted in a new one, before anybody asks
    for the next job; where that cannot be done either, the outcome is returned unrecorded and uncounted.

    Args:
        session: a session of the application's, not in a transaction, used for nothing else.
        queue: a one-transaction queue.
        kinds: those that `invoke` can run; None for models without kinds.
        worker: its name, for `locked_by`.
        invoke: calls the handler.
        key: run this due job instead of the first.

    Raises:
        ConfigurationError: the session's engine is in autocommit mode.
        Exception: whatever kept the claim from being sent.
    """
    bind = session.get_bind(job_mapper(queue.model))
    isolation_of(bind)
    guard = Guard(session, bind)
    try:
        rows = first_statement(
            session,
            lambda: lifecycle.claim_rows(
                session, queue.model, queue=queue.name, kinds=kinds, limit=1, locked_by=worker, lease=None, key=key
            ),
        )
        if not rows:
            return None
        task = queue.task_for(rows[0])
        if task is None:
            raise ConfigurationError(f"{queue!r} has no task for the job it claimed")
        outcome = _run_locked(session, task, rows[0], guard, invoke)
        return outcome if outcome.recorded else _count_afresh(session, queue.model, outcome, guard)
    finally:
        _end(session, guard)


def _run_locked(
    session: Session, task: Task[..., Any, Any], row: Mapping[str, Any], guard: Guard, invoke: Invoke
) -> Outcome:
    model = task.queue.model
    fence = lifecycle.row_fence(model, row)
    savepoint = session.begin_nested()
    released = False
    try:
        current = _begin(session, task, row, fence, _NEVER_LOST)
        write = _perform(session, task, current, guard, invoke)
        session.flush()
        savepoint.commit()
        released = True
        outcome = Outcome(ending_of(write), fence, row, write)
    except _NO_OUTCOME:
        raise
    except BaseException as error:
        if not guard.started and _is_nobodys_fault(error):
            raise  # with the transaction goes the claim, as if it had never been made
        outcome = _failed_locked(error, task, row, fence)
        if guard.misuse is not None:
            return outcome if outcome.ending is Ending.FAILED else _failed_locked(guard.misuse, task, row, fence)
    try:
        if not released:
            savepoint.rollback()
        if outcome.write is not None and outcome.write.verb is not Verb.COMPLETE:
            _write_here(session, model, fence, outcome.write, JobStatus.DONE)
        session.commit()
    except Exception as error:  # noqa: BLE001  the transaction is lost, and the claim with it
        # the first error is the one to tell
        return outcome if outcome.ending is Ending.FAILED else _failed_locked(error, task, row, fence)
    guard.close()
    return replace(outcome, recorded=True)


def _count_afresh(session: Session, model: type[JobTable], outcome: Outcome, guard: Guard) -> Outcome:
    """Count a failure whose transaction took the claim back with it.

    Where another worker has claimed the job already, this waits until its transaction ends, on the slot of the failure.
    Were the count left to the worker's own connections, a job that kills its connection would be claimed again first,
    and never run out of attempts.
    """
    write, fence = outcome.write, outcome.fence
    if write is None:
        return outcome
    try:
        _roll_back(session)
        delay, error = write.values.get("delay", timedelta(0)), write.values["error"]
        counted = lifecycle.count_failure(
            session, model, fence, delay=delay, error=error, lethal=write.verb is Verb.FAIL
        )
        if (  # a COMMIT that went past the session has committed this very claim
            not counted
            and guard.misuse is not None
            and lifecycle.lock_done(session, model, fence) == outcome.row["started_at"]
        ):
            counted = fence in lifecycle.record(session, model, [(fence, write)], held=JobStatus.DONE)
        session.commit()
    except Exception:  # noqa: BLE001  left to the worker's own connection
        return replace(outcome, counted=False)
    if counted:
        return replace(outcome, recorded=True)
    lost = LeaseLost(fence.key, fence.attempt)
    lost.__cause__ = outcome.error
    return replace(outcome, ending=Ending.LOST, write=None, error=lost)


def _begin(
    session: Session, task: Task[..., Any, Any], row: Mapping[str, Any], fence: Fence, lost: Event
) -> CurrentJob:
    deadline = None if task.timeout is None else time.monotonic() + task.timeout.total_seconds()
    if not session.in_transaction():
        session.begin()  # sends nothing; from here on the guard sees it end
    current = CurrentJob(fence, row, attacher(session, task.queue.model, row), lost, deadline)
    set_current_job(session, current)
    return current


def _perform(session: Session, task: Task[..., Any, Any], current: CurrentJob, guard: Guard, invoke: Invoke) -> Write:
    arguments = task.codec.decode(current.row["payload"], session) if task.queue.has_kinds else {}
    guard.hand_over()
    try:
        result = invoke(task, arguments)
        _refuse_awaitable(result)
        guard.check()
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


def _refuse_awaitable(result: object) -> None:
    """A sync handler that gives a coroutine has done nothing yet: no success."""
    if not python_inspect.isawaitable(result):
        return
    if python_inspect.iscoroutine(result):
        result.close()
    raise TypeError("the handler returned an awaitable, which nobody awaits: declare it with `async def`")


def _too_late(task: Task[..., Any, Any]) -> AttemptTimeout:
    return AttemptTimeout(f"the attempt took longer than its timeout of {task.timeout}")


def _write_here(session: Session, model: type[JobTable], fence: Fence, write: Write, held: JobStatus) -> None:
    if fence not in lifecycle.record(session, model, [(fence, write)], held=held):
        raise LeaseLost(fence.key, fence.attempt)


def failed(
    error: BaseException, task: Task[..., Any, Any], row: Mapping[str, Any], fence: Fence, *, started: bool = True
) -> Outcome:
    """The outcome of an attempt that ended with an exception, not yet recorded.

    Args:
        error: the exception.
        task: the task of the job's kind.
        row: the job as it was claimed.
        fence: key and attempt number.
        started: the handler was called. If not, an absent database is not the job's fault: it is tried again after the
            backoff, without costing an attempt.
    """
    if not started and _is_nobodys_fault(error):
        snooze = Write(Verb.SNOOZE, {"delay": delay_after(task, fence.attempt)})
        return Outcome(Ending.RELEASED, fence, row, snooze, error=error)
    write = write_for_error(error, task, fence)
    if write is None:
        return Outcome(Ending.LOST, fence, row, None, error=error)
    ending = ending_of(write)
    return Outcome(ending, fence, row, write, error=error if ending is Ending.FAILED else None)


def _failed_locked(error: BaseException, task: Task[..., Any, Any], row: Mapping[str, Any], fence: Fence) -> Outcome:
    """As `failed`; a row that this transaction has locked cannot be lost, so its handler made it look so."""
    outcome = failed(error, task, row, fence)
    if outcome.write is not None:
        return outcome
    write = Write(Verb.RETRY, {"delay": delay_after(task, fence.attempt), "error": describe_error(error)})
    return replace(outcome, ending=Ending.FAILED, write=write)


def _is_nobodys_fault(error: BaseException) -> bool:
    """No connection could be had, or it broke."""
    if isinstance(error, DBAPIError):
        return error.connection_invalidated or error.statement is None
    return isinstance(error, PoolTimeoutError | OSError) or sqlstate_of(error)[:2] in _NO_CONNECTION


def _roll_back(session: Session) -> None:
    """To the root, also where a savepoint on the way is not there any more."""
    with suppress(Exception):
        session.rollback()
    if session.in_transaction():
        session.rollback()


def _end(session: Session, guard: Guard) -> None:
    guard.take_back()
    with suppress(Exception):  # a dead connection cannot roll back, and need not
        _roll_back(session)
    set_current_job(session, None)
    guard.close()
