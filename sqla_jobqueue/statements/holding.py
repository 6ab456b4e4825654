"""While a job is held: renew its lease, look whether it is still held, lock it; and see whose claim ended it."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    Interval,
    Select,
    bindparam,
    select,
    update,
)
from sqlalchemy.sql.dml import ReturningUpdate

from sqla_jobqueue.model import JobTable, cached, job_table, key_columns
from sqla_jobqueue.statements.common import (
    clock,
    is_picked,
    pick,
)
from sqla_jobqueue.statements.fences import given_rows, is_fenced
from sqla_jobqueue.status import JobStatus


@cached
def extend_lease(model: type[JobTable]) -> ReturningUpdate[Any]:
    """Move the end of held leases to ``clock_timestamp() + :lease``; return the keys that were extended.

    ::

        WITH picked AS (SELECT id AS key_0 FROM jobs JOIN unnest(...) AS given (...) ON <fence>
                        FOR NO KEY UPDATE OF jobs SKIP LOCKED)
        UPDATE jobs SET locked_until = clock_timestamp() + :lease FROM picked WHERE ...

    Parameters: those of `fence`, and ``lease``, one for all.

    Why SKIP LOCKED: a handler that has touched its own job row holds its lock until it ends. Waiting for it would let
    every other lease of the worker lapse, while that row needs no renewal: reclaim skips it, too.
    """
    table = job_table(model)
    given = given_rows(table)
    candidates = select(table).join_from(table, given, is_fenced(table, given, JobStatus.RUNNING))
    picked = pick(candidates, table, None)
    return (
        update(table)
        .where(is_picked(table, picked))
        .values(locked_until=clock() + bindparam("lease", type_=Interval))
        .returning(*key_columns(table), table.c.attempts)
    )


@cached
def still_held(model: type[JobTable]) -> Select[Any]:
    """Select those of the given fences that still own their job. Parameters: those of `fence`."""
    table = job_table(model)
    given = given_rows(table)
    return select(*key_columns(table), table.c.attempts).join_from(
        table, given, is_fenced(table, given, JobStatus.RUNNING)
    )


@cached
def lock_held(model: type[JobTable]) -> Select[Any]:
    """`still_held`, and lock the rows. Parameters: those of `fence`.

    Why: at REPEATABLE READ and above, a renewal during the handler would make its "done" fail with 40001. Its
    transaction begins with this instead; the row lock is the lease from then on.
    """
    return still_held(model).with_for_update(key_share=True, of=job_table(model))


@cached
def lock_done(model: type[JobTable]) -> Select[Any]:
    """Select when the given jobs that are `done` were claimed, and lock the rows. Parameters: those of `fence`.

    Why: a claim in one transaction that was rolled back gave its attempt number back, so the next claim has the same.
    Only the instant tells the two apart.
    """
    table = job_table(model)
    given = given_rows(table)
    done = select(table.c.started_at).join_from(table, given, is_fenced(table, given, JobStatus.DONE))
    return done.with_for_update(key_share=True, of=table)
