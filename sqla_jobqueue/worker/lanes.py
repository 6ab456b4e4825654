"""Lanes: where the jobs of one queue come from, and how many may run.

A leased lane claims as many jobs as it has free slots, on the worker's connection. A one-transaction lane cannot: the
claim belongs into the handler's own transaction. So it starts one runner, which claims and runs jobs until there are
none; each runner that finds a job starts another, up to the slots, so an idle lane costs one query per poll, and a busy
one is at full width after a few jobs. Sync and async tasks of such a queue are two lanes over the same slots.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Protocol

from sqla_jobqueue import lifecycle
from sqla_jobqueue.control import Line
from sqla_jobqueue.execution import Ending, Outcome
from sqla_jobqueue.lifecycle import Verb, Write, row_fence
from sqla_jobqueue.loops import is_outage
from sqla_jobqueue.tasks import JobQueue
from sqla_jobqueue.worker.handlers import Handlers, Result
from sqla_jobqueue.worker.hooks import Told
from sqla_jobqueue.worker.leases import Lease, Leases

logger = logging.getLogger("sqla_jobqueue")


@dataclass(slots=True)
class Slots:
    """How many jobs of a queue may run at once in this worker."""

    capacity: int
    used: int = 0
    _lock: Lock = field(default_factory=Lock)

    def take(self, wanted: int = 1) -> int:
        """Take up to so many; return how many there were."""
        with self._lock:
            taken = max(0, min(wanted, self.capacity - self.used))
            self.used += taken
            return taken

    def give(self, count: int = 1) -> None:
        """Give them back."""
        with self._lock:
            self.used -= count


class Hub(Protocol):
    """What lanes tell the worker. Its methods may be called from any thread.

    Attributes:
        activity: counts the jobs that ended.
        stopping: no new jobs.
        told: hears of claims.
    """

    activity: int
    stopping: bool
    told: Told

    def began(self, count: int) -> None:
        """So many jobs, or attempts to claim one, are in flight."""

    def ended(self, lane: Lane, outcome: Outcome | None, lease: Lease | None) -> None:
        """One of them is over."""

    def crashed(self, error: BaseException) -> None:
        """An error that is no outage: the worker ends."""


class Lane:
    """What both sorts have in common.

    Args:
        queue: which one.
        slots: of the queue.
        hub: the worker's side: what happens when jobs end.

    Attributes:
        hot: there may be something due: poll at once.
        empty_at: the worker's activity count at the start of the last poll that found nothing.
    """

    def __init__(self, queue: JobQueue[Any], slots: Slots, hub: Hub) -> None:
        self.queue = queue
        self.slots = slots
        self.hub = hub
        self.hot = True
        self.empty_at = -1

    def poll(self) -> None:
        """Look for due jobs and start them, as far as slots are free."""
        raise NotImplementedError


class LeasedLane(Lane):
    """Claims in batches under a lease, then runs."""

    def __init__(
        self,
        queue: JobQueue[Any],
        slots: Slots,
        hub: Hub,
        *,
        line: Line,
        leases: Leases,
        handlers: Handlers,
        name: str,
    ) -> None:
        super().__init__(queue, slots, hub)
        self._line = line
        self._leases = leases
        self._handlers = handlers
        self._name = name
        self._kinds = tuple(sorted(queue.tasks)) if queue.has_kinds else None

    def poll(self) -> None:
        """Claim for all free slots; stay hot if there may be more than that."""
        free = self.slots.take(self.slots.capacity)
        if not free:
            return  # hot until a slot is given back
        self.hot = False
        began_at = self.hub.activity
        rows: list[Mapping[str, Any]] = []
        claimed_at = time.monotonic()
        try:
            with self._line.begin() as connection:
                rows = lifecycle.claim_rows(
                    connection,
                    self.queue.model,
                    queue=self.queue.name,
                    kinds=self._kinds,
                    limit=free,
                    locked_by=self._name,
                    lease=self.queue.settings.lease,
                )
        except BaseException:
            self.hot = True
            raise
        finally:
            self.slots.give(free - len(rows))
            self.hub.began(len(rows))
        if rows:
            self.hub.told.claimed(self.queue.name, len(rows))
        if len(rows) == free:
            self.hot = True
        elif not rows:
            self.empty_at = began_at
        for row in rows:
            self._start(row, claimed_at)

    def _start(self, row: Mapping[str, Any], claimed_at: float) -> None:
        fence = row_fence(self.queue.model, row)
        lease = self._leases.add(self.queue, fence, claimed_at)
        task = self.queue.task_for(row)

        def done(outcome: Outcome) -> None:
            self.slots.give()
            self.hub.ended(self, outcome, lease)

        if task is None or self.hub.stopping:
            done(Outcome(Ending.RELEASED, fence, row, Write(Verb.RELEASE, {})))
        else:
            self._handlers.start_claimed(task, row, lease, done)


class OneTransactionLane(Lane):
    """Claims and runs in the handler's own transaction."""

    def __init__(self, queue: JobQueue[Any], slots: Slots, hub: Hub, *, handlers: Handlers, is_async: bool) -> None:
        super().__init__(queue, slots, hub)
        self._handlers = handlers
        self._is_async = is_async
        mine = tuple(sorted(kind for kind, task in queue.tasks.items() if task.is_async is is_async))
        self._kinds = mine if queue.has_kinds else None
        self._away = False

    def poll(self) -> None:
        """Start a runner, if a slot is free."""
        if self.hub.stopping or not self.slots.take():
            return
        self.hot = False
        self.hub.began(1)
        self._handlers.start_claiming(
            self.queue, self._kinds, is_async=self._is_async, done=_runner(self, self.hub.activity)
        )

    def found(self, result: Result, began_at: int) -> bool:
        """Take note of what a runner found; whether it goes on."""
        if isinstance(result, Outcome):
            self._note(away=False)
            self.hub.ended(self, result, None)
            go_on = not self.hub.stopping
            if go_on:
                self.hub.began(1)
                self.poll()  # one more runner, while there is work
                return True
        elif result is None:
            self._note(away=False)
            self.empty_at = began_at
            self.hub.ended(self, None, None)
        else:
            self._failed(result)
            self.hub.ended(self, None, None)
        self.slots.give()
        return False

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, Exception) and not is_outage(error):
            logger.critical("queue %s: an error that is no outage, the worker ends", self.queue.name, exc_info=error)
            self.hub.crashed(error)
        elif isinstance(error, Exception):
            self._note(away=True, error=error)

    def _note(self, *, away: bool, error: BaseException | None = None) -> None:
        if away and not self._away:
            logger.warning("queue %s: the database is away: %s", self.queue.name, type(error).__name__)
        elif self._away and not away:
            logger.warning("queue %s: the database is back", self.queue.name)
        self._away = away


def _runner(lane: OneTransactionLane, began_at: int) -> Callable[[Result], bool]:
    state = {"began_at": began_at}

    def done(result: Result) -> bool:
        go_on = lane.found(result, state["began_at"])
        state["began_at"] = lane.hub.activity
        return go_on

    return done
