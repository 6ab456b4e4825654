"""Candidate selects, and the verbs that act on candidates."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

from sqlalchemy import (
    ARRAY,
    BindParameter,
    ColumnElement,
    Delete,
    FromClause,
    Integer,
    Interval,
    Select,
    Table,
    Text,
    bindparam,
    delete,
    func,
    inspect,
    literal_column,
    null,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import array
from sqlalchemy.orm import Mapper
from sqlalchemy.sql.dml import ReturningDelete, ReturningUpdate

from sqla_jobqueue.errors import ConfigurationError
from sqla_jobqueue.model import TIMESTAMPTZ, J, JobTable, cached, job_table, key_columns
from sqla_jobqueue.statements.common import (
    DONE,
    LEASE_EXPIRED,
    RUNNING,
    after_failure,
    bound,
    clock,
    is_due,
    is_expired,
    is_picked,
    pick,
    with_error,
    word,
    written,
)
from sqla_jobqueue.status import TERMINAL, JobStatus


def due(
    model: type[J],
    *,
    queue: str | BindParameter[str] | None = None,
    kinds: Sequence[str] | ColumnElement[Any] | None = None,
) -> Select[J]:
    """Select the jobs that may be claimed, in order: priority, then run_at, then key, smaller first.

    ::

        SELECT ... FROM jobs
        WHERE status = 'pending' AND run_at <= now() [AND queue = :queue] [AND kind = ANY (:kinds)]
        ORDER BY priority, run_at, id

    Args:
        model: the job model.
        queue: name of one queue; None for all (no index serves the order then).
        kinds: only these kinds, as a worker that knows no others asks.

    Why: one queue at a time, since ``queue = ANY (...)`` cannot use the order of the pending index (342 ms against
    0.35 ms with a million pending rows).
    """
    table = job_table(model)
    candidates = select(model).where(is_due(table))
    if queue is not None:
        candidates = candidates.where(table.c.queue == bound(queue, Text()))
    if kinds is not None:
        candidates = candidates.where(table.c.kind == func.any(bound(kinds, ARRAY(Text()))))
    return candidates.order_by(table.c.priority, table.c.run_at, *key_columns(table))


def expired(model: type[J]) -> Select[J]:
    """Select the running jobs whose lease has lapsed, longest ago first.

    ::

        SELECT ... FROM jobs WHERE status = 'running' AND locked_until < now() ORDER BY locked_until
    """
    table = job_table(model)
    return select(model).where(is_expired(table)).order_by(table.c.locked_until)


def finished(
    model: type[J],
    *,
    older_than: timedelta | BindParameter[timedelta],
    statuses: Sequence[JobStatus] = TERMINAL,
    queue: str | BindParameter[str] | None = None,
) -> Select[J]:
    """Select the jobs that reached a terminal state some time ago.

    ::

        SELECT ... FROM jobs
        WHERE status IN ('done', 'failed', 'cancelled') AND finished_at <= now() - :older_than [AND queue = :queue]

    Args:
        model: the job model.
        older_than: time since `finished_at`, by the database's clock.
        statuses: terminal ones only.
        queue: name of one queue; None for all. With a queue and one status the oldest come first, straight from the
            finished index; without, it is read through, in no order.

    Why an order there: without, the planner reads the table from its beginning for the first that are old enough,
    and those may stand at its end.
    """
    if live := set(statuses) - set(TERMINAL):
        raise ConfigurationError(f"finished() is about terminal states, not {', '.join(sorted(live))}")
    table = job_table(model)
    age = bound(older_than, Interval())
    old = table.c.finished_at <= func.now(type_=TIMESTAMPTZ) - age
    words = [word(status) for status in statuses]
    reached = table.c.status == words[0] if len(words) == 1 else table.c.status.in_(words)
    candidates = select(model).where(reached, old)
    if queue is not None:
        candidates = candidates.where(table.c.queue == bound(queue, Text()))
        if len(words) == 1:
            candidates = candidates.order_by(table.c.finished_at)
    return candidates


def _model_of(candidates: Select[J], verb: str) -> type[J]:
    described: list[Any] = candidates.column_descriptions if isinstance(candidates, Select) else []
    entity: Any = described[0].get("entity") if described else None
    mapper = inspect(entity, raiseerr=False)
    if not isinstance(mapper, Mapper) or not issubclass(mapper.class_, JobTable):
        raise ConfigurationError(f"{verb}() takes a select of a job model, such as due(Job) or expired(Job) make")
    model: type[J] = entity
    return model


def _write_picked(model: type[J], picked: FromClause, values: dict[str, Any]) -> ReturningUpdate[J]:
    """Write to the picked rows; return them as instances.

    Why two ways: RETURNING has the columns of one table. Where a class hierarchy has several, the columns of the job's
    table are loaded, and the others when they are asked for.
    """
    table = job_table(model)
    mapper = inspect(model)
    if mapper.persist_selectable is table and mapper.with_polymorphic is None:
        statement = update(model).where(is_picked(table, picked)).values(values).returning(model)
        return statement.execution_options(synchronize_session=False, populate_existing=True)
    if mapper.base_mapper.local_table is not table:
        raise ConfigurationError(
            f"{model.__qualname__} has its state in {table.name!r} and its identity in a parent's table, so that no "
            "RETURNING can load it: take claim_rows() or reclaim_rows(), which return rows"
        )
    rows = update(table).where(is_picked(table, picked)).values(values).returning(*table.c)
    loaded = select(model).from_statement(rows).execution_options(populate_existing=True)
    return cast("ReturningUpdate[J]", loaded)


def _claim_values(
    table: Table, lease: timedelta | BindParameter[timedelta] | None, locked_by: Any, *, done: bool
) -> dict[str, Any]:
    values: dict[str, Any] = {"attempts": table.c.attempts + 1, "started_at": clock()}
    if locked_by is not None:
        values["locked_by"] = bound(locked_by, Text())
    if lease is not None:
        values |= {"status": RUNNING, "locked_until": clock() + bound(lease, Interval())}
    elif done:
        values |= {"status": DONE, "locked_until": null(), "finished_at": clock()}
    return values


def claim(
    candidates: Select[J],
    *,
    limit: int | BindParameter[int] = 1,
    lease: timedelta | BindParameter[timedelta] | None,
    locked_by: str | BindParameter[str] | None = None,
) -> ReturningUpdate[J]:
    """Take the first candidates that nobody holds; return them as job instances, in no particular order.

    ::

        WITH picked AS (SELECT id AS key_0 FROM jobs WHERE ... ORDER BY priority, run_at, id
                        LIMIT :limit FOR NO KEY UPDATE OF jobs SKIP LOCKED)
        UPDATE jobs SET status = 'running', attempts = attempts + 1,
                        locked_until = clock_timestamp() + :lease, started_at = clock_timestamp()
        FROM picked WHERE jobs.id = picked.key_0 RETURNING jobs.*

    Args:
        candidates: `due(Model)` and further conditions.
        limit: jobs at most.
        lease: time until others may take them back: commit, then work, then `complete`. None: the status stays
            `pending` and the row lock is the claim, so work and `complete` belong into this very transaction.
        locked_by: name of the worker, for people.
    """
    model = _model_of(candidates, "claim")
    table = job_table(model)
    return _write_picked(model, pick(candidates, table, limit), _claim_values(table, lease, locked_by, done=False))


@cached
def claim_rows(
    model: type[JobTable], *, kinds: tuple[str, ...] | None, done: bool, named: bool = False
) -> ReturningUpdate[Any]:
    """`claim` as the worker sends it: one queue, prebuilt, and table rows instead of instances.

    Parameters: ``of_queue``, ``limit``, ``worker``, and ``lease`` unless `done`; where `named`, ``named_0``,
    ``named_1``... for the primary key.

    Args:
        model: the job model.
        kinds: those that the worker knows, a part of the statement since they never change; None for all.
        done: write `done` at once. Nobody sees it before the transaction that also holds the work commits, and a
            rollback takes it back, so it is the claim and the completion in one statement and one row version.
        named: only the job with this primary key.
    """
    table = job_table(model)
    of_queue = bindparam("of_queue", type_=Text)
    known = None if kinds is None else array[Any]([bound(kind, Text()) for kind in kinds], type_=Text())
    candidates = due(model, queue=of_queue, kinds=known)
    for n, column in enumerate(key_columns(table) if named else ()):
        candidates = candidates.where(column == bindparam(f"named_{n}", type_=column.type))
    picked = pick(candidates, table, bindparam("limit", type_=Integer))
    lease = None if done else bindparam("lease", type_=Interval)
    values = _claim_values(table, lease, bindparam("worker", type_=Text), done=done)
    return update(table).where(is_picked(table, picked)).values(values).returning(*table.c)


def reclaim_expired(candidates: Select[J], *, limit: int | BindParameter[int] | None = None) -> ReturningUpdate[J]:
    """Take jobs back from lost workers: `pending` again, or `failed` when that was the last attempt.

    ::

        WITH picked AS (SELECT id AS key_0 FROM jobs WHERE status = 'running' AND locked_until < now() ...
                        FOR NO KEY UPDATE OF jobs SKIP LOCKED)
        UPDATE jobs SET status = CASE WHEN attempts >= max_attempts THEN 'failed' ELSE 'pending' END,
                        locked_until = NULL, last_error = 'lease expired',
                        finished_at = CASE WHEN attempts >= max_attempts THEN clock_timestamp() END
        FROM picked WHERE jobs.id = picked.key_0 RETURNING jobs.*

    A row that its own live handler has locked is skipped: the row lock is the lease while it lasts.
    """
    model = _model_of(candidates, "reclaim_expired")
    table = job_table(model)
    return _write_picked(model, pick(candidates, table, limit), _reclaimed(table))


def _reclaimed(table: Table) -> dict[str, Any]:
    return after_failure(table) | with_error(table, literal_column(f"'{LEASE_EXPIRED}'", Text))


@cached
def reclaim_rows(model: type[JobTable]) -> ReturningUpdate[Any]:
    """`reclaim_expired` as maintenance sends it: prebuilt, keys and new states instead of instances.

    Parameter: ``limit``.
    """
    table = job_table(model)
    picked = pick(expired(model), table, bindparam("limit", type_=Integer))
    return update(table).where(is_picked(table, picked)).values(_reclaimed(table)).returning(*written(table))


def prune(candidates: Select[J], *, limit: int | BindParameter[int] | None = None) -> ReturningDelete[Any]:
    """Delete finished jobs; return their keys.

    ::

        WITH picked AS (SELECT id AS key_0 FROM jobs WHERE status IN (...) AND finished_at <= ... LIMIT :limit
                        FOR UPDATE OF jobs SKIP LOCKED)
        DELETE FROM jobs USING picked WHERE jobs.id = picked.key_0 RETURNING jobs.id

    Why FOR UPDATE here: a DELETE would wait for an open transaction that references the row by a foreign key.
    """
    model = _model_of(candidates, "prune")
    table = job_table(model)
    picked = pick(candidates, table, limit, key_share=False)
    statement: Delete = delete(table).where(is_picked(table, picked))
    return statement.returning(*key_columns(table))


@cached
def prune_rows(model: type[JobTable], status: JobStatus) -> ReturningDelete[Any]:
    """`prune` as maintenance sends it: one queue and one status, prebuilt.

    Parameters: ``of_queue``, ``older_than``, ``limit``.
    """
    candidates = finished(
        model,
        older_than=bindparam("older_than", type_=Interval),
        statuses=(status,),
        queue=bindparam("of_queue", type_=Text),
    )
    return prune(candidates, limit=bindparam("limit", type_=Integer))
