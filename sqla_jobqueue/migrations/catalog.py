"""What stands in the database, and what the server would make of a shape, in the same words.

PostgreSQL prints an expression as it has parsed it, so two definitions can be compared once it has printed both. The
wanted one is therefore made on an empty temporary table with the same columns, read, and dropped again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import (
    ARRAY,
    Column,
    Connection,
    Index,
    Integer,
    Text,
    and_,
    cast,
    column,
    func,
    select,
    table,
    true,
)
from sqlalchemy.dialects.postgresql import aggregate_order_by
from sqlalchemy.schema import CreateIndex, DropTable

from sqla_jobqueue.migrations.ddl import Action, AddCheck, AddColumn, AlterTable, CreateLike, DropColumn, Ref
from sqla_jobqueue.migrations.shape import IndexPart, Shape, part_name
from sqla_jobqueue.statements.shape import Marker, is_table, marker_of, pg_class, read_marker

SCRATCH: Final = Ref("sqla_jobqueue_wanted", "pg_temp")
"""The temporary table."""


def _catalog(name: str, *columns: str) -> Any:
    return table(name, *map(column, columns), schema="pg_catalog").alias(name)


_of = _catalog("pg_class", "oid", "relname", "relam", "reloptions").alias("of")
_am = _catalog("pg_am", "oid", "amname")
_attribute = _catalog(
    "pg_attribute", "attrelid", "attname", "atttypid", "atttypmod", "attnum", "attnotnull", "attisdropped"
)
_attrdef = _catalog("pg_attrdef", "adrelid", "adnum", "adbin")
_constraint = _catalog("pg_constraint", "conrelid", "contype", "conname", "conbin", "convalidated")
_index = _catalog(
    "pg_index",
    *("indexrelid", "indrelid", "indkey", "indoption", "indclass", "indcollation", "indpred"),
    *("indnatts", "indnkeyatts", "indisunique", "indisvalid"),
)


@dataclass(frozen=True, slots=True)
class FoundColumn:
    """A column; type and default as PostgreSQL prints them."""

    kind: str
    not_null: bool
    default: str | None


@dataclass(frozen=True, slots=True)
class FoundCheck:
    """A check.

    Attributes:
        condition: as PostgreSQL prints it.
        valid: it was tried on every row.
    """

    condition: str
    valid: bool


@dataclass(frozen=True, slots=True)
class FoundIndex:
    """An index.

    Attributes:
        columns: names, or expressions.
        where: which rows it has, as PostgreSQL prints it.
        unique: whether it is.
        rest: access method, operator classes, collations, order, included columns.
        plain: the other attributes say all that somebody would write of it.
        valid: it is complete. What an interrupted concurrent build leaves is not.
    """

    columns: tuple[str, ...]
    where: str | None
    unique: bool
    rest: str
    plain: bool
    valid: bool


@dataclass(frozen=True, slots=True)
class Found:
    """A table as it is; `size` in bytes, without indexes."""

    oid: int
    partitioned: bool
    size: int
    marker: Marker | None
    columns: Mapping[str, FoundColumn]
    checks: Mapping[str, FoundCheck]
    indexes: Mapping[str, FoundIndex]

    @property
    def version(self) -> int:
        """Of the schema, as the marker tells; 0 without one."""
        return 0 if self.marker is None else self.marker.version


def read(connection: Connection, ref: Ref) -> Found | None:
    """Read a table; None if there is none."""
    c = pg_class.c
    facts = c.oid, c.relkind, func.pg_catalog.pg_relation_size(c.oid).label("size"), marker_of(pg_class).label("marker")
    where = {"of_table": ref.name, "of_schema": ref.schema}
    row = connection.execute(select(*facts).where(is_table(pg_class)), where).one_or_none()
    if row is None:
        return None
    return Found(
        oid=row.oid,
        partitioned=row.relkind in {"p", b"p"},
        size=row.size,
        marker=read_marker(row.marker),
        columns=_columns(connection, row.oid),
        checks=_checks(connection, row.oid),
        indexes=_indexes(connection, row.oid),
    )


def wanted(connection: Connection, ref: Ref, shape: Shape, key: Sequence[str], names: Mapping[str, str]) -> Found:
    """What the table would be with this shape."""
    columns = [make() for make in shape.columns.values() if make is not None]
    SCRATCH.table(*columns)
    actions: list[Action] = [DropColumn(each.name, if_exists=True) for each in columns]
    actions += [AddColumn(each) for each in columns]
    for name, condition in shape.checks.items():
        if condition is not None:
            actions.append(AddCheck(part_name(ref.name, f"{name}_check", names), condition))
    connection.execute(DropTable(SCRATCH.table(), if_exists=True))  # left by a run that an error ended
    connection.execute(CreateLike(SCRATCH, ref))
    if actions:
        connection.execute(AlterTable(SCRATCH, *actions))
    for name, part in shape.indexes.items():
        if part is not None:
            connection.execute(CreateIndex(make_index(SCRATCH, part_name(ref.name, f"{name}_idx", names), part, key)))
    found = read(connection, SCRATCH)
    connection.execute(DropTable(SCRATCH.table()))
    if found is None:
        raise RuntimeError(f"{SCRATCH} was just made, and is not found")
    return found


def make_index(ref: Ref, name: str, part: IndexPart, key: Sequence[str], **options: Any) -> Index:
    """An index as SQLAlchemy has it."""
    names = part.columns_with(key)
    home = ref.table(*(Column(each) for each in dict.fromkeys(names)))
    return Index(name, *(home.c[each] for each in names), unique=part.unique, postgresql_where=part.where, **options)


def _columns(connection: Connection, oid: int) -> dict[str, FoundColumn]:
    c = _attribute.c
    query = (
        select(
            c.attname,
            func.pg_catalog.format_type(c.atttypid, c.atttypmod),
            c.attnotnull,
            func.pg_catalog.pg_get_expr(_attrdef.c.adbin, _attrdef.c.adrelid),
        )
        .select_from(
            _attribute.outerjoin(_attrdef, and_(_attrdef.c.adrelid == c.attrelid, _attrdef.c.adnum == c.attnum))
        )
        .where(c.attrelid == oid, c.attnum > 0, c.attisdropped.is_(False))
        .order_by(c.attnum)
    )
    return {name: FoundColumn(*facts) for name, *facts in connection.execute(query)}


def _checks(connection: Connection, oid: int) -> dict[str, FoundCheck]:
    c = _constraint.c
    condition = func.pg_catalog.pg_get_expr(c.conbin, c.conrelid)
    query = select(c.conname, condition, c.convalidated).where(c.conrelid == oid, c.contype == "c")
    return {name: FoundCheck(*facts) for name, *facts in connection.execute(query)}


def _indexes(connection: Connection, oid: int) -> dict[str, FoundIndex]:
    c = _index.c
    place = func.generate_series(1, c.indnkeyatts).table_valued("place").render_derived().lateral("places")
    printed = func.pg_catalog.pg_get_indexdef(c.indexrelid, cast(place.c.place, Integer), true(), type_=Text)
    columns = select(func.array_agg(aggregate_order_by(printed, place.c.place), type_=ARRAY(Text)))
    query = (
        select(
            _of.c.relname.label("name"),
            columns.select_from(place).scalar_subquery().label("columns"),
            func.pg_catalog.pg_get_expr(c.indpred, c.indrelid).label("where"),
            c.indisunique,
            c.indisvalid,
            _am.c.amname,
            (c.indnatts - c.indnkeyatts).label("included"),
            *(cast(c[each], Text).label(each) for each in ("indkey", "indoption", "indclass", "indcollation")),
        )
        .select_from(_index.join(_of, _of.c.oid == c.indexrelid).join(_am, _am.c.oid == _of.c.relam))
        .where(c.indrelid == oid)
    )
    found: dict[str, FoundIndex] = {}
    for row in connection.execute(query):
        rest = f"{row.amname} {row.indclass} {row.indcollation} {row.indoption} {row.included}"
        descending, expression = set(row.indoption.split()) - {"0"}, "0" in row.indkey.split()
        found[row.name] = FoundIndex(
            columns=tuple(row.columns),
            where=row.where,
            unique=row.indisunique,
            rest=rest,
            plain=row.amname == "btree" and not row.included and not descending and not expression,
            valid=row.indisvalid,
        )
    return found
