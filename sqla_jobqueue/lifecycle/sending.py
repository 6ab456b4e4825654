"""Where a statement is sent, and which jobs its rows stand for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from sqlalchemy import Connection, Result, Row
from sqlalchemy.orm import Session

from sqla_jobqueue.model import (
    JobTable,
    job_mapper,
    job_table,
    key_columns,
)
from sqla_jobqueue.statements import Fence

Executor: TypeAlias = Session | Connection
"""Where a statement is sent."""


def connection_of(executor: Executor, model: type[JobTable]) -> Connection:
    """The connection itself, or that of the session's transaction for a job model."""
    if isinstance(executor, Connection):
        return executor
    return executor.connection(bind_arguments={"mapper": job_mapper(model)})


def execute(executor: Executor, model: type[JobTable], statement: Any, parameters: Mapping[str, Any]) -> Result[Any]:
    """Send a statement about a job model.

    Why on the session's connection: `Session.execute` copies the statement, whose cache key is then computed anew each
    time: a fifth of what a claim costs the client. Nor does this flush.
    """
    return connection_of(executor, model).execute(statement, parameters)


def fences_in(model: type[JobTable], rows: Iterable[Row[Any]]) -> set[Fence]:
    """Which fences the returned rows stand for: they begin with the key and the attempt number."""
    width = len(key_columns(job_table(model)))
    return {Fence(tuple(row[:width]), row[width]) for row in rows}


def row_fence(model: type[JobTable], row: Mapping[str, Any]) -> Fence:
    """The fence of a claimed row."""
    return Fence(tuple(row[column.name] for column in key_columns(job_table(model))), row["attempts"])
