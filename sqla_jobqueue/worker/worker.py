"""The worker: lanes, loops and signals put together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any, Final, Self

from sqlalchemy import URL, Engine, Table

from sqla_jobqueue.errors import ConfigurationError
from sqla_jobqueue.execution import Ending, Outcome
from sqla_jobqueue.loops import Loop
from sqla_jobqueue.maintenance import Maintenance
from sqla_jobqueue.model import job_mapper
from sqla_jobqueue.tasks import JobQueue
from sqla_jobqueue.wakeup import Listener
from sqla_jobqueue.worker.control import Control, control_source
from sqla_jobqueue.worker.handlers import AsyncSessions, Handlers, Sessions
from sqla_jobqueue.worker.lanes import Lane, LeasedLane, OneTransactionLane, Slots
from sqla_jobqueue.worker.leases import Lease, Leases
from sqla_jobqueue.worker.recorder import Pending, Recorder
from sqla_jobqueue.worker.runners import EventLoop

logger = logging.getLogger("sqla_jobqueue")

DEFAULT_CONCURRENCY: Final = 10
DEFAULT_POLL: Final = timedelta(seconds=2)
DEFAULT_GRACE: Final = timedelta(seconds=30)
SECONDS_TO_STOP: Final = 2.0
"""What writing the last outcomes and closing connections may take after the grace period."""
EXIT_STOPPED: Final = 0
EXIT_CRASHED: Final = 1
EXIT_FORCED: Final = 3


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
        listen: use LISTEN. Off behind a transaction pooler; polling then finds everything.
        grace: how long running jobs may take to end after a stop.
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
        listen: bool = True,
        grace: timedelta = DEFAULT_GRACE,
        name: str | None = None,
    ) -> None:
        if not queues:
            raise ConfigurationError("a worker needs at least one queue")
        if poll_interval <= timedelta(0) or grace < timedelta(0):
            raise ConfigurationError("poll_interval is above zero, grace zero or more")
        _check_tasks(queues, sessions, async_sessions)
        self.queues = queues
        self.name = name or f"{socket.gethostname()}:{os.getpid()}"
        self.activity = 0
        self.stopping = False
        self._capacity = {queue: _capacity(queue, concurrency) for queue in queues}
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
        self._next_poll = 0.0
        self._lanes: list[Lane] = []

    # ------------------------------------------------------------------------------------------------- for applications

    def run(self) -> int:
        """Work until SIGTERM, SIGINT or `stop`; return the exit code.

        The first signal stops gracefully, within `grace`; a second one at once. 0: stopped, nothing left behind. 1: an
        error that is no outage. 3: ended before its jobs, which come back after their leases.
        """
        with self._signals():
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
        """Ask the worker to stop; from any thread or signal handler, any number of times. Returns at once."""
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

    # --------------------------------------------------------------------------------------------------- for the lanes

    def began(self, count: int) -> None:
        """So many jobs, or attempts to claim one, are in flight."""
        with self._changed:
            self._in_flight += count

    def ended(self, lane: Lane, outcome: Outcome | None, lease: Lease | None) -> None:
        """A job or an attempt to claim one is over: write its outcome, or let go of it."""
        if outcome is None:
            self._settled(lane, active=False)
            return
        _log(outcome, lane.queue)
        if outcome.recorded or outcome.write is None:
            if lease is not None:
                self._leases.remove(lease)
            self._settled(lane, active=True)
        else:
            self._recorder.put(Pending(lane, outcome, lease))

    def crashed(self, error: BaseException) -> None:
        """An error that is no outage: the worker ends, loudly."""
        self._crash = self._crash or error
        self.stop()

    # ------------------------------------------------------------------------------------------------------- internals

    def _start(self, loop: asyncio.AbstractEventLoop | None) -> None:
        if self._started:
            raise ConfigurationError("a worker runs once: make a new one")
        self._started = True
        self._event_loop = EventLoop(loop) if self._async_sessions is not None else None
        if self._event_loop:
            self._event_loop.start()
        self._handlers = Handlers(self._sessions, self._async_sessions, self._event_loop, self.name)
        self._control = self._make_control()
        leased = [queue for queue in self.queues if not queue.settings.one_transaction]
        self._leases = Leases(self._control.engine(), leased, self.crashed)
        self._recorder = Recorder(self._control.engine(), self._written, self.crashed)
        self._claimer = Loop("claim", self._claim, self.crashed)
        self._lanes = self._make_lanes(self._control.engine())
        tables = dict.fromkeys(queue.table for queue in self.queues)
        self._listener = Listener(self._control.engine(), tables, self._woken, self.crashed) if self._listen else None
        self._maintenance = Maintenance(self._control.engine(), self.queues, self._reclaimed, self.crashed)
        for queue in self.queues:
            logger.info("worker %s: queue %s, tasks %s", self.name, queue.name, ", ".join(sorted(queue.tasks)))
        self._leases.start()
        self._recorder.start()
        if not self._draining:
            self._maintenance.start()
            if self._listener:
                self._listener.start()
        self._claimer.start()

    def _make_control(self) -> Control:
        mapper = job_mapper(self.queues[0].model)
        if self._control_given is not None:
            control = Control(self._control_given)
        else:
            control = Control(control_source(self._handlers.bind(mapper)))
        self._handlers.ask(lambda session: control.check_same_database(session, mapper))
        return control

    def _make_lanes(self, engine: Engine) -> list[Lane]:
        lanes: list[Lane] = []
        for queue, capacity in self._capacity.items():
            slots = Slots(capacity)
            if not queue.settings.one_transaction:
                lanes.append(
                    LeasedLane(
                        queue,
                        slots,
                        self,
                        engine=engine,
                        leases=self._leases,
                        handlers=self._handlers,
                        name=self.name,
                    )
                )
                continue
            lanes += [
                OneTransactionLane(queue, slots, self, handlers=self._handlers, is_async=is_async)
                for is_async in sorted({task.is_async for task in queue.tasks.values()})
            ]
        return lanes

    def _claim(self) -> float:
        now = time.monotonic()
        if now >= self._next_poll:
            self._next_poll = now + self._poll * random.uniform(0.8, 1.2)  # noqa: S311  keeps a fleet apart
            for lane in self._lanes:
                lane.hot = True
        for lane in self._lanes:
            if lane.hot and not self.stopping:
                lane.poll()
        return max(0.0, self._next_poll - time.monotonic())

    def _woken(self, table: Table, queue: str | None) -> None:
        for lane in self._lanes:
            if lane.queue.table is table and queue in {None, lane.queue.name}:
                lane.hot = True
        self._claimer.wake()

    def _reclaimed(self) -> None:
        for lane in self._lanes:
            lane.hot = True
        self._claimer.wake()

    def _written(self, pending: Pending, held: bool) -> None:
        if pending.lease is not None:
            self._leases.remove(pending.lease)
        if not held:
            logger.warning(
                "job %s in queue %s, attempt %d: its result is refused, the lease is lost",
                pending.outcome.fence.key,
                pending.lane.queue.name,
                pending.outcome.fence.attempt,
            )
        self._settled(pending.lane, active=True)

    def _settled(self, lane: Lane, *, active: bool) -> None:
        with self._changed:
            self._in_flight -= 1
            if active:
                self.activity += 1
            if self._draining and not self._in_flight:
                for other in self._lanes:
                    other.hot = other.hot or other.empty_at < self.activity
            self._changed.notify_all()
            news = lane.hot or (self._draining and not self._in_flight)
        if news:
            self._claimer.wake()

    def _is_quiet(self) -> bool:
        return not self._in_flight and all(lane.empty_at == self.activity for lane in self._lanes)

    def _finish(self) -> None:
        self.stopping = True
        if not self._lanes:
            return  # never came to claim
        lanes, self._lanes = self._lanes, []
        self._claimer.stop()
        self._claimer.join(self._grace + SECONDS_TO_STOP)
        self._wait_until_ended(time.monotonic() + self._grace)
        if self._in_flight:
            self._handlers.cancel()
            self._wait_until_ended(time.monotonic() + SECONDS_TO_STOP)
        if self._in_flight:
            names = ", ".join(sorted({lane.queue.name for lane in lanes}))
            logger.warning("worker %s: %d jobs left to their leases, in queues %s", self.name, self._in_flight, names)
        if self._listener and not self._draining:
            self._listener.stop()
        if not self._draining:
            self._maintenance.stop()
        self._recorder.stop(SECONDS_TO_STOP)
        self._leases.stop()
        if self._event_loop:
            self._handlers.close(SECONDS_TO_STOP)
            self._event_loop.stop(SECONDS_TO_STOP)
        self._control.dispose()

    def _wait_until_ended(self, deadline: float) -> None:
        with self._changed:
            while self._in_flight and not self._forced and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)

    @contextlib.contextmanager
    def _signals(self) -> Any:
        """SIGTERM and SIGINT stop gracefully, the second one at once. Only the main thread may install handlers."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(_number: int, _frame: FrameType | None) -> None:
            self._forced = self._stop_requested.is_set()
            self._stop_requested.set()

        before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _check_tasks(
    queues: Sequence[JobQueue[Any]], sessions: Sessions | None, async_sessions: AsyncSessions | None
) -> None:
    if len({(queue.table, queue.name) for queue in queues}) < len(queues):
        raise ConfigurationError("a queue is given to the worker twice")
    for queue in queues:
        if not queue.tasks:
            raise ConfigurationError(f"{queue!r} has no tasks: import the module that declares them")
        for task in queue.tasks.values():
            task.codec.check()
            if task.is_async and async_sessions is None:
                raise ConfigurationError(f"{task!r} is async: the worker needs async_sessions=")
            if not task.is_async and sessions is None:
                raise ConfigurationError(f"{task!r} is sync: the worker needs sessions=")


def _capacity(queue: JobQueue[Any], concurrency: int | Mapping[str, int]) -> int:
    capacity = concurrency if isinstance(concurrency, int) else concurrency.get(queue.name, DEFAULT_CONCURRENCY)
    if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 1:
        raise ConfigurationError(f"concurrency of queue {queue.name!r} is a number from 1, not {capacity!r}")
    return capacity


_LEVELS: Final = {Ending.DONE: logging.DEBUG, Ending.FAILED: logging.WARNING, Ending.LOST: logging.WARNING}


def _log(outcome: Outcome, queue: JobQueue[Any]) -> None:
    logger.log(
        _LEVELS.get(outcome.ending, logging.INFO),
        "job %s (%s) in queue %s, attempt %d: %s",
        outcome.fence.key,
        outcome.row.get("kind", queue.model.__qualname__),
        queue.name,
        outcome.fence.attempt,
        outcome.ending,
        exc_info=outcome.error if outcome.ending is Ending.FAILED else None,
    )
