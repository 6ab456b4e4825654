"""Run jobs inside the test's transaction: all that are due, one, or each at its commit."""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from threading import Lock
from types import CoroutineType
from typing import Any, Final, ParamSpec, TypeAlias, TypeVar, overload
from weakref import WeakSet

from sqlalchemy import event, func, inspect
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, SessionTransaction, scoped_session

from sqla_jobqueue import lifecycle, statements
from sqla_jobqueue.errors import ConfigurationError, JobSignal
from sqla_jobqueue.execution import Ending, Outcome
from sqla_jobqueue.lifecycle.sending import execute
from sqla_jobqueue.model import JobTable, job_mapper, job_table, key_columns
from sqla_jobqueue.session import AnySession, enqueue
from sqla_jobqueue.tasks import Call, JobQueue, Task, queues_with_tasks
from sqla_jobqueue.testing.finding import connection_of, job_connections, models_of, on, queues_of
from sqla_jobqueue.testing.stage import Stage
from sqla_jobqueue.worker.handlers import AsyncSessions, Sessions

P = ParamSpec("P")
R = TypeVar("R")
SyncSession: TypeAlias = Session | scoped_session[Any]
AsyncSessionLike: TypeAlias = AsyncSession | async_scoped_session[Any]
AsyncTask: TypeAlias = "Task[P, Coroutine[Any, Any, R], Any] | Task[P, CoroutineType[Any, Any, R], Any]"
"""mypy takes what an async function returns for the one, pyright for the other."""

DEFAULT_LIMIT: Final = 1000
"""Jobs that one `drain` runs. More look like a job that enqueues itself for ever."""
_RECLAIM: Final = 1000


@overload
def drain(
    session: SyncSession,
    *queues: JobQueue[Any],
    raises: bool = True,
    limit: int = DEFAULT_LIMIT,
    sessions: Sessions | None = None,
) -> list[Outcome]: ...
@overload
def drain(
    session: AsyncSessionLike,
    *queues: JobQueue[Any],
    raises: bool = True,
    limit: int = DEFAULT_LIMIT,
    sessions: Sessions | None = None,
    async_sessions: AsyncSessions | None = None,
) -> Awaitable[list[Outcome]]: ...
def drain(
    session: AnySession,
    *queues: JobQueue[Any],
    raises: bool = True,
    limit: int = DEFAULT_LIMIT,
    sessions: Sessions | None = None,
    async_sessions: AsyncSessions | None = None,
) -> Any:
    """Run due jobs until there are none, as a worker does, inside the session's transaction.

    Jobs of lost workers are taken back first, as maintenance does. Each handler gets a session of its own on the
    connection of the test's, so it sees what the test has written, and the test sees what it wrote. Jobs whose time has
    not come wait: see `advance`. An async session runs sync handlers, too.

    Args:
        session: the test's; it is flushed, and its objects are loaded anew afterwards.
        queues: which; all that have tasks if left out.
        raises: raise the first failure of a handler, once it is recorded. False: the test looks at the outcomes.
        limit: so many jobs at most.
        sessions: gives sync handlers their sessions, as to the worker, where they need a special one (Flask's, a scoped
            session's). They must be on the connection of the test's.
        async_sessions: the same for async handlers.

    Returns:
        What became of each attempt, in order: `Outcome.ending` is ``"done"``, ``"failed"``...; awaited on an async
        session.

    Raises:
        AssertionError: the limit is reached.
        ConfigurationError: the session has no transaction of the test's, or no session for the handlers can be made.
        Exception: whatever a handler raised.
    """
    stage = Stage(session, sessions, async_sessions)
    return on(session, lambda outer: _drain(stage, outer, queues, raises=raises, limit=limit))


