"""Opens a session of the application's and runs a handler on it: in a thread, or as a task on the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from typing import Any, TypeAlias

from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import Session
from sqlalchemy.util import await_only

from sqla_jobqueue.execution import Ending, Invoke, Outcome, failed, run_claimed, run_in_one_transaction
from sqla_jobqueue.lifecycle import Verb, Write, row_fence
from sqla_jobqueue.session import async_session_of, current_attempt, sync_session_of
from sqla_jobqueue.tasks import JobQueue, Task
from sqla_jobqueue.worker.hooks import Told
from sqla_jobqueue.worker.leases import Lease
from sqla_jobqueue.worker.runners import EventLoop, Threads

logger = logging.getLogger("sqla_jobqueue")

Sessions: TypeAlias = Callable[[], AbstractContextManager[Any]]
"""A sessionmaker, or any callable that gives a context manager of a Session or scoped session."""
AsyncSessions: TypeAlias = Callable[[], AbstractAsyncContextManager[Any]]
"""The same for an AsyncSession."""
Result: TypeAlias = Outcome | BaseException | None
"""An outcome; None when nothing was due; an error of the database or the application's session, not of the job."""


class Handlers:
    """Runs handlers of both flavours.

    Args:
        sessions: for sync handlers.
        async_sessions: for async handlers.
        loop: where async handlers run; None where there are none.
        told: hears of each start.
        name: of the worker, for `locked_by`.
    """

    def __init__(
        self,
        sessions: Sessions | None,
        async_sessions: AsyncSessions | None,
        loop: EventLoop | None,
        told: Told,
        name: str,
    ) -> None:
        self._sessions = sessions
        self._async_sessions = async_sessions
        self._loop = loop
        self._told = told
        self._name = name
        self._threads = Threads(f"sqla_jobqueue.{name}")
        self._tasks: set[asyncio.Task[None]] = set()

    def start_claimed(
        self, task: Task[..., Any, Any], row: Mapping[str, Any], lease: Lease, done: Callable[[Outcome], None]
    ) -> None:
        """Run a job that is held under a lease; `done` gets its outcome, from the thread or loop it ran on."""
        if task.is_async:
            self._spawn(self._async_claimed(task, row, lease, done), lease)
        else:
            self._threads.run(lambda: done(self._claimed(task, row, lease)))

    def start_claiming(
        self, queue: JobQueue[Any], kinds: tuple[str, ...] | None, *, is_async: bool, done: Callable[[Result], bool]
    ) -> None:
        """Claim and run jobs of a one-transaction queue, one after the other, as long as `done` says so."""
        if is_async:
            self._spawn(self._async_claiming(queue, kinds, done), None)
        else:
            self._threads.run(lambda: self._claiming(queue, kinds, done))

    def cancel(self) -> None:
        """Cancel the async handlers that are running."""
        for task in list(self._tasks):
            if self._loop:
                self._loop.cancel(task)

    def close(self, seconds: float, mapper: Any) -> None:
        """End idle threads; close an async engine's pooled connections that were made in the worker's own event loop.

        Why: no other loop could use them, nor close them.
        """
        self._threads.close()
        if self._loop is not None and self._loop.owned:
            with suppress(TimeoutError):
                self._loop.submit(self._dispose(mapper)).result(seconds)

    async def _dispose(self, mapper: Any) -> None:
        async with _given(self._async_sessions)() as session:
            bind = sync_session_of(session).get_bind(mapper)
        if isinstance(bind, Engine):
            await AsyncEngine(bind).dispose()

    def bind(self, mapper: Any) -> Engine | Connection:
        """What the application's sessions are bound to, for a job model."""
        bind: Engine | Connection = self.ask(lambda session: session.get_bind(mapper))[0]
        return bind

    def ask(self, question: Callable[[Session], Any]) -> list[Any]:
        """Put a question to a session of each flavour of the application's, from outside its event loop."""
        answers: list[Any] = []
        if self._sessions is not None:
            with self._sessions() as session:
                answers.append(question(sync_session_of(session)))
        if self._loop is not None:
            answers.append(self._loop.submit(self._async_ask(question)).result())
        return answers

    async def _async_ask(self, question: Callable[[Session], Any]) -> Any:
        async with _given(self._async_sessions)() as session:
            return await async_session_of(session).run_sync(question)

    def _claimed(self, task: Task[..., Any, Any], row: Mapping[str, Any], lease: Lease) -> Outcome:
        outcome: Outcome | None = None
        try:
            with _given(self._sessions)() as session:
                invoke = self._sync_invoke(session)
                outcome = run_claimed(sync_session_of(session), task, row, invoke, lost=lease.lost)
        except BaseException as error:  # noqa: BLE001  the session could not be opened or closed
            outcome = _stands(outcome, error) or _broken(task, row, error)
        return _or_broken(outcome, task, row)

    def _claiming(self, queue: JobQueue[Any], kinds: tuple[str, ...] | None, done: Callable[[Result], bool]) -> None:
        while done(self._claim_one(queue, kinds)):
            pass

    def _claim_one(self, queue: JobQueue[Any], kinds: tuple[str, ...] | None) -> Result:
        outcome: Outcome | None = None
        try:
            with _given(self._sessions)() as session:
                invoke = self._sync_invoke(session)
                outcome = run_in_one_transaction(sync_session_of(session), queue, kinds, self._name, invoke)
        except BaseException as error:  # noqa: BLE001  told to the lane
            return _stands(outcome, error) or error
        return outcome

    def _sync_invoke(self, session: Any) -> Invoke:
        def invoke(task: Task[..., Any, Any], arguments: dict[str, Any]) -> object:
            self._tell_start(task, session)
            return task.handler(session, **arguments)

        return invoke

    def _async_invoke(self, session: Any) -> Invoke:
        """Await the handler from within the greenlet that `run_sync` runs its function in."""

        def invoke(task: Task[..., Any, Any], arguments: dict[str, Any]) -> object:
            self._tell_start(task, session)
            return await_only(limited(task, task.handler(session, **arguments)))

        return invoke

    def _tell_start(self, task: Task[..., Any, Any], session: Any) -> None:
        current = current_attempt(session)
        self._told.started(task.queue, current.fence, current.row)

    def _spawn(self, work: Any, lease: Lease | None) -> None:
        loop = _given(self._loop)

        def started(task: asyncio.Task[None]) -> None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            if lease is not None:
                lease.on_lost = lambda: loop.cancel(task)
                if lease.lost.is_set():  # told before there was a task
                    loop.cancel(task)

        loop.spawn(work, started)

    async def _async_claimed(
        self, task: Task[..., Any, Any], row: Mapping[str, Any], lease: Lease, done: Callable[[Outcome], None]
    ) -> None:
        outcome: Outcome | None = None
        try:
            async with _given(self._async_sessions)() as session:
                invoke = self._async_invoke(session)
                outcome = await async_session_of(session).run_sync(run_claimed, task, row, invoke, lost=lease.lost)
        except asyncio.CancelledError as error:
            outcome = outcome or _cancelled(task, row, lease, error)
        except BaseException as error:  # noqa: BLE001  the session could not be opened or closed
            outcome = _stands(outcome, error) or _broken(task, row, error)
        done(_or_broken(outcome, task, row))

    async def _async_claiming(
        self, queue: JobQueue[Any], kinds: tuple[str, ...] | None, done: Callable[[Result], bool]
    ) -> None:
        go_on = True
        while go_on:
            result: Result = None
            outcome: Outcome | None = None
            try:
                async with _given(self._async_sessions)() as session:
                    invoke = self._async_invoke(session)
                    result = outcome = await async_session_of(session).run_sync(
                        run_in_one_transaction, queue, kinds, self._name, invoke
                    )
            except BaseException as error:  # noqa: BLE001  told to the lane; a cancelled one was rolled back
                result = _stands(outcome, error) or error
            go_on = done(result)


