"""Time for tests: it is the rows that move, since nobody can move the database's clock."""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import timedelta
from typing import Any, overload

from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from sqla_jobqueue import statements
from sqla_jobqueue.lifecycle.sending import execute
from sqla_jobqueue.session import AnySession
from sqla_jobqueue.tasks import JobQueue
from sqla_jobqueue.testing.finding import models_of, on
from sqla_jobqueue.testing.stage import Stage


@overload
def advance(session: Session | scoped_session[Any], delta: timedelta, *queues: JobQueue[Any]) -> int: ...
@overload
def advance(
    session: AsyncSession | async_scoped_session[Any], delta: timedelta, *queues: JobQueue[Any]
) -> Awaitable[int]: ...
def advance(session: AnySession, delta: timedelta, *queues: JobQueue[Any]) -> Any:
    """Let time go by: move every instant of every job that much into the past.

    Scheduled and retried jobs become due, leases lapse, finished jobs grow old. It moves rows of the whole table,
    whatever their queue, within the session's transaction.

    Args:
        session: the test's.
        delta: how long. Above zero: time does not go back.
        queues: whose tables; those of all queues with tasks if left out.

    Returns:
        How many jobs there are; awaited on an async session.
    """
    if delta <= timedelta(0):
        raise ValueError(f"advance needs a timedelta above zero, not {delta}")
    return _move(session, queues, statements.advance, delta=delta)


@overload
def expire_leases(session: Session | scoped_session[Any], *queues: JobQueue[Any]) -> int: ...
@overload
def expire_leases(session: AsyncSession | async_scoped_session[Any], *queues: JobQueue[Any]) -> Awaitable[int]: ...
def expire_leases(session: AnySession, *queues: JobQueue[Any]) -> Any:
    """Let the lease of every running job lapse, as if its worker were lost. `drain` takes such jobs back.

    Args:
        session: the test's.
        queues: whose tables; those of all queues with tasks if left out.

    Returns:
        How many leases lapsed; awaited on an async session.
    """
    return _move(session, queues, statements.expire_leases)


def _move(session: AnySession, queues: tuple[JobQueue[Any], ...], builder: Any, **parameters: Any) -> Any:
    stage = Stage(session, None, None)

    def move(outer: Session) -> int:
        outer.flush()
        models = models_of(outer, *queues)
        moved = sum(len(execute(outer, model, builder(model), parameters).all()) for model in models)
        stage.show()
        return moved

    return on(session, move)
