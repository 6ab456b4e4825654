"""Options of a job, checked at once, and the checks that queues and tasks share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

from sqla_jobqueue.errors import ConfigurationError, EnqueueError

MAX_QUEUE_NAME: Final = 128
"""Characters."""
MAX_KIND: Final = 255
"""Characters."""
MAX_INTEGER: Final = 2**31 - 1
MAX_DURATION: Final = timedelta(days=36_500)
"""What is added to the database's clock stays a timestamp that every driver can read."""
_YEARS: Final = range(2, 9999)
"""Of `run_at`: told in another time zone, it must still be an instant that Python can hold."""


def checked_name(what: str, name: object, longest: int, error: type[Exception] = ConfigurationError) -> str:
    """A name that PostgreSQL can store and an index can hold."""
    if not isinstance(name, str) or not name:
        raise error(f"a {what} is a non-empty string, not {name!r}")
    if len(name) > longest or "\x00" in name or any("\ud800" <= char <= "\udfff" for char in name):
        raise error(f"a {what} has at most {longest} characters and no NUL or surrogates: {name[:40]!a}")
    return name


def is_duration(value: object, shortest: timedelta) -> bool:
    """A timedelta that can be added to a timestamp."""
    return isinstance(value, timedelta) and shortest <= value <= MAX_DURATION


def is_integer(value: object, lowest: int) -> bool:
    """A number, not a bool, that fits the column."""
    return isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= MAX_INTEGER


def check_attempts(value: object, error: type[Exception]) -> None:
    """A column of type integer, and an attempt that can be the last."""
    if value is not None and not is_integer(value, 1):
        raise error(f"max_attempts is a number from 1 to {MAX_INTEGER}, not {value!r}")


def check_backoff(value: object) -> None:
    """Found here, not when the first attempt has failed."""
    if value is not None and not callable(value):
        raise ConfigurationError(
            f"a backoff takes the number of the attempt that failed and returns a timedelta, as exponential() does, "
            f"not {value!r}"
        )


def check_priority(value: object, error: type[Exception]) -> None:
    """A column of type integer."""
    if value is not None and not is_integer(value, -MAX_INTEGER):
        raise error(f"priority is a number from {-MAX_INTEGER} to {MAX_INTEGER}, smaller first, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How one job is enqueued. None leaves the task's, then the queue's default.

    Attributes:
        delay: not before this long after the flush that writes the job, by the database's clock; up to a century.
        run_at: not before this instant; timezone-aware. Not together with `delay`.
        priority: smaller first.
        max_attempts: the attempt with this number is the last.
        meta: JSON object stored beside the payload.
    """

    delay: timedelta | None = None
    run_at: datetime | None = None
    priority: int | None = None
    max_attempts: int | None = None
    meta: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.delay is not None and not is_duration(self.delay, timedelta(0)):
            raise EnqueueError(f"delay is a timedelta from zero to {MAX_DURATION.days} days, not {self.delay!r}")
        if self.run_at is not None:
            if not isinstance(self.run_at, datetime):
                raise EnqueueError(f"run_at is a datetime, not {self.run_at!r}")
            if self.run_at.utcoffset() is None:
                raise EnqueueError("run_at needs a timezone: a naive datetime would mean whatever the server's zone is")
            if self.run_at.year not in _YEARS:
                raise EnqueueError(f"run_at is beyond what PostgreSQL and Python both can tell: {self.run_at}")
            if self.delay is not None:
                raise EnqueueError("give delay or run_at, not both")
        check_attempts(self.max_attempts, EnqueueError)
        check_priority(self.priority, EnqueueError)
        if self.meta is not None:
            from sqla_jobqueue.payload import check_json  # noqa: PLC0415  brings pydantic

            if not isinstance(self.meta, Mapping):
                raise EnqueueError(f"meta is a JSON object, not {type(self.meta).__name__}")
            object.__setattr__(self, "meta", check_json(dict(self.meta)))  # a copy: the caller keeps theirs


def merged(old: Options, new: Options) -> Options:
    """The old options, with what the new ones give put over them."""
    given = {name: value for name in Options.__slots__ if (value := getattr(new, name)) is not None}
    if "delay" in given:
        return replace(old, run_at=None, **given)
    if "run_at" in given:
        return replace(old, delay=None, **given)
    return replace(old, **given)
