"""Words, conditions and locking that the builders share."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final, cast

from sqlalchemy import (
    BindParameter,
    Column,
    ColumnElement,
    FromClause,
    Select,
    Table,
    Text,
    and_,
    bindparam,
    case,
    func,
    literal_column,
    null,
)
from sqlalchemy.dialects.postgresql import JSONB

from sqla_jobqueue.model import INFO_BROUGHT, TIMESTAMPTZ, key_columns
from sqla_jobqueue.status import TERMINAL, JobStatus

LEASE_EXPIRED: Final = "lease expired"
"""`last_error` of a job whose worker was lost."""

KEPT_ERRORS: Final = 20
"""Entries of `JobErrorsMixin.errors` that are kept."""


def word(status: JobStatus) -> ColumnElement[str]:
    """A status as a literal: a bound parameter would keep a prepared statement from using a partial index."""
    return literal_column(f"'{status.value}'", Text)


PENDING, RUNNING, DONE, FAILED, CANCELLED = (word(status) for status in JobStatus)


def bound(value: Any, kind: Any) -> ColumnElement[Any]:
    """A value as a bound parameter of a known type; a construct (such as a `bindparam`) passes as it is."""
    return value if isinstance(value, ColumnElement) else bindparam(None, value, type_=kind, unique=True)


def clock() -> ColumnElement[datetime]:
    """The database's clock, now: it moves on within a transaction."""
    return func.clock_timestamp(type_=TIMESTAMPTZ)


def is_pending(table: FromClause) -> ColumnElement[bool]:
    """Waiting, due or not."""
    return table.c.status == PENDING


def is_due(table: FromClause) -> ColumnElement[bool]:
    """Waiting, and its time has come."""
    return and_(is_pending(table), table.c.run_at <= func.now(type_=TIMESTAMPTZ))


def is_expired(table: FromClause) -> ColumnElement[bool]:
    """Claimed by a worker that let the lease lapse."""
    return and_(table.c.status == RUNNING, table.c.locked_until < func.now(type_=TIMESTAMPTZ))


def is_finished(table: FromClause) -> ColumnElement[bool]:
    """In one of the terminal states."""
    return table.c.status.in_([word(status) for status in TERMINAL])


def is_now(table: FromClause, *statuses: JobStatus) -> ColumnElement[bool]:
    """The status, hidden from the planner.

    Why: its statistics often say that nothing is running, and then it prefers the tiny partial index, or a join of
    batch with batch, to the primary key: 83 us a job instead of 9 in batches of 100.
    """
    hidden = table.c.status.concat(literal_column("''", Text))
    if len(statuses) == 1:
        return hidden == word(statuses[0])
    return hidden.in_([word(status) for status in statuses])


def beside(table: Table, name: str) -> str:
    """A name for a source that stands beside the job table, which may itself be called so."""
    return f"{name}_" if table.name == name else name


def pick(
    candidates: Select[Any], table: Table, limit: int | BindParameter[int] | None, *, key_share: bool = True
) -> FromClause:
    """Lock the keys of the candidates that nobody else has locked; with `key_share`, nor wait for foreign keys to them.

    Why a CTE: it is evaluated once. As ``WHERE id IN (SELECT ... LIMIT 10)`` the planner may run the subquery once
    per outer row: 1,001 jobs claimed for LIMIT 10 with stale statistics.
    """
    keys = [column.label(f"key_{n}") for n, column in enumerate(key_columns(table))]
    locked = candidates.with_only_columns(*keys, maintain_column_froms=True)
    if limit is not None:
        locked = locked.limit(cast("int", limit))
    return locked.with_for_update(skip_locked=True, key_share=key_share, of=table).cte(beside(table, "picked"))


def is_picked(table: Table, picked: FromClause) -> ColumnElement[bool]:
    """Its key is among the rows of `pick`, or of any other source with ``key_0``, ``key_1``..."""
    return and_(*(column == picked.c[f"key_{n}"] for n, column in enumerate(key_columns(table))))


def written(table: Table) -> list[Column[Any]]:
    """What a verb returns of each job it changed: the fence, the new status, and when it is due."""
    return [*key_columns(table), table.c.attempts, table.c.status, table.c.run_at]


def with_error(table: Table, error: ColumnElement[Any], attempt: ColumnElement[int] | None = None) -> dict[str, Any]:
    """Set `last_error`, and add an entry to `errors` where the model has it."""
    values: dict[str, Any] = {"last_error": error}
    if "errors" in table.c and INFO_BROUGHT in table.c.errors.info:
        number = table.c.attempts if attempt is None else attempt
        entry = func.jsonb_build_object("attempt", number, "at", clock(), "error", error, type_=JSONB)
        appended = table.c.errors.concat(func.jsonb_build_array(entry, type_=JSONB))
        path: ColumnElement[Any] = literal_column(f"'$[last - {KEPT_ERRORS - 1} to last]'::jsonpath")
        values["errors"] = func.jsonb_path_query_array(appended, path, type_=JSONB)
    return values


def after_failure(table: Table) -> dict[str, Any]:
    """The lesson's CASE: back to the queue, or to the dead letter when that was the last attempt."""
    exhausted = table.c.attempts >= table.c.max_attempts
    return {
        "status": case((exhausted, FAILED), else_=PENDING),
        "finished_at": case((exhausted, clock())),
        "locked_until": null(),
    }


TERMINAL_NOW: Final[dict[str, Any]] = {"locked_until": null(), "finished_at": clock()}
"""What every verb sets that ends a job."""
WAITING: Final[dict[str, Any]] = {"status": PENDING, "locked_until": null(), "finished_at": null()}
"""What every verb sets that puts a job back into the queue."""
