"""A session whose commits are savepoints, on a connection whose transaction is rolled back."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any, TypeVar, overload

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from sqla_jobqueue.session import AsyncJobSession, JobSession

S = TypeVar("S", bound=Session)
A = TypeVar("A", bound=AsyncSession)


@overload
def rolled_back(engine: Engine, /, **options: Any) -> AbstractContextManager[JobSession[Any]]: ...
@overload
def rolled_back(engine: Engine, class_: type[S], /, **options: Any) -> AbstractContextManager[S]: ...
@overload
def rolled_back(engine: AsyncEngine, /, **options: Any) -> AbstractAsyncContextManager[AsyncJobSession[Any]]: ...
@overload
def rolled_back(engine: AsyncEngine, class_: type[A], /, **options: Any) -> AbstractAsyncContextManager[A]: ...
def rolled_back(engine: Any, class_: Any = None, /, **options: Any) -> Any:
    """A session for one test: what it commits is there for the rest of the test, and gone after it.

    The session is bound to a connection of its own (``session.bind``), on which a transaction is begun. Its commits and
    rollbacks are those of savepoints. At the end the transaction is rolled back, so that no test sees another's rows.
    Further sessions of the test, such as those that a request makes, go onto the same connection::

        make_session.configure(bind=session.bind, join_transaction_mode="create_savepoint")

    Args:
        engine: an Engine, or an AsyncEngine.
        class_: of the session; `JobSession` or `AsyncJobSession` if left out.
        options: for the session. ``expire_on_commit`` is False for an async one, unless told otherwise.

    Returns:
        A context manager of the session; async with an AsyncEngine.
    """
    options = {"join_transaction_mode": "create_savepoint"} | options
    if isinstance(engine, AsyncEngine):
        return _async(engine, class_ or AsyncJobSession, {"expire_on_commit": False} | options)
    return _sync(engine, class_ or JobSession, options)


@contextmanager
def _sync(engine: Engine, class_: type[S], options: dict[str, Any]) -> Generator[S]:
    with engine.connect() as connection:
        transaction = connection.begin()
        try:
            with class_(bind=connection, **options) as session:
                yield session
        finally:
            transaction.rollback()


@asynccontextmanager
async def _async(engine: AsyncEngine, class_: type[A], options: dict[str, Any]) -> AsyncGenerator[A]:
    async with engine.connect() as connection:
        transaction = await connection.begin()
        try:
            async with class_(bind=connection, **options) as session:
                yield session
        finally:
            await transaction.rollback()
