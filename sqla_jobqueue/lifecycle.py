"""One plain function per verb: send its statement, read the rows, raise.

They take a Session or a Connection and neither commit nor flush. An AsyncSession runs them through ``run_sync``::

    lifecycle.requeue(session, job)
    await async_session.run_sync(lifecycle.requeue, job)

The worker's verbs (`complete`, `retry`, `fail`, `snooze`, `release`) raise `LeaseLost` when the job is not theirs any
more. The operator's (`cancel`, `requeue`) return whether they changed anything. `record` writes the outcomes of many
jobs of a model in one statement per verb.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final, TypeAlias, cast

from sqlalchemy import Column, Connection, Result, Row, inspect
from sqlalchemy.orm import Session

from sqla_jobqueue import statements
from sqla_jobqueue.errors import ConfigurationError, LeaseLost
from sqla_jobqueue.model import (
    DEFAULT_MAX_ATTEMPTS,
    INFO_BROUGHT,
    SCHEMA_VERSION,
    J,
    JobTable,
    job_mapper,
    job_table,
    key_columns,
)
from sqla_jobqueue.statements import Fence, fence_of, fences_with
from sqla_jobqueue.statements.shape import read_marker, table_columns
from sqla_jobqueue.status import JobStatus

Executor: TypeAlias = Session | Connection
"""Where a statement is sent."""

MAX_ERROR: Final = 2000
"""Characters of `last_error`."""
LONGEST_DELAY: Final = timedelta(days=36_525)
"""A century. A timedelta may be so long that no timestamp is."""


class Verb(StrEnum):
    """How an attempt may end."""

    COMPLETE = "complete"
    RETRY = "retry"
    FAIL = "fail"
    SNOOZE = "snooze"
    RELEASE = "release"
    CANCEL = "cancel"


_BUILDERS: Final = {
    Verb.COMPLETE: statements.complete,
    Verb.RETRY: statements.retry,
    Verb.FAIL: statements.fail,
    Verb.SNOOZE: statements.snooze,
    Verb.RELEASE: statements.release,
    Verb.CANCEL: statements.cancel,
}


@dataclass(frozen=True, slots=True)
class Write:
    """A verb and what it writes.

    Attributes:
        verb: which.
        values: what its statement asks for besides the fence, e.g. ``{"delay": ..., "error": ...}``.
    """

    verb: Verb
    values: Mapping[str, Any]


def storable(text: str) -> str:
    """Text that PostgreSQL stores: no NUL, no lone surrogates, bounded."""
    clean = text.replace("\x00", "\ufffd").encode("utf-8", "replace").decode("utf-8")
    return clean if len(clean) <= MAX_ERROR else clean[: MAX_ERROR - 1] + "\u2026"


def _storable(values: Mapping[str, Any]) -> dict[str, Any]:
    checked = dict(values)
    if "error" in checked:
        checked["error"] = storable(checked["error"])
    if "delay" in checked:
        checked["delay"] = min(max(checked["delay"], timedelta(0)), LONGEST_DELAY)
    return checked


def _execute(executor: Executor, model: type[JobTable], statement: Any, parameters: Mapping[str, Any]) -> Result[Any]:
    if isinstance(executor, Connection):
        return executor.execute(statement, parameters)
    return executor.execute(statement, parameters, bind_arguments={"mapper": job_mapper(model)})


def _fences(model: type[JobTable], rows: Iterable[Row[Any]]) -> set[Fence]:
    """Which fences the returned rows stand for: they begin with the key and the attempt number."""
    width = len(key_columns(job_table(model)))
    return {Fence(tuple(row[:width]), row[width]) for row in rows}


def claim_rows(
    executor: Executor,
    model: type[JobTable],
    *,
    queue: str,
    kinds: Sequence[str] | None,
    limit: int,
    locked_by: str,
    lease: timedelta | None,
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
    """
    statement = statements.claim_rows(model, kinds=kinds is not None, done=lease is None)
    parameters: dict[str, Any] = {"of_queue": queue, "limit": limit, "worker": locked_by}
    if kinds is not None:
        parameters["kinds"] = list(kinds)
    if lease is not None:
        parameters["lease"] = lease
    rows = cast("Sequence[Mapping[str, Any]]", _execute(executor, model, statement, parameters).mappings().all())
    keys = [column.name for column in key_columns(job_table(model))]
    return sorted(rows, key=lambda row: (row["priority"], row["run_at"], *(row[key] for key in keys)))


