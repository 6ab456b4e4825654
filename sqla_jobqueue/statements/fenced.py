"""Verbs that act on jobs which somebody holds or names: by key and attempt number, one or many."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import (
    ARRAY,
    Column,
    ColumnElement,
    FromClause,
    Integer,
    Interval,
    Select,
    Table,
    Text,
    Update,
    and_,
    bindparam,
    case,
    exists,
    func,
    inspect,
    null,
    or_,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.sql.dml import ReturningUpdate

from sqla_jobqueue.errors import ConfigurationError
from sqla_jobqueue.model import JobTable, job_mapper, job_table, key_columns
from sqla_jobqueue.statements.common import (
    CANCELLED,
    DONE,
    FAILED,
    PENDING,
    RUNNING,
    after_failure,
    beside,
    cached,
    clock,
    is_now,
    is_picked,
    pick,
    with_error,
    written,
)
from sqla_jobqueue.status import LIVE, TERMINAL, JobStatus


@dataclass(frozen=True, slots=True)
class Fence:
    """Who owns a job: its primary key and the attempt number under which it was claimed.

    Attributes:
        key: the primary key, one value per column, in the order of the table.
        attempt: the value of ``attempts``.
    """

    key: tuple[Any, ...]
    attempt: int


def fence_of(job: JobTable) -> Fence:
    """The fence of a job instance, from what is loaded. Sends nothing.

    Raises:
        ConfigurationError: the job was never flushed, or its attempt number is not loaded (a commit expires it). Read
            anew, the number could be that of somebody else's attempt, and the fence would let this one through.
    """
    mapper = job_mapper(type(job))
    state = inspect(job)
    if state.identity is None:
        raise ConfigurationError(f"{job!r} is not in the database yet: flush it first")
    key = tuple(state.identity[: len(mapper.primary_key)])
    attempt: int | None = state.dict.get(mapper.get_property_by_column(job_table(type(job)).c.attempts).key)
    if attempt is None:
        raise ConfigurationError(
            f"the attempt number of {mapper.class_.__name__} {key} is not loaded, and read anew it could be that of "
            "somebody else's attempt: take fence(job) before the commit that expires it, set expire_on_commit=False, "
            "or refresh a job that is nobody's"
        )
    return Fence(key, attempt)


def fence(*jobs: JobTable | Fence, **values: Any) -> dict[str, list[Any]]:
    """Parameters of a statement that acts on jobs by their fence: arrays, one element per job.

    Args:
        jobs: job instances as they were claimed, or fences.
        values: what the verb asks for besides (``delay=``, ``error=``): the same for all jobs.
    """
    fences = [job if isinstance(job, Fence) else fence_of(job) for job in jobs]
    return fences_with([(one, values) for one in fences])


def fences_with(rows: Iterable[tuple[Fence, dict[str, Any]]]) -> dict[str, list[Any]]:
    """As `fence`, each job with values of its own."""
    parameters: dict[str, list[Any]] = {}
    for one, values in rows:
        for n, part in enumerate(one.key):
            parameters.setdefault(_PARAMETER(f"key_{n}"), []).append(part)
        parameters.setdefault(_PARAMETER("attempt"), []).append(one.attempt)
        for name, value in values.items():
            parameters.setdefault(_PARAMETER(name), []).append(value)
    return parameters


def _given(table: Table, **values: Any) -> FromClause:
    """The parameters of `fence` as rows: ``unnest(:given_key_0, :given_attempt, ...) AS given (...)``."""
    columns: list[Column[Any]] = [Column(f"key_{n}", column.type) for n, column in enumerate(key_columns(table))]
    columns.append(Column("attempt", Integer()))
    columns += [Column(name, kind) for name, kind in values.items()]
    arrays = [bindparam(_PARAMETER(column.name), type_=ARRAY(column.type)) for column in columns]
    return func.unnest(*arrays).table_valued(*columns).render_derived(name=beside(table, "given"))


def _is_fenced(table: Table, given: FromClause, *held: JobStatus) -> ColumnElement[bool]:
    """Still the attempt that was claimed, still in the status that the claim gave it."""
    return and_(is_picked(table, given), table.c.attempts == given.c.attempt, is_now(table, *held))


_PARAMETER: Final = "given_{}".format
"""Names of the arrays. Why: a parameter called like a column of the model would be taken for a value to SET."""

_TERMINAL_NOW: Final[dict[str, Any]] = {"locked_until": null(), "finished_at": clock()}
_WAITING: Final[dict[str, Any]] = {"status": PENDING, "locked_until": null(), "finished_at": null()}


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
    given = _given(table)
    candidates = select(table).join_from(table, given, _is_fenced(table, given, JobStatus.RUNNING))
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
    given = _given(table)
    return select(*key_columns(table), table.c.attempts).join_from(
        table, given, _is_fenced(table, given, JobStatus.RUNNING)
    )


@cached
def lock_held(model: type[JobTable]) -> Select[Any]:
    """`still_held`, and lock the rows. Parameters: those of `fence`.

    Why: at REPEATABLE READ and above, a renewal during the handler would make its "done" fail with 40001. Its
    transaction begins with this instead; the row lock is the lease from then on.
    """
    return still_held(model).with_for_update(key_share=True, of=job_table(model))


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
    return _by_fence(model, {"status": DONE, **_TERMINAL_NOW}, held)


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
    given = _given(table, delay=Interval(), error=Text())
    run_at = case((table.c.attempts >= table.c.max_attempts, table.c.run_at), else_=clock() + given.c.delay)
    values = after_failure(table) | {"run_at": run_at} | with_error(table, given.c.error)
    return _update_given(table, given, values, held)


@cached
def fail(model: type[JobTable], held: JobStatus = JobStatus.RUNNING) -> ReturningUpdate[Any]:
    """To the dead letter at once, whatever attempts are left; fenced. Parameter besides the fence: ``error``."""
    table = job_table(model)
    given = _given(table, error=Text())
    values = {"status": FAILED, **_TERMINAL_NOW} | with_error(table, given.c.error)
    return _update_given(table, given, values, held)


@cached
def snooze(model: type[JobTable], held: JobStatus = JobStatus.RUNNING) -> ReturningUpdate[Any]:
    """`pending` again after ``delay``, without costing an attempt; fenced.

    Why ``max_attempts + 1`` and not ``attempts - 1``: an attempt number that came back would let a stale worker in.
    """
    table = job_table(model)
    given = _given(table, delay=Interval())
    values = _WAITING | {"run_at": clock() + given.c.delay, "max_attempts": table.c.max_attempts + 1}
    return _update_given(table, given, values, held)


@cached
def release(model: type[JobTable], held: JobStatus = JobStatus.RUNNING) -> ReturningUpdate[Any]:
    """Give a claimed job back unstarted: `pending`, due as before, without costing an attempt; fenced."""
    more = job_table(model).c.max_attempts + 1
    return _by_fence(model, _WAITING | {"max_attempts": more}, held)


@cached
def cancel(model: type[JobTable], held: JobStatus | None = None) -> ReturningUpdate[Any]:
    """`pending` or `running` -> `cancelled`, fenced. Parameter besides the fence: ``error``, the reason.

    Args:
        model: the job model.
        held: status under which the caller holds the job; None for an operator who holds nothing. Then rows that
            are locked (by a handler in one-transaction mode) are skipped, not waited for.
    """
    table = job_table(model)
    given = _given(table, error=Text())

    def values(source: FromClause) -> dict[str, Any]:
        return {"status": CANCELLED, **_TERMINAL_NOW, "last_error": source.c.error}

    if held is not None:
        return _update_given(table, given, values(given), held)
    return _update_picked(table, given, values, _is_fenced(table, given, *LIVE))


@cached
def requeue(model: type[JobTable]) -> ReturningUpdate[Any]:
    """Terminal -> `pending`, due now, with more attempts; fenced. The operator's verb, as `retry` is the worker's.

    Parameter besides the fence: ``more``, attempts to allow (3 is what a new job has). A job whose unique key a live
    job has taken meanwhile is left as it is; so are all but one of those that share a unique key.
    """
    table = job_table(model)
    given = _given(table, more=Integer())
    rival = table.alias(beside(table, "rival"))
    taken = exists().where(rival.c.unique_key == table.c.unique_key, rival.c.status.in_([PENDING, RUNNING]))
    wanted = and_(_is_fenced(table, given, *TERMINAL), or_(table.c.unique_key.is_(None), ~taken))

    def values(source: FromClause) -> dict[str, Any]:
        return _WAITING | {"run_at": clock(), "max_attempts": table.c.attempts + source.c.more}

    return _update_picked(table, given, values, wanted, once=table.c.unique_key)


@cached
def fill_payload(model: type[JobTable]) -> Update:
    """Put the keys of entities that were flushed together with their jobs into the payloads.

    Parameters per job: ``id_0``, ``id_1``... (the primary key) and ``keys``, a JSON object.

    Why: an entity has no key before the flush, and a job that waited for a second flush would be lost by a savepoint
    rollback in between, and leave foreign keys to it NULL.
    """
    table = job_table(model)
    mine = (column == bindparam(f"id_{n}", type_=column.type) for n, column in enumerate(key_columns(table)))
    return update(table).where(*mine).values(payload=table.c.payload.concat(bindparam("keys", type_=JSONB)))


@cached
def count_failure(model: type[JobTable]) -> ReturningUpdate[Any]:
    """A failure that its own transaction could not record: the claim was rolled back with it, so count it here.

    The job is `pending` with the attempt number before the claim; the attempt and its outcome are written at once.
    Parameters besides the fence (of the attempt that ran): ``delay``, ``error``, ``lethal`` (to the dead letter).

    Why the fence is one less: the rollback gave the attempt back. Had another worker claimed the job meanwhile, its
    number would not match, and that worker's outcome stands.
    """
    table = job_table(model)
    given = _given(table, delay=Interval(), error=Text(), lethal=Integer())
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
    return _update_given(table, _given(table), values, held)


def _update_given(table: Table, given: FromClause, values: dict[str, Any], held: JobStatus) -> ReturningUpdate[Any]:
    """Write to jobs that the caller holds: nobody else may, so there is nothing to wait for or to order."""
    return update(table).where(_is_fenced(table, given, held)).values(values).returning(*written(table))


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
