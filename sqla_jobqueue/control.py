"""The worker's own connections, beside the application's.

Claims, renewals, outcomes and housekeeping go over connections of the worker's own, from threads of its own, so that
neither a blocked event loop nor an exhausted application pool lets a lease lapse. They are made like the application's,
so that connect arguments and ``do_connect`` hooks (tokens, certificates) stay in force. Each loop has one, a `Line`,
kept open between its ticks and made anew after any error; a statement that gets no answer in time, because the other
end is gone without a word, is ended by closing the socket under it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Generator
from threading import Lock
from typing import Any, Final

from sqlalchemy import URL, Connection, Engine, create_engine, func, make_url, select
from sqlalchemy.orm import Session

from sqla_jobqueue.errors import ConfigurationError
from sqla_jobqueue.loops import Loop

ANSWER_SECONDS: Final = 30.0
"""How long a statement of the worker's may take; its slowest one deletes a thousand rows."""

_DRIVER: Final = "postgresql+psycopg"
_TRANSLATE: Final = "schema_translate_map"
_ASK: Final = "give the worker control=, an engine or URL of the same database for the psycopg driver"


class Line:
    """One connection of the worker's, used by one loop.

    Every statement is a transaction at READ COMMITTED, whatever the application's engine says.

    Args:
        engine: with a pool of its own.
        seconds: how long a statement may take.
    """

    def __init__(self, engine: Engine, seconds: float) -> None:
        self._engine = engine
        self._seconds = seconds
        self._connection: Connection | None = None
        self._lock = Lock()
        self._deadline = 0.0

    @contextlib.contextmanager
    def begin(self) -> Generator[Connection]:
        """A transaction; the connection is made anew after an error in it."""
        try:
            connection = self.connect()
            with self.answering(), connection.begin():
                yield connection
        except BaseException:
            self.drop()
            raise

    def connect(self) -> Connection:
        """The connection, made if there is none."""
        if self._connection is None:
            connection = self._engine.connect()
            # in autocommit, a statement that is a transaction by itself takes one round trip instead of three
            # (asked, since the dialect may still be learning its default from another line's first connection)
            autocommit = connection.get_isolation_level() == "READ COMMITTED"
            connection.connection.rollback()
            self._connection = connection.execution_options(
                isolation_level="AUTOCOMMIT" if autocommit else "READ COMMITTED"
            )
        return self._connection

    @contextlib.contextmanager
    def answering(self) -> Generator[None]:
        """Statements in here have so many seconds, all together."""
        with self._lock:
            self._deadline = time.monotonic() + self._seconds
        try:
            yield
        finally:
            with self._lock:
                self._deadline = 0.0

    def drop(self) -> None:
        """Close the connection for good: it may be broken, or lead to a server that is read-only now."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.invalidate()
            with contextlib.suppress(Exception):
                connection.close()

    def close(self) -> None:
        """Close the connection and its pool."""
        self.drop()
        self._engine.dispose()

    def end_if_silent(self) -> None:
        """Called from another thread: shut the socket of a statement that is overdue."""
        with self._lock:
            connection = self._connection
            if not self._deadline or time.monotonic() < self._deadline or connection is None:
                return
            self._deadline = 0.0
            driver_connection: Any = connection.connection.driver_connection
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(driver_connection.fileno())) as shared:
                shared.shutdown(socket.SHUT_RDWR)


class Control:
    """Makes the worker's lines, and watches them.

    Args:
        source: what the application's engine, or ``control=``, is.
        translate: the application's `schema_translate_map`; an engine that is given with one of its own keeps that.
        seconds: how long a statement may take.
    """

    def __init__(self, source: Engine | URL | str, translate: Any = None, *, seconds: float = ANSWER_SECONDS) -> None:
        self._source = source
        self._translate = translate
        self._seconds = seconds
        self._lines: list[Line] = []
        self._watch = Loop("watch", self._look, lambda _error: None)
        self._watch.start()

    def line(self, source: Engine | URL | str | None = None) -> Line:
        """A new line, with a pool of its own; to another URL of the same server where one is given."""
        line = Line(_engine_from(self._source if source is None else source, self._translate), self._seconds)
        self._lines.append(line)
        return line

    def check_same_database(self, session: Session, mapper: Any) -> None:
        """Compare with what the application's session reaches.

        Raises:
            ConfigurationError: they are two databases.
        """
        question = select(func.current_database(), func.pg_postmaster_start_time())
        theirs = session.execute(question, bind_arguments={"mapper": mapper}).one()
        session.rollback()
        line = self.line()
        try:
            with line.begin() as connection:
                ours = connection.execute(question).one()
        finally:
            self._lines.remove(line)
            line.close()
        if tuple(ours) != tuple(theirs):
            raise ConfigurationError(
                f"the worker's own connections reach database {ours[0]!r}, the application's session "
                f"{theirs[0]!r}: {_ASK}"
            )

    def close(self) -> None:
        """Close every line."""
        self._watch.stop()
        self._watch.join()
        for line in self._lines:
            line.close()
        self._lines.clear()

    def _look(self) -> float:
        for line in list(self._lines):
            line.end_if_silent()
        return min(1.0, self._seconds / 4)


def control_source(bind: Engine | Connection) -> Engine | URL:
    """Where the worker connects by itself, given what the application's session is bound to.

    Raises:
        ConfigurationError: it cannot be derived.
    """
    engine = bind.engine
    if engine.dialect.name != "postgresql":
        raise ConfigurationError(f"jobs need PostgreSQL, the session is bound to {engine.dialect.name}")
    driver = engine.dialect.driver
    if driver == "psycopg" and not engine.dialect.is_async:
        return engine
    if driver == "psycopg" or (driver == "asyncpg" and not engine.url.query):  # psycopg has one name for both flavours
        return engine.url.set(drivername=_DRIVER)
    raise ConfigurationError(f"cannot tell how to connect from {engine.url.render_as_string()!r}: {_ASK}")


def translation_of(bind: Engine | Connection) -> Any:
    """The `schema_translate_map` of what the application's session is bound to, None without one."""
    return bind.get_execution_options().get(_TRANSLATE)


def _engine_from(source: Engine | URL | str, translate: Any) -> Engine:
    if isinstance(source, Engine):
        if source.dialect.driver != "psycopg" or source.dialect.is_async:
            raise ConfigurationError(f"the worker's own engine needs the psycopg driver: {_ASK}")
        own = Engine(source.pool.recreate(), source.dialect, source.url)
        return _translating(own, translation_of(source) or translate)
    url = make_url(source)
    if url.get_driver_name() != "psycopg":
        url = url.set(drivername=_DRIVER)
    return _translating(create_engine(url), translate)


def _translating(engine: Engine, translate: Any) -> Engine:
    if translate is not None:
        engine.update_execution_options(**{_TRANSLATE: translate})
    return engine
