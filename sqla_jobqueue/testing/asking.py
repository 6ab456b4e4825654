"""What is in the queue."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, TypeAlias, TypeVar, cast, overload

from sqlalchemy import Select, select
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from sqla_jobqueue.errors import ConfigurationError
from sqla_jobqueue.model import JobTable, job_table, key_columns
from sqla_jobqueue.payload import check_json
from sqla_jobqueue.session import AnySession
from sqla_jobqueue.statements import is_pending
from sqla_jobqueue.tasks import JobQueue, Kind, Task, has_kinds
from sqla_jobqueue.testing.finding import models_of, on

J = TypeVar("J", bound=JobTable)
SyncSession: TypeAlias = Session | scoped_session[Any]
AsyncSessionLike: TypeAlias = AsyncSession | async_scoped_session[Any]


@overload
def enqueued(
    session: SyncSession, what: Task[..., Any, J] | Kind[J] | JobQueue[J] | type[J], /, **payload: Any
) -> list[J]: ...
@overload
def enqueued(session: SyncSession, /) -> list[Any]: ...
@overload
def enqueued(
    session: AsyncSessionLike, what: Task[..., Any, J] | Kind[J] | JobQueue[J] | type[J], /, **payload: Any
) -> Awaitable[list[J]]: ...
@overload
def enqueued(session: AsyncSessionLike, /) -> Awaitable[list[Any]]: ...
def enqueued(session: AnySession, what: Any = None, /, **payload: Any) -> Any:
    """The pending jobs, due or not, in the order in which they would run.

    Args:
        session: the test's; it is flushed.
        what: a task, a kind, a queue or a job model; all queues with tasks if left out.
        payload: of a task or kind: only jobs with these values, given as to `enqueue`. May be a part of the payload.

    Returns:
        The job instances, attached to the session; awaited on an async session.

    Raises:
        PayloadError: the handler takes no such argument.
    """
    return on(session, lambda outer: _matching(outer, what, payload))


@overload
def assert_enqueued(session: SyncSession, task: Task[..., Any, J] | Kind[J], /, **payload: Any) -> J: ...
@overload
def assert_enqueued(
    session: AsyncSessionLike, task: Task[..., Any, J] | Kind[J], /, **payload: Any
) -> Awaitable[J]: ...
def assert_enqueued(session: AnySession, task: Any, /, **payload: Any) -> Any:
    """A job of the task is pending with these values. Its opposite is ``assert not enqueued(session, task, ...)``.

    Args:
        session: the test's; it is flushed.
        task: a task, or a kind.
        payload: as for `enqueued`.

    Returns:
        The first such job, so that its `run_at`, `priority` and the like can be looked at; awaited on an async session.

    Raises:
        AssertionError: there is none; says which there are.
        PayloadError: the handler takes no such argument.
    """

    def check(outer: Session) -> JobTable:
        found = _matching(outer, task, payload)
        if found:
            first: JobTable = found[0]
            return first
        shown = ", ".join(f"{name}={value!r}" for name, value in payload.items())
        there = _matching(outer, task.queue.model, {})
        raise AssertionError(
            f"no pending {task!r} with ({shown}); pending are: {'; '.join(map(_shown, there)) or 'none at all'}"
        )

    return on(session, check)


def _shown(job: JobTable) -> str:
    named: Any = job
    return f"{named.kind} {named.payload} in {job.queue!r}" if has_kinds(type(job)) else repr(job)


def _matching(session: Session, what: Any, payload: dict[str, Any]) -> list[Any]:
    session.flush()
    wanted = _encoded(session, what, payload)
    found = [job for model in _models(session, what) for job in session.scalars(_pending(model, what))]
    return [job for job in found if not wanted or _holds(job.payload, wanted)]


def _holds(payload: Any, wanted: dict[str, Any]) -> bool:
    return isinstance(payload, dict) and all(name in payload and payload[name] == wanted[name] for name in wanted)


def _models(session: Session, what: Any) -> list[type[JobTable]]:
    if what is None:
        return models_of(session)
    if isinstance(what, Task | Kind):
        return [cast("Any", what).queue.model]
    if isinstance(what, JobQueue):
        return [cast("Any", what).model]
    if isinstance(what, type) and issubclass(what, JobTable):
        return [what]
    raise ConfigurationError(f"a task, a kind, a queue or a job model is needed, not {what!r}")


def _pending(model: type[JobTable], what: Any) -> Select[Any]:
    table = job_table(model)
    query = select(model).where(is_pending(table)).order_by(table.c.priority, table.c.run_at, *key_columns(table))
    if isinstance(what, Task | Kind):
        query = query.where(table.c.queue == cast("Any", what).queue.name, table.c.kind == cast("Any", what).kind)
    elif isinstance(what, JobQueue):
        query = query.where(table.c.queue == what.name)
    return query.execution_options(populate_existing=True)


def _encoded(session: Session, what: Any, payload: dict[str, Any]) -> dict[str, Any]:
    """The values as they stand in the table."""
    if not payload:
        return {}
    if isinstance(what, Task):
        codec = cast("Task[..., Any, Any]", what).codec
        return codec.attach(codec.bind((), payload, partial=True), session)[0]
    if isinstance(what, Kind):
        return dict(check_json(payload))
    raise ConfigurationError(f"a payload belongs to a task or a kind, not to {what!r}")
