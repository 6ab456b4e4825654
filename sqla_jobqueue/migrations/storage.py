"""Storage parameters of a job table: the operation, and the comparator that writes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from alembic.autogenerate.render import renderers
from alembic.operations import MigrateOperation, Operations
from alembic.operations.ops import CreateTableOp, ModifyTableOps, UpgradeOps
from alembic.util import PriorityDispatchResult
from sqlalchemy import ARRAY, Connection, MetaData, Table, Text, column, func, select, table

from sqla_jobqueue.model import INFO_STORAGE, SetStorageParameters

if TYPE_CHECKING:
    from alembic.autogenerate.api import AutogenContext

OUR_INFO: Final = "sqla_jobqueue."
"""How the keys of ``Table.info`` begin that are the library's."""

_names = ("oid", "relname", "relnamespace")
_pg_class = table("pg_class", *map(column, _names), column("reloptions", ARRAY(Text)), schema="pg_catalog")
_pg_namespace = table("pg_namespace", column("oid"), column("nspname"), schema="pg_catalog")


@Operations.register_operation("set_storage_parameters")
class SetStorageParametersOp(MigrateOperation):
    """Set storage parameters of a table, or reset them.

    Args:
        table_name: the table.
        parameters: name -> value; None resets to the server's default.
        existing: what these parameters are now, None where the default is in force: what `reverse` sets.
        schema: of the table; None for the one that the search path finds.
    """

    def __init__(
        self,
        table_name: str,
        parameters: Mapping[str, str | None],
        *,
        existing: Mapping[str, str | None] | None = None,
        schema: str | None = None,
    ) -> None:
        known = existing or {}
        self.table_name = table_name
        self.parameters = dict(parameters)
        self.existing = {name: known.get(name) for name in parameters}
        self.schema = schema

    @classmethod
    def set_storage_parameters(
        cls, operations: Operations, table_name: str, parameters: Mapping[str, str | None], *, schema: str | None = None
    ) -> None:
        """Set storage parameters of a table, e.g. ``{"fillfactor": "85"}``; None resets one.

        ::

            ALTER TABLE jobs SET (fillfactor = '85'), RESET (autovacuum_vacuum_scale_factor)

        It holds for rows written from now on and takes a SHARE UPDATE EXCLUSIVE lock: reads and writes go on.
        """
        operations.invoke(cls(table_name, parameters, schema=schema))

    def reverse(self) -> SetStorageParametersOp:
        """Back to what was there."""
        return SetStorageParametersOp(self.table_name, self.existing, existing=self.parameters, schema=self.schema)

    def to_diff_tuple(self) -> tuple[Any, ...]:
        """What ``alembic check`` shows."""
        return ("set_storage_parameters", self.schema, self.table_name, self.parameters, self.existing)


@Operations.implementation_for(SetStorageParametersOp)
def _run(operations: Operations, operation: SetStorageParametersOp) -> None:
    altered = Table(operation.table_name, MetaData(), schema=operation.schema)
    operations.execute(SetStorageParameters(altered, operation.parameters))


@renderers.dispatch_for(SetStorageParametersOp)
def _render(context: AutogenContext, operation: SetStorageParametersOp) -> str:
    lines = [f"{name!r}: {value!r}" for name, value in operation.parameters.items()]
    body = "".join(f"    {line},\n" for line in lines)
    schema = "" if operation.schema is None else f", schema={str(operation.schema)!r}"
    prefix = context.opts["alembic_module_prefix"]
    return f"{prefix}set_storage_parameters({str(operation.table_name)!r}, {{\n{body}}}{schema})"


def compare_storage_parameters(
    context: AutogenContext,
    changes: ModifyTableOps,
    _schema: str | None,
    _name: str,
    existing_table: Table | None,
    model_table: Table | None,
) -> PriorityDispatchResult:
    """Add an operation where a job table's parameters in the database are not those of the model."""
    wanted: Mapping[str, str] = {} if model_table is None else model_table.info.get(INFO_STORAGE, {})
    if model_table is not None and wanted:
        found = {} if existing_table is None else _storage_parameters(context.connection, model_table)
        changed = {name: value for name, value in wanted.items() if not _equal(value, found.get(name))}
        if changed:
            operation = SetStorageParametersOp(
                model_table.name, changed, existing=dict(found), schema=model_table.schema
            )
            changes.ops.append(operation)
    return PriorityDispatchResult.CONTINUE


def hide_our_info(_context: AutogenContext, upgrade: UpgradeOps) -> PriorityDispatchResult:
    """Keep what the library remembers in ``Table.info`` out of ``op.create_table``, where Alembic prints it."""
    for operation in upgrade.ops:
        if isinstance(operation, CreateTableOp) and operation.info:
            for key in [key for key in operation.info if str(key).startswith(OUR_INFO)]:
                del operation.info[key]
    return PriorityDispatchResult.CONTINUE


def _storage_parameters(connection: Connection | None, existing: Table) -> dict[str, str]:
    """The parameters that stand in the catalog, as text."""
    if connection is None:
        return {}
    query = select(_pg_class.c.reloptions).where(_pg_class.c.relname == existing.name)
    if existing.schema is None:
        query = query.where(func.pg_table_is_visible(_pg_class.c.oid))
    else:
        home = _pg_class.c.relnamespace == _pg_namespace.c.oid
        query = query.join(_pg_namespace, home).where(_pg_namespace.c.nspname == existing.schema)
    options: list[str] = connection.scalar(query) or []
    return {name: value for name, _, value in (option.partition("=") for option in options)}


def _equal(wanted: str, found: str | None) -> bool:
    """0.02 is 0.020, and on is ON."""
    if found is None:
        return False
    try:
        return float(wanted) == float(found)
    except ValueError:
        return wanted.lower() == found.lower()
