"""What can go wrong, and what a handler may say.

Errors, all of them `JobQueueError`::

    JobQueueError
    ├── ConfigurationError      a model, queue, task or worker is declared wrongly; raised where it is declared
    ├── EnqueueError            a job cannot be enqueued as asked; raised by the call, before any SQL
    │   └── PayloadError        a payload value does not fit the handler, or JSON
    ├── LeaseLost               somebody else owns the job now; also a StaleDataError
    ├── TransactionMisuse       a handler ended, broke or outlived the transaction that the worker owns
    └── JobNotRunnable          the job can never run as it stands, so it goes to the dead letter at once
        ├── PayloadNotReadable  the stored payload does not fit the handler
        └── EntityGone          the row that an entity argument names does not exist any more

Signals are a separate tree, since raising one is no error: `Retry`, `Snooze`, `Cancel`. Raising a signal undoes the
handler's writes. Returning `Snooze` or `Cancel` commits them.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from sqlalchemy.orm.exc import StaleDataError


class JobQueueError(Exception):
    """Base of every error that the library raises."""


class ConfigurationError(JobQueueError):
    """A declaration is wrong: raised at import or start, never while jobs run."""


class EnqueueError(JobQueueError):
    """A job cannot be enqueued as asked. Nothing was sent; the session is as it was."""


class PayloadError(EnqueueError, TypeError):
    """A payload value does not fit the handler's annotation, or is nothing that JSON and PostgreSQL can hold.

    Attributes:
        path: where the value stands in the payload, e.g. ``("address", "lines", 2)``.
    """

    def __init__(self, message: str, path: tuple[str | int, ...] = ()) -> None:
        super().__init__(message)
        self.path = path


class LeaseLost(JobQueueError, StaleDataError):
    """A write after a claim changed no row: this attempt does not own the job any more.

    Another worker may have claimed it, or an operator may have cancelled it. Roll back; whoever owns the job now
    writes its outcome.

    Attributes:
        key: the job's primary key, one value per column.
        attempt: the attempt that was fenced off.
    """

    def __init__(self, key: tuple[Any, ...], attempt: int) -> None:
        shown = key[0] if len(key) == 1 else key
        super().__init__(
            f"attempt {attempt} does not own job {shown} any more (reclaimed, cancelled or deleted): its "
            "result is refused, roll back its transaction"
        )
        self.key = key
        self.attempt = attempt


class TransactionMisuse(JobQueueError):
    """A handler committed, rolled back, closed, broke or outlived the transaction that its worker owns."""


class JobNotRunnable(JobQueueError):
    """No retry can help: the job goes to the dead letter."""


class PayloadNotReadable(JobNotRunnable):
    """The stored payload does not fit the handler's signature."""


class EntityGone(JobNotRunnable):
    """The row that an entity argument names does not exist any more."""


class JobSignal(Exception):
    """Base of what a handler may raise to say how its attempt ends."""


class Retry(JobSignal):
    """This attempt failed, try again: counted like any failure, dead letter once attempts are used up.

    Args:
        reason: stored as ``last_error``.
        delay: wait this long instead of the task's backoff.
    """

    def __init__(self, reason: str = "retry", *, delay: timedelta | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.delay = delay


class Snooze(JobSignal):
    """Not now: run the job again after a delay. Costs no attempt.

    Args:
        delay: how long to wait, by the database's clock.
    """

    def __init__(self, delay: timedelta) -> None:
        if delay < timedelta(0):
            raise ValueError(f"Snooze needs a delay of zero or more, not {delay}")
        super().__init__(f"snoozed for {delay}")
        self.delay = delay


class Cancel(JobSignal):
    """Never: the job ends as ``cancelled``.

    Args:
        reason: stored as ``last_error``.
    """

    def __init__(self, reason: str = "cancelled by its handler") -> None:
        super().__init__(reason)
        self.reason = reason
