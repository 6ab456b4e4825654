"""The five states of a job, and which changes between them are legal.

There is no state for "scheduled" or "retrying": both are `pending` with a ``run_at`` ahead, so nothing has to move rows
from one state to another when their time comes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class JobStatus(StrEnum):
    """Text in the database, under a CHECK: an enum type could not be altered by a migration in its transaction."""

    PENDING = "pending"
    """Waiting for ``run_at`` and a worker."""
    RUNNING = "running"
    """Claimed under a lease, ``locked_until``."""
    DONE = "done"
    FAILED = "failed"
    """The dead letter: out of attempts, or not runnable at all."""
    CANCELLED = "cancelled"


LIVE: Final = (JobStatus.PENDING, JobStatus.RUNNING)
TERMINAL: Final = (JobStatus.DONE, JobStatus.FAILED, JobStatus.CANCELLED)

CHANGES: Final[dict[JobStatus, frozenset[JobStatus]]] = {
    JobStatus.PENDING: frozenset({JobStatus.RUNNING, JobStatus.DONE, JobStatus.FAILED, JobStatus.CANCELLED}),
    JobStatus.RUNNING: frozenset({JobStatus.PENDING, JobStatus.DONE, JobStatus.FAILED, JobStatus.CANCELLED}),
    JobStatus.DONE: frozenset({JobStatus.PENDING}),
    JobStatus.FAILED: frozenset({JobStatus.PENDING}),
    JobStatus.CANCELLED: frozenset({JobStatus.PENDING}),
}
"""From each status to those it may change to. Out of a terminal status only `requeue` leads.

`pending` leads straight to `done` and `failed` in one-transaction mode, where nobody ever sees the job running.
"""
