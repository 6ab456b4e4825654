"""A side loop that survives the database's absence and nothing else.

Claiming, listening, renewing, recording and maintenance are the same kind of thread: do one tick, say how long to wait,
be woken early if there is news. When the database is away the tick is tried again, after a delay that grows with jitter
up to a bound, and the log says so once per change of state. Any other error is a bug: it is logged with its traceback
and handed to the owner, which ends the process instead of running on without that loop.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from typing import Final

from sqlalchemy.exc import DBAPIError, InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

logger = logging.getLogger("sqla_jobqueue")

FIRST_DELAY: Final = 0.2
"""Seconds before the first new try."""
LONGEST_DELAY: Final = 15.0
"""Seconds between tries at most."""
_OUTAGES: Final = frozenset({"08", "40", "53", "55", "57", "58"})
"""Classes of SQLSTATE: most of asyncpg's errors have no class of their own in SQLAlchemy, those at its connect none."""


def is_outage(error: BaseException) -> bool:
    """The database cannot be reached or cannot work right now, which no change of code would mend."""
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    state = getattr(error.orig if isinstance(error, DBAPIError) else error, "sqlstate", None)
    if isinstance(state, str) and state[:2] in _OUTAGES:
        return True
    return isinstance(error, OperationalError | InterfaceError | InternalError | PoolTimeoutError | OSError)


def outage_delay(failures: int) -> float:
    """Seconds to wait after so many failures in a row, at least one: doubling, bounded, a half to all of it."""
    longest: float = min(FIRST_DELAY * 2.0 ** min(failures - 1, 16), LONGEST_DELAY)
    return longest * (0.5 + random.random() / 2)  # noqa: S311  spreads load, hides nothing


class Loop(threading.Thread):
    """A daemon thread that ticks until it is stopped.

    Args:
        name: for logs and the thread.
        tick: does the work once; returns seconds until the next tick, None to wait until woken.
        on_crash: gets an error that is no outage; the loop ends with it.
    """

    def __init__(self, name: str, tick: Callable[[], float | None], on_crash: Callable[[BaseException], None]) -> None:
        super().__init__(name=f"sqla_jobqueue.{name}", daemon=True)
        self._tick = tick
        self._on_crash = on_crash
        self._news = threading.Event()
        self._stopping = threading.Event()
        self._failures = 0
        self._label = name

    @property
    def stopping(self) -> bool:
        """Whether the loop was told to end: a long tick looks here between its steps."""
        return self._stopping.is_set()

    def wake(self) -> None:
        """Tick again without waiting, unless the database is away."""
        self._news.set()

    def stop(self) -> None:
        """End after the current tick. Returns at once; `join` waits."""
        self._stopping.set()
        self._news.set()

    def run(self) -> None:
        """Tick, wait, tick."""
        while not self._stopping.is_set():
            self._news.clear()
            try:
                wait = self._tick()
            except Exception as error:
                if not is_outage(error):
                    logger.critical("%s: an error that is no outage, the worker ends", self._label, exc_info=error)
                    self._on_crash(error)
                    return
                self._away(error)
                continue
            self.recovered()
            self._news.wait(wait)

    def recovered(self) -> None:
        """The database answers. A tick that lasts says so itself."""
        if self._failures:
            logger.warning("%s: the database is back", self._label)
            self._failures = 0

    def _away(self, error: BaseException) -> None:
        self._failures += 1
        if self._failures == 1:
            first = (str(error).splitlines() or [""])[0]
            logger.warning("%s: the database is away, trying again: %s: %s", self._label, type(error).__name__, first)
        self._stopping.wait(outage_delay(self._failures))
