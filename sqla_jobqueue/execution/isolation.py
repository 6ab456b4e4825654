"""What the application's isolation level means for an attempt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqla_jobqueue.errors import ConfigurationError
from sqla_jobqueue.execution.outcome import sqlstate_of

R = TypeVar("R")

SNAPSHOT_LEVELS: Final = frozenset({"REPEATABLE READ", "SERIALIZABLE"})
"""Here an UPDATE fails if its row was changed since the transaction's first statement, as a renewal does."""

_SERIALIZATION_FAILURE: Final = "40001"
_TRIES: Final = 5
_levels: WeakKeyDictionary[Engine, str] = WeakKeyDictionary()


def isolation_of(bind: Engine | Connection) -> str:
    """The isolation level of the application's transactions; asked once per engine.

    Raises:
        ConfigurationError: there are none, the engine is in autocommit mode.
    """
    given: str | None = bind.get_execution_options().get("isolation_level")
    if given is not None:
        level = given.replace("_", " ").upper()
    elif isinstance(bind, Connection):
        level = _ask_level(bind)
    else:
        known = _levels.get(bind)
        if known is None:
            with bind.connect() as connection:
                known = _levels[bind] = _ask_level(connection)
        level = known
    if level == "AUTOCOMMIT":
        raise ConfigurationError(
            "the session's engine commits every statement by itself (isolation_level AUTOCOMMIT), so a handler's "
            "writes and the job's outcome could not commit together: give the worker sessions on a transactional one"
        )
    return level


def _ask_level(connection: Connection) -> str:
    driver_side: Any = connection.connection.dbapi_connection
    return "AUTOCOMMIT" if driver_side.autocommit else connection.get_isolation_level()


def first_statement(session: Session, send: Callable[[], R]) -> R:
    """Send the first statement of a transaction, again where it met a concurrent update of its row."""
    for _ in range(_TRIES - 1):
        try:
            return send()
        except DBAPIError as error:
            if sqlstate_of(error) != _SERIALIZATION_FAILURE:
                raise
            session.rollback()
    return send()
