"""What the database says of a job table: its columns, and the version that stands in a comment on one of its checks.

In plain SQL::

    SELECT obj_description(oid, 'pg_constraint') FROM pg_constraint
    WHERE conrelid = 'jobs'::regclass AND contype = 'c'           -- sqla_jobqueue schema 1, for workers from 0
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from sqlalchemy import ColumnElement, Select, Text, and_, bindparam, column, func, or_, select, table

_MARKER: Final = re.compile(r"sqla_jobqueue schema (\d+), for workers from (\d+)")

pg_class: Final = table(
    "pg_class",
    *(column(name) for name in ("oid", "relname", "relnamespace", "relkind", "reloptions")),
    schema="pg_catalog",
)
_pg_namespace = table("pg_namespace", column("oid"), column("nspname"), schema="pg_catalog")
_pg_attribute = table(
    "pg_attribute",
    *(column(name) for name in ("attrelid", "attname", "attnum", "attisdropped")),
    schema="pg_catalog",
)
_pg_constraint = table("pg_constraint", *(column(name) for name in ("oid", "conrelid", "contype")), schema="pg_catalog")


@dataclass(frozen=True, slots=True)
class Marker:
    """The version of a job table, as its marker tells.

    Attributes:
        version: number of the newest schema step that it has.
        oldest_worker: workers of libraries that know an older version may not run on it.
    """

    version: int
    oldest_worker: int


def read_marker(comment: str | None) -> Marker | None:
    """Read the marker; None if the comment is none."""
    found = _MARKER.match(comment or "")
    return None if found is None else Marker(int(found[1]), int(found[2]))


def is_table(relation: Any) -> ColumnElement[bool]:
    """It is the table ``of_table`` in ``of_schema``; where that is NULL, the one that the search path finds."""
    schema = bindparam("of_schema", type_=Text)
    home = select(_pg_namespace.c.nspname).where(_pg_namespace.c.oid == relation.c.relnamespace).scalar_subquery()
    found = or_(home == schema, and_(schema.is_(None), func.pg_catalog.pg_table_is_visible(relation.c.oid)))
    return and_(relation.c.relname == bindparam("of_table", type_=Text), found)


def marker_of(relation: Any) -> ColumnElement[str]:
    """The marker's text, or NULL. Why not asked for by the check's name: naming conventions make it anything."""
    comment = func.pg_catalog.obj_description(_pg_constraint.c.oid, "pg_constraint", type_=Text)
    mine = and_(_pg_constraint.c.conrelid == relation.c.oid, _pg_constraint.c.contype == "c")
    return select(func.max(comment)).where(mine, comment.startswith("sqla_jobqueue schema ")).scalar_subquery()


@cache
def table_columns() -> Select[*tuple[Any, ...]]:
    """Select the marker and the name of each column; no row where there is no table.

    Parameters: ``of_table``, ``of_schema``.
    """
    mine = and_(_pg_attribute.c.attrelid == pg_class.c.oid, _pg_attribute.c.attnum > 0, ~_pg_attribute.c.attisdropped)
    return (
        select(marker_of(pg_class).label("marker"), _pg_attribute.c.attname.label("name"))
        .select_from(pg_class.outerjoin(_pg_attribute, mine))
        .where(is_table(pg_class))
    )
