"""The job that a session works for, and the sync Session behind any kind of session."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Event
from typing import Any, Final, TypeAlias

from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from sqla_jobqueue.errors import ConfigurationError, LeaseLost
from sqla_jobqueue.model import JobTable
from sqla_jobqueue.statements import Fence

AnySession: TypeAlias = Session | scoped_session[Any] | AsyncSession | async_scoped_session[Any]

INFO_CURRENT: Final = "sqla_jobqueue.current"
"""Key of ``Session.info`` under which the running job stands."""


@dataclass(slots=True)
class CurrentJob:
    """What a handler's session knows of the job it works for.

    Attributes:
        fence: key and attempt number.
        row: the job as it was claimed.
        attach: makes the instance of the row and attaches it to the session.
        lost: set by the worker when the lease is gone.
        deadline: on the monotonic clock; after it the result is refused. None without a timeout.
    """

    fence: Fence
    row: Mapping[str, Any]
    attach: Callable[[], JobTable]
    lost: Event
    deadline: float | None = None
    _job: JobTable | None = None

    @property
    def job(self) -> JobTable:
        """The job, attached to the session once somebody asks for it: most handlers never do."""
        if self._job is None:
            self._job = self.attach()
        return self._job

    @property
    def is_lost(self) -> bool:
        """The lease is gone, or the time is over: whatever the handler still does will be refused."""
        return self.lost.is_set() or self.is_late

    @property
    def is_late(self) -> bool:
        """The time is over."""
        return self.deadline is not None and time.monotonic() >= self.deadline


def sync_session_of(session: AnySession) -> Session:
    """The Session that does the work: behind an AsyncSession, in a scoped registry, or the object itself.

    Raises:
        ConfigurationError: it is no Session of SQLAlchemy's.
    """
    found: object = session() if isinstance(session, scoped_session | async_scoped_session) else session
    if isinstance(found, AsyncSession):
        found = found.sync_session
    if not isinstance(found, Session):
        raise ConfigurationError(f"a SQLAlchemy Session or AsyncSession is needed, not {type(session).__name__}")
    return found


def async_session_of(session: Any) -> AsyncSession:
    """The AsyncSession in an async scoped registry, or the object itself."""
    found: AsyncSession = session() if isinstance(session, async_scoped_session) else session
    return found


def set_current_job(session: Session, current: CurrentJob | None) -> None:
    """Tell a session which job it works for."""
    if current is None:
        session.info.pop(INFO_CURRENT, None)
    else:
        session.info[INFO_CURRENT] = current


def current_attempt(session: AnySession) -> CurrentJob:
    """What a handler's session knows of its job.

    Raises:
        ConfigurationError: the session was not handed to a handler by a worker.
    """
    current: CurrentJob | None = sync_session_of(session).info.get(INFO_CURRENT)
    if current is None:
        raise ConfigurationError("this session works for no job: it was not handed to a handler by a worker")
    return current


def current_job(session: AnySession, *default: Any) -> Any:
    """The job that a handler's session works for, attached to that session.

    Args:
        session: of any kind.
        default: returned for a session that works for no job, as an event listener of all sessions may ask.

    Raises:
        ConfigurationError: the session was not handed to a handler by a worker, and there is no default.
    """
    if default and INFO_CURRENT not in sync_session_of(session).info:
        return default[0]
    return current_attempt(session).job


def is_lost(session: AnySession) -> bool:
    """Whether the job's lease is gone, or its time over."""
    return current_attempt(session).is_lost


def raise_if_lost(session: AnySession) -> None:
    """Stop a handler whose result would be refused.

    Raises:
        LeaseLost: the job is lost.
    """
    current = current_attempt(session)
    if current.is_lost:
        raise LeaseLost(current.fence.key, current.fence.attempt)