def row_fence(model: type[JobTable], row: Mapping[str, Any]) -> Fence:
    """The fence of a claimed row."""
    return Fence(tuple(row[column.name] for column in key_columns(job_table(model))), row["attempts"])


def record(
    executor: Executor,
    model: type[JobTable],
    writes: Sequence[tuple[Fence, Write]],
    *,
    held: JobStatus = JobStatus.RUNNING,
) -> set[Fence]:
    """Write how attempts ended, one statement per verb; return the fences that still held.

    Those missing from the result are lost: somebody else owns the job, and its outcome.
    """
    kept: set[Fence] = set()
    for verb in dict.fromkeys(write.verb for _, write in writes):
        mine = [(fence, _storable(write.values)) for fence, write in writes if write.verb is verb]
        rows = _execute(executor, model, _BUILDERS[verb](model, held), fences_with(mine))
        kept |= _fences(model, rows)
    return kept


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
    extended = _fences(model, _execute(executor, model, statements.extend_lease(model), parameters))
    missing = [fence for fence in fences if fence not in extended]
    if not missing:
        return extended, set()
    alive = _fences(model, _execute(executor, model, statements.still_held(model), statements.fence(*missing)))
    return extended, set(missing) - alive


def lock_held(executor: Executor, model: type[JobTable], fence: Fence) -> None:
    """Lock the row of a held job until the transaction ends.

    Raises:
        LeaseLost: the job is not this attempt's any more.
    """
    if _execute(executor, model, statements.lock_held(model), statements.fence(fence)).first() is None:
        raise LeaseLost(fence.key, fence.attempt)


def count_failure(
    executor: Executor, model: type[JobTable], fence: Fence, *, delay: timedelta, error: str, lethal: bool
) -> bool:
    """Count a failed attempt whose own transaction, claim included, was rolled back; False if the job moved on."""
    parameters = statements.fence(fence, **_storable({"delay": delay, "error": error}), lethal=int(lethal))
    return _execute(executor, model, statements.count_failure(model), parameters).first() is not None


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
        rows = _execute(executor, model, builder(model), fences_with(mine))
        done |= {(model, fence) for fence in _fences(model, rows)}
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
    rows = _execute(executor, model, statement, {"limit": limit})
    width = len(key_columns(job_table(model)))
    return [(Fence(tuple(row[:width]), row[width]), row.status) for row in rows]


def prune(
    executor: Executor, model: type[JobTable], *, queue: str, status: JobStatus, older_than: timedelta, limit: int
) -> int:
    """Delete up to so many jobs of a queue that finished that way long enough ago; return how many."""
    statement = statements.prune_rows(model, status)
    parameters = {"of_queue": queue, "older_than": older_than, "limit": limit}
    return len(_execute(executor, model, statement, parameters).all())


def summary(executor: Executor, model: type[JobTable], **options: Any) -> Sequence[Row[Any]]:
    """Counts per queue and status; see `statements.summary`."""
    return _execute(executor, model, statements.summary(model, **options), {}).all()


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
    mapper, table = job_mapper(model), job_table(model)
    connection = executor.connection(bind_arguments={"mapper": mapper}) if isinstance(executor, Session) else executor
    where = {"of_table": table.name, "of_schema": connection.schema_for_object(table)}
    rows = _execute(executor, model, table_columns(), where).all()
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
