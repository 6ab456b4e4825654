"""The mixins that make a mapped class a job table.

A job is a class of the application's own `Base`, with whatever columns, foreign keys and relationships it needs::

    class Job(JobMixin, Base):
        __tablename__ = "jobs"

`JobMixin` is a complete job: a key, a kind, a payload, and the state of the queue. A class that declares a primary key
of its own (UUID, composite) keeps it. `JobStateMixin` brings the state alone and turns a model that exists into a
queue: the row is the job. On a `MappedAsDataclass` base, `JobDataclassMixin` and `JobStateDataclassMixin` take their
places. `JobErrorsMixin` and `JobResultMixin` add a history of errors, and a result and progress (`...DataclassMixin`).

Checks, indexes and storage parameters are attached when the mapper is made, not through ``__table_args__``, which an
application's own would replace. Types are explicit, so a ``type_annotation_map`` does not change them. The attempt
number is the mapper's version id, so an ORM write to a job that somebody else claimed meanwhile is a StaleDataError.
"""

from __future__ import annotations

from sqla_jobqueue.model import equipment as equipment  # attaches the events
from sqla_jobqueue.model.base import J, JobTable
from sqla_jobqueue.model.columns import DEFAULT_MAX_ATTEMPTS, DEFAULT_QUEUE, INFO_BROUGHT, TIMESTAMPTZ, JsonValue
from sqla_jobqueue.model.equipment import INFO_PART, OLDEST_WORKER, RESERVED_KEYS, SCHEMA_VERSION, equip, schema_marker
from sqla_jobqueue.model.lookup import cached, job_mapper, job_table, key_columns
from sqla_jobqueue.model.mixins import (
    JobDataclassMixin,
    JobErrorsDataclassMixin,
    JobErrorsMixin,
    JobMixin,
    JobResultDataclassMixin,
    JobResultMixin,
    JobStateDataclassMixin,
    JobStateMixin,
)
from sqla_jobqueue.model.naming import MAX_IDENTIFIER_BYTES, fitted
from sqla_jobqueue.model.storage import INFO_STORAGE, STORAGE_PARAMETERS, SetStorageParameters

__all__ = [
    "DEFAULT_MAX_ATTEMPTS",
    "DEFAULT_QUEUE",
    "INFO_BROUGHT",
    "INFO_PART",
    "INFO_STORAGE",
    "MAX_IDENTIFIER_BYTES",
    "OLDEST_WORKER",
    "RESERVED_KEYS",
    "SCHEMA_VERSION",
    "STORAGE_PARAMETERS",
    "TIMESTAMPTZ",
    "J",
    "JobDataclassMixin",
    "JobErrorsDataclassMixin",
    "JobErrorsMixin",
    "JobMixin",
    "JobResultDataclassMixin",
    "JobResultMixin",
    "JobStateDataclassMixin",
    "JobStateMixin",
    "JobTable",
    "JsonValue",
    "SetStorageParameters",
    "cached",
    "equip",
    "fitted",
    "job_mapper",
    "job_table",
    "key_columns",
    "schema_marker",
]
