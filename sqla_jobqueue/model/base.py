"""What every job model is an instance of; a column declared by it and by a job mixin is refused at once."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar, cast

from sqlalchemy import (
    Column,
    inspect,
)
from sqlalchemy.orm import Mapped, MappedColumn

from sqla_jobqueue.errors import ConfigurationError
from sqla_jobqueue.model.columns import COLUMNS


class JobTable:
    """What every job model is an instance of, whichever mixin it uses. Not for use in a class statement."""

    if TYPE_CHECKING:
        queue: Mapped[str]
        status: Mapped[str]
        priority: Mapped[int]
        attempts: Mapped[int]
        max_attempts: Mapped[int]
        run_at: Mapped[datetime]
        locked_until: Mapped[datetime | None]
        locked_by: Mapped[str | None]
        last_error: Mapped[str | None]
        unique_key: Mapped[str | None]
        created_at: Mapped[datetime]
        started_at: Mapped[datetime | None]
        finished_at: Mapped[datetime | None]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if not _is_ours(cls):
            _refuse_clashes(cls)
        super().__init_subclass__(**kwargs)


J = TypeVar("J", bound=JobTable)


def _column_of(value: object) -> Column[Any] | None:
    """The column that an attribute's value declares."""
    declared: object = cast("Any", value).column if isinstance(value, MappedColumn) else value
    return cast("Any", declared) if isinstance(declared, Column) else None


def is_primary_key(value: object) -> bool:
    """Whether an attribute's value declares a primary key column."""
    column = _column_of(value)
    return column is not None and column.primary_key


def column_names(value: object) -> set[str]:
    """The column name that an attribute's value gives."""
    column = _column_of(value)
    return {column.name} if column is not None and column.name else set()


def _is_ours(cls: type) -> bool:
    """One of this package's own classes, not one that uses them."""
    return cls.__module__.startswith(f"{__package__}.")


def _own_attributes(cls: type) -> dict[str, object]:
    """What a class body declares: annotated or assigned."""
    return {**dict.fromkeys(vars(cls).get("__annotations__", {})), **vars(cls)}


def _refuse_clashes(cls: type) -> None:
    brought = {
        name
        for base in cls.__mro__
        if _is_ours(base)
        for name in _own_attributes(base)
        if name in COLUMNS and name != "id"  # a key of one's own may be called so
    }
    for base in cls.__mro__:
        if _is_ours(base) or (issubclass(base, JobTable) and inspect(base, raiseerr=False) is not None):
            continue
        for name, value in _own_attributes(base).items():
            for clash in ({name} | column_names(value)) & brought:
                raise ConfigurationError(
                    f"{cls.__qualname__}: column {clash!r} is brought by the job mixin and declared again by "
                    f"{base.__qualname__}: rename one's own, or map it under another attribute and column name"
                )
