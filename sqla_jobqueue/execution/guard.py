"""The session guard: the worker owns the handler's transaction, and notices when it is not what it was.

A handler may flush, query and open savepoints. It may not commit, roll back or close the session. A commit is refused
on the spot, whether it comes from the session, from its connection, or as a statement; the rest is noticed, and either
way the attempt fails. One that swallowed a database error has lost its writes although nothing was raised, since
PostgreSQL answers the later COMMIT with a ROLLBACK; that is found by looking at the transaction before anything is
recorded. And a thread or task that goes on using the session after the handler returned gets an error instead of a
transaction that nobody will ever commit.
"""

from __future__ import annotations

import re
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Connection, Engine, event, select
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, SessionTransaction

from sqla_jobqueue.errors import TransactionMisuse
from sqla_jobqueue.execution.outcome import describe_error, sqlstate_of

INFO_GUARD: Final = "sqla_jobqueue.guard"
"""Key of ``Session.info`` under which the guard stands."""

_ADVICE: Final = (
    "the worker commits it together with the job's outcome; for a part that may fail use `with session.begin_nested():`"
)
_ABORTED: Final = "25P02"
_PSYCOPG: Final = frozenset({"psycopg", "psycopg_async"})
_ENDS_TRANSACTION: Final = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/)*"
    r"(?:COMMIT|END|ABORT|PREPARE\s+TRANSACTION|ROLLBACK(?!(?:\s+(?:WORK|TRANSACTION))?\s+TO))\b",
    re.IGNORECASE | re.DOTALL,
)


class Guard:
    """Watches one session for one attempt.

    Args:
        session: watched from now on.
        bind: where its job model lives.
    """

    def __init__(self, session: Session, bind: Engine | Connection) -> None:
        self._session = session
        self._armed = False
        self._watched: set[SessionTransaction] = set()
        self._savepoint: SessionTransaction | None = None
        self._misuse: TransactionMisuse | None = None
        self._connections: dict[Connection, BaseException | None] = {}
        """Those with a transaction of the session's, and the last database error on each."""
        self._used: set[Connection] = set()
        """Drivers begin a transaction with its first statement: before it, none is missing."""
        self.started = False
        """The handler was called."""
        _listen(bind)
        session.info[INFO_GUARD] = self

    @property
    def touched(self) -> bool:
        """The session has a transaction on some connection."""
        return bool(self._connections)

    @property
    def misuse(self) -> TransactionMisuse | None:
        """What the handler did to the transaction that the attempt began with, so that it is gone."""
        return self._misuse

    def hand_over(self) -> None:
        """From here on the handler has the session."""
        self._savepoint = self._session.get_nested_transaction()
        root = self._session.get_transaction()
        self._watched = {found for found in (root, self._savepoint) if found is not None}
        self._armed = True
        self.started = True

    def take_back(self) -> None:
        """From here on the worker has it again."""
        self._armed = False

    def close(self) -> None:
        """The attempt is over: whoever still uses the session gets an error."""
        self._forget()
        self._session.info[INFO_GUARD] = _Over()

    def _forget(self) -> None:
        for connection in self._connections:
            _guards.pop(connection, None)
        self._connections.clear()
        self._used.clear()

    def check(self) -> None:
        """Look whether the transaction is still the one that was handed over, and able to commit.

        Raises:
            TransactionMisuse: it is not.
        """
        if not self._session.is_active:
            raise self._swallowed()
        if self._misuse is not None:
            raise self._misuse
        nested = self._session.get_nested_transaction()
        if nested is not None and nested is not self._savepoint:
            raise TransactionMisuse("the handler left a savepoint open: use `with session.begin_nested():`")
        for connection, error in self._connections.items():
            self._probe(connection, error)

    def _probe(self, connection: Connection, error: BaseException | None) -> None:
        """Look at the state of the driver's transaction, which SQLAlchemy does not know.

        psycopg tells without I/O whether it is aborted, or was ended by a COMMIT sent as a statement. asyncpg tells
        only the latter; whether it is aborted is seen by sending a statement, and asked only after an error.
        """
        if connection.closed or connection.invalidated:
            raise self._swallowed()
        if connection not in self._used:
            return
        driver_connection: Any = connection.connection.driver_connection
        driver = connection.dialect.driver
        ended = False
        if driver in _PSYCOPG:
            status = driver_connection.info.transaction_status.name
            if status in {"INERROR", "UNKNOWN"}:
                raise self._swallowed()
            ended = status == "IDLE"
        else:
            if error is not None or driver != "asyncpg":
                try:
                    connection.execute(select(1))
                except DBAPIError:
                    raise self._swallowed() from error
            ended = driver == "asyncpg" and not driver_connection.is_in_transaction()
        if ended:
            raise self._misused("a handler must not end the transaction behind its session's back")

    def _swallowed(self) -> TransactionMisuse:
        cause = next((error for error in reversed([*self._connections.values()]) if error is not None), None)
        told = f" ({describe_error(cause)})" if cause else ""
        error = TransactionMisuse(
            f"the handler swallowed a database error{told}, which undid all its writes: "
            "wrap the part that may fail in `with session.begin_nested():`"
        )
        error.__cause__ = cause
        return error

    def _misused(self, what: str) -> TransactionMisuse:
        if self._misuse is None:
            self._misuse = TransactionMisuse(f"{what}: {_ADVICE}")
        return self._misuse

    # ------------------------------------------------------------------------------------------- told by the listeners

    def on_begin(self, _session: Session, connection: Connection) -> None:
        """A transaction or savepoint begins on a connection."""
        if connection not in self._connections:
            self._connections[connection] = None
            _guards[connection] = self
            _listen(connection.engine)

    def on_commit(self) -> None:
        """Refuse a commit by the handler; the release of its own savepoint is no commit."""
        if self._armed:
            nested = self._session.get_nested_transaction()
            if nested is None or nested is self._savepoint:
                raise self._misused("a handler must not commit its session")

    def on_end(self, transaction: SessionTransaction) -> None:
        """Notice that the handler ended the transaction."""
        if self._armed and transaction in self._watched:
            self._misused("a handler must not roll back or close its session")
        elif not self._armed and transaction.parent is None:
            self._forget()

    def on_statement(self, connection: Connection, statement: str) -> None:
        """Refuse a statement that would end the transaction."""
        if self._armed and _ENDS_TRANSACTION.match(statement):
            raise self._misused("a handler must not end its session's transaction by a statement")
        self._used.add(connection)

    def on_connection_commit(self) -> None:
        """Refuse a commit of the connection itself."""
        if self._armed:
            raise self._misused("a handler must not commit its session's connection")

    def on_connection_rollback(self) -> None:
        """Notice a rollback of the connection itself; that of a failed flush is the session's own."""
        if self._armed and self._session.is_active:
            self._misused("a handler must not roll back its session's connection")

    def on_error(self, connection: Connection, error: BaseException) -> None:
        """Keep the last database error, so that a swallowed one can be named; not those that only follow from it."""
        if self._connections.get(connection) is None or sqlstate_of(error) != _ABORTED:
            self._connections[connection] = error


