"""How long to wait after a failed attempt: attempt number in, delay out.

A backoff is any callable from the number of the attempt that failed (1 for the first) to a `timedelta`. The delay is
added to the database's clock by the statement that writes the failure, so no clock of an application takes part.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final, TypeAlias

from sqla_jobqueue.errors import ConfigurationError

Backoff: TypeAlias = Callable[[int], timedelta]

_MOST_DOUBLINGS: Final = 40
"""2**40 seconds are 35,000 years: no cap is above, and no float or timedelta overflows below."""


def exponential(
    *,
    base: float = 2.0,
    unit: timedelta = timedelta(seconds=1),
    cap: timedelta = timedelta(hours=1),
    jitter: float = 0.1,
) -> Backoff:
    """Wait ``unit * base**attempt``: 2, 4, 8... seconds as it stands.

    Args:
        base: factor from one attempt to the next, above 1.
        unit: what is multiplied.
        cap: never wait longer than this (jitter included).
        jitter: share of the delay added at random, 0 to 1, so that jobs that failed together do not come back together.
    """
    if base <= 1:
        raise ConfigurationError(f"exponential() needs a base above 1, not {base}")
    if unit <= timedelta(0) or cap <= timedelta(0):
        raise ConfigurationError("exponential() needs a unit and a cap above zero")
    if not 0 <= jitter <= 1:
        raise ConfigurationError(f"exponential() needs a jitter from 0 to 1, not {jitter}")
    longest = cap.total_seconds()

    def delay(attempt: int) -> timedelta:
        try:
            seconds = unit.total_seconds() * base ** min(attempt, _MOST_DOUBLINGS)
        except OverflowError:
            seconds = longest
        seconds *= 1 + random.random() * jitter  # noqa: S311  spreads load, hides nothing
        return timedelta(seconds=min(seconds, longest))

    return delay


def fixed(delay: timedelta) -> Backoff:
    """Wait the same time after every failed attempt."""
    if delay < timedelta(0):
        raise ConfigurationError(f"fixed() needs a delay of zero or more, not {delay}")
    return lambda _attempt: delay


def sequence(delays: Sequence[timedelta]) -> Backoff:
    """Wait ``delays[0]`` after the first failed attempt, ``delays[1]`` after the second; the last one repeats."""
    waits = tuple(delays)
    if not waits or any(wait < timedelta(0) for wait in waits):
        raise ConfigurationError("sequence() needs at least one delay, all of zero or more")
    return lambda attempt: waits[min(attempt, len(waits)) - 1]
