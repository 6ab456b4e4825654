"""LISTEN for new jobs, on a connection of its own.

A wake-up is a hint that a queue has something due; polling finds the same jobs a little later. So this loop may lose
its connection at any time: it connects again, listens again, and then wakes every queue once, since it cannot know what
it missed. A periodic round trip notices a connection whose other end is gone without a word.
"""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable, Iterable
from typing import Any, Final

from sqlalchemy import Connection, Table, select

from sqla_jobqueue.control import Line
from sqla_jobqueue.loops import Loop
from sqla_jobqueue.session import channel_of
from sqla_jobqueue.statements import Listen

ROUND_TRIP_SECONDS: Final = 20.0
"""A silent connection is asked for a sign of life this often."""


class Listener:
    """Wakes queues as their jobs commit.

    Args:
        line: the connection to listen on.
        tables: job tables to listen for.
        on_wake: called with a table and the name of a queue, or None for all of its queues.
        on_crash: called with an error that is no outage.
        round_trip: seconds of silence after which the connection is asked for a sign of life.
    """

    def __init__(
        self,
        line: Line,
        tables: Iterable[Table],
        on_wake: Callable[[Table, str | None], None],
        on_crash: Callable[[BaseException], None],
        *,
        round_trip: float = ROUND_TRIP_SECONDS,
    ) -> None:
        self._line = line
        self._tables = tuple(tables)
        self._on_wake = on_wake
        self._round_trip = round_trip
        self._reader, self._writer = os.pipe()
        self._loop = Loop("listen", self._tick, on_crash)

    def start(self) -> None:
        """Begin to listen, in a thread of its own."""
        self._loop.start()

    def stop(self) -> None:
        """Stop listening. Returns when the thread has ended."""
        self._loop.stop()
        os.write(self._writer, b"x")
        if self._loop.ident is not None:
            self._loop.join()
        os.close(self._reader)
        os.close(self._writer)

    def _tick(self) -> float:
        try:
            self._listen(self._line.connect())
        finally:
            self._line.drop()
        return 0.0

    def _listen(self, connection: Connection) -> None:
        channels: dict[str, Table] = {}
        with self._line.answering():
            for table in self._tables:
                channel = channel_of(connection, table)
                channels[channel] = table
                connection.execute(Listen(channel))
        self._loop.recovered()
        for table in self._tables:
            self._on_wake(table, None)
        driver_connection: Any = connection.connection.driver_connection
        with selectors.DefaultSelector() as selector:
            selector.register(driver_connection.fileno(), selectors.EVENT_READ)
            selector.register(self._reader, selectors.EVENT_READ)
            while not self._loop.stopping:
                silent = not selector.select(self._round_trip)
                with self._line.answering():
                    if silent:
                        connection.execute(select(1))
                    for notification in driver_connection.notifies(timeout=0):
                        woken = channels.get(notification.channel)
                        if woken is not None:
                            self._on_wake(woken, notification.payload or None)
