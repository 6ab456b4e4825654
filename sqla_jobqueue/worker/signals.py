"""SIGTERM and SIGINT for a worker that is a process of its own; and what its exit codes mean."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Generator
from types import FrameType
from typing import Final

EXIT_STOPPED: Final = 0
"""Stopped; every job that was running has its outcome written."""
EXIT_CRASHED: Final = 1
"""An error that is no outage."""
EXIT_FORCED: Final = 3
"""Ended before its jobs, which come back after their leases."""


@contextlib.contextmanager
def stop_signals(on_signal: Callable[[], None]) -> Generator[None]:
    """Call a function at each SIGTERM and SIGINT, also as process 1, which has no default for them.

    Only the main thread may install handlers; in another one this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(_number: int, _frame: FrameType | None) -> None:
        on_signal()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
