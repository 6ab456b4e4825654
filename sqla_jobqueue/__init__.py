"""A table of your own PostgreSQL as a job queue, for SQLAlchemy.

Mix `JobMixin` into a mapped class, declare a `JobQueue`, decorate handlers with its ``task``, and enqueue on your own
Session: job and data commit together. A `Worker` gives each handler a session, and commits its writes together with
"done", or not at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqla_jobqueue.backoff import Backoff, exponential, fixed, sequence
from sqla_jobqueue.errors import (
    Cancel,
    ConfigurationError,
    EnqueueError,
    EntityGone,
    JobNotRunnable,
    JobQueueError,
    JobSignal,
    LeaseLost,
    PayloadError,
    PayloadNotReadable,
    Retry,
    Snooze,
    TransactionMisuse,
)
from sqla_jobqueue.model import (
    JobDataclassMixin,
    JobErrorsMixin,
    JobMixin,
    JobResultMixin,
    JobStateDataclassMixin,
    JobStateMixin,
)
from sqla_jobqueue.session import AsyncJobSession, EnqueueMixin, JobSession, current_job, enqueue, enqueue_all
from sqla_jobqueue.status import JobStatus
from sqla_jobqueue.tasks import Call, JobQueue, Kind, Options, Task

if TYPE_CHECKING:
    from sqla_jobqueue.payload import ref
    from sqla_jobqueue.worker import Worker

__version__ = "0.1.0"

__all__ = [
    "AsyncJobSession",
    "Backoff",
    "Call",
    "Cancel",
    "ConfigurationError",
    "EnqueueError",
    "EnqueueMixin",
    "EntityGone",
    "JobDataclassMixin",
    "JobErrorsMixin",
    "JobMixin",
    "JobNotRunnable",
    "JobQueue",
    "JobQueueError",
    "JobResultMixin",
    "JobSession",
    "JobSignal",
    "JobStateDataclassMixin",
    "JobStateMixin",
    "JobStatus",
    "Kind",
    "LeaseLost",
    "Options",
    "PayloadError",
    "PayloadNotReadable",
    "Retry",
    "Snooze",
    "Task",
    "TransactionMisuse",
    "Worker",
    "current_job",
    "enqueue",
    "enqueue_all",
    "exponential",
    "fixed",
    "ref",
    "sequence",
]


def __getattr__(name: str) -> Any:
    """Load what brings psycopg or pydantic when it is first asked for: a model module needs neither."""
    if name == "Worker":
        from sqla_jobqueue.worker import Worker  # noqa: PLC0415

        return Worker
    if name == "ref":
        from sqla_jobqueue.payload import ref  # noqa: PLC0415

        return ref
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
