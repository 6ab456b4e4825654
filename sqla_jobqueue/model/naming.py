"""Names of checks and indexes, by the application's naming convention and within PostgreSQL's bound."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final, cast

from sqlalchemy import (
    CheckConstraint,
    Index,
    MetaData,
    Table,
)
from sqlalchemy.schema import conv

MAX_IDENTIFIER_BYTES: Final = 63
"""PostgreSQL's NAMEDATALEN - 1: it cuts longer names silently, two of them perhaps to the same one."""

_DEFAULT_NAMING: Final = MetaData().naming_convention


def fitted(name: str, digested: str, ending: str = "") -> str:
    """A name with its ending, within 63 bytes: a digest takes the place of what is too much."""
    if len((name + ending).encode()) <= MAX_IDENTIFIER_BYTES:
        return name + ending
    ending = f"_{hashlib.sha256(digested.encode()).hexdigest()[:8]}{ending}"
    return name.encode()[: MAX_IDENTIFIER_BYTES - len(ending)].decode(errors="ignore") + ending


def name_for(table: Table, kind: type[Index | CheckConstraint], suffix: str) -> str | None:
    """What to call an index or check before the application's naming convention, if it has one, gives its name."""
    short, ending = ("ix", "idx") if kind is Index else ("ck", "check")
    conventions = cast("Mapping[Any, Any]", table.metadata.naming_convention)
    template: Any = conventions.get(short) or conventions.get(kind)
    if template is None or template == _DEFAULT_NAMING.get(short):
        return fitted(table.name, table.name, f"_{suffix}_{ending}")
    return suffix if "constraint_name" in str(template) else None


def settle_name(item: Index | CheckConstraint, table: Table, suffix: str) -> None:
    """Replace a conventional name that does not serve.

    Why: ``ix_%(column_0_label)s`` names two of our indexes alike; and PostgreSQL cuts what is longer than 63 bytes,
    two names perhaps to the same one, where SQLAlchemy counts characters.
    """
    given = str(item.name)
    name = fitted(given, given)
    taken = {other.name for others in (table.indexes, table.constraints) for other in others if other is not item}
    if item.name is None or name in taken:
        name = fitted(table.name, table.name, f"_{suffix}_{'idx' if isinstance(item, Index) else 'check'}")
    if name != given:
        item.name = conv(name)
