"""Queues and tasks: how they are declared, and what is refused there."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Text, func
from sqlalchemy.orm import DeclarativeBase, Mapped, column_property, mapped_column

from sqla_jobqueue import Call, ConfigurationError, JobMixin, JobQueue, JobStateMixin, JobStatus, Task, fixed
from sqla_jobqueue.tasks import declared_queues, queue_settings


def new_model(mixin: type[Any] = JobMixin) -> Any:
    class Root(DeclarativeBase):
        pass

    class Work(mixin, Root):
        __tablename__ = "works"
        id: Mapped[int] = mapped_column(primary_key=True)

    return Work


def test_one_queue_declared_twice():
    model = new_model()
    backoff = fixed(timedelta(seconds=1))
    keep = {JobStatus.FAILED: timedelta(days=9), JobStatus.DONE: timedelta(days=1)}
    first = JobQueue(model, "mail", backoff=backoff, keep=keep)
    twin = JobQueue(model, "mail", backoff=backoff, keep=dict(reversed(keep.items())))

    @first.task
    def one(session: Any) -> None: ...

    assert twin.tasks == {"one": one}
    with pytest.raises(ConfigurationError, match=r"<JobQueue 'mail' of .*Work> has a task 'one' already"):
        twin.task(one.handler)
    for other in (
        {"lease": timedelta(minutes=1)},
        {"max_attempts": 4},
        {"one_transaction": True},
        {"backoff": fixed(timedelta(seconds=2))},
        {"keep": None},
        {"notify": False},
    ):
        with pytest.raises(
            ConfigurationError, match=r"queue 'mail' of .*Work is declared twice with different settings"
        ):
            JobQueue(model, "mail", **{"backoff": backoff, "keep": keep} | other)
    assert [name for name, _ in declared_queues(model.__table__)] == ["mail"]
    assert queue_settings(model.__table__, "mail") == first.settings
    assert queue_settings(model.__table__, "other") is None
    assert not JobQueue(model, "other", lease=timedelta(minutes=1)).tasks
    assert not JobQueue(new_model(), "mail", max_attempts=9).tasks  # another table
    JobQueue(model)
    JobQueue(model)


BAD_QUEUES: dict[str, tuple[dict[str, Any], str]] = {
    "empty": ({"name": ""}, "a queue name is a non-empty string"),
    "None": ({"name": None}, "a queue name is a non-empty string"),
    "too long": ({"name": "q" * 129}, "a queue name has at most 128 characters"),
    "NUL": ({"name": "a\0b"}, "no NUL or surrogates"),
    "surrogate": ({"name": "\ud800"}, "no NUL or surrogates"),
    "short lease": ({"lease": timedelta(milliseconds=999)}, "a lease is a timedelta from 0:00:01"),
    "endless lease": ({"lease": timedelta.max}, "to 36500 days"),
    "lease of a number": ({"lease": 300}, "a lease is a timedelta"),
    "attempts 0": ({"max_attempts": 0}, "max_attempts is a number from 1"),
    "attempts -1": ({"max_attempts": -1}, "max_attempts is a number from 1"),
    "attempts None": ({"max_attempts": None}, "max_attempts is a number from 1"),
    "attempts True": ({"max_attempts": True}, "max_attempts is a number from 1"),
    "attempts huge": ({"max_attempts": 2**40}, "max_attempts is a number from 1"),
    "backoff": ({"backoff": timedelta(seconds=5)}, "a backoff takes the number of the attempt"),
    "no backoff": ({"backoff": None}, "a queue needs a backoff"),
    "keep for negative": ({"keep": timedelta(-1)}, "keep needs a timedelta from zero"),
    "keep for a number": ({"keep": 5}, "keep is a timedelta, a mapping"),
    "keep pending": ({"keep": {JobStatus.PENDING: None}}, "keep is about done, failed, cancelled, not <?.*pending"),
    "keep unknown": ({"keep": {"finished": timedelta(1)}}, "keep is about done, failed, cancelled, not 'finished'"),
    "keep days": ({"keep": {"done": 1}}, "keep needs a timedelta"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_QUEUES.values(), ids=BAD_QUEUES)
def test_queues_declared_wrongly(arguments, message):
    model = new_model()
    with pytest.raises(ConfigurationError, match=message):
        JobQueue(model, **arguments)
    assert not declared_queues(model.__table__)


def test_no_job_model():
    for thing in (object, DeclarativeBase, None):
        with pytest.raises(ConfigurationError, match="is no job model"):
            JobQueue(thing)


def test_how_long_finished_jobs_stay():
    day = timedelta(days=1)

    def kept(mixin: type[Any] = JobMixin, **keep: Any) -> dict[JobStatus, timedelta]:
        return dict(JobQueue(new_model(mixin), **keep).settings.keep)

    assert kept() == {JobStatus.DONE: day, JobStatus.CANCELLED: day}
    assert kept(JobStateMixin) == {}
    assert kept(keep=None) == {}
    assert kept(JobStateMixin, keep=2 * day) == {JobStatus.DONE: 2 * day, JobStatus.CANCELLED: 2 * day}
    assert kept(keep={"done": timedelta(0), JobStatus.FAILED: day, "cancelled": None}) == {
        JobStatus.DONE: timedelta(0),
        JobStatus.FAILED: day,
    }


class Called:
    def __call__(self, session: Any) -> None: ...


def test_handlers_that_cannot_be_tasks():
    queue = JobQueue(new_model())

    def nothing() -> None: ...
    def rest(session: Any, *values: int) -> None: ...
    def fine(session: Any) -> None: ...

    for handler, message in [
        (nothing, "nothing: a handler takes the session as its first parameter"),
        (rest, "name every parameter"),
        (Called(), "has no __name__ to be its kind: give it a name="),
        (print, "print"),
        (None, "give it a name="),
        ("text", "give it a name="),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            queue.task()(handler)
    task = queue.task(fine)
    with pytest.raises(ConfigurationError, match="is a task already"):
        queue.task(name="again")(task)
    assert list(queue.tasks) == ["fine"]
    assert queue.task(name="called")(Called()).kind == "called"


BAD_TASKS: dict[str, tuple[dict[str, Any], str]] = {
    "empty name": ({"name": ""}, "a kind is a non-empty string"),
    "long name": ({"name": "x" * 256}, "a kind has at most 255 characters"),
    "NUL": ({"name": "\0"}, "no NUL"),
    "attempts": ({"max_attempts": 0}, "max_attempts"),
    "priority": ({"priority": "high"}, "priority"),
    "timeout 0": ({"timeout": timedelta(0)}, "a timeout is a timedelta above zero"),
    "timeout number": ({"timeout": 5}, "a timeout is a timedelta above zero"),
    "backoff": ({"backoff": 5}, "a backoff takes"),
}


@pytest.mark.parametrize(("options", "message"), BAD_TASKS.values(), ids=BAD_TASKS)
def test_tasks_declared_wrongly(options, message):
    queue = JobQueue(new_model())

    def handler(session: Any) -> None: ...

    with pytest.raises(ConfigurationError, match=message):
        queue.task(**options)(handler)
    assert not queue.tasks


def test_a_task_is_its_handler_and_its_settings():
    backoff = fixed(timedelta(seconds=9))
    queue = JobQueue(new_model(), backoff=backoff)

    @queue.task
    def double(session: Any, number: int) -> int:
        """Two of it."""
        return 2 * number

    @queue.task(name="halve", timeout=timedelta(seconds=3), backoff=fixed(timedelta(0)))
    async def half(session: Any, number: int) -> float:
        return number / 2

    assert double(None, 4) == double(None, number=4) == 8
    assert asyncio.run(half(None, 4)) == 2
    assert (double.kind, double.__name__, double.__doc__) == ("double", "double", "Two of it.")
    assert (double.backoff, double.timeout, double.is_async) == (backoff, None, False)
    assert (half.kind, half.timeout, half.is_async) == ("halve", timedelta(seconds=3), True)
    assert half.backoff is not backoff
    assert repr(half) == "<Task 'halve' of queue 'default'>"
    assert isinstance(double.call(4), Call)
    assert isinstance(double.options(priority=1), Task)
    assert (half.options(priority=1).timeout, half.options().is_async) == (timedelta(seconds=3), True)
    assert queue.tasks == {"double": double, "halve": half}
    assert queue.task_for({"kind": "halve"}) is half
    assert queue.task_for({"kind": "unknown"}) is None


def test_tasks_of_a_queue_whose_rows_are_the_jobs():
    queue = JobQueue(new_model(JobStateMixin))

    def two(session: Any, value: int) -> None: ...
    def one(session: Any) -> None: ...

    with pytest.raises(ConfigurationError, match=r"takes the session alone and reads session\.job"):
        queue.task(two)
    task = queue.task(one)
    with pytest.raises(ConfigurationError, match="its queue has one task"):
        queue.task(name="another")(one)
    assert queue.task_for({}) is task


def test_an_existing_model_with_columns_named_kind_and_payload():
    class Root(DeclarativeBase):
        pass

    class Upload(JobStateMixin, Root):
        __tablename__ = "uploads"
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str] = mapped_column(Text)
        payload: Mapped[str] = mapped_column(Text)
        size: Mapped[int] = column_property(func.length(payload))

    queue = JobQueue(Upload)
    assert not queue.has_kinds
    assert queue.settings.keep == ()
    with pytest.raises(ConfigurationError, match="has no kinds"):
        queue.kind("x")
