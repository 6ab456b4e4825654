"""Checks, indexes and storage parameters, attached when the mapper is made."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    CheckConstraint,
    Column,
    ColumnElement,
    Index,
    Table,
    event,
)
from sqlalchemy.orm import Mapper

from sqla_jobqueue.errors import ConfigurationError
from sqla_jobqueue.model.base import JobTable
from sqla_jobqueue.model.columns import INFO_BROUGHT
from sqla_jobqueue.model.lookup import job_mapper, job_table, key_columns
from sqla_jobqueue.model.naming import name_for, settle_name
from sqla_jobqueue.model.storage import INFO_STORAGE, STORAGE_PARAMETERS, SetStorageParameters
from sqla_jobqueue.status import LIVE, TERMINAL, JobStatus

INFO_PART: Final = "sqla_jobqueue.part"
"""Key of ``Index.info`` and ``CheckConstraint.info``: which of the job table's own it is, e.g. ``pending``."""

SCHEMA_VERSION: Final = 1
"""Of the job table as this release makes it: the number of the newest step in ``migrations/steps``."""

OLDEST_WORKER: Final = 0
"""The oldest schema version whose workers may run on a table of this one."""

RESERVED_KEYS: Final = frozenset({"of_queue", "limit", "worker", "lease", "keys"})
"""Parameters of the prebuilt statements: SQLAlchemy takes a parameter called like a column for a value to SET."""


def schema_marker(version: int, oldest_worker: int) -> str:
    """The comment on a job table's check of `status` that tells its version.

    Why there: it is dumped and restored, Alembic leaves it alone, and the table's own comment is the application's.
    """
    return f"sqla_jobqueue schema {version}, for workers from {oldest_worker}"


def _check(table: Table, suffix: str, condition: ColumnElement[bool], comment: str | None = None) -> None:
    name = name_for(table, CheckConstraint, suffix)
    check = CheckConstraint(condition, name=name, info={INFO_PART: suffix}, comment=comment)
    table.append_constraint(check)
    settle_name(check, table, suffix)


def _index(table: Table, suffix: str, columns: tuple[Column[Any], ...], **options: Any) -> None:
    index = Index(name_for(table, Index, suffix), *columns, info={INFO_PART: suffix}, **options)
    settle_name(index, table, suffix)


def equip(table: Table) -> None:
    """Attach the checks, indexes and storage parameters of a job table.

    A partitioned one goes without the unique index, since its columns are not those of the partitions, and without
    storage parameters, which only the partitions have.
    """
    c = table.c
    partitioned = bool(table.dialect_options["postgresql"]["partition_by"])
    marker = schema_marker(SCHEMA_VERSION, OLDEST_WORKER)
    _check(table, "status", c.status.in_([status.value for status in JobStatus]), marker)
    _check(table, "attempts", (c.attempts >= 0) & (c.max_attempts >= 1))
    _check(table, "lease", (c.status != JobStatus.RUNNING.value) | c.locked_until.is_not(None))
    _check(table, "queue", c.queue != "")
    pending = c.status == JobStatus.PENDING.value
    live = c.unique_key.is_not(None) & c.status.in_([status.value for status in LIVE])
    terminal = c.status.in_([status.value for status in TERMINAL])
    in_order = (c.queue, c.priority, c.run_at, *key_columns(table))
    _index(table, "pending", in_order, postgresql_where=pending)
    _index(table, "lease", (c.locked_until,), postgresql_where=c.status == JobStatus.RUNNING.value)
    _index(table, "finished", (c.queue, c.status, c.finished_at), postgresql_where=terminal)
    table.info[INFO_STORAGE] = {} if partitioned else dict(STORAGE_PARAMETERS)
    if partitioned:
        return
    _index(table, "unique_key", (c.unique_key,), unique=True, postgresql_where=live)
    set_storage = SetStorageParameters(table, STORAGE_PARAMETERS)
    event.listen(table, "after_create", set_storage.execute_if(dialect="postgresql"))


@event.listens_for(JobTable, "after_mapper_constructed", propagate=True)
def _equip_mapper(mapper: Mapper[Any], cls: type[JobTable]) -> None:
    if mapper.concrete:
        raise ConfigurationError(
            f"{cls.__qualname__}: a job class takes no part in concrete inheritance, since its rows would be in two "
            "queues: make it a job class of its own"
        )
    if mapper is not job_mapper(cls):
        return
    table = job_table(cls)
    keys = key_columns(table)
    if mapper.inherits is None and tuple(mapper.primary_key) != keys:
        raise ConfigurationError(f"{cls.__qualname__} is mapped under another primary key than its table's")
    if len(keys) > 1 and any(INFO_BROUGHT in column.info for column in keys):
        raise ConfigurationError(
            f"{cls.__qualname__}: JobDataclassMixin brings the key 'id': call one's own key so, or use "
            "JobStateDataclassMixin and declare kind, payload and meta"
        )
    if reserved := RESERVED_KEYS.intersection(table.c.keys()):
        name = min(reserved)
        raise ConfigurationError(
            f"{cls.__qualname__}: {name!r} names a parameter of the queue's statements: give the column another "
            f"key, mapped_column({name!r}, key='{name}_')"
        )
    if INFO_STORAGE not in table.info:
        equip(table)
    if mapper.version_id_col is None:
        mapper.version_id_col = table.c.attempts
        mapper.version_id_generator = False
