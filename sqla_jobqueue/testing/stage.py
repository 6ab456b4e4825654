"""Where a test's jobs run: a session of their own, on the connection of the test."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Final, cast

from sqlalchemy import Connection
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapper, Session
from sqlalchemy.util import await_only

from sqla_jobqueue import lifecycle
from sqla_jobqueue.errors import ConfigurationError
from sqla_jobqueue.execution import Invoke, Outcome, run_claimed, run_in_one_transaction
from sqla_jobqueue.lifecycle import row_fence
from sqla_jobqueue.model import job_mapper
from sqla_jobqueue.session import AnySession, sync_session_of
from sqla_jobqueue.tasks import JobQueue, Task
from sqla_jobqueue.testing.finding import connection_of, given
from sqla_jobqueue.worker.handlers import AsyncSessions, Sessions, limited

WORKER: Final = "sqla_jobqueue.testing"
"""What stands in `locked_by`."""


class Stage:
    """Claims and runs jobs for one session of a test.

    Args:
        session: the test's.
        sessions: gives sync handlers their sessions; made like the test's own session if left out.
        async_sessions: the same for async handlers.

    Attributes:
        result: what the last handler returned.
        raised: what it raised.
    """

    def __init__(self, session: AnySession, sessions: Sessions | None, async_sessions: AsyncSessions | None) -> None:
        found = given(session)
        self.session: Session = sync_session_of(found)
        self.result: object = None
        self.raised: BaseException | None = None
        self._async_class = type(found) if isinstance(found, AsyncSession) else None
        self._sessions = sessions or self._new
        self._async_sessions = async_sessions or self._new_async

    def claim_and_run(self, queue: JobQueue[Any], key: tuple[Any, ...] | None = None) -> Outcome | None:
        """Run the first due job of a queue, or the due one with this key; None where there is none."""
        if not queue.settings.one_transaction:
            return self._leased(queue, tuple(sorted(queue.tasks)), key)
        for is_async in sorted({task.is_async for task in queue.tasks.values()}):
            mine = tuple(sorted(kind for kind, task in queue.tasks.items() if task.is_async is is_async))
            outcome = self._in_one_transaction(queue, mine, is_async=is_async, key=key)
            if outcome is not None:
                return outcome
        return None

    def _leased(self, queue: JobQueue[Any], kinds: tuple[str, ...], key: tuple[Any, ...] | None) -> Outcome | None:
        connection = connection_of(self.session, job_mapper(queue.model))
        rows = lifecycle.claim_rows(
            connection,
            queue.model,
            queue=queue.name,
            kinds=kinds if queue.has_kinds else None,
            limit=1,
            locked_by=WORKER,
            lease=queue.settings.lease,
            key=key,
        )
        task = queue.task_for(rows[0]) if rows else None
        if task is None:
            return None
        with self._opened(queue, is_async=task.is_async) as (session, invoke):
            outcome = run_claimed(session, task, rows[0], invoke)
        if outcome.write is not None and not outcome.recorded:
            lifecycle.record(connection, queue.model, [(row_fence(queue.model, rows[0]), outcome.write)])
        return outcome

    def _in_one_transaction(
        self, queue: JobQueue[Any], kinds: tuple[str, ...], *, is_async: bool, key: tuple[Any, ...] | None
    ) -> Outcome | None:
        given_kinds = kinds if queue.has_kinds else None
        with self._opened(queue, is_async=is_async) as (session, invoke):
            return run_in_one_transaction(session, queue, given_kinds, WORKER, invoke, key=key)

    @contextmanager
    def _opened(self, queue: JobQueue[Any], *, is_async: bool) -> Generator[tuple[Session, Invoke]]:
        """A session for a handler, and how to call the handler with it."""
        self.result = self.raised = None
        if is_async and self._async_class is None:
            raise ConfigurationError(f"{queue!r} has async tasks: give an AsyncSession of the test's, and await")
        opened = _awaited(self._async_sessions()) if is_async else self._sessions()
        with opened as handed:
            session = sync_session_of(handed)
            self._check(session, job_mapper(queue.model))

            def invoke(task: Task[..., Any, Any], arguments: dict[str, Any]) -> object:
                try:
                    result = task.handler(handed, **arguments)
                    self.result = await_only(limited(task, result)) if is_async else result
                except BaseException as error:
                    self.raised = error
                    raise
                return self.result

            yield session, invoke

    def _check(self, session: Session, mapper: Mapper[Any]) -> None:
        if session.get_bind(mapper) is not connection_of(self.session, mapper):
            raise ConfigurationError(
                "the session of the handlers is not on the connection of the test's session: bind both to one, as the "
                "handler would not see what the test has written"
            )
        if session.join_transaction_mode != "create_savepoint":
            raise ConfigurationError(
                'the session of the handlers needs join_transaction_mode="create_savepoint": else the first job that '
                "fails rolls the test's transaction back"
            )

    def _new(self) -> Session:
        session: Session = self._made(_on_connection_of(self.session))
        return session

    def _new_async(self) -> AsyncSession:
        async_class: Any = self._async_class
        session: AsyncSession = self._made(async_class, sync_session_class=_on_connection_of(self.session))
        return session

    def _made(self, kind: Any, **options: Any) -> Any:
        outer = self.session
        if own := getattr(outer, "execution_options", None):  # SQLAlchemy 2.1
            options["execution_options"] = own
        try:
            return kind(
                autoflush=outer.autoflush,
                expire_on_commit=outer.expire_on_commit,
                join_transaction_mode="create_savepoint",
                **options,
            )
        except TypeError as error:
            raise ConfigurationError(
                f"cannot make a session for handlers like the test's own, {type(outer).__qualname__} ({error}): give "
                "sessions= or async_sessions=, as to the worker"
            ) from error

    def show(self) -> None:
        """Let the test's objects be as the handlers left them.

        Expired, they are loaded when they are next asked for; an async session could not do that, so there they are
        loaded now.
        """
        if self._async_class is None:
            self.session.expire_all()
            return
        for entity in list(self.session):
            try:
                self.session.refresh(entity)
            except InvalidRequestError:  # its row is gone
                self.session.expire(entity)


def _on_connection_of(outer: Session) -> type[Session]:
    """The class of a session, with sessions that find the connections of that one."""

    class OnConnection(type(outer)):  # type: ignore[misc]  # a class that is known at run time only
        def get_bind(self, mapper: Any = None, **arguments: Any) -> Connection:
            return connection_of(outer, mapper, **arguments)

    OnConnection.__name__ = OnConnection.__qualname__ = type(outer).__name__
    return cast("type[Session]", OnConnection)


@contextmanager
def _awaited(manager: AbstractAsyncContextManager[Any]) -> Generator[Any]:
    """An async context manager, entered and left from within a greenlet of SQLAlchemy's."""
    entered = await_only(manager.__aenter__())
    try:
        yield entered
    except BaseException:
        if not await_only(manager.__aexit__(*sys.exc_info())):
            raise
    else:
        await_only(manager.__aexit__(None, None, None))
