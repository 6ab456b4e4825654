"""Take back the jobs of lost workers, delete those that were kept long enough.

Every worker does both, without a leader: SKIP LOCKED makes ten of them share the rows, and one that is frozen in the
middle holds up nobody. A chore is a statement with a limit; each batch is a transaction of its own.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from sqlalchemy import Connection

from sqla_jobqueue import lifecycle
from sqla_jobqueue.control import Line
from sqla_jobqueue.loops import Loop
from sqla_jobqueue.tasks import JobQueue

logger = logging.getLogger("sqla_jobqueue")

RECLAIM_EVERY: Final = timedelta(seconds=5)
PRUNE_EVERY: Final = timedelta(minutes=1)
BATCH: Final = 1000
"""Rows of one transaction."""


@dataclass(slots=True)
class Chore:
    """One recurring piece of housekeeping.

    Attributes:
        name: for logs.
        every: time between runs, give or take a fifth.
        batch: does up to `BATCH` rows in the connection's transaction; returns how many.
    """

    name: str
    every: timedelta
    batch: Callable[[Connection], int]
    next_at: float = field(default=0.0)

    def postpone(self) -> None:
        """Set the next run; jitter keeps a fleet of workers apart."""
        self.next_at = time.monotonic() + self.every.total_seconds() * random.uniform(0.8, 1.2)  # noqa: S311


class Maintenance:
    """Runs the chores of some queues in a thread of its own.

    Args:
        line: the connection to use.
        queues: their models are reclaimed, their finished jobs pruned.
        on_rows: called with a chore's name and how many rows a batch of it touched.
        on_crash: called with an error that is no outage.
    """

    def __init__(
        self,
        line: Line,
        queues: Sequence[JobQueue[Any]],
        on_rows: Callable[[str, int], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self._line = line
        self._chores = chores(queues)
        self._on_rows = on_rows
        self._loop = Loop("maintain", self._tick, on_crash)

    def start(self) -> None:
        """Begin, in a thread of its own."""
        self._loop.start()

    def stop(self) -> None:
        """Stop after the current batch. Returns when the thread has ended."""
        self._loop.stop()
        if self._loop.ident is not None:
            self._loop.join()

    def _tick(self) -> float:
        for chore in self._chores:
            if chore.next_at <= time.monotonic() and not self._loop.stopping:
                run_chore(self._line, chore, self._on_rows, lambda: self._loop.stopping)
                chore.postpone()
        return max(0.0, min(chore.next_at for chore in self._chores) - time.monotonic())


def run_chore(
    line: Line, chore: Chore, on_rows: Callable[[str, int], None], stopping: Callable[[], bool] = lambda: False
) -> int:
    """Do batches until one comes back short; return how many rows there were."""
    total = 0
    while not stopping():
        with line.begin() as connection:
            count = chore.batch(connection)
        total += count
        if count:
            logger.info("%s: %d rows", chore.name, count)
            on_rows(chore.name, count)
        if count < BATCH:
            break
    return total


def chores(queues: Sequence[JobQueue[Any]]) -> list[Chore]:
    """What there is to do for these queues: reclaim per model, prune per queue and status."""
    return [_reclaim(model) for model in dict.fromkeys(queue.model for queue in queues)] + [
        _prune(queue, status, age) for queue in queues for status, age in queue.settings.keep
    ]


def _reclaim(model: Any) -> Chore:
    def batch(connection: Connection) -> int:
        return len(lifecycle.reclaim_expired(connection, model, limit=BATCH))

    return Chore(f"reclaim {model.__tablename__}", RECLAIM_EVERY, batch)


def _prune(queue: JobQueue[Any], status: Any, age: timedelta) -> Chore:
    def batch(connection: Connection) -> int:
        return lifecycle.prune(connection, queue.model, queue=queue.name, status=status, older_than=age, limit=BATCH)

    return Chore(f"prune {queue.name} {status}", PRUNE_EVERY, batch)
