"""Writes the outcomes that a handler's own transaction could not hold.

Failures, whose transaction was rolled back; the success of a handler that never used the database; jobs given back
unstarted. They are collected and written in batches on the worker's own connection, fenced like everything else. While
the database is away they wait, their leases held as long as that lasts.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from threading import Condition
from typing import Any, Final

from sqla_jobqueue import lifecycle
from sqla_jobqueue.control import Line
from sqla_jobqueue.execution import Outcome
from sqla_jobqueue.lifecycle import Verb, Write
from sqla_jobqueue.loops import Loop
from sqla_jobqueue.statements import Fence
from sqla_jobqueue.worker.lanes import Lane
from sqla_jobqueue.worker.leases import Lease

logger = logging.getLogger("sqla_jobqueue")

BATCH: Final = 500
"""Outcomes of one statement."""


@dataclass(frozen=True, slots=True)
class Pending:
    """An outcome to be written.

    Attributes:
        lane: where the job came from.
        outcome: what to write.
        lease: held until it is written; None in one-transaction mode.
    """

    lane: Lane
    outcome: Outcome
    lease: Lease | None


class Recorder:
    """Collects outcomes and writes them.

    Args:
        line: where they go.
        on_written: called with each outcome and whether its fence still held.
        on_crash: called with an error that is no outage.
    """

    def __init__(
        self,
        line: Line,
        on_written: Callable[[Pending, bool], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self._line = line
        self._on_written = on_written
        self._waiting: list[Pending] = []
        self._changed = Condition()
        self._loop = Loop("record", self._tick, on_crash)

    def start(self) -> None:
        """Begin to write, in a thread of its own."""
        self._loop.start()

    def stop(self, seconds: float) -> None:
        """Write what is there, for so many seconds at most, then stop."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, seconds)
        self._loop.stop()
        if self._loop.ident is not None:
            self._loop.join(seconds)

    def put(self, pending: Pending) -> None:
        """Hand over an outcome."""
        with self._changed:
            self._waiting.append(pending)
        self._loop.wake()

    def __len__(self) -> int:
        return len(self._waiting)

    def _tick(self) -> float | None:
        with self._changed:
            batch = self._waiting[:BATCH]
        groups: defaultdict[type[Any], list[Pending]] = defaultdict(list)
        for pending in batch:
            groups[pending.lane.queue.model].append(pending)
        for model, group in groups.items():
            self._write(model, group)
        with self._changed:
            more = bool(self._waiting)
        return 0.0 if more else None

    def _write(self, model: type[Any], group: list[Pending]) -> None:
        counted = [pending for pending in group if pending.outcome.counted]
        kept: set[Fence] = set()
        if counted:
            writes = [(pending.outcome.fence, _write_of(pending)) for pending in counted]
            with self._line.begin() as connection:
                kept = lifecycle.record(connection, model, writes)
        self._done(counted, kept)
        for pending in group:
            if not pending.outcome.counted:
                with self._line.begin() as connection:
                    held = _count(connection, model, pending)
                self._done([pending], {pending.outcome.fence} if held else set())

    def _done(self, written: list[Pending], kept: set[Fence]) -> None:
        for pending in written:
            self._on_written(pending, pending.outcome.fence in kept)
        with self._changed:
            finished = {id(pending) for pending in written}
            self._waiting = [pending for pending in self._waiting if id(pending) not in finished]
            self._changed.notify_all()


def _write_of(pending: Pending) -> Write:
    if pending.outcome.write is None:
        raise AssertionError(f"nothing to write for {pending.outcome.fence}")
    return pending.outcome.write


def _count(connection: Any, model: type[Any], pending: Pending) -> bool:
    """Count a failure whose transaction took the claim back with it."""
    write = _write_of(pending)
    if write.verb not in {Verb.RETRY, Verb.FAIL}:
        return True  # snoozed, cancelled or released: the rollback left the job as it was, due
    return lifecycle.count_failure(
        connection,
        model,
        pending.outcome.fence,
        delay=write.values.get("delay", timedelta(0)),
        error=write.values["error"],
        lethal=write.verb is Verb.FAIL,
    )
