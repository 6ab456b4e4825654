"""DDL that neither SQLAlchemy nor Alembic has a construct for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sqlalchemy import CheckConstraint, Column, ColumnElement, DefaultClause, MetaData, Table
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import ExecutableDDLElement

if TYPE_CHECKING:
    from sqlalchemy.sql.compiler import DDLCompiler


@dataclass(frozen=True, slots=True)
class Ref:
    """A table by its name.

    Attributes:
        name: without the schema.
        schema: None for the one that the search path finds.
    """

    name: str
    schema: str | None = None

    def __str__(self) -> str:
        return self.name if self.schema is None else f"{self.schema}.{self.name}"

    def table(self, *columns: Column[Any]) -> Table:
        """As SQLAlchemy names it."""
        return Table(self.name, MetaData(), *columns, schema=self.schema)


class Action(Protocol):
    """One change in an ALTER TABLE."""

    def sql(self, compiler: DDLCompiler) -> str:
        """Its text."""
        ...


@dataclass(frozen=True, slots=True)
class AddColumn:
    """``ADD COLUMN name type ...``."""

    column: Column[Any]

    def sql(self, compiler: DDLCompiler) -> str:
        """Its text."""
        return f"ADD COLUMN {compiler.get_column_specification(self.column)}"


@dataclass(frozen=True, slots=True)
class DropColumn:
    """``DROP COLUMN name``; its indexes and checks go with it."""

    name: str
    if_exists: bool = False

    def sql(self, compiler: DDLCompiler) -> str:
        """Its text."""
        return f"DROP COLUMN {'IF EXISTS ' * self.if_exists}{compiler.preparer.quote(self.name)}"


@dataclass(frozen=True, slots=True)
class SetDefault:
    """``ALTER COLUMN name SET DEFAULT 'value'``, for rows to come."""

    name: str
    value: str

    def sql(self, compiler: DDLCompiler) -> str:
        """Its text."""
        default = compiler.render_default_string(DefaultClause(self.value).arg)
        return f"ALTER COLUMN {compiler.preparer.quote(self.name)} SET DEFAULT {default}"


@dataclass(frozen=True, slots=True)
class AddCheck:
    """``ADD CONSTRAINT name CHECK (...) NOT VALID``: it holds for rows written from now on, and reads none."""

    name: str
    condition: ColumnElement[bool] | str

    def sql(self, compiler: DDLCompiler) -> str:
        """Its text."""
        condition = CheckConstraint(self.condition).sqltext
        text = compiler.sql_compiler.process(condition, include_table=False, literal_binds=True)
        return f"ADD CONSTRAINT {compiler.preparer.quote(self.name)} CHECK ({text}) NOT VALID"


@dataclass(frozen=True, slots=True)
class DropConstraint:
    """``DROP CONSTRAINT IF EXISTS name``."""

    name: str

    def sql(self, compiler: DDLCompiler) -> str:
        """Its text."""
        return f"DROP CONSTRAINT IF EXISTS {compiler.preparer.quote(self.name)}"


@dataclass(frozen=True, slots=True)
class ValidateConstraint:
    """``VALIDATE CONSTRAINT name``: reads the whole table, while reads and writes go on."""

    name: str

    def sql(self, compiler: DDLCompiler) -> str:
        """Its text."""
        return f"VALIDATE CONSTRAINT {compiler.preparer.quote(self.name)}"


class AlterTable(ExecutableDDLElement):
    """``ALTER TABLE name action, action``: one lock, all or nothing."""

    inherit_cache = False

    def __init__(self, ref: Ref, *actions: Action) -> None:
        self.ref = ref
        self.actions: Sequence[Action] = actions


@compiles(AlterTable, "postgresql")
def _compile_alter_table(element: AlterTable, compiler: DDLCompiler, **_kw: Any) -> str:
    actions = ", ".join(action.sql(compiler) for action in element.actions)
    return f"ALTER TABLE {compiler.preparer.format_table(element.ref.table())} {actions}"


class RenameIndex(ExecutableDDLElement):
    """``ALTER INDEX name RENAME TO other``."""

    inherit_cache = False

    def __init__(self, schema: str | None, name: str, other: str) -> None:
        self.index = Ref(name, schema)
        self.other = other


@compiles(RenameIndex, "postgresql")
def _compile_rename_index(element: RenameIndex, compiler: DDLCompiler, **_kw: Any) -> str:
    preparer = compiler.preparer
    return f"ALTER INDEX {preparer.format_table(element.index.table())} RENAME TO {preparer.quote(element.other)}"


class CreateLike(ExecutableDDLElement):
    """``CREATE TABLE pg_temp.name (LIKE other)``: a temporary table with the same columns."""

    inherit_cache = False

    def __init__(self, ref: Ref, other: Ref) -> None:
        self.ref = ref
        self.other = other


@compiles(CreateLike, "postgresql")
def _compile_create_like(element: CreateLike, compiler: DDLCompiler, **_kw: Any) -> str:
    preparer = compiler.preparer
    new, like = (preparer.format_table(ref.table()) for ref in (element.ref, element.other))
    return f"CREATE TABLE {new} (LIKE {like})"
