"""The leases that a worker holds, and their renewal.

At a third of the lease every held job is renewed, all of a model and lease length in one statement. What comes back
missing is lost: its handler is told, and its result will be refused. A lease that could not be renewed for its whole
length is lost, too, as far as the handler is concerned: somebody else may be at work by now.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event, Lock
from typing import Any, Final

from sqla_jobqueue import lifecycle
from sqla_jobqueue.control import Line
from sqla_jobqueue.loops import Loop
from sqla_jobqueue.statements import Fence
from sqla_jobqueue.tasks import JobQueue

logger = logging.getLogger("sqla_jobqueue")

RENEWALS_PER_LEASE: Final = 3


@dataclass(slots=True, eq=False)
class Lease:
    """One held job.

    Attributes:
        queue: of the job.
        fence: key and attempt number.
        valid_until: on the monotonic clock, counted from before the statement that took or renewed it.
        lost: set when it is gone.
        on_lost: told then, from the renewing thread.
    """

    queue: JobQueue[Any]
    fence: Fence
    valid_until: float
    lost: Event = field(default_factory=Event)
    on_lost: Callable[[], None] = lambda: None


class Leases:
    """All leases of a worker.

    Args:
        line: where renewals go.
        queues: leased queues; the shortest lease sets the pace.
        on_crash: called with an error that is no outage.
    """

    def __init__(self, line: Line, queues: list[JobQueue[Any]], on_crash: Callable[[BaseException], None]) -> None:
        self._line = line
        self._held: dict[tuple[type[Any], Fence], Lease] = {}
        self._lock = Lock()
        shortest = min((queue.settings.lease.total_seconds() for queue in queues), default=0.0)
        self._pace = shortest / RENEWALS_PER_LEASE
        self._loop = Loop("renew", self._tick, on_crash) if queues else None

    def start(self) -> None:
        """Begin to renew, in a thread of its own."""
        if self._loop:
            self._loop.start()

    def stop(self) -> None:
        """Stop renewing. Returns when the thread has ended."""
        if self._loop:
            self._loop.stop()
            if self._loop.ident is not None:
                self._loop.join()

    def add(self, queue: JobQueue[Any], fence: Fence, claimed_at: float) -> Lease:
        """Hold a job that was just claimed.

        Args:
            queue: of the job.
            fence: key and attempt number.
            claimed_at: on the monotonic clock, before the claim was sent.
        """
        lease = Lease(queue, fence, claimed_at + queue.settings.lease.total_seconds())
        with self._lock:
            self._held[queue.model, fence] = lease
        return lease

    def remove(self, lease: Lease) -> None:
        """Let go of a job whose outcome is written."""
        with self._lock:
            self._held.pop((lease.queue.model, lease.fence), None)

    def __len__(self) -> int:
        return len(self._held)

    def _tick(self) -> float:
        groups: defaultdict[tuple[type[Any], float], list[Lease]] = defaultdict(list)
        with self._lock:
            held = list(self._held.values())
        for lease in held:
            groups[lease.queue.model, lease.queue.settings.lease.total_seconds()].append(lease)
        try:
            for (model, seconds), leases in groups.items():
                self._renew(model, seconds, leases)
        finally:
            now = time.monotonic()
            for lease in held:
                if lease.valid_until < now:
                    self._lose(lease, "could not be renewed in time")
        return self._pace

    def _renew(self, model: type[Any], seconds: float, leases: list[Lease]) -> None:
        asked_at = time.monotonic()
        fences = [lease.fence for lease in leases]
        with self._line.begin() as connection:
            _extended, lost = lifecycle.extend_lease(connection, model, fences, leases[0].queue.settings.lease)
        for lease in leases:
            if lease.fence not in lost:
                lease.valid_until = asked_at + seconds
            elif (model, lease.fence) in self._held:  # not one that was finished meanwhile
                self._lose(lease, "is owned by another attempt, cancelled or deleted")

    def _lose(self, lease: Lease, why: str) -> None:
        if lease.lost.is_set():
            return
        lease.lost.set()
        logger.warning(
            "lease of job %s in queue %s, attempt %d, %s", lease.fence.key, lease.queue.name, lease.fence.attempt, why
        )
        lease.on_lost()