def _drain(
    stage: Stage, session: Session, queues: Sequence[JobQueue[Any]], *, raises: bool, limit: int = DEFAULT_LIMIT
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    session.flush()
    chosen = queues_of(session, queues)
    try:
        while ran := _round(stage, session, chosen, raises=raises, limit=limit - len(outcomes)):
            outcomes += ran
    finally:
        stage.show()
    return outcomes


def _round(
    stage: Stage, session: Session, queues: Sequence[JobQueue[Any]], *, raises: bool, limit: int
) -> list[Outcome]:
    """What is due now; the jobs that come due meanwhile are for the next round."""
    for model in models_of(session, *queues) if queues else ():
        connection = connection_of(session, job_mapper(model))
        lifecycle.reclaim_expired(connection, model, limit=_RECLAIM)
        execute(connection, model, statements.settle(model), {})
    outcomes: list[Outcome] = []
    for queue in queues:
        while (outcome := stage.claim_and_run(queue)) is not None:
            outcomes.append(outcome)
            if raises and (error := _failure(outcome)):
                raise _told(error, queue, outcome)
            if len(outcomes) > limit:
                raise AssertionError(
                    f"drain ran more than its limit, the last job was {_named(queue, outcome)}: does it enqueue itself?"
                )
    return outcomes


def _failure(outcome: Outcome) -> BaseException | None:
    """The error of an attempt that went wrong; a `Retry` is what its handler wanted."""
    if outcome.ending is not Ending.FAILED and outcome.error is None:
        return None
    return None if isinstance(outcome.error, JobSignal) else outcome.error


def _told(error: BaseException, queue: JobQueue[Any], outcome: Outcome) -> BaseException:
    error.add_note(f"in {_named(queue, outcome)}; drain(..., raises=False) lets failures be")
    return error


def _named(queue: JobQueue[Any], outcome: Outcome) -> str:
    name = outcome.row.get("kind") or queue.model.__qualname__
    return f"job {outcome.fence.key} {name!r} of queue {queue.name!r}, attempt {outcome.fence.attempt}"


@overload
def perform(session: SyncSession, task: Task[P, R, Any], /, *args: P.args, **payload: P.kwargs) -> R: ...
@overload
def perform(
    session: AsyncSessionLike, task: AsyncTask[P, R], /, *args: P.args, **payload: P.kwargs
) -> Awaitable[R]: ...
@overload
def perform(
    session: AsyncSessionLike, task: Task[P, R, Any], /, *args: P.args, **payload: P.kwargs
) -> Awaitable[R]: ...
@overload
def perform(session: SyncSession, job: Call[Any] | JobTable, /) -> Any: ...
@overload
def perform(session: AsyncSessionLike, job: Call[Any] | JobTable, /) -> Awaitable[Any]: ...
def perform(session: AnySession, what: Any, /, *args: Any, **payload: Any) -> Any:
    """Run one job for real, now, and return what its handler returned.

    Unlike calling the task, which calls its handler: the payload goes through the table, entities are loaded from it,
    `session.job` is there, a commit is refused, and the writes are kept together with the job's outcome or not at all.

    Args:
        session: the test's; it is flushed, and its objects are loaded anew afterwards.
        what: a task or a call, which is enqueued first; or a pending job, due or not.
        args: payload of a task by position.
        payload: payload of a task by keyword.

    Returns:
        The handler's result; awaited on an async session.

    Raises:
        AssertionError: the job is not pending.
        Exception: whatever the handler raised, signals too, once the outcome is recorded.
    """
    stage = Stage(session, None, None)
    return on(session, lambda outer: _perform(stage, outer, what, args, payload))


def _perform(stage: Stage, session: Session, what: Any, args: tuple[Any, ...], payload: dict[str, Any]) -> object:
    job: Any = what
    if not isinstance(what, JobTable) or inspect(what).transient:
        job = enqueue(session, what, *args, **payload)
    session.flush()
    table = job_table(type(job))
    queue = next((each for each in queues_with_tasks(table) if each.name == job.queue), None)
    identity = inspect(job).identity
    outcome = None
    if queue is not None and identity is not None:
        job.run_at = func.least(table.c.run_at, func.now())
        session.flush()
        outcome = stage.claim_and_run(queue, tuple(identity[: len(key_columns(table))]))
    stage.show()
    if outcome is None:
        raise AssertionError(f"{job!r} is not pending, or no task runs it in this process: it was not performed")
    if stage.raised is not None:
        raise stage.raised
    if outcome.error is not None:
        raise outcome.error
    return stage.result


@contextmanager
def inline(
    session: AnySession,
    *queues: JobQueue[Any],
    raises: bool = True,
    sessions: Sessions | None = None,
    async_sessions: AsyncSessions | None = None,
) -> Generator[list[Outcome]]:
    """Run due jobs at each commit of a session on the test's connection, for as long as the block lasts.

    As if a worker were idle and quick: ``with inline(session): client.post("/orders")``. A rolled back transaction runs
    nothing. The application is not disturbed: what a handler raises is raised at the end of the block.

    Args:
        session: the test's, bound to a connection; sync or async, it is a plain ``with``.
        queues: which; all that have tasks if left out.
        raises: raise the failures of handlers at the end of the block.
        sessions: as for `drain`.
        async_sessions: as for `drain`.

    Yields:
        What became of each attempt; it grows.

    Raises:
        ConfigurationError: the session is not bound to a connection.
        ExceptionGroup: several handlers failed.
    """
    stage = Stage(session, sessions, async_sessions)
    connections = job_connections(stage.session, queues)
    if not connections:
        raise ConfigurationError(
            "inline needs a session that is bound to a connection of the test's, whose transaction is rolled back: "
            "sqla_jobqueue.testing.rolled_back makes one"
        )
    outcomes: list[Outcome] = []
    committed: WeakSet[SessionTransaction] = WeakSet()
    busy = Lock()

    def after_commit(committing: Session) -> None:
        transaction = committing.get_transaction()
        if transaction is not None and not committing.in_nested_transaction():
            committed.add(transaction)

    def after_end(ended: Session, transaction: SessionTransaction) -> None:
        """Why not in `after_commit`: there, the session's savepoint is not released yet."""
        if transaction not in committed or not connections & job_connections(ended, queues):
            return
        if busy.acquire(blocking=False):  # not for the commits of the jobs themselves
            try:
                outcomes.extend(_drain(stage, stage.session, queues, raises=False))
            finally:
                busy.release()

    event.listen(Session, "after_commit", after_commit)
    event.listen(Session, "after_transaction_end", after_end)
    try:
        yield outcomes
    finally:
        event.remove(Session, "after_commit", after_commit)
        event.remove(Session, "after_transaction_end", after_end)
    failures = [error for outcome in outcomes if (error := _failure(outcome))]
    if raises and len(failures) == 1:
        raise failures[0]
    if raises and failures:
        raise BaseExceptionGroup("handlers failed", failures)
