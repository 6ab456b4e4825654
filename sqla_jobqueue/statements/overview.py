"""Counts that stay cheap on a large table."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from sqlalchemy import Column, ColumnElement, FromClause, Select, false, func, select, true, tuple_, union_all

from sqla_jobqueue.model import TIMESTAMPTZ, JobTable, job_table
from sqla_jobqueue.statements.common import PENDING, RUNNING, beside, is_finished, is_pending

DEFAULT_COUNT_CAP: Final = 10_000
"""Rows that `summary` counts, per queue, status and priority, before it says "at least"."""


def _levels(condition: ColumnElement[bool], *columns: Column[Any], name: str) -> FromClause:
    """The distinct values of an index's leading columns, by one descent of the index each.

    Why: ``SELECT DISTINCT`` reads every entry.
    """
    ordered = select(*columns).where(condition).order_by(*columns).limit(1)
    first = ordered.subquery(f"first_{name}")
    level = select(first).cte(beside(columns[0].table, name), recursive=True)
    beyond = tuple_(*columns) > tuple_(*(level.c[column.name] for column in columns))
    following = ordered.where(beyond).correlate(level).lateral(f"next_{name}")
    return level.union_all(select(following).join_from(level, following, true()))


def summary(model: type[JobTable], *, cap: int = DEFAULT_COUNT_CAP) -> Select[str, str, int, int, timedelta]:
    """Select counts per queue and status, at a cost that does not grow with the table.

    Rows: ``queue``, ``status``, ``jobs``, ``due`` (pending: may be claimed now; running: the lease has lapsed), and
    ``oldest_due_age`` (interval since the oldest of those became due, NULL where there is none).

    Args:
        model: the job model.
        cap: count at most this many rows per queue, status and priority, and of the running ones at most this many in
            all, those that lapse first; a figure at or above it means "at least". The age is exact all the same.

    Why: queues, priorities and statuses are found by loose index scans (one descent each), and each is then counted
    along the index up to the cap.
    """
    table = job_table(model)
    now = func.now(type_=TIMESTAMPTZ)

    def counted(level: FromClause, condition: ColumnElement[bool], on: Sequence[str], since: Column[Any]) -> FromClause:
        same = [table.c[name] == level.c[name] for name in on]
        rows = select(since.label("since")).where(condition, *same).order_by(since).limit(cap)
        return rows.correlate(level).lateral("counted")

    def part(
        level: FromClause, condition: ColumnElement[bool], on: Sequence[str], since: Column[Any], *, status: Any
    ) -> Select[*tuple[Any, ...]]:
        each = counted(level, condition, on, since)
        ready = false() if status is None else each.c.since <= now
        return (
            select(
                level.c.queue.label("queue"),
                (level.c.status if status is None else status).label("status"),
                func.count().label("jobs"),
                func.count().filter(ready).label("due"),
                (now - func.min(each.c.since).filter(ready)).label("oldest_due_age"),
            )
            .join_from(level, each, true())
            .group_by(level.c.queue, *([level.c.status] if status is None else []))
        )

    c = table.c
    waiting = _levels(is_pending(table), c.queue, c.priority, name="waiting")
    over = _levels(is_finished(table), c.queue, c.status, name="over")
    running = c.status == RUNNING
    by_age = select(c.queue, c.locked_until.label("since")).where(running).order_by(c.locked_until)
    held = by_age.limit(cap).subquery("held")
    lapsed = held.c.since < now
    parts = union_all(
        part(waiting, is_pending(table), ("queue", "priority"), c.run_at, status=PENDING),
        select(
            held.c.queue,
            RUNNING.label("status"),
            func.count().label("jobs"),
            func.count().filter(lapsed).label("due"),
            (now - func.min(held.c.since).filter(lapsed)).label("oldest_due_age"),
        ).group_by(held.c.queue),
        part(over, is_finished(table), ("queue", "status"), c.finished_at, status=None),
    ).subquery("summary")
    return select(parts).order_by(parts.c.queue, parts.c.status)
