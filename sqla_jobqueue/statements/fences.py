"""The fence: who owns a job, as parameters and as a condition."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import (
    ARRAY,
    Column,
    ColumnElement,
    FromClause,
    Integer,
    Table,
    and_,
    bindparam,
    func,
    inspect,
    update,
)
from sqlalchemy.sql.dml import ReturningUpdate

from sqla_jobqueue.errors import ConfigurationError
from sqla_jobqueue.model import JobTable, job_mapper, job_table, key_columns
from sqla_jobqueue.statements.common import (
    beside,
    is_now,
    is_picked,
    written,
)
from sqla_jobqueue.status import JobStatus

_PARAMETER: Final = "given_{}".format
"""Names of the arrays. Why: a parameter called like a column of the model would be taken for a value to SET."""


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


def given_rows(table: Table, **values: Any) -> FromClause:
    """The parameters of `fence` as rows: ``unnest(:given_key_0, :given_attempt, ...) AS given (...)``."""
    columns: list[Column[Any]] = [Column(f"key_{n}", column.type) for n, column in enumerate(key_columns(table))]
    columns.append(Column("attempt", Integer()))
    columns += [Column(name, kind) for name, kind in values.items()]
    arrays = [bindparam(_PARAMETER(column.name), type_=ARRAY(column.type)) for column in columns]
    return func.unnest(*arrays).table_valued(*columns).render_derived(name=beside(table, "given"))


def is_fenced(table: Table, given: FromClause, *held: JobStatus) -> ColumnElement[bool]:
    """Still the attempt that was claimed, still in the status that the claim gave it."""
    return and_(is_picked(table, given), table.c.attempts == given.c.attempt, is_now(table, *held))


def update_given(table: Table, given: FromClause, values: dict[str, Any], held: JobStatus) -> ReturningUpdate[Any]:
    """Write to jobs that the caller holds: nobody else may, so there is nothing to wait for or to order."""
    return update(table).where(is_fenced(table, given, held)).values(values).returning(*written(table))
