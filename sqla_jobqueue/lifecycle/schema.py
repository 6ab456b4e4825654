"""Whether a table is one that this release can work on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Column

from sqla_jobqueue.errors import ConfigurationError
from sqla_jobqueue.lifecycle.sending import Executor, connection_of
from sqla_jobqueue.model import (
    INFO_BROUGHT,
    SCHEMA_VERSION,
    JobTable,
    job_table,
)
from sqla_jobqueue.statements.shape import read_marker, table_columns


def check_schema(executor: Executor, model: type[JobTable]) -> int:
    """Whether this release can work on the table as it is in the database; return the table's schema version.

    Columns that the model does not know are no hindrance, nor is an older version that lacks none of the columns: a
    rolling deploy has both for a while.

    Returns:
        The version of the last schema step; 0 for a table made before they were counted.

    Raises:
        ConfigurationError: the table or some of its columns are missing, or it was made for later workers. The text
            names the migration to run.
    """
    table = job_table(model)
    connection = connection_of(executor, model)
    where = {"of_table": table.name, "of_schema": connection.schema_for_object(table)}
    rows = connection.execute(table_columns(), where).all()
    if not rows:
        raise ConfigurationError(f"there is no table {table.fullname!r} in the database: run 'alembic upgrade head'")
    marker = read_marker(rows[0].marker)
    if marker is not None and marker.oldest_worker > SCHEMA_VERSION:
        raise ConfigurationError(
            f"{table.fullname!r} is at schema version {marker.version} and for workers from version "
            f"{marker.oldest_worker}; this one knows {SCHEMA_VERSION}: upgrade sqla_jobqueue, or run 'alembic "
            "downgrade' with the newer one first"
        )
    version = 0 if marker is None else marker.version
    if missing := [column for column in table.c if column.name not in {row.name for row in rows}]:
        raise ConfigurationError(_missing(table.fullname, missing, version))
    return version


def _missing(name: str, columns: Sequence[Column[Any]], version: int) -> str:
    names = ", ".join(column.name for column in columns)
    found = f"{name!r} lacks columns that its model has ({names})"
    remedy = "run 'alembic upgrade head', with a revision that adds them"
    if any(INFO_BROUGHT in column.info for column in columns):
        remedy = (
            f"it is at schema version {version}, this release makes version {SCHEMA_VERSION}. Run 'alembic upgrade "
            "head'; if no revision is waiting, 'alembic revision --autogenerate' writes it"
        )
    return f"{found}: {remedy}"
