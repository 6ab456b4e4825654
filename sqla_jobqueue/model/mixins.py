"""The mixins themselves: which columns each brings."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    MetaData,
    PrimaryKeyConstraint,
    Table,
    inspect,
)
from sqlalchemy.orm import Mapped, MappedAsDataclass

from sqla_jobqueue.errors import ConfigurationError
from sqla_jobqueue.model.base import JobTable, column_names, is_primary_key
from sqla_jobqueue.model.columns import JsonValue, brought


class JobStateMixin(JobTable):
    """The state of a queue, for a model that has a key and data of its own: the row itself is the job."""

    queue: Mapped[str] = brought("queue")
    """Name of the `JobQueue`. ``default`` unless told otherwise."""
    status: Mapped[str] = brought("status")
    """A `JobStatus` as text. A plain `str`, so that a state of a later version does not stop this one."""
    priority: Mapped[int] = brought("priority")
    """Smaller first: 0 before 10. (Celery and procrastinate are the other way round.)"""
    attempts: Mapped[int] = brought("attempts")
    """How often the job was claimed. Only grows; with the primary key it is the fence of every write after a claim."""
    max_attempts: Mapped[int] = brought("max_attempts")
    """A failed attempt with this number is the last. Raised, not `attempts` lowered, where an attempt is given back."""
    run_at: Mapped[datetime] = brought("run_at")
    """Not before this instant of the database's clock. Also the order within a priority."""
    locked_until: Mapped[datetime | None] = brought("locked_until")
    """End of the lease, while `running`."""
    locked_by: Mapped[str | None] = brought("locked_by")
    """Name of the worker that claimed it last. For people; ownership is the fence."""
    last_error: Mapped[str | None] = brought("last_error")
    """Type and message of the last failure, cleaned and bounded, without bound parameters."""
    unique_key: Mapped[str | None] = brought("unique_key")
    """At most one pending or running job has it."""
    created_at: Mapped[datetime] = brought("created_at")
    """When the enqueueing transaction began."""
    started_at: Mapped[datetime | None] = brought("started_at")
    """When the last attempt was claimed."""
    finished_at: Mapped[datetime | None] = brought("finished_at")
    """When the job reached `done`, `failed` or `cancelled`. Retention counts from here."""


class JobMixin(JobStateMixin):
    """A complete job: key, kind, payload, meta and the state of the queue."""

    if TYPE_CHECKING:
        id: Mapped[int]

    kind: Mapped[str] = brought("kind")
    """Which task runs it. Only kinds that a worker's queues have declared are ever claimed."""
    payload: Mapped[JsonValue] = brought("payload")
    """A JSON object named after the handler's parameters; an entity parameter ``order`` stands as ``order_id``."""
    meta: Mapped[JsonValue] = brought("meta")
    """A JSON object beside the payload: tenant, trace, locale. No handler parameter is read from it."""

    @classmethod
    def __table_cls__(cls, name: str, metadata: MetaData, *args: Any, **kwargs: Any) -> Any:
        """Make the table; SQLAlchemy's hook. Adds `id` where the class brings no primary key of its own.

        Why here: only now is every way seen in which a key may be declared (column, mixin, base class, ``Annotated``,
        ``PrimaryKeyConstraint``).
        """
        make: Callable[..., Any] = getattr(super(), "__table_cls__", Table)
        has_key = any(isinstance(arg, PrimaryKeyConstraint) or is_primary_key(arg) for arg in args)
        if has_key or any(inspect(base, raiseerr=False) is not None for base in cls.__mro__[1:]):
            return make(name, metadata, *args, **kwargs)
        if any("id" in vars(base) for base in cls.__mro__) or any(column_names(arg) == {"id"} for arg in args):
            raise ConfigurationError(
                f"{cls.__qualname__}: 'id' is the key that JobMixin brings, and is declared again without "
                "primary_key=True: make it the key, or rename it"
            )
        return make(name, metadata, brought("id").column, *args, **kwargs)


class JobStateDataclassMixin(MappedAsDataclass, JobTable, kw_only=True):
    """`JobStateMixin` for a `MappedAsDataclass` base. The database sets the state; none of it is in ``__init__``."""

    queue: Mapped[str] = brought("queue", init=False)
    status: Mapped[str] = brought("status", init=False)
    priority: Mapped[int] = brought("priority", init=False)
    attempts: Mapped[int] = brought("attempts", init=False)
    max_attempts: Mapped[int] = brought("max_attempts", init=False)
    run_at: Mapped[datetime] = brought("run_at", init=False)
    locked_until: Mapped[datetime | None] = brought("locked_until", init=False)
    locked_by: Mapped[str | None] = brought("locked_by", init=False)
    last_error: Mapped[str | None] = brought("last_error", init=False)
    unique_key: Mapped[str | None] = brought("unique_key", init=False)
    created_at: Mapped[datetime] = brought("created_at", init=False)
    started_at: Mapped[datetime | None] = brought("started_at", init=False)
    finished_at: Mapped[datetime | None] = brought("finished_at", init=False)


class JobDataclassMixin(JobStateDataclassMixin, kw_only=True):
    """`JobMixin` for a `MappedAsDataclass` base: ``Job(kind=..., payload=...)``."""

    id: Mapped[int] = brought("id", init=False)
    kind: Mapped[str] = brought("kind")
    payload: Mapped[JsonValue] = brought("payload", default_factory=dict)
    meta: Mapped[JsonValue] = brought("meta", default_factory=dict)


class JobErrorsMixin:
    """Adds the history of errors."""

    errors: Mapped[JsonValue] = brought("errors")
    """One object per failed attempt, ``{"attempt", "at", "error"}``, oldest first; the last 20 are kept."""


class JobErrorsDataclassMixin(MappedAsDataclass, kw_only=True):
    """`JobErrorsMixin` for a `MappedAsDataclass` base."""

    errors: Mapped[JsonValue] = brought("errors", init=False)


class JobResultMixin:
    """Adds what a handler returned and how far it is."""

    result: Mapped[JsonValue] = brought("result")
    """JSON, written with `done`."""
    progress: Mapped[float | None] = brought("progress")
    """0 to 1."""


class JobResultDataclassMixin(MappedAsDataclass, kw_only=True):
    """`JobResultMixin` for a `MappedAsDataclass` base."""

    result: Mapped[JsonValue] = brought("result", init=False)
    progress: Mapped[float | None] = brought("progress", init=False)
