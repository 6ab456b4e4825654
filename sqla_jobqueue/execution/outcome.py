"""How an attempt ended, as data; and the text of an error as it may be stored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final, cast

from sqlalchemy.exc import DBAPIError, StatementError

from sqla_jobqueue.errors import Cancel, JobNotRunnable, JobSignal, LeaseLost, Retry, Snooze
from sqla_jobqueue.lifecycle import Verb, Write, storable
from sqla_jobqueue.statements import Fence
from sqla_jobqueue.tasks import Task

_SUB_ERRORS: Final = 3
"""Of an exception group, so many are told."""


class Ending(StrEnum):
    """What became of an attempt, for hooks and logs."""

    DONE = "done"
    FAILED = "failed"
    SNOOZED = "snoozed"
    CANCELLED = "cancelled"
    RELEASED = "released"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended.

    Attributes:
        ending: what became of it.
        fence: key and attempt number.
        row: the job as it was claimed; a plain mapping, attached to nothing.
        write: what is to be written; None where nothing is (the lease is lost).
        recorded: it is written: in the handler's own transaction, which has committed, or in one right after it.
        counted: the claim was committed. If not (one-transaction mode, transaction lost), the attempt is yet to count.
        error: the exception of a failure, or of a lost lease.
    """

    ending: Ending
    fence: Fence
    row: Mapping[str, Any]
    write: Write | None
    recorded: bool = False
    counted: bool = True
    error: BaseException | None = None

    @property
    def is_dead(self) -> bool:
        """A failure that leaves no attempt: the job is in the dead letter."""
        if self.write is None or self.write.verb not in {Verb.RETRY, Verb.FAIL}:
            return False
        last: bool = self.fence.attempt >= self.row["max_attempts"]
        return last or self.write.verb is Verb.FAIL


_ENDINGS: Final = {
    Verb.COMPLETE: Ending.DONE,
    Verb.RETRY: Ending.FAILED,
    Verb.FAIL: Ending.FAILED,
    Verb.SNOOZE: Ending.SNOOZED,
    Verb.RELEASE: Ending.RELEASED,
    Verb.CANCEL: Ending.CANCELLED,
}


def ending_of(write: Write) -> Ending:
    """What a written verb means for the attempt."""
    return _ENDINGS[write.verb]


def write_for_result(result: object) -> Write:
    """What a handler's return value says: a returned signal commits the handler's writes.

    Raises:
        TypeError: it is a signal that can only be raised.
    """
    if isinstance(result, Snooze | Cancel):
        return _write_for_signal(result)
    if isinstance(result, JobSignal):
        raise TypeError(f"{type(result).__qualname__} is raised, not returned: it undoes the handler's writes")
    return Write(Verb.COMPLETE, {})


def _write_for_signal(signal: Snooze | Cancel) -> Write:
    if isinstance(signal, Snooze):
        return Write(Verb.SNOOZE, {"delay": signal.delay})
    return Write(Verb.CANCEL, {"error": storable(_text_of(signal.reason))})


def write_for_error(error: BaseException, task: Task[..., Any, Any], fence: Fence) -> Write | None:
    """What a raised exception says; None for the job's own lost lease, about which there is nothing to write."""
    match error:
        case LeaseLost(key=fence.key, attempt=fence.attempt):
            return None
        case Snooze() | Cancel():
            return _write_for_signal(error)
        case Retry():
            delay = error.delay if isinstance(error.delay, timedelta) else delay_after(task, fence.attempt)
            return Write(Verb.RETRY, {"delay": delay, "error": storable(_text_of(error.reason))})
        case JobNotRunnable():
            return Write(Verb.FAIL, {"error": describe_error(error)})
        case _:
            return Write(Verb.RETRY, {"delay": delay_after(task, fence.attempt), "error": describe_error(error)})


def delay_after(task: Task[..., Any, Any], attempt: int) -> timedelta:
    """The task's backoff; an error in it must not lose the failure that is being recorded."""
    try:
        delay = task.backoff(attempt)
    except Exception:  # noqa: BLE001  user code
        return task.queue.settings.lease
    return delay if isinstance(delay, timedelta) else task.queue.settings.lease


def sqlstate_of(error: BaseException) -> str:
    """PostgreSQL's code of a database error, from whichever driver; empty where there is none."""
    state = getattr(error.orig if isinstance(error, DBAPIError) else error, "sqlstate", None)
    return state if isinstance(state, str) else ""


def describe_error(error: BaseException) -> str:
    """Type and message of an error, cleaned and bounded, without what a statement was given.

    Why: the text of SQLAlchemy's errors holds the bound parameters, the DETAIL of PostgreSQL's holds row values, and so
    do its messages about data that does not fit (class 22): all may be secrets. Of a database error the driver's first
    line is kept.
    """
    return storable(_described(error))


def _described(error: BaseException) -> str:
    if isinstance(error, StatementError):
        return _described_statement(error)
    driver = error.__cause__
    if driver is not None and type(error).__module__.startswith("sqlalchemy.") and sqlstate_of(driver):
        error = driver  # asyncpg's own, behind the one that SQLAlchemy makes of it
    name = type(error).__qualname__
    message = _text_of(error)
    if state := sqlstate_of(error):
        message = message.partition("\n")[0]
        if state.startswith("22"):
            message = re.sub(r'"[^"]*"', '"..."', message.partition(": ")[0])
    if isinstance(error, BaseExceptionGroup):
        inner: tuple[BaseException, ...] = cast("Any", error).exceptions
        parts = "; ".join(_described(part) for part in inner[:_SUB_ERRORS])
        message = f"{message}: {parts}{'; ...' if len(inner) > _SUB_ERRORS else ''}"
    return f"{name}: {message}" if message else name


def _described_statement(error: StatementError) -> str:
    orig = error.orig
    if orig is None:
        return f"{type(error).__qualname__}: {str(error.args[0]).partition(chr(10))[0]}"
    if not isinstance(error, DBAPIError):
        return f"{type(orig).__qualname__}: a statement was given a parameter that its column does not take"
    return _described(orig)


def _text_of(value: object) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001  an error whose text cannot be made is still an error
        return "(its message could not be made)"
