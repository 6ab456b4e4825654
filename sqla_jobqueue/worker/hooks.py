"""Seeing into a worker: log records, and hooks for metrics and alarms.

Both get what is known of a job as a plain `JobSnapshot`, attached to no session. Payloads are in no log record.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqla_jobqueue.execution import Ending, Outcome
from sqla_jobqueue.statements import Fence
from sqla_jobqueue.tasks import JobQueue

logger = logging.getLogger("sqla_jobqueue")

_LEVELS: Final = {Ending.DONE: logging.DEBUG, Ending.FAILED: logging.WARNING, Ending.LOST: logging.WARNING}


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """A job as it was claimed.

    Attributes:
        model: name of its class.
        queue: name of its queue.
        kind: of the task; None where the row itself is the job.
        key: primary key, one value per column.
        attempt: number of this attempt, 1 for the first.
        max_attempts: the last one.
        run_at: when it was due.
        row: every column of the table.
    """

    model: str
    queue: str
    kind: str | None
    key: tuple[Any, ...]
    attempt: int
    max_attempts: int
    run_at: datetime
    row: Mapping[str, Any]

    def __repr__(self) -> str:
        """Without the row: its payload may hold secrets."""
        return f"<JobSnapshot {self.kind or self.model} {self.key} in {self.queue!r}, attempt {self.attempt}>"


def snapshot(queue: JobQueue[Any], fence: Fence, row: Mapping[str, Any]) -> JobSnapshot:
    """What hooks and logs get to see of a job."""
    return JobSnapshot(
        model=queue.model.__qualname__,
        queue=queue.name,
        kind=row.get("kind"),
        key=fence.key,
        attempt=fence.attempt,
        max_attempts=row["max_attempts"],
        run_at=row["run_at"],
        row=row,
    )


class WorkerHooks:
    """Base class for hooks: override what is of interest, and give an instance to the worker.

    They are called from the worker's threads, and from the event loop for async handlers: be quick, block nothing. A
    hook that raises is logged, and harms nothing.
    """

    def claimed(self, queue: str, count: int) -> None:
        """So many jobs of a leased queue were claimed."""

    def job_started(self, job: JobSnapshot) -> None:
        """The job's handler is about to be called."""

    def job_finished(self, job: JobSnapshot, ending: Ending) -> None:
        """The job's outcome is written, and it was no failure: done, snoozed, cancelled or released."""

    def job_failed(self, job: JobSnapshot, error: BaseException | None, *, dead: bool) -> None:
        """The attempt's failure is written.

        Args:
            job: the job.
            error: what was raised.
            dead: it was the last attempt: the job is in the dead letter.
        """

    def lease_lost(self, job: JobSnapshot) -> None:
        """The attempt's result is refused: the job is somebody else's."""

    def maintained(self, chore: str, count: int) -> None:
        """Housekeeping touched so many rows."""


class Told:
    """Tells hooks and log what happened.

    Args:
        hooks: to be told.
    """

    def __init__(self, hooks: Sequence[WorkerHooks]) -> None:
        self._hooks = tuple(hooks)

    def _each(self, call: Callable[[WorkerHooks], None]) -> None:
        for hook in self._hooks:
            try:
                call(hook)
            except Exception:
                logger.exception("a hook of %s raised", type(hook).__qualname__)

    def claimed(self, queue: str, count: int) -> None:
        """Jobs of a leased queue were claimed."""
        self._each(lambda hook: hook.claimed(queue, count))

    def started(self, queue: JobQueue[Any], fence: Fence, row: Mapping[str, Any]) -> None:
        """A handler is about to be called."""
        if self._hooks:
            job = snapshot(queue, fence, row)
            self._each(lambda hook: hook.job_started(job))

    def ended(self, queue: JobQueue[Any], outcome: Outcome, *, held: bool) -> None:
        """An outcome is written, or refused."""
        ending = outcome.ending if held else Ending.LOST
        level = _LEVELS.get(ending, logging.INFO)
        if not self._hooks and not logger.isEnabledFor(level):
            return
        job = snapshot(queue, outcome.fence, outcome.row)
        dead = outcome.is_dead
        logger.log(
            level,
            "%s %s in queue %s, attempt %d of %d: %s",
            job.kind or job.model,
            job.key[0] if len(job.key) == 1 else job.key,
            job.queue,
            job.attempt,
            job.max_attempts,
            "failed for the last time" if ending is Ending.FAILED and dead else ending,
            exc_info=outcome.error if ending is Ending.FAILED else None,
            extra={
                "job_queue": job.queue,
                "job_kind": job.kind,
                "job_key": job.key,
                "job_attempt": job.attempt,
                "job_ending": str(ending),
            },
        )
        if ending is Ending.LOST:
            self._each(lambda hook: hook.lease_lost(job))
        elif ending is Ending.FAILED:
            self._each(lambda hook: hook.job_failed(job, outcome.error, dead=dead))
        else:
            self._each(lambda hook: hook.job_finished(job, ending))

    def maintained(self, chore: str, count: int) -> None:
        """Housekeeping touched rows."""
        self._each(lambda hook: hook.maintained(chore, count))
