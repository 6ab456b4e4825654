"""How an attempt ended, as data; and the text of an error as it may be stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final

from sqlalchemy.exc import StatementError

from sqla_jobqueue.errors import Cancel, JobNotRunnable, LeaseLost, Retry, Snooze
from sqla_jobqueue.lifecycle import Verb, Write
from sqla_jobqueue.statements import Fence
from sqla_jobqueue.tasks import Task

MAX_ERROR: Final = 2000
"""Characters of `last_error`."""


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
        recorded: it was written in the handler's own transaction, which has committed.
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
    """What a handler's return value says: a returned signal commits the handler's writes."""
    if isinstance(result, Snooze | Cancel):
        return _write_for_signal(result)
    return Write(Verb.COMPLETE, {})


def _write_for_signal(signal: Snooze | Cancel) -> Write:
    if isinstance(signal, Snooze):
        return Write(Verb.SNOOZE, {"delay": signal.delay})
    return Write(Verb.CANCEL, {"error": clean(signal.reason)})


def write_for_error(error: BaseException, task: Task[..., Any, Any], fence: Fence) -> Write | None:
    """What a raised exception says; None for the job's own lost lease, about which there is nothing to write."""
    attempt = fence.attempt
    match error:
        case LeaseLost(key=fence.key, attempt=fence.attempt):
            return None
        case Snooze() | Cancel():
            return _write_for_signal(error)
        case Retry():
            delay = error.delay if error.delay is not None else _delay(task, attempt)
            return Write(Verb.RETRY, {"delay": delay, "error": clean(error.reason)})
        case JobNotRunnable():
            return Write(Verb.FAIL, {"error": describe_error(error)})
    return Write(Verb.RETRY, {"delay": _delay(task, attempt), "error": describe_error(error)})


def _delay(task: Task[..., Any, Any], attempt: int) -> timedelta:
    """The task's backoff; an error in it must not lose the failure that is being recorded."""
    try:
        delay = task.backoff(attempt)
    except Exception:  # noqa: BLE001  user code
        return task.queue.settings.lease
    return max(delay, timedelta(0)) if isinstance(delay, timedelta) else task.queue.settings.lease


def clean(text: str) -> str:
    """Text that PostgreSQL stores: no NUL, no lone surrogates, bounded."""
    storable = text.replace("\x00", "\ufffd").encode("utf-8", "replace").decode("utf-8")
    return storable if len(storable) <= MAX_ERROR else storable[: MAX_ERROR - 1] + "\u2026"


def describe_error(error: BaseException) -> str:
    """Type and message of an error, cleaned and bounded, without what a statement was given.

    Why: the text of SQLAlchemy's errors holds the bound parameters, and the DETAIL of PostgreSQL's holds row values:
    both may be secrets. Of a database error the driver's first line is kept.
    """
    shown: BaseException = error
    if isinstance(error, StatementError) and error.orig is not None:
        shown = error.orig
    try:
        message = str(shown)
    except Exception:  # noqa: BLE001  an error whose text cannot be made is still an error
        message = "(its message could not be made)"
    if shown is not error:
        message = message.split("\n", 1)[0]
    name = type(shown).__qualname__
    return clean(f"{name}: {message}" if message else name)
