"""The worker's own engine, beside the application's.

Claims, renewals, outcomes and housekeeping go over connections of the worker's own, from threads of its own, so that
neither a blocked event loop nor an exhausted application pool lets a lease lapse. The engine is made from the
application's, so that connect arguments and ``do_connect`` hooks (tokens, certificates) stay in force. Each loop has
its own, so that none waits for another's connection, whatever the pool's size.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import URL, Connection, Engine, create_engine, func, make_url, select
from sqlalchemy.orm import Session

from sqla_jobqueue.errors import ConfigurationError

_DRIVER: Final = "postgresql+psycopg"
_ASK: Final = "give the worker control=, an engine or URL of the same database for the psycopg driver"


class Control:
    """Makes the worker's engines.

    Args:
        source: what the application's engine, or ``control=``, is.
    """

    def __init__(self, source: Engine | URL | str) -> None:
        self._source = source
        self._engines: list[Engine] = []
        self._level: str | None = None

    def engine(self) -> Engine:
        """A new engine with a pool of its own, whose statements are transactions at READ COMMITTED."""
        made = _engine_from(self._source)
        self._engines.append(made)
        if self._level is None:
            with made.connect() as connection:
                server = connection.default_isolation_level
            # one round trip instead of three for a statement that is a transaction by itself
            self._level = "AUTOCOMMIT" if server == "READ COMMITTED" else "READ COMMITTED"
        return made.execution_options(isolation_level=self._level)

    def check_same_database(self, session: Session, mapper: Any) -> None:
        """Compare with what the application's session reaches.

        Raises:
            ConfigurationError: they are two databases.
        """
        question = select(func.current_database(), func.pg_postmaster_start_time())
        theirs = session.execute(question, bind_arguments={"mapper": mapper}).one()
        session.rollback()
        with self.engine().connect() as connection:
            ours = connection.execute(question).one()
        if tuple(ours) != tuple(theirs):
            raise ConfigurationError(
                f"the worker's own connections reach database {ours[0]!r}, the application's session "
                f"{theirs[0]!r}: {_ASK}"
            )

    def dispose(self) -> None:
        """Close every connection of every engine made."""
        for engine in self._engines:
            engine.dispose()
        self._engines.clear()


def control_source(bind: Engine | Connection) -> Engine | URL:
    """Where the worker connects by itself, given what the application's session is bound to.

    Raises:
        ConfigurationError: it cannot be derived.
    """
    engine = bind.engine
    if engine.dialect.name != "postgresql":
        raise ConfigurationError(f"jobs need PostgreSQL, the session is bound to {engine.dialect.name}")
    driver = engine.dialect.driver
    if driver == "psycopg":
        return engine
    if driver == "psycopg_async":
        return engine.url.set(drivername=_DRIVER)
    if driver == "asyncpg" and not engine.url.query:
        return engine.url.set(drivername=_DRIVER)
    raise ConfigurationError(f"cannot tell how to connect from {engine.url.render_as_string()!r}: {_ASK}")


def _engine_from(source: Engine | URL | str) -> Engine:
    if isinstance(source, Engine):
        if source.dialect.driver != "psycopg":
            raise ConfigurationError(f"the worker's own engine needs the psycopg driver: {_ASK}")
        return Engine(source.pool.recreate(), source.dialect, source.url)
    url = make_url(source)
    if url.get_driver_name() != "psycopg":
        url = url.set(drivername=_DRIVER)
    return create_engine(url, pool_pre_ping=True)
