"""How a job model's mapper, table and key are found."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ParamSpec, TypeVar, cast

from sqlalchemy import Column, Table, inspect
from sqlalchemy.orm import Mapper

from sqla_jobqueue.errors import ConfigurationError
from sqla_jobqueue.model.base import JobTable

P = ParamSpec("P")
R = TypeVar("R")


def cached(builder: Callable[P, R]) -> Callable[P, R]:
    """`functools.cache` that keeps the signature. Keyed by the model, of which an application has a handful."""
    return cast("Callable[P, R]", cache(cast("Callable[..., R]", builder)))


@cached
def job_mapper(model: type[JobTable]) -> Mapper[Any]:
    """The mapper whose table holds the job's state: the model's own, or an ancestor's in a class hierarchy.

    Raises:
        ConfigurationError: the class is not mapped, or has no job mixin.
    """
    mapper = inspect(model, raiseerr=False)
    if not isinstance(mapper, Mapper) or not issubclass(mapper.class_, JobTable):
        raise ConfigurationError(
            f"{getattr(model, '__qualname__', model)!r} is no job model: "
            "mix JobMixin or JobStateMixin into a mapped class"
        )
    return [step for step in mapper.iterate_to_root() if issubclass(step.class_, JobTable)][-1]


@cached
def job_table(model: type[JobTable]) -> Table:
    """The table that holds the job's state."""
    table = job_mapper(model).local_table
    if not isinstance(table, Table):
        raise ConfigurationError(f"{model.__qualname__} is mapped to {table!r}: a job model needs a table")
    return cast("Table", table)


@cached
def key_columns(table: Table) -> tuple[Column[Any], ...]:
    """The primary key of a job table, in its order."""
    return tuple(table.primary_key.columns)
