"""How an attempt ends: verbs of the one who holds the job, by key and attempt number, one or many."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    Integer,
    Interval,
    Text,
    and_,
    case,
    or_,
    update,
)
from sqlalchemy.sql.dml import ReturningUpdate

from sqla_jobqueue.model import JobTable, cached, job_table
from sqla_jobqueue.statements.common import (
    DONE,
    FAILED,
    PENDING,
    TERMINAL_NOW,
    WAITING,
    after_failure,
    clock,
    is_now,
    is_picked,
    with_error,
    written,
)
from sqla_jobqueue.statements.fences import given_rows, update_given
from sqla_jobqueue.status import JobStatus


@cached
def complete(model: type[JobTable], held: JobStatus = JobStatus.RUNNING) -> ReturningUpdate[Any]:
    """`running` -> `done`, fenced.

    ::

        UPDATE jobs SET status = 'done', locked_until = NULL, finished_at = clock_timestamp()
        FROM unnest(:given_key_0, :given_attempt) AS given (key_0, attempt)
        WHERE id = given.key_0 AND attempts = given.attempt AND status || '' = 'running' RETURNING ...

    Args:
        model: the job model.
        held: status under which the caller holds the job: `running` under a lease; in one transaction the one that
            `claim` left, `pending` or `done`.
    """
    return _by_fence(model, {"status": DONE, **TERMINAL_NOW}, held)


@cached
def retry(model: type[JobTable], held: JobStatus = JobStatus.RUNNING) -> ReturningUpdate[Any]:
    """A failed attempt: `pending` after ``delay``, or `failed` when it was the last one; fenced.

    ::

        UPDATE jobs SET status = CASE WHEN attempts >= max_attempts THEN 'failed' ELSE 'pending' END,
                        run_at = CASE WHEN attempts >= max_attempts THEN run_at
                                      ELSE clock_timestamp() + given.delay END,
                        locked_until = NULL, last_error = given.error,
                        finished_at = CASE WHEN attempts >= max_attempts THEN clock_timestamp() END
        FROM unnest(...) AS given (...) WHERE <fence> RETURNING ...

    Parameters besides the fence: ``delay`` (timedelta), ``error`` (text).
    """
    table = job_table(model)
    given = given_rows(table, delay=Interval(), error=Text())
    run_at = case((table.c.attempts >= table.c.max_attempts, table.c.run_at), else_=clock() + given.c.delay)
    values = after_failure(table) | {"run_at": run_at} | with_error(table, given.c.error)
    return update_given(table, given, values, held)


@cached
def fail(model: type[JobTable], held: JobStatus = JobStatus.RUNNING) -> ReturningUpdate[Any]:
    """To the dead letter at once, whatever attempts are left; fenced. Parameter besides the fence: ``error``."""
    table = job_table(model)
    given = given_rows(table, error=Text())
    values = {"status": FAILED, **TERMINAL_NOW} | with_error(table, given.c.error)
    return update_given(table, given, values, held)


@cached
def snooze(model: type[JobTable], held: JobStatus = JobStatus.RUNNING) -> ReturningUpdate[Any]:
    """`pending` again after ``delay``, without costing an attempt; fenced.

    Why ``max_attempts + 1`` and not ``attempts - 1``: an attempt number that came back would let a stale worker in.
    """
    table = job_table(model)
    given = given_rows(table, delay=Interval())
    values = WAITING | {"run_at": clock() + given.c.delay, "max_attempts": table.c.max_attempts + 1}
    return update_given(table, given, values, held)


@cached
def release(model: type[JobTable], held: JobStatus = JobStatus.RUNNING) -> ReturningUpdate[Any]:
    """Give a claimed job back unstarted: `pending`, due as before, without costing an attempt; fenced."""
    more = job_table(model).c.max_attempts + 1
    return _by_fence(model, WAITING | {"max_attempts": more}, held)


@cached
def count_failure(model: type[JobTable]) -> ReturningUpdate[Any]:
    """A failure that its own transaction could not record: the claim was rolled back with it, so count it here.

    The job is `pending` with the attempt number before the claim; the attempt and its outcome are written at once.
    Parameters besides the fence (of the attempt that ran): ``delay``, ``error``, ``lethal`` (to the dead letter).

    Why the fence is one less: the rollback gave the attempt back. Had another worker claimed the job meanwhile, its
    number would not match, and that worker's outcome stands.
    """
    table = job_table(model)
    given = given_rows(table, delay=Interval(), error=Text(), lethal=Integer())
    over = or_(given.c.attempt >= table.c.max_attempts, given.c.lethal == 1)
    values = {
        "attempts": given.c.attempt,
        "status": case((over, FAILED), else_=PENDING),
        "finished_at": case((over, clock())),
        "run_at": case((over, table.c.run_at), else_=clock() + given.c.delay),
        "started_at": clock(),
        **with_error(table, given.c.error, given.c.attempt),
    }
    wanted = and_(is_picked(table, given), table.c.attempts == given.c.attempt - 1, is_now(table, JobStatus.PENDING))
    return update(table).where(wanted).values(values).returning(*written(table))


def _by_fence(model: type[JobTable], values: dict[str, Any], held: JobStatus) -> ReturningUpdate[Any]:
    table = job_table(model)
    return update_given(table, given_rows(table), values, held)