class _Over:
    """Stands in the place of the guard once the attempt is over."""

    def on_begin(self, session: Session, connection: Connection) -> None:
        """Refuse a transaction that nobody would commit, and free its connection: the session may not be closed."""
        if connection is not session.bind:
            connection.invalidate()
        raise TransactionMisuse(
            "the job has ended and with it the transaction: a thread or task that the handler started still uses "
            "its session; wait for it, or give it a session of its own"
        )

    def on_commit(self) -> None:
        """Without a transaction there is nothing to commit."""

    def on_end(self, _transaction: SessionTransaction) -> None:
        """Without a connection there is nothing to lose."""


_guards: WeakKeyDictionary[Connection, Guard] = WeakKeyDictionary()
_listened: WeakSet[Engine | Connection] = WeakSet()


def _listen(bind: Engine | Connection) -> None:
    """Hear what happens on the connections of an engine. What no guard watches is let pass after one look-up."""
    for target in (bind, bind.engine):
        if target in _listened:
            continue
        _listened.add(target)
        event.listen(target, "before_cursor_execute", _before_cursor_execute)
        event.listen(target, "commit", _connection_commit)
        event.listen(target, "rollback", _connection_rollback)
        if isinstance(target, Engine):
            event.listen(target, "handle_error", _handle_error)


def _before_cursor_execute(connection: Connection, _cursor: Any, statement: str, *_rest: Any) -> None:
    if guard := _guards.get(connection):
        guard.on_statement(connection, statement)


def _connection_commit(connection: Connection) -> None:
    if guard := _guards.get(connection):
        guard.on_connection_commit()


def _connection_rollback(connection: Connection) -> None:
    if guard := _guards.get(connection):
        guard.on_connection_rollback()


def _handle_error(context: ExceptionContext) -> None:
    connection = context.connection
    if connection is not None and (guard := _guards.get(connection)):
        guard.on_error(connection, context.original_exception)


def _guard_of(session: Session) -> Guard | _Over | None:
    return session.info.get(INFO_GUARD)


@event.listens_for(Session, "after_begin")
def _after_begin(session: Session, _transaction: SessionTransaction, connection: Connection) -> None:
    if guard := _guard_of(session):
        guard.on_begin(session, connection)


@event.listens_for(Session, "before_commit")
def _before_commit(session: Session) -> None:
    if guard := _guard_of(session):
        guard.on_commit()


@event.listens_for(Session, "after_transaction_end")
def _after_transaction_end(session: Session, transaction: SessionTransaction) -> None:
    if guard := _guard_of(session):
        guard.on_end(transaction)
