"""Session classes with the verbs as methods."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, ParamSpec, cast, overload

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from typing_extensions import TypeVar

from sqla_jobqueue.model import JobTable
from sqla_jobqueue.session import current, enqueueing
from sqla_jobqueue.tasks import Call, Kind, Task

P = ParamSpec("P")
J = TypeVar("J", bound=JobTable, default=Any)
K = TypeVar("K", bound=JobTable)


class EnqueueMixin:
    """Adds the verbs to an application's own Session or AsyncSession class.

    ``class MySession(EnqueueMixin, Session): ...``
    """

    @overload
    def enqueue(self, what: Task[P, Any, K], /, *args: P.args, **payload: P.kwargs) -> K: ...
    @overload
    def enqueue(self, what: Kind[K], /, **payload: Any) -> K: ...
    @overload
    def enqueue(self, what: Call[K], /) -> K: ...
    @overload
    def enqueue(self, what: K, /) -> K: ...
    def enqueue(self, what: Any, /, *args: Any, **payload: Any) -> Any:
        """Add a job to this unit of work, without I/O; see `sqla_jobqueue.enqueue`."""
        return enqueueing.enqueue(cast("Session", self), what, *args, **payload)

    def enqueue_all(self, calls: Iterable[Call[K]], /) -> list[K]:
        """Add several jobs, or none if one does not fit; see `sqla_jobqueue.enqueue_all`."""
        return enqueueing.enqueue_all(cast("Session", self), calls)

    @property
    def job_is_lost(self) -> bool:
        """In a handler: the lease is gone or the time over, so that the result will be refused."""
        return current.is_lost(cast("Session", self))

    def raise_if_lost(self) -> None:
        """In a handler: raise `LeaseLost` if the job is lost."""
        current.raise_if_lost(cast("Session", self))


class JobSession(EnqueueMixin, Session, Generic[J]):
    """A Session with `enqueue`; in a handler also with the job.

    ``sessionmaker(engine, class_=JobSession)``. The type argument is the model of `job`: annotate a handler's session
    as ``JobSession[Job]``.
    """

    @property
    def job(self) -> J:
        """In a handler: the job being run, attached to this session."""
        return cast("J", current.current_job(self))


class AsyncJobSession(EnqueueMixin, AsyncSession, Generic[J]):
    """An AsyncSession with `enqueue` (which needs no await); in a handler also with the job.

    ``async_sessionmaker(async_engine, class_=AsyncJobSession)``.
    """

    sync_session_class = JobSession

    @property
    def job(self) -> J:
        """In a handler: the job being run, attached to this session."""
        return cast("J", current.current_job(self))
