"""Where handlers run: threads for sync ones, one event loop for async ones."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any


class Threads:
    """Daemon threads, made when needed, kept for the next handler.

    Why not a ThreadPoolExecutor: the interpreter waits for its threads at exit, and a handler that never returns would
    keep the process for ever. These are left to their leases.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._made = 0

    def run(self, work: Callable[[], None]) -> None:
        """Run a callable that does not raise, on an idle thread or a new one."""
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                self._made += 1
                threading.Thread(target=self._serve, name=f"{self._name}-{self._made}", daemon=True).start()
            self._work.put(work)

    def close(self) -> None:
        """End the idle threads, and the others once they are idle."""
        for _ in range(self._made):
            self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            with self._lock:
                self._idle += 1


class EventLoop:
    """The event loop of async handlers: one in a thread of its own, or the application's that is running.

    Args:
        loop: the application's; None for a thread of the worker's.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.owned = loop is None
        self._loop = loop or asyncio.new_event_loop()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, where the loop is the worker's own."""
        if self.owned:
            self._thread = threading.Thread(target=self._serve, name="sqla_jobqueue.async", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def stop(self, seconds: float) -> None:
        """Stop the thread, where the loop is the worker's own."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(seconds)

    def spawn(self, work: Coroutine[Any, Any, None], on_task: Callable[[asyncio.Task[None]], None]) -> None:
        """Start a coroutine that does not raise, from any thread; `on_task` gets its task, on the loop."""

        def start() -> None:
            on_task(self._loop.create_task(work))

        self._loop.call_soon_threadsafe(start)

    def submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine from another thread; the future gives its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def cancel(self, task: asyncio.Task[None]) -> None:
        """Cancel a task, from any thread."""
        self._loop.call_soon_threadsafe(task.cancel)
