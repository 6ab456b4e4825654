"""Attempt number in, delay out: bounds, caps, jitter, and input that no backoff can mean."""

import random
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqla_jobqueue.backoff import exponential, fixed, sequence
from sqla_jobqueue.errors import ConfigurationError

SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)
CENTURY = timedelta(days=36500)


def test_two_four_eight_seconds():
    assert [exponential(jitter=0)(attempt) for attempt in (1, 2, 3, 4)] == [
        2 * SECOND,
        4 * SECOND,
        8 * SECOND,
        16 * SECOND,
    ]


def test_base_and_unit():
    assert exponential(base=3, unit=timedelta(minutes=1), jitter=0, cap=HOUR)(2) == timedelta(minutes=9)
    assert exponential(base=1.5, jitter=0)(2) == timedelta(seconds=2.25)


def test_the_cap_holds_and_is_an_hour_unless_told():
    assert exponential(jitter=0)(11) == timedelta(seconds=2048)
    assert exponential(jitter=0)(12) == HOUR
    assert exponential(cap=5 * SECOND, jitter=0)(3) == 5 * SECOND
    assert exponential(cap=timedelta(milliseconds=10), jitter=1)(1) == timedelta(milliseconds=10)


def test_jitter_only_adds_and_within_its_share(monkeypatch):
    for drawn, seconds in ((0.0, 8), (0.5, 10), (1.0, 12)):
        monkeypatch.setattr(random, "random", lambda drawn=drawn: drawn)
        assert exponential(jitter=0.5)(3) == timedelta(seconds=seconds)
    assert exponential(jitter=0.5, cap=9 * SECOND)(3) == 9 * SECOND  # the cap counts with the jitter in


def test_jitter_differs_from_job_to_job():
    delays = {exponential()(5) for _ in range(50)}
    assert len(delays) > 40
    assert all(32 * SECOND <= delay <= 35.2 * SECOND for delay in delays)


@given(
    attempt=st.integers(min_value=1, max_value=2**63),
    base=st.floats(min_value=1.0001, max_value=1e300),
    unit=st.timedeltas(min_value=timedelta(microseconds=1), max_value=CENTURY),
    cap=st.timedeltas(min_value=timedelta(microseconds=1), max_value=CENTURY),
    jitter=st.floats(min_value=0, max_value=1),
)
def test_any_attempt_number_gives_a_delay_within_the_cap(attempt, base, unit, cap, jitter):
    delay = exponential(base=base, unit=unit, cap=cap, jitter=jitter)
    assert timedelta(0) <= delay(attempt) <= cap


def test_it_does_not_shrink_as_attempts_grow():
    delay = exponential(jitter=0, cap=CENTURY)
    delays = [delay(attempt) for attempt in range(1, 200)]
    assert delays == sorted(delays)


def test_fixed():
    assert [fixed(SECOND)(attempt) for attempt in (1, 2, 2**40)] == [SECOND] * 3
    assert fixed(timedelta(0))(1) == timedelta(0)


def test_sequence_repeats_its_last():
    delay = sequence([SECOND, 10 * SECOND, HOUR])
    assert [delay(attempt) for attempt in (1, 2, 3, 4, 2**40)] == [SECOND, 10 * SECOND, HOUR, HOUR, HOUR]


def test_sequence_is_not_changed_from_outside():
    delays = [SECOND]
    delay = sequence(delays)
    delays[0] = HOUR
    assert delay(1) == SECOND


@pytest.mark.parametrize(
    "make",
    [
        lambda: exponential(base=1),
        lambda: exponential(base=0.5),
        lambda: exponential(base=-2),
        lambda: exponential(unit=timedelta(0)),
        lambda: exponential(unit=-SECOND),
        lambda: exponential(cap=timedelta(0)),
        lambda: exponential(cap=-SECOND),
        lambda: exponential(jitter=-0.1),
        lambda: exponential(jitter=1.1),
        lambda: exponential(jitter=float("nan")),
        lambda: fixed(-SECOND),
        lambda: sequence([]),
        lambda: sequence([SECOND, -SECOND]),
    ],
)
def test_what_no_backoff_can_mean_is_refused_where_it_is_declared(make):
    with pytest.raises(ConfigurationError, match="needs"):
        make()
