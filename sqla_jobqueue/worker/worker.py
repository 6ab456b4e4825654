"""The worker: lanes, loops and signals put together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Self

from sqlalchemy import URL, Engine, Table
from sqlalchemy.orm import Session

from sqla_jobqueue.control import Control, control_source, translation_of
from sqla_jobqueue.errors import ConfigurationError
from sqla_jobqueue.execution import Outcome, isolation_of
from sqla_jobqueue.loops import Loop, logger
from sqla_jobqueue.maintenance import Maintenance
from sqla_jobqueue.model import job_mapper
from sqla_jobqueue.tasks import JobQueue
from sqla_jobqueue.wakeup import Listener
from sqla_jobqueue.worker.checks import DEFAULT_CONCURRENCY, capacities, check_queues
from sqla_jobqueue.worker.handlers import AsyncSessions, Handlers, Sessions
from sqla_jobqueue.worker.hooks import Told, WorkerHooks
from sqla_jobqueue.worker.lanes import Lane, LeasedLane, OneTransactionLane, Slots
from sqla_jobqueue.worker.leases import Lease, Leases
from sqla_jobqueue.worker.recorder import Pending, Recorder
from sqla_jobqueue.worker.runners import EventLoop
from sqla_jobqueue.worker.signals import EXIT_CRASHED, EXIT_FORCED, EXIT_STOPPED, stop_signals

DEFAULT_POLL: Final = timedelta(seconds=2)
DEFAULT_GRACE: Final = timedelta(seconds=30)
SECONDS_TO_STOP: Final = 1.5
"""What cancelling, writing the last outcomes and closing may take after the grace period."""


class Worker:
    """Runs the jobs of some queues.

    ``run()`` for a process of its own; ``with worker:`` or ``async with worker:`` inside an application; ``drain()``
    for tests and scripts.

    Args:
        queues: at least one, all with at least one task.
        sessions: a sessionmaker, or any callable that gives a context manager of a Session, for sync handlers.
        async_sessions: the same for async handlers.
        concurrency: jobs at once, per queue; or a mapping from queue name to that number.
        control: engine or URL for the worker's own connections (psycopg). Derived from the sessions' engine if left
            out.
        poll_interval: how often an idle queue is looked at when no wake-up comes; also the precision of `run_at`.
        listen: use LISTEN; an engine or URL for it alone, where the others go through a transaction pooler. False:
            polling finds everything.
        grace: how long running jobs may take to end after a stop. Then async handlers are cancelled and their jobs
            given back; sync ones, which cannot be stopped, are left to their leases.
        hooks: told what happens; see `WorkerHooks`.
        name: for `locked_by` and logs; host and process id if left out.

    Raises:
        ConfigurationError: a queue without tasks, a sync task without `sessions`, an async one without
            `async_sessions`, a signature that cannot be resolved, or a number out of range.
    """

    def __init__(
        self,
        *queues: JobQueue[Any],
        sessions: Sessions | None = None,
        async_sessions: AsyncSessions | None = None,
        concurrency: int | Mapping[str, int] = DEFAULT_CONCURRENCY,
        control: Engine | URL | str | None = None,
        poll_interval: timedelta = DEFAULT_POLL,
        listen: bool | Engine | URL | str = True,
        grace: timedelta = DEFAULT_GRACE,
        hooks: Sequence[WorkerHooks] = (),
        name: str | None = None,
    ) -> None:
        if poll_interval <= timedelta(0) or grace < timedelta(0):
            raise ConfigurationError("poll_interval is above zero, grace zero or more")
        check_queues(queues, sync=sessions is not None, asynchronous=async_sessions is not None)
        self.queues = queues
        self.name = name or f"{socket.gethostname()}:{os.getpid()}"
        self.activity = 0
        self.stopping = False
        self.told = Told(hooks)
        self._capacities = capacities(queues, concurrency)
        self._sessions = sessions
        self._async_sessions = async_sessions
        self._control_given = control
        self._poll = poll_interval.total_seconds()
        self._listen = listen
        self._grace = grace.total_seconds()
        self._in_flight = 0
        self._changed = threading.Condition()
        self._stop_requested = threading.Event()
        self._forced = False
        self._crash: BaseException | None = None
        self._draining = False
        self._started = False
        self._made = contextlib.ExitStack()
        self._checked = False
        self._next_poll = 0.0
        self._lanes: list[Lane] = []

    # ---------------------------------------------------------------------------------------------- for applications

    def run(self) -> int:
        """Work until SIGTERM, SIGINT or `stop`; return the exit code.

        The first signal stops gracefully, within `grace`; a second one at once. 0: stopped, nothing left behind. 1: an
        error that is no outage. 3: ended before its jobs, which come back after their leases.
        """
        with stop_signals(self._signalled):
            try:
                self._start(None)
                self._stop_requested.wait()
            finally:
                self._finish()
        if self._crash is not None:
            return EXIT_CRASHED
        return EXIT_FORCED if self._in_flight else EXIT_STOPPED

    def drain(self, *, timeout: timedelta | None = None) -> None:
        """Work until nothing is due and nothing runs, then stop.

        Args:
            timeout: raise TimeoutError after this long.
        """
        self._draining = True
        quiet = False
        try:
            self._start(None)
            with self._changed:
                quiet = self._changed.wait_for(
                    lambda: self._is_quiet() or self._stop_requested.is_set(),
                    timeout.total_seconds() if timeout else None,
                )
        finally:
            self._finish()
        if self._crash is not None:
            raise self._crash
        if not quiet:
            raise TimeoutError(f"jobs are still due or running after {timeout}")

    def stop(self) -> None:
        """Ask the worker to stop; from any thread, any number of times. Returns at once."""
        self._stop_requested.set()
        with self._changed:
            self._changed.notify_all()

    def __enter__(self) -> Self:
        self._start(None)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._finish()
        if self._crash is not None and error is None:
            raise self._crash

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._start, loop)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self._finish)
        if self._crash is not None and error is None:
            raise self._crash

    # ------------------------------------------------------------------------------------------------- for the lanes

    def began(self, count: int) -> None:
        """So many jobs, or attempts to claim one, are in flight."""
        with self._changed:
            self._in_flight += count

    def ended(self, lane: Lane, outcome: Outcome | None, lease: Lease | None) -> None:
        """A job or an attempt to claim one is over: write its outcome, or let go of it."""
        if outcome is None:
            self._settled(lane, active=False)
        elif outcome.recorded or outcome.write is None:
            self._let_go(lane, outcome, lease, held=outcome.recorded)
        else:
            self._recorder.put(Pending(lane, outcome, lease))

    def crashed(self, error: BaseException) -> None:
        """An error that is no outage: the worker ends, loudly."""
        self._crash = self._crash or error
        self.stop()

    # ----------------------------------------------------------------------------------------------------- internals

    def _start(self, loop: asyncio.AbstractEventLoop | None) -> None:
        if self._started:
            raise ConfigurationError("a worker runs once: make a new one")
        self._started = True
        try:
            self._make(loop)
        except BaseException:
            self._made.close()
            raise
        for queue in self.queues:
            logger.info("worker %s: queue %s, tasks %s", self.name, queue.name, ", ".join(sorted(queue.tasks)))
        for part in (self._leases, self._recorder, *self._background, self._claimer):
            part.start()

    def _make(self, loop: asyncio.AbstractEventLoop | None) -> None:
        event_loop = EventLoop(loop) if self._async_sessions is not None else None
        if event_loop:
            event_loop.start()
            self._made.callback(event_loop.stop, SECONDS_TO_STOP / 2)
        self._handlers = Handlers(self._sessions, self._async_sessions, event_loop, self.told, self.name)
        self._made.callback(self._handlers.close, SECONDS_TO_STOP / 2, self._mapper)
        bind = self._handlers.bind(self._mapper)
        self._control = Control(self._control_given or control_source(bind), translation_of(bind))
        self._made.callback(self._control.close)
        leased = [queue for queue in self.queues if not queue.settings.one_transaction]
        self._leases = Leases(self._control.line(), leased, self.crashed)
        self._recorder = Recorder(self._control.line(), self._written, self.crashed)
        self._claimer = Loop("claim", self._claim, self.crashed)
        self._background: list[Maintenance | Listener] = [] if self._draining else self._make_background()
        self._lanes = self._make_lanes()

    def _check_session(self, session: Session) -> None:
        for mapper in dict.fromkeys(job_mapper(queue.model) for queue in self.queues):
            isolation_of(session.get_bind(mapper))
            self._control.check_same_database(session, mapper)

    @property
    def _mapper(self) -> Any:
        return job_mapper(self.queues[0].model)

    def _make_background(self) -> list[Maintenance | Listener]:
        parts: list[Maintenance | Listener] = [
            Maintenance(self._control.line(), self.queues, self._maintained, self.crashed)
        ]
        if self._listen is not False:
            line = self._control.line(None if self._listen is True else self._listen)
            tables = dict.fromkeys(queue.table for queue in self.queues)
            parts.append(Listener(line, tables, self._woken, self.crashed))
        return parts

    def _make_lanes(self) -> list[Lane]:
        lanes: list[Lane] = []
        line = self._control.line()
        for queue, capacity in self._capacities.items():
            slots = Slots(capacity)
            if queue.settings.one_transaction:
                lanes += [
                    OneTransactionLane(queue, slots, self, handlers=self._handlers, is_async=is_async)
                    for is_async in sorted({task.is_async for task in queue.tasks.values()})
                ]
            else:
                leases, handlers = self._leases, self._handlers
                lanes.append(
                    LeasedLane(queue, slots, self, line=line, leases=leases, handlers=handlers, name=self.name)
                )
        return lanes

    def _claim(self) -> float:
        if not self._checked:
            self._handlers.ask(self._check_session)
            self._checked = True
        now = time.monotonic()
        if now >= self._next_poll:
            self._next_poll = now + self._poll * random.uniform(0.8, 1.2)  # noqa: S311  keeps a fleet apart
            self._heat()
        for lane in self._lanes:
            if lane.hot and not self.stopping:
                lane.poll()
        with self._changed:
            self._changed.notify_all()  # a lane that was found empty may be what `drain` waits for
        return max(0.0, self._next_poll - time.monotonic())

    def _heat(self, table: Table | None = None, queue: str | None = None) -> None:
        for lane in self._lanes:
            if table in {None, lane.queue.table} and queue in {None, lane.queue.name}:
                lane.hot = True

    def _woken(self, table: Table | None, queue: str | None) -> None:
        self._heat(table, queue)
        self._claimer.wake()

    def _maintained(self, chore: str, count: int) -> None:
        self.told.maintained(chore, count)
        self._woken(None, None)

    def _written(self, pending: Pending, held: bool) -> None:
        self._let_go(pending.lane, pending.outcome, pending.lease, held=held)

    def _let_go(self, lane: Lane, outcome: Outcome, lease: Lease | None, *, held: bool) -> None:
        if lease is not None:
            self._leases.remove(lease)
        self.told.ended(lane.queue, outcome, held=held)
        self._settled(lane, active=True)

    def _settled(self, lane: Lane, *, active: bool) -> None:
        with self._changed:
            self._in_flight -= 1
            self.activity += active
            idle = self._draining and not self._in_flight
            for other in self._lanes if idle else ():
                other.hot = other.hot or other.empty_at < self.activity
            self._changed.notify_all()
        if lane.hot or idle:
            self._claimer.wake()

    def _is_quiet(self) -> bool:
        return not self._in_flight and all(lane.empty_at == self.activity for lane in self._lanes)

    def _signalled(self) -> None:
        self._forced = self._stop_requested.is_set()
        self._stop_requested.set()

    def _finish(self) -> None:
        self.stopping = True
        if not self._lanes:
            return  # never came to claim
        lanes, self._lanes = self._lanes, []
        self._claimer.stop()
        self._wait_until_ended(self._grace, heed_force=True)
        if self._in_flight:
            self._handlers.cancel()
            self._wait_until_ended(SECONDS_TO_STOP / 2)
        if self._in_flight:
            names = ", ".join(sorted({lane.queue.name for lane in lanes}))
            logger.warning("worker %s: %d jobs left to their leases, in queues %s", self.name, self._in_flight, names)
        for part in self._background:
            part.stop()
        self._recorder.stop(SECONDS_TO_STOP / 2)
        self._leases.stop()
        self._made.close()

    def _wait_until_ended(self, seconds: float, *, heed_force: bool = False) -> None:
        """Until no claim is under way and nothing runs; in short steps, since a signal handler cannot notify."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._in_flight or self._claimer.is_alive():
                left = deadline - time.monotonic()
                if left <= 0 or (heed_force and self._forced):
                    return
                self._changed.wait(min(left, 0.05))
