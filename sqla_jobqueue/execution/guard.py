"""The session guard: the worker owns the handler's transaction, and notices when it is not what it was.

A handler may flush, query and open savepoints. It may not commit, roll back or close the session: the first is refused
on the spot, the others are noticed, and either way the attempt fails. One that swallowed a database error has lost its
writes although nothing was raised, since PostgreSQL answers the later COMMIT with a ROLLBACK; that is found by looking
at the transaction before anything is recorded. And a thread or task that goes on using the session after the handler
returned gets an error instead of a transaction that nobody will ever commit.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Connection, Engine, event, select
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, SessionTransaction

from sqla_jobqueue.errors import TransactionMisuse

INFO_GUARD: Final = "sqla_jobqueue.guard"
"""Key of ``Session.info`` under which the guard stands."""

_ADVICE: Final = (
    "the worker commits it together with the job's outcome; for a part that may fail use `with session.begin_nested():`"
)


_PSYCOPG: Final = frozenset({"psycopg", "psycopg_async"})


class Phase(Enum):
    """Who has the session."""

    WORKER = auto()
    HANDLER = auto()
    OVER = auto()


class Guard:
    """Watches one session for one attempt.

    Attributes:
        touched: the session has begun a transaction on a connection.
    """

    def __init__(self, session: Session) -> None:
        self._phase = Phase.WORKER
        self._watched: set[SessionTransaction] = set()
        self._savepoint: SessionTransaction | None = None
        self._misuse: TransactionMisuse | None = None
        self._connections: list[Connection] = []
        session.info[INFO_GUARD] = self

    @property
    def touched(self) -> bool:
        """The session has begun a transaction on some connection."""
        return bool(self._connections)

    @property
    def broken(self) -> bool:
        """The transaction that the attempt began with is gone."""
        return self._misuse is not None

    def hand_over(self, session: Session) -> None:
        """From here on the handler has the session."""
        self._savepoint = session.get_nested_transaction()
        self._watched = {found for found in (session.get_transaction(), self._savepoint) if found is not None}
        self._phase = Phase.HANDLER

    def take_back(self) -> None:
        """From here on the worker has it again."""
        self._phase = Phase.WORKER

    def close(self) -> None:
        """The attempt is over: whoever still uses the session gets an error."""
        self._phase = Phase.OVER

    def check(self, session: Session) -> None:
        """Look whether the transaction is still the one that was handed over, and able to commit.

        Raises:
            TransactionMisuse: it is not.
        """
        if self._misuse is not None:
            raise self._misuse
        if not session.is_active:
            raise self._swallowed()
        nested = session.get_nested_transaction()
        if nested is not None and nested is not self._savepoint:
            raise TransactionMisuse("the handler left a savepoint open: use `with session.begin_nested():`")
        for connection in self._connections:
            _probe(connection, self._swallowed)

    def _swallowed(self) -> TransactionMisuse:
        causes = [cause for connection in self._connections if (cause := _last_errors.get(connection)) is not None]
        cause = causes[-1] if causes else None
        first = f" ({type(cause).__qualname__}: {str(cause).splitlines()[0] if str(cause) else ''})" if cause else ""
        error = TransactionMisuse(
            f"the handler swallowed a database error{first}, which undid all its writes: "
            "wrap the part that may fail in `with session.begin_nested():`"
        )
        error.__cause__ = cause
        return error

    def on_begin(self, connection: Connection) -> None:
        """A transaction begins on a connection."""
        if self._phase is Phase.OVER:
            raise TransactionMisuse(
                "the job has ended and with it the transaction: a thread or task that the handler started still uses "
                "its session; wait for it, or give it a session of its own"
            )
        self._connections.append(connection)
        if connection.engine not in _watched_engines:
            _watched_engines.add(connection.engine)
            event.listen(connection.engine, "handle_error", _remember_error)
            event.listen(connection.engine, "before_cursor_execute", _remember_use)
            _used.add(connection)  # this one's first statements were not seen

    def on_commit(self, session: Session) -> None:
        """Refuse a commit by the handler; the release of its own savepoint is no commit."""
        if self._phase is not Phase.HANDLER:
            return
        if (nested := session.get_nested_transaction()) is None or nested is self._savepoint:
            self._misuse = TransactionMisuse(f"a handler must not commit its session: {_ADVICE}")
            raise self._misuse

    def on_end(self, transaction: SessionTransaction) -> None:
        """Notice that the handler ended the transaction."""
        if self._phase is Phase.HANDLER and transaction in self._watched and self._misuse is None:
            self._misuse = TransactionMisuse(f"a handler must not roll back or close its session: {_ADVICE}")


_watched_engines: WeakSet[Engine] = WeakSet()
_used: WeakSet[Connection] = WeakSet()
_last_errors: WeakKeyDictionary[Connection, BaseException] = WeakKeyDictionary()


def _remember_error(context: ExceptionContext) -> None:
    """Keep the last database error of a connection, so that a swallowed one can be named."""
    if context.connection is not None:
        _last_errors[context.connection] = context.original_exception


def _remember_use(connection: Connection, *_rest: Any) -> None:
    """Drivers begin a transaction with its first statement: before it, none is missing."""
    _used.add(connection)


def _probe(connection: Connection, swallowed: Callable[[], TransactionMisuse]) -> None:
    """Look at the state of the driver's transaction, which SQLAlchemy does not know.

    psycopg tells without I/O whether it is aborted, or was ended by a COMMIT sent as a statement. asyncpg tells with
    the next statement.
    """
    if connection not in _used:
        return
    driver_connection: Any = connection.connection.driver_connection
    ended = False
    if connection.dialect.driver in _PSYCOPG:
        status = driver_connection.info.transaction_status.name
        if status == "INERROR":
            raise swallowed()
        ended = status == "IDLE"
    else:
        try:
            connection.execute(select(1))
        except DBAPIError as error:
            raise swallowed() from error
        if connection.dialect.driver == "asyncpg":
            ended = not driver_connection.is_in_transaction()
    if ended:
        raise TransactionMisuse(f"the handler ended the transaction by a statement of its own: {_ADVICE}")


def _guard_of(session: Session) -> Guard | None:
    return session.info.get(INFO_GUARD)


@event.listens_for(Session, "after_begin")
def _after_begin(session: Session, _transaction: SessionTransaction, connection: Connection) -> None:
    if guard := _guard_of(session):
        guard.on_begin(connection)


@event.listens_for(Session, "before_commit")
def _before_commit(session: Session) -> None:
    if guard := _guard_of(session):
        guard.on_commit(session)


@event.listens_for(Session, "after_transaction_end")
def _after_transaction_end(session: Session, transaction: SessionTransaction) -> None:
    if guard := _guard_of(session):
        guard.on_end(transaction)
