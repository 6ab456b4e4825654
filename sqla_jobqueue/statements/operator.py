"""Verbs for jobs that anybody may hold, named by key and attempt number as they were seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import (
    Column,
    ColumnElement,
    FromClause,
    Integer,
    Table,
    Text,
    and_,
    exists,
    func,
    or_,
    select,
    update,
)
from sqlalchemy.sql.dml import ReturningUpdate

from sqla_jobqueue.model import JobTable, cached, job_table, key_columns
from sqla_jobqueue.statements.common import (
    CANCELLED,
    PENDING,
    RUNNING,
    TERMINAL_NOW,
    WAITING,
    beside,
    clock,
    is_picked,
    written,
)
from sqla_jobqueue.statements.fences import given_rows, is_fenced, update_given
from sqla_jobqueue.status import LIVE, TERMINAL, JobStatus


@cached
def cancel(model: type[JobTable], held: JobStatus | None = None) -> ReturningUpdate[Any]:
    """`pending` or `running` -> `cancelled`, fenced. Parameter besides the fence: ``error``, the reason.

    Args:
        model: the job model.
        held: status under which the caller holds the job; None for an operator who holds nothing. Then rows that
            are locked (by a handler in one-transaction mode) are skipped, not waited for.
    """
    table = job_table(model)
    given = given_rows(table, error=Text())

    def values(source: FromClause) -> dict[str, Any]:
        return {"status": CANCELLED, **TERMINAL_NOW, "last_error": source.c.error}

    if held is not None:
        return update_given(table, given, values(given), held)
    return _update_picked(table, given, values, is_fenced(table, given, *LIVE))


@cached
def requeue(model: type[JobTable]) -> ReturningUpdate[Any]:
    """Terminal -> `pending`, due now, with more attempts; fenced. The operator's verb, as `retry` is the worker's.

    Parameter besides the fence: ``more``, attempts to allow (3 is what a new job has). A job whose unique key a live
    job has taken meanwhile is left as it is; so are all but one of those that share a unique key.
    """
    table = job_table(model)
    given = given_rows(table, more=Integer())
    rival = table.alias(beside(table, "rival"))
    taken = exists().where(rival.c.unique_key == table.c.unique_key, rival.c.status.in_([PENDING, RUNNING]))
    wanted = and_(is_fenced(table, given, *TERMINAL), or_(table.c.unique_key.is_(None), ~taken))

    def values(source: FromClause) -> dict[str, Any]:
        return WAITING | {"run_at": clock(), "max_attempts": table.c.attempts + source.c.more}

    return _update_picked(table, given, values, wanted, once=table.c.unique_key)


def _update_picked(
    table: Table,
    given: FromClause,
    values: Callable[[FromClause], dict[str, Any]],
    wanted: ColumnElement[bool],
    once: Column[Any] | None = None,
) -> ReturningUpdate[Any]:
    """Write to jobs that anybody may hold: lock what is free first, so that it neither waits nor deadlocks.

    With `once`, only to the first of those that have the same value there.
    """
    keys = [column.label(f"key_{n}") for n, column in enumerate(key_columns(table))]
    asked = list(given.c[len(keys) :])
    if once is not None:
        asked.append(once.label("once"))
    locked = select(*keys, *asked).join_from(table, given, wanted)
    picked: FromClause = locked.with_for_update(skip_locked=True, key_share=True, of=table).cte(beside(table, "picked"))
    if once is not None:  # FOR UPDATE and a window do not go into one SELECT
        order = func.row_number().over(partition_by=picked.c.once, order_by=[picked.c[key.name] for key in keys])
        ranked = select(picked, order.label("place")).subquery("ranked")
        first = or_(ranked.c.once.is_(None), ranked.c.place == 1)
        picked = select(ranked).where(first).cte(beside(table, "chosen"))
    return update(table).where(is_picked(table, picked)).values(values(picked)).returning(*written(table))
