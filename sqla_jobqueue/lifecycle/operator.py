"""Verbs of the operator, who holds nothing, and of maintenance."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, Row, inspect

from sqla_jobqueue import statements
from sqla_jobqueue.lifecycle.sending import Executor, execute, fences_in
from sqla_jobqueue.lifecycle.writes import storable
from sqla_jobqueue.model import (
    DEFAULT_MAX_ATTEMPTS,
    J,
    JobTable,
    job_mapper,
    job_table,
    key_columns,
)
from sqla_jobqueue.statements import Fence, fence_of, fences_with
from sqla_jobqueue.status import JobStatus


def cancel(executor: Executor, *jobs: JobTable, reason: str = "cancelled") -> list[bool]:
    """`pending` or `running` -> `cancelled`, as the instances show them; whether each was.

    False: the job moved on since it was read, or a handler in one-transaction mode has its row locked right now. A
    running leased job is cancelled for good: its handler is told, and its result refused.
    """
    return _by_operator(executor, jobs, statements.cancel, error=storable(reason))


def requeue(executor: Executor, *jobs: JobTable, attempts: int = DEFAULT_MAX_ATTEMPTS) -> list[bool]:
    """Terminal -> `pending`, due now, with so many more attempts; whether each was.

    False: the job moved on since it was read, or a live job has its unique key.
    """
    if attempts < 1:
        raise ValueError(f"requeue needs at least one attempt to allow, not {attempts}")
    return _by_operator(executor, jobs, statements.requeue, more=attempts)


def _by_operator(executor: Executor, jobs: Sequence[JobTable], builder: Any, **values: Any) -> list[bool]:
    done: set[tuple[type[JobTable], Fence]] = set()
    named = [(job_mapper(type(job)).class_, fence_of(job)) for job in jobs]
    for model in dict.fromkeys(model for model, _ in named):
        mine = [(fence, values) for owner, fence in named if owner is model]
        rows = execute(executor, model, builder(model), fences_with(mine))
        done |= {(model, fence) for fence in fences_in(model, rows)}
    if not isinstance(executor, Connection):
        for job, name in zip(jobs, named, strict=True):
            if name in done and job in executor:
                state = inspect(job)
                unchanged = state.unmodified & set(state.mapper.column_attrs.keys())
                executor.expire(job, list(unchanged))  # what the application has changed stays its own
    return [name in done for name in named]


def reclaim_expired(executor: Executor, model: type[J], *, limit: int) -> list[tuple[Fence, str]]:
    """Take back up to so many jobs from lost workers; return each fence that ended and the new status."""
    statement = statements.reclaim_rows(model)
    rows = execute(executor, model, statement, {"limit": limit})
    width = len(key_columns(job_table(model)))
    return [(Fence(tuple(row[:width]), row[width]), row.status) for row in rows]


def prune(
    executor: Executor, model: type[JobTable], *, queue: str, status: JobStatus, older_than: timedelta, limit: int
) -> int:
    """Delete up to so many jobs of a queue that finished that way long enough ago; return how many."""
    statement = statements.prune_rows(model, status)
    parameters = {"of_queue": queue, "older_than": older_than, "limit": limit}
    return len(execute(executor, model, statement, parameters).all())


def summary(executor: Executor, model: type[JobTable], **options: Any) -> Sequence[Row[Any]]:
    """Counts per queue and status; see `statements.summary`."""
    return execute(executor, model, statements.summary(model, **options), {}).all()