def _given(value: Any) -> Any:
    if value is None:
        raise AssertionError("checked when the worker was made")
    return value


async def limited(task: Task[..., Any, Any], work: Any) -> object:
    """What an async handler returns, within its task's timeout."""
    try:
        async with asyncio.timeout(task.timeout.total_seconds() if task.timeout else None):
            return await work
    except asyncio.CancelledError as error:
        current = asyncio.current_task()
        if current is None or current.cancelling():
            raise
        # nobody cancelled the handler itself: taken for that, its job would be given back and run again, for ever
        raise RuntimeError("the handler awaited something that was cancelled") from error


def _cancelled(
    task: Task[..., Any, Any], row: Mapping[str, Any], lease: Lease, error: asyncio.CancelledError
) -> Outcome:
    """A cancelled handler's transaction is rolled back: the job is lost, or given back because the worker stops."""
    fence = row_fence(task.queue.model, row)
    if lease.lost.is_set():
        return Outcome(Ending.LOST, fence, row, None, error=error)
    return Outcome(Ending.RELEASED, fence, row, Write(Verb.RELEASE, {}))


def _stands(outcome: Outcome | None, error: BaseException) -> Outcome | None:
    """An outcome that there was before the application's session failed to close: it may be committed."""
    if outcome is not None:
        logger.error("the application's session raised while it was closed, after the job's end", exc_info=error)
    return outcome


def _broken(task: Task[..., Any, Any], row: Mapping[str, Any], error: BaseException) -> Outcome:
    """The application's session could not be opened."""
    return failed(error, task, row, row_fence(task.queue.model, row), started=False)


def _or_broken(outcome: Outcome | None, task: Task[..., Any, Any], row: Mapping[str, Any]) -> Outcome:
    if outcome is not None:
        return outcome
    return _broken(task, row, RuntimeError("the context manager of the application's session swallowed an exception"))
