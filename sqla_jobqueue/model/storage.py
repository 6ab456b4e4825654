"""Storage parameters of a job table."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import (
    Table,
    Text,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import ExecutableDDLElement

if TYPE_CHECKING:
    from sqlalchemy.sql.compiler import DDLCompiler

INFO_STORAGE: Final = "sqla_jobqueue.storage"
"""Key of ``Table.info`` under which a job table's storage parameters stand, for migrations."""

STORAGE_PARAMETERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "fillfactor": "85",
        "autovacuum_vacuum_scale_factor": "0.02",
        "autovacuum_vacuum_insert_scale_factor": "0.05",
        "autovacuum_analyze_scale_factor": "0.05",
        "autovacuum_vacuum_cost_delay": "1",
    }
)
"""A job row is updated two or three times and then deleted: room on the page for its next version, and an autovacuum
that comes after 2 % of dead rows instead of 20 %."""


class SetStorageParameters(ExecutableDDLElement):
    """``ALTER TABLE ... SET (...), RESET (...)``: storage parameters of an existing table; None resets one.

    Why: SQLAlchemy 2.0 drops ``postgresql_with`` on a table silently, so both versions set them this way.
    """

    inherit_cache = False

    def __init__(self, table: Table, parameters: Mapping[str, str | None]) -> None:
        self.table = table
        self.parameters = dict(parameters)


@compiles(SetStorageParameters, "postgresql")
def _compile_set_storage(element: SetStorageParameters, compiler: DDLCompiler, **_kw: Any) -> str:
    def quoted(name: str) -> str:
        return ".".join(compiler.preparer.quote(part) for part in name.split("."))  # toast.autovacuum_enabled

    def literal(value: str) -> str:
        return compiler.sql_compiler.render_literal_value(str(value), Text())

    new = [f"{quoted(name)} = {literal(value)}" for name, value in element.parameters.items() if value is not None]
    gone = [quoted(name) for name, value in element.parameters.items() if value is None]
    changes = [f"{verb} ({', '.join(names)})" for verb, names in (("SET", new), ("RESET", gone)) if names]
    return f"ALTER TABLE {compiler.preparer.format_table(element.table)} {', '.join(changes)}"
