"""The library's own part of a job table as a value: what a version has, and what changes from one to another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, TypeVar

from sqlalchemy import Column, ColumnElement

from sqla_jobqueue.model import fitted

T = TypeVar("T")

KEY: Final = "<key>"
"""Stands for the primary key's columns among those of an index."""

STATUS_CHECK: Final = "status_check"
"""The check that carries the table's version in its comment."""


@dataclass(frozen=True, slots=True, eq=False)
class IndexPart:
    """An index of a job table.

    Attributes:
        columns: their names, `KEY` for those of the primary key.
        where: which rows it has.
        unique: whether it is.
    """

    columns: tuple[str, ...]
    where: ColumnElement[bool]
    unique: bool = False

    def columns_with(self, key: Iterable[str]) -> list[str]:
        """The columns' names."""
        return [name for column in self.columns for name in (key if column == KEY else (column,))]


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """Columns, checks and indexes by their short names (``pending``), storage parameters by their own.

    In the change that a step makes, None says that the part goes away.
    """

    columns: Mapping[str, Callable[[], Column[Any]] | None] = field(default_factory=dict[str, Any])
    checks: Mapping[str, ColumnElement[bool] | None] = field(default_factory=dict[str, Any])
    indexes: Mapping[str, IndexPart | None] = field(default_factory=dict[str, Any])
    storage: Mapping[str, str | None] = field(default_factory=dict[str, Any])

    def changed_by(self, step: Shape) -> Shape:
        """This one after a step."""
        return Shape(
            _merged(self.columns, step.columns),
            _merged(self.checks, step.checks),
            _merged(self.indexes, step.indexes),
            _merged(self.storage, step.storage),
        )

    def leading_to(self, target: Shape) -> Shape:
        """What has to change to make this one the other: the step between them, forward or back."""
        return Shape(
            _difference(self.columns, target.columns),
            _difference(self.checks, target.checks),
            _difference(self.indexes, target.indexes),
            _difference(self.storage, target.storage),
        )

    def parts(self) -> set[str]:
        """The checks and indexes, each by its short name and kind."""
        return {f"{name}_check" for name in self.checks} | {f"{name}_idx" for name in self.indexes}

    def partitioned(self) -> Shape:
        """What a partitioned table can have of it: no unique index without its partition key, nothing stored."""
        indexes = {name: part for name, part in self.indexes.items() if part is None or not part.unique}
        return Shape(self.columns, self.checks, indexes, {})


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A numbered change of the library's own part of every job table. Never edited once released.

    Attributes:
        number: of the version that it leads to; the former one is one less.
        summary: what changes, and why.
        change: the parts that it adds, replaces or (None) removes. The way back follows from the version before.
        oldest_worker: the oldest version whose workers may run on the table from here on.
    """

    number: int
    summary: str
    change: Shape
    oldest_worker: int = 0


def part_name(table: str, part: str, names: Mapping[str, str]) -> str:
    """What an index or check of a table is called: as told, else as without a naming convention."""
    return names.get(part) or fitted(table, table, f"_{part}")


def frozen(values: Mapping[str, T]) -> Mapping[str, T]:
    """A mapping that nobody edits."""
    return MappingProxyType(dict(values))


def _merged(former: Mapping[str, T | None], step: Mapping[str, T | None]) -> Mapping[str, T | None]:
    merged = {**former, **step}
    return {name: part for name, part in merged.items() if part is not None}


def _difference(source: Mapping[str, T | None], target: Mapping[str, T | None]) -> Mapping[str, T | None]:
    names = dict.fromkeys((*source, *target))
    return {name: target.get(name) for name in names if source.get(name) is not target.get(name)}
