"""For tests: move the instants of rows, since nobody can move the database's clock.

A test that is rolled back lives in one transaction, in which ``now()`` stands still. So its jobs become due, and its
leases lapse, by moving the rows into the past.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from sqlalchemy import Interval, bindparam, func, update
from sqlalchemy.sql.dml import ReturningUpdate

from sqla_jobqueue.model import TIMESTAMPTZ, JobTable, cached, job_table, key_columns
from sqla_jobqueue.statements.common import RUNNING, bound, clock, is_pending

_INSTANTS: Final = ("run_at", "locked_until", "created_at", "started_at", "finished_at")
_INSTANT: Final = timedelta(microseconds=1)
"""The least that PostgreSQL tells apart."""


@cached
def advance(model: type[JobTable]) -> ReturningUpdate[Any]:
    """Move every instant of every job into the past, as if so much time had gone by. Parameter: ``delta``."""
    table = job_table(model)
    earlier: dict[Any, Any] = {name: table.c[name] - bindparam("delta", type_=Interval) for name in _INSTANTS}
    return update(table).values(earlier).returning(*key_columns(table))


@cached
def settle(model: type[JobTable]) -> ReturningUpdate[Any]:
    """Make due what is due by the clock that runs on, but not yet by a ``now()`` that stands still.

    Such as a job that was to be retried at once.
    """
    table = job_table(model)
    now = func.now(type_=TIMESTAMPTZ)
    overtaken = (is_pending(table), table.c.run_at > now, table.c.run_at <= clock())
    return update(table).where(*overtaken).values(run_at=now).returning(*key_columns(table))


@cached
def expire_leases(model: type[JobTable]) -> ReturningUpdate[Any]:
    """Let the lease of every running job lapse, as if its worker had been gone for so long."""
    table = job_table(model)
    now = func.now(type_=TIMESTAMPTZ)
    held = (table.c.status == RUNNING, table.c.locked_until >= now)
    lapsed = now - bound(_INSTANT, Interval())
    return update(table).where(*held).values(locked_until=lapsed).returning(*key_columns(table))
