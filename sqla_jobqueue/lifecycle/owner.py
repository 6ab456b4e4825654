"""Verbs of the one who holds a job: claim, renew, and every way to end an attempt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, cast

from sqla_jobqueue import statements
from sqla_jobqueue.errors import LeaseLost
from sqla_jobqueue.lifecycle.sending import Executor, execute, fences_in
from sqla_jobqueue.lifecycle.writes import Verb, Write, record, storable_values
from sqla_jobqueue.model import (
    JobTable,
    job_table,
    key_columns,
)
from sqla_jobqueue.statements import Fence, fence_of, fences_with
from sqla_jobqueue.status import JobStatus


def claim_rows(
    executor: Executor,
    model: type[JobTable],
    *,
    queue: str,
    kinds: tuple[str, ...] | None,
    limit: int,
    locked_by: str,
    lease: timedelta | None,
    key: tuple[Any, ...] | None = None,
) -> list[Mapping[str, Any]]:
    """Claim jobs of one queue, as rows of the table, in the order of the queue.

    Args:
        executor: where to send it.
        model: the job model.
        queue: its name.
        kinds: the ones that are known; None for models without kinds.
        limit: jobs at most.
        locked_by: name of the worker.
        lease: None in one-transaction mode: then the rows say `done` already, see `statements.claim_rows`.
        key: the primary key of the one job to claim.
    """
    statement = statements.claim_rows(model, kinds=kinds, done=lease is None, named=key is not None)
    parameters: dict[str, Any] = {"of_queue": queue, "limit": limit, "worker": locked_by}
    parameters |= {f"named_{n}": part for n, part in enumerate(key or ())}
    if lease is not None:
        parameters["lease"] = lease
    rows = cast("Sequence[Mapping[str, Any]]", execute(executor, model, statement, parameters).mappings().all())
    keys = [column.name for column in key_columns(job_table(model))]
    return sorted(rows, key=lambda row: (row["priority"], row["run_at"], *(row[key] for key in keys)))


def _one(executor: Executor, job: JobTable, write: Write, held: JobStatus) -> None:
    fence = fence_of(job)
    if fence not in record(executor, type(job), [(fence, write)], held=held):
        raise LeaseLost(fence.key, fence.attempt)


def complete(executor: Executor, job: JobTable, *, held: JobStatus = JobStatus.RUNNING) -> None:
    """`running` -> `done`.

    Raises:
        LeaseLost: the job is not this attempt's any more.
    """
    _one(executor, job, Write(Verb.COMPLETE, {}), held)


def retry(
    executor: Executor, job: JobTable, *, delay: timedelta, error: str, held: JobStatus = JobStatus.RUNNING
) -> None:
    """A failed attempt: `pending` after the delay, `failed` when it was the last.

    Raises:
        LeaseLost: the job is not this attempt's any more.
    """
    _one(executor, job, Write(Verb.RETRY, {"delay": delay, "error": error}), held)


def fail(executor: Executor, job: JobTable, *, error: str, held: JobStatus = JobStatus.RUNNING) -> None:
    """`running` -> `failed`, the dead letter, whatever attempts are left.

    Raises:
        LeaseLost: the job is not this attempt's any more.
    """
    _one(executor, job, Write(Verb.FAIL, {"error": error}), held)


def snooze(executor: Executor, job: JobTable, *, delay: timedelta, held: JobStatus = JobStatus.RUNNING) -> None:
    """`running` -> `pending` after the delay, without costing an attempt.

    Raises:
        LeaseLost: the job is not this attempt's any more.
    """
    _one(executor, job, Write(Verb.SNOOZE, {"delay": delay}), held)


def release(executor: Executor, job: JobTable, *, held: JobStatus = JobStatus.RUNNING) -> None:
    """`running` -> `pending`, due as before, without costing an attempt.

    Raises:
        LeaseLost: the job is not this attempt's any more.
    """
    _one(executor, job, Write(Verb.RELEASE, {}), held)


def extend_lease(
    executor: Executor, model: type[JobTable], fences: Sequence[Fence], lease: timedelta
) -> tuple[set[Fence], set[Fence]]:
    """Renew leases; return those extended, and those lost.

    A fence in neither set still holds: its own handler has the row locked, and the lock is the lease.
    """
    if not fences:
        return set(), set()
    parameters = {**fences_with((fence, {}) for fence in fences), "lease": lease}
    extended = fences_in(model, execute(executor, model, statements.extend_lease(model), parameters))
    missing = [fence for fence in fences if fence not in extended]
    if not missing:
        return extended, set()
    alive = fences_in(model, execute(executor, model, statements.still_held(model), statements.fence(*missing)))
    return extended, set(missing) - alive


def lock_held(executor: Executor, model: type[JobTable], fence: Fence) -> None:
    """Lock the row of a held job until the transaction ends.

    Raises:
        LeaseLost: the job is not this attempt's any more.
    """
    if execute(executor, model, statements.lock_held(model), statements.fence(fence)).first() is None:
        raise LeaseLost(fence.key, fence.attempt)


def lock_done(executor: Executor, model: type[JobTable], fence: Fence) -> datetime | None:
    """When the attempt that ended as `done` was claimed, its row locked; None where there is no such attempt."""
    row = execute(executor, model, statements.lock_done(model), statements.fence(fence)).first()
    return row[0] if row else None


def count_failure(
    executor: Executor, model: type[JobTable], fence: Fence, *, delay: timedelta, error: str, lethal: bool
) -> bool:
    """Count a failed attempt whose own transaction, claim included, was rolled back; False if the job moved on."""
    parameters = statements.fence(fence, **storable_values({"delay": delay, "error": error}), lethal=int(lethal))
    return execute(executor, model, statements.count_failure(model), parameters).first() is not None
