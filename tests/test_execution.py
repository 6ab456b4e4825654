"""One attempt, on real sessions: every ending, the session guard, and the job instance that a handler sees.

Nearly every test runs six times: under a lease and in one transaction, on a sync session (psycopg) and on async ones
(psycopg, asyncpg). A body is a function of a sync Session in all of them; an async session runs it by ``run_sync``. Each
compares what the handler wrote with what became of the job.
"""

import asyncio
import contextlib
import itertools
import threading
from datetime import timedelta
from typing import ClassVar

import pytest
from sqlalchemy import (
    ForeignKey,
    Integer,
    Text,
    create_engine,
    delete,
    event,
    func,
    insert,
    literal_column,
    select,
    text,  # noqa: TID251  as an application may send it
    update,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.exc import DBAPIError, IntegrityError, InvalidRequestError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.ext.mutable import MutableDict
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    column_property,
    composite,
    mapped_column,
    reconstructor,
    relationship,
    sessionmaker,
)
from sqlalchemy.util import await_only

from sqla_jobqueue import (
    AsyncJobSession,
    Cancel,
    ConfigurationError,
    JobErrorsMixin,
    JobMixin,
    JobNotRunnable,
    JobQueue,
    JobSession,
    JobStateMixin,
    LeaseLost,
    Retry,
    Snooze,
    TransactionMisuse,
    fixed,
    lifecycle,
)
from sqla_jobqueue.execution import Ending, describe_error, run_claimed, run_in_one_transaction
from sqla_jobqueue.lifecycle import Verb
from sqla_jobqueue.status import JobStatus
from tests.helpers import driver_url, wait_until

FLAVOURS = ("sync", "psycopg", "asyncpg")
MODES = ("leased", "one_transaction")
numbers = itertools.count(1)


class Base(DeclarativeBase):
    pass


class Job(JobErrorsMixin, JobMixin, Base):
    __tablename__ = "jobs"


COLUMNS = [column.name for column in Job.__table__.c]  # and their attributes


class Effect(Base):
    """What a handler writes."""

    __tablename__ = "effects"
    id: Mapped[int] = mapped_column(primary_key=True)
    what: Mapped[str] = mapped_column(unique=True)


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]


class Bench:
    """A job, a handler, and one attempt at it."""

    def __init__(self, flavour, mode, control, **engine_options):
        self.flavour, self.mode, self.control = flavour, mode, control
        url = control.url.render_as_string(hide_password=False)
        self.is_async, self.leased = flavour != "sync", mode == "leased"
        if self.is_async:
            self.loop = asyncio.Runner()
            self.loop.get_loop()
            self.engine = create_async_engine(driver_url(url, flavour), **engine_options)
            self.sessions = async_sessionmaker(self.engine, class_=AsyncJobSession)
            self.sync_engine = self.engine.sync_engine
        else:
            self.sync_engine = self.engine = create_engine(url, **engine_options)
            self.sessions = sessionmaker(self.engine, class_=JobSession)
        self.queue = None
        self.kept = []
        """Sessions that handlers had."""

    def close(self):
        if self.is_async:
            self.loop.run(self.engine.dispose())
            self.loop.close()
        else:
            self.engine.dispose()

    # ----------------------------------------------------------------------------------------------------- the story

    def task(self, handler, model=Job, **options):
        """A queue of its own with one task, "work"."""
        self.queue = JobQueue(model, f"queue {next(numbers)}", one_transaction=not self.leased)
        options = {"backoff": fixed(timedelta(hours=1)), **options}
        return self.queue.task(name="work" if self.queue.has_kinds else None, **options)(handler)

    def handler(self, body, *, plain=False):
        """A handler of the flavour at hand; a plain body gets the session itself."""
        if not self.is_async:
            return body

        async def handler(session):
            return body(session) if plain else await session.run_sync(body)

        return handler

    def enqueue(self, **columns):
        table = self.queue.table
        values = {"queue": self.queue.name, "kind": "work", **columns}
        if not self.queue.has_kinds:
            del values["kind"]
        with self.control.begin() as connection:
            return connection.execute(insert(table).values(values).returning(table.c.id)).scalar_one()

    def claim(self, lease=timedelta(minutes=5), worker="A"):
        with self.control.begin() as connection:
            [row] = lifecycle.claim_rows(
                connection,
                self.queue.model,
                queue=self.queue.name,
                kinds=("work",) if self.queue.has_kinds else None,
                limit=1,
                locked_by=worker,
                lease=lease,
            )
        return row

    def run(self, body=None, *, plain=False, task=None, job=None, lost=None, record=True, sessions=None, **options):
        """Enqueue a job, attempt it, write what is left to write; the outcome."""
        task = task or self.task(self.handler(body, plain=plain), **options)
        self.enqueue(**(job or {}))
        return self.attempt(task, lost=lost, record=record, sessions=sessions)

    def attempt(self, task, *, lost=None, record=True, sessions=None, row=None):
        row = row or (self.claim() if self.leased else None)
        make = self.perform(task, row, lost, sessions or self.sessions)
        outcome = self.loop.run(make) if self.is_async else make()
        if record and outcome is not None:
            self.record(outcome)
        return outcome

    def perform(self, task, row, lost=None, sessions=None):
        kinds = ("work",) if self.queue.has_kinds else None
        sessions = sessions or self.sessions

        def body(session, invoke):
            if self.leased:
                return run_claimed(session, task, row, invoke, lost=lost)
            return run_in_one_transaction(session, self.queue, kinds, "A", invoke)

        def perform():
            with sessions() as session:
                self.kept.append(session)
                return body(session, lambda task, arguments: task.handler(session, **arguments))

        async def async_perform():
            async with sessions() as session:
                self.kept.append(session)

                async def limited(task, arguments):
                    async with asyncio.timeout(task.timeout.total_seconds() if task.timeout else None):
                        return await task.handler(session, **arguments)

                return await session.run_sync(body, lambda task, arguments: await_only(limited(task, arguments)))

        return async_perform() if self.is_async else perform

    def record(self, outcome):
        """As the worker does, on a connection of its own."""
        write = outcome.write
        if outcome.recorded or write is None:
            return
        with self.control.begin() as connection:
            if outcome.counted:
                assert lifecycle.record(connection, self.queue.model, [(outcome.fence, write)]) == {outcome.fence}
            else:
                lifecycle.count_failure(
                    connection,
                    self.queue.model,
                    outcome.fence,
                    delay=write.values.get("delay", timedelta(0)),
                    error=write.values["error"],
                    lethal=write.verb is Verb.FAIL,
                )

    # ---------------------------------------------------------------------------------------------- what came of it

    @property
    def row(self):
        table = self.queue.table
        wait = (table.c.run_at - func.clock_timestamp()).label("wait")
        with self.control.begin() as connection:
            return connection.execute(select(table, wait).where(table.c.queue == self.queue.name)).one()._mapping

    @property
    def effects(self):
        with self.control.begin() as connection:
            return connection.scalars(select(Effect.what).order_by(Effect.id)).all()

    def assert_done(self, *effects):
        row = self.row
        assert (row["status"], self.effects) == ("done", [*effects]), row["last_error"]
        assert (row["locked_until"], row["last_error"], row["attempts"]) == (None, None, 1)
        assert row["finished_at"] is not None

    def assert_failed(self, error, *effects):
        """One counted failure, due again later, and none of the handler's writes."""
        row = self.row
        assert (row["status"], self.effects) == ("pending", [*effects])
        assert error in row["last_error"]
        assert (row["attempts"], row["max_attempts"], row["locked_until"], row["finished_at"]) == (1, 3, None, None)
        assert timedelta(minutes=59) < row["wait"] <= timedelta(hours=1)
        [entry] = row["errors"]
        assert (entry["attempt"], entry["error"]) == (1, row["last_error"])
        assert self.sync_engine.pool.checkedout() == 0

    def terminate(self, pid):
        with self.control.begin() as connection:
            connection.execute(select(func.pg_terminate_backend(pid, 10_000)))


@pytest.fixture(scope="module")
def server_side(_databases):
    """One database for all of these tests: each has a queue of its own, and only the effects are deleted."""
    name = _databases.take()
    engine = create_engine(_databases.url(name))
    for base in (Base, RichBase, SingleBase, JoinedBase, DocumentBase, OwnBase):
        base.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(insert(Customer).values(id=1, name="dave"))
    yield engine
    engine.dispose()
    _databases.give_back(name)


@pytest.fixture
def control(server_side):
    with server_side.begin() as connection:
        for table in (Effect, Order, Job, YearlyExport, Document):
            connection.execute(delete(table.__table__))
    return server_side


@pytest.fixture
def make_bench(control):
    with contextlib.ExitStack() as stack:

        def make(flavour, mode, **options):
            bench = Bench(flavour, mode, control, **options)
            stack.callback(bench.close)
            return bench

        yield make


@pytest.fixture(params=[f"{mode}-{flavour}" for mode in MODES for flavour in FLAVOURS])
def bench(request, make_bench):
    mode, flavour = request.param.split("-")
    return make_bench(flavour, mode)


@pytest.fixture(params=MODES)
def sync_bench(request, make_bench):
    return make_bench("sync", request.param)


@pytest.fixture(params=[f"{mode}-{flavour}" for mode in MODES for flavour in FLAVOURS[1:]])
def async_bench(request, make_bench):
    mode, flavour = request.param.split("-")
    return make_bench(flavour, mode)


@pytest.fixture(params=FLAVOURS)
def leased(request, make_bench):
    return make_bench(request.param, "leased")


@pytest.fixture(params=FLAVOURS)
def locked(request, make_bench):
    """In one transaction."""
    return make_bench(request.param, "one_transaction")


def write(session, what="effect"):
    session.add(Effect(what=what))
    session.flush()


def write_twice(session):
    """By Core: the second is a duplicate."""
    session.execute(insert(Effect).values(what="effect"))
    session.execute(insert(Effect).values(what="effect"))


# ------------------------------------------------------------------------------------------------------- the endings


def test_success_commits_writes_and_outcome_together(bench):
    outcome = bench.run(write)
    assert (outcome.ending, outcome.recorded) == (Ending.DONE, True)
    bench.assert_done("effect")
    assert bench.row["locked_by"] == "A"


def test_what_is_still_unflushed_is_committed_too(bench):
    bench.run(lambda session: session.add(Effect(what="effect")))
    bench.assert_done("effect")


def test_a_handler_that_never_uses_the_session_leaves_its_success_to_be_written_with_others(bench):
    outcome = bench.run(lambda _session: "any value", record=False)
    assert (outcome.ending, outcome.recorded) == (Ending.DONE, not bench.leased)
    assert bench.row["status"] == ("running" if bench.leased else "done")
    bench.record(outcome)
    bench.assert_done()


def test_a_handler_that_only_enqueues_commits_the_job_with_its_own_end(bench):
    def body(session):
        session.enqueue(other)

    task = bench.task(bench.handler(body, plain=True))
    other = JobQueue(Job, f"queue {next(numbers)}").task(lambda _session: None)
    bench.enqueue()
    assert bench.attempt(task).recorded
    bench.assert_done()
    with bench.control.begin() as connection:
        assert connection.scalar(select(Job.status).where(Job.queue == other.queue.name)) == "pending"


def test_asking_for_a_connection_and_sending_nothing_is_fine(bench):
    bench.run(lambda session: session.connection() and None)
    bench.assert_done()


def test_an_exception_undoes_the_writes_and_counts(bench):
    def body(session):
        write(session)
        raise ValueError("no")

    outcome = bench.run(body)
    assert (outcome.ending, str(outcome.error)) == (Ending.FAILED, "no")
    assert outcome.recorded is not bench.leased
    bench.assert_failed("ValueError: no")


def test_a_system_exit_is_a_failure_too(bench):
    def body(session):
        write(session)
        raise SystemExit(3)

    bench.run(body)
    bench.assert_failed("SystemExit: 3")


@pytest.mark.parametrize("signal", [KeyboardInterrupt, asyncio.CancelledError])
def test_what_ends_the_caller_is_no_outcome(sync_bench, signal):
    def body(session):
        write(session)
        raise signal

    with pytest.raises(signal):
        sync_bench.run(body)
    assert (sync_bench.row["status"], sync_bench.effects) == ("running" if sync_bench.leased else "pending", [])
    assert sync_bench.sync_engine.pool.checkedout() == 0


def test_a_cancelled_task_leaves_no_trace_and_no_connection(async_bench):
    async def handler(session):
        await session.execute(insert(Effect).values(what="effect"))
        asyncio.current_task().cancel()
        await session.execute(select(1))

    task = async_bench.task(handler)
    async_bench.enqueue()
    with pytest.raises(asyncio.CancelledError):
        async_bench.attempt(task)
    assert (async_bench.row["status"], async_bench.effects) == ("running" if async_bench.leased else "pending", [])
    assert async_bench.sync_engine.pool.checkedout() == 0


def test_raised_retry_undoes_the_writes_and_counts(bench):
    def body(session):
        write(session)
        raise Retry("SMTP timeout", delay=timedelta(minutes=10))

    assert bench.run(body).ending is Ending.FAILED
    row = bench.row
    assert (row["status"], row["last_error"], row["attempts"], bench.effects) == ("pending", "SMTP timeout", 1, [])
    assert timedelta(minutes=9) < row["wait"] <= timedelta(minutes=10)


def test_raised_retry_without_a_delay_takes_the_backoff(bench):
    def body(session):
        raise Retry("later")

    bench.run(body)
    bench.assert_failed("later")


@pytest.mark.parametrize("returned", [False, True], ids=["raised", "returned"])
def test_snooze_costs_no_attempt(bench, returned):
    def body(session):
        write(session)
        if returned:
            return Snooze(timedelta(minutes=10))
        raise Snooze(timedelta(minutes=10))

    assert bench.run(body).ending is Ending.SNOOZED
    row = bench.row
    assert (row["status"], row["last_error"], bench.effects) == ("pending", None, ["effect"] * returned)
    assert (row["attempts"], row["max_attempts"], row["finished_at"]) == (1, 4, None)
    assert timedelta(minutes=9) < row["wait"] <= timedelta(minutes=10)


@pytest.mark.parametrize("returned", [False, True], ids=["raised", "returned"])
def test_cancel_ends_the_job(bench, returned):
    def body(session):
        write(session)
        if returned:
            return Cancel("not needed")
        raise Cancel("not needed")

    assert bench.run(body).ending is Ending.CANCELLED
    row = bench.row
    assert (row["status"], row["last_error"], bench.effects) == ("cancelled", "not needed", ["effect"] * returned)
    assert row["finished_at"] is not None


def test_a_snooze_returned_without_touching_the_session_counts_the_same(bench):
    bench.run(lambda _session: Snooze(timedelta(minutes=10)))
    assert (bench.row["status"], bench.row["max_attempts"]) == ("pending", 4)


def test_a_returned_retry_is_no_success(bench):
    def body(session):
        write(session)
        return Retry("later")

    bench.run(body)
    bench.assert_failed("TypeError: Retry is raised, not returned")


def test_a_coroutine_that_nobody_awaits_is_no_success(sync_bench):
    async def forgotten(session):
        pass  # pragma: no cover

    sync_bench.run(forgotten)
    sync_bench.assert_failed("the handler returned an awaitable")


def test_not_runnable_goes_to_the_dead_letter_at_once(bench):
    def body(session):
        write(session)
        raise JobNotRunnable("no such printer")

    bench.run(body)
    row = bench.row
    assert (row["status"], row["last_error"], row["attempts"]) == ("failed", "JobNotRunnable: no such printer", 1)
    assert (bench.effects, len(row["errors"])) == ([], 1)
    assert row["finished_at"] is not None


def order_handler(bench, annotation):
    def sync_handler(session, order: annotation):
        session.add(Effect(what=order.customer if order else "nobody"))

    async def async_handler(session, order: annotation):
        session.add(Effect(what=order.customer if order else "nobody"))

    return async_handler if bench.is_async else sync_handler


def test_entities_are_loaded_through_the_session(bench):
    with bench.control.begin() as connection:
        connection.execute(insert(Order).values(id=4, customer="dave"))
    bench.run(task=bench.task(order_handler(bench, Order)), job={"payload": {"order_id": 4}})
    bench.assert_done("dave")


def test_an_entity_that_is_gone_is_lethal_unless_optional(bench):
    bench.run(task=bench.task(order_handler(bench, Order)), job={"payload": {"order_id": 4}})
    row = bench.row
    assert (row["status"], row["attempts"], bench.effects) == ("failed", 1, [])
    assert row["last_error"].startswith("EntityGone: work: ")
    bench.run(task=bench.task(order_handler(bench, Order | None)), job={"payload": {"order_id": 4}})
    bench.assert_done("nobody")


@pytest.mark.parametrize(
    "payload", [None, "text", [1], {}, {"order_id": "x"}, {"order_id": None}, {"order_id": 4, "more": 1}, {"order": 4}]
)
def test_a_payload_that_cannot_be_read_is_lethal_and_counted(make_bench, payload):
    for flavour, mode in (("sync", "leased"), ("asyncpg", "one_transaction")):
        bench = make_bench(flavour, mode)
        job = {"payload": payload if payload is not None else literal_column("'null'::jsonb")}
        bench.run(task=bench.task(order_handler(bench, Order)), job=job)
        row = bench.row
        assert (row["status"], row["attempts"], bench.effects) == ("failed", 1, [])
        assert row["last_error"].startswith("PayloadNotReadable: work: ")


def broken_backoff(_attempt):
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("backoff", "at_least", "at_most"),
    [
        (broken_backoff, timedelta(minutes=4), timedelta(minutes=5)),  # the lease
        (lambda _attempt: "soon", timedelta(minutes=4), timedelta(minutes=5)),
        (lambda _attempt: timedelta(hours=-1), timedelta(minutes=-1), timedelta(0)),
        (lambda _attempt: timedelta.max, timedelta(days=36_500), timedelta(days=36_600)),
    ],
    ids=["raises", "no timedelta", "negative", "endless"],
)
def test_a_bad_backoff_does_not_lose_the_failure(bench, backoff, at_least, at_most):
    def body(session):
        write(session)
        raise ValueError("no")

    bench.run(body, backoff=backoff)
    row = bench.row
    assert (row["status"], row["last_error"], row["attempts"]) == ("pending", "ValueError: no", 1)
    assert at_least < row["wait"] <= at_most
    assert bench.effects == []


def test_the_backoff_is_asked_with_the_number_of_the_attempt(bench):
    asked = []

    def backoff(attempt):
        asked.append(attempt)
        return timedelta(0)

    def body(session):
        raise ValueError("no")

    task = bench.task(bench.handler(body), backoff=backoff)
    bench.enqueue()
    for _ in range(3):
        bench.attempt(task)
    assert (bench.row["status"], asked[:2]) == ("failed", [1, 2])


def test_the_last_attempt_that_fails_is_the_dead_letter(bench):
    def body(session):
        write(session)
        raise ValueError("no")

    outcome = bench.run(body, job={"attempts": 2})
    row = bench.row
    assert outcome.is_dead
    assert (row["status"], row["attempts"], row["last_error"]) == ("failed", 3, "ValueError: no")
    assert (row["locked_until"], bench.effects) == (None, [])
    assert row["finished_at"] is not None


def test_an_attempt_beyond_a_lowered_maximum_is_the_last(bench):
    def body(session):
        raise ValueError("no")

    bench.run(body, job={"attempts": 7, "max_attempts": 3})
    assert (bench.row["status"], bench.row["attempts"]) == ("failed", 8)


@pytest.mark.parametrize(
    ("raised", "stored"),
    [
        (Cancel(None), ("cancelled", "None")),
        (Retry(ValueError("no")), ("pending", "no")),
        (Retry("no", delay="soon"), ("pending", "no")),
        (Retry("no", delay=timedelta.max), ("pending", "no")),
        (Snooze(timedelta.max), ("pending", None)),
    ],
    ids=repr,
)
def test_odd_signals_are_recorded_all_the_same(bench, raised, stored):
    def body(session):
        write(session)
        raise raised

    bench.run(body)
    assert (bench.row["status"], bench.row["last_error"]) == stored
    assert bench.effects == []


# ----------------------------------------------------------------------------------------------------------- timeouts


def test_an_async_handler_is_cancelled_at_its_timeout(async_bench):
    seen = []

    async def handler(session):
        await session.execute(insert(Effect).values(what="effect"))
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append(session.job_is_lost)
            raise

    async_bench.run(task=async_bench.task(handler, timeout=timedelta(seconds=0.05)))
    assert seen == [True]
    async_bench.assert_failed("AttemptTimeout: the attempt took longer than its timeout of 0:00:00.05")


def test_a_timeout_in_the_middle_of_a_statement_is_counted(async_bench):
    async def handler(session):
        await session.execute(insert(Effect).values(what="effect"))
        await session.execute(select(func.pg_sleep(60)))

    async_bench.run(task=async_bench.task(handler, timeout=timedelta(seconds=0.1)))
    async_bench.assert_failed("AttemptTimeout")


def test_a_timeout_that_the_handler_swallows_is_no_success(async_bench):
    async def handler(session):
        await session.execute(insert(Effect).values(what="effect"))
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    async_bench.run(task=async_bench.task(handler, timeout=timedelta(seconds=0.05)))
    async_bench.assert_failed("AttemptTimeout")


def test_a_sync_handler_is_told_at_its_timeout_and_its_result_refused(sync_bench):
    def body(session):
        assert not session.job_is_lost
        write(session)
        wait_until(lambda: session.job_is_lost)

    sync_bench.run(body, timeout=timedelta(seconds=0.1))
    sync_bench.assert_failed("AttemptTimeout: the attempt took longer than its timeout of 0:00:00.1")


def test_raise_if_lost_after_the_timeout_is_the_timeout(sync_bench):
    def body(session):
        write(session)
        while True:
            session.raise_if_lost()

    sync_bench.run(body, timeout=timedelta(seconds=0.05))
    sync_bench.assert_failed("AttemptTimeout")


def test_a_signal_raised_after_the_timeout_is_heeded(sync_bench):
    def body(session):
        wait_until(lambda: session.job_is_lost)
        raise Snooze(timedelta(minutes=1))

    assert sync_bench.run(body, timeout=timedelta(seconds=0.05)).ending is Ending.SNOOZED
    assert sync_bench.row["max_attempts"] == 4


# --------------------------------------------------------------------------------------------------------- lost leases


@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
def test_a_lost_lease_is_told_and_nothing_is_written(leased, raises):
    lost = threading.Event()

    def body(session):
        write(session)
        assert not session.job_is_lost
        lost.set()
        assert session.job_is_lost
        if raises:
            raise ValueError("no")

    outcome = leased.run(body, lost=lost)
    assert (outcome.ending, outcome.write) == (Ending.LOST, None)
    assert (leased.row["status"], leased.row["last_error"], leased.effects) == ("running", None, [])


def test_raise_if_lost_stops_the_handler(leased):
    lost = threading.Event()

    def body(session):
        lost.set()
        session.raise_if_lost()
        raise AssertionError

    outcome = leased.run(body, lost=lost)
    assert isinstance(outcome.error, LeaseLost)


def test_a_row_that_is_locked_cannot_be_lost(locked):
    """A handler that says so (here by ending its job itself, under the wrong status) has failed; once, not for ever."""

    def body(session):
        write(session)
        lifecycle.complete(session, session.info["sqla_jobqueue.current"].job)

    locked.run(body)
    locked.assert_failed("LeaseLost: attempt 1 does not own job")


# ---------------------------------------------------------------------------------------------------------- the guard


def swallow(error=IntegrityError):
    return contextlib.suppress(error)


def swallowed_by_core(session):
    with swallow():
        write_twice(session)


def swallowed_by_flush(session):
    write(session)
    with swallow():
        write(session)


def swallowed_by_connection(session):
    connection = session.connection()
    connection.execute(insert(Effect).values(what="effect"))
    with swallow():
        connection.execute(insert(Effect).values(what="effect"))


@pytest.mark.parametrize("body", [swallowed_by_core, swallowed_by_flush, swallowed_by_connection])
def test_a_swallowed_database_error_is_a_failure_with_the_original_error(bench, body):
    outcome = bench.run(body)
    assert isinstance(outcome.error, TransactionMisuse)
    bench.assert_failed("TransactionMisuse: the handler swallowed a database error (UniqueViolation")
    assert "duplicate key value violates unique constraint" in bench.row["last_error"]
    assert "begin_nested()" in bench.row["last_error"]
    assert bench.row["last_error"].count("\n") == 0


def test_a_swallowed_error_inside_begin_nested_is_fine(bench):
    def body(session):
        write(session, "outer")
        for _ in range(2):
            with swallow(), session.begin_nested():
                session.execute(insert(Effect).values(what="inner"))
                session.execute(insert(Effect).values(what="outer"))
            with swallow(), session.begin_nested():
                write(session, "outer")
        with session.begin_nested():
            write(session, "last")

    bench.run(body)
    bench.assert_done("outer", "last")


def test_a_savepoint_left_open_is_a_failure(bench):
    def body(session):
        write(session, "outer")
        session.begin_nested()
        write(session, "inner")

    bench.run(body)
    bench.assert_failed("TransactionMisuse: the handler left a savepoint open")


def test_an_error_with_a_savepoint_left_open_is_that_error(bench):
    def body(session):
        write(session, "outer")
        session.begin_nested()
        write(session, "inner")
        raise ValueError("no")

    bench.run(body)
    bench.assert_failed("ValueError: no")


def committing(session):
    write(session)
    session.commit()


def committing_untouched(session):
    session.commit()


def committing_quietly(session):
    write(session)
    with contextlib.suppress(TransactionMisuse):
        session.commit()


def committing_quietly_and_going_on(session):
    committing_quietly(session)
    with contextlib.suppress(TransactionMisuse, InvalidRequestError, DBAPIError):
        write(session, "more")


def committing_the_connection(session):
    write(session)
    session.connection().commit()


def committing_the_connection_quietly(session):
    write(session)
    with contextlib.suppress(TransactionMisuse):
        session.connection().commit()


def committing_through_an_own_savepoint(session):
    session.begin_nested()
    write(session)
    session.commit()


def committing_the_transaction_object(session):
    write(session)
    session.get_transaction().commit()


@pytest.mark.parametrize(
    "body",
    [
        committing,
        committing_untouched,
        committing_quietly,
        committing_quietly_and_going_on,
        committing_the_connection,
        committing_the_connection_quietly,
        committing_through_an_own_savepoint,
        committing_the_transaction_object,
    ],
)
def test_a_commit_by_the_handler_is_refused(bench, body):
    bench.run(body)
    bench.assert_failed("TransactionMisuse: a handler must not commit its session")
    assert "with session.begin_nested():" in bench.row["last_error"]


def test_an_awaited_commit_is_refused_in_the_handler_itself(async_bench):
    seen = []

    async def handler(session):
        session.add(Effect(what="effect"))
        try:
            await session.commit()
        except TransactionMisuse as error:
            seen.append(str(error))

    async_bench.run(task=async_bench.task(handler))
    assert "begin_nested()" in seen[0]
    async_bench.assert_failed("TransactionMisuse")


def rolling_back(session):
    write(session)
    session.rollback()


def rolling_back_and_going_on(session):
    write(session)
    session.rollback()
    write(session, "more")


def rolling_back_untouched(session):
    session.rollback()


def rolling_back_the_connection(session):
    write(session)
    session.connection().rollback()


def closing(session):
    write(session)
    session.close()


def closing_and_going_on(session):
    write(session)
    session.close()
    write(session, "more")


def closing_by_context(session):
    with session:
        write(session)


def closing_the_connection(session):
    write(session)
    session.connection().close()


def rolling_back_after_an_error(session):
    try:
        write_twice(session)
    except IntegrityError:
        session.rollback()
    write(session, "more")


@pytest.mark.parametrize(
    "body",
    [
        rolling_back,
        rolling_back_and_going_on,
        rolling_back_untouched,
        rolling_back_the_connection,
        closing,
        closing_and_going_on,
        closing_by_context,
        closing_the_connection,
        rolling_back_after_an_error,
    ],
)
def test_a_rollback_or_close_by_the_handler_is_a_failure(bench, body):
    bench.run(body)
    bench.assert_failed("TransactionMisuse: a handler must not roll back")
    assert "with session.begin_nested():" in bench.row["last_error"]


@pytest.mark.parametrize("raises", [Snooze(timedelta(hours=1)), Cancel(), Retry("later"), ValueError("no")], ids=repr)
def test_a_rollback_before_an_error_is_that_error_and_before_a_signal_a_failure(bench, raises):
    """In one transaction the claim is gone with it, so there is nothing to snooze or cancel."""

    def body(session):
        write(session)
        session.rollback()
        raise raises

    bench.run(body)
    if isinstance(raises, ValueError):
        bench.assert_failed("ValueError: no")
    elif isinstance(raises, Retry):
        bench.assert_failed("later")
    elif not bench.leased:
        bench.assert_failed("TransactionMisuse: a handler must not roll back")
    else:
        assert bench.row["status"] == ("cancelled" if isinstance(raises, Cancel) else "pending")
    assert bench.effects == []


@pytest.mark.parametrize(
    ("statement", "way"),
    [
        ("COMMIT", "session"),
        (" /* now */ commit;", "connection"),
        ("-- now\nEND", "driver_sql"),
        ("ROLLBACK", "driver_sql"),
        ("abort", "session"),
        ("ROLLBACK WORK", "connection"),
    ],
)
def test_a_transaction_ended_by_a_statement_is_refused(bench, statement, way):
    def body(session):
        write(session)
        if way == "session":
            session.execute(text(statement))
        elif way == "connection":
            session.connection().execute(text(statement))
        else:
            with contextlib.suppress(TransactionMisuse):
                session.connection().exec_driver_sql(statement)
            with contextlib.suppress(DBAPIError):
                session.execute(insert(Effect).values(what="more"))

    bench.run(body)
    bench.assert_failed("TransactionMisuse: a handler must not end its session's transaction by a statement")
    assert "with session.begin_nested():" in bench.row["last_error"]


def test_savepoints_by_statement_are_allowed(bench):
    def body(session):
        write(session, "outer")
        session.execute(text("SAVEPOINT mine"))
        write(session, "inner")
        session.execute(text("ROLLBACK TO SAVEPOINT mine"))
        session.execute(text("rollback transaction to mine"))
        session.execute(text("RELEASE mine"))

    bench.run(body)
    bench.assert_done("outer")


def test_a_commit_past_sqlalchemy_is_no_success(bench):
    """The handler's writes are then its own affair, but the job must not look done."""

    def body(session):
        write(session)
        raw = session.connection().connection.driver_connection
        if bench.flavour == "sync":
            raw.execute("COMMIT")
        else:
            await_only(raw.execute("COMMIT"))

    bench.run(body)
    bench.assert_failed("TransactionMisuse: a handler must not end the transaction", "effect")


def test_a_thread_that_outlives_its_handler_gets_an_error(sync_bench):
    over = threading.Event()
    seen = []

    def stray(session):
        assert over.wait(20)
        try:
            session.execute(insert(Effect).values(what="stray"))
        except TransactionMisuse as error:
            seen.append(str(error))

    def body(session):
        write(session)
        threading.Thread(target=stray, args=(session,)).start()

    sync_bench.run(body)
    over.set()
    wait_until(lambda: seen)
    assert "a thread or task that the handler started still uses its session" in seen[0]
    sync_bench.assert_done("effect")
    assert sync_bench.sync_engine.pool.checkedout() == 0


def test_a_task_that_outlives_its_handler_gets_an_error(async_bench):
    strays = []

    async def stray(session, over):
        await over.wait()
        await session.execute(insert(Effect).values(what="stray"))

    async def handler(session):
        await session.run_sync(write)
        over = asyncio.Event()
        strays.append((asyncio.create_task(stray(session, over)), over))

    async def story(perform):
        outcome = await perform
        [(task, over)] = strays
        over.set()
        with pytest.raises(TransactionMisuse, match="a thread or task that the handler started"):
            await task
        return outcome

    task = async_bench.task(handler)
    async_bench.enqueue()
    async_bench.loop.run(story(async_bench.perform(task, async_bench.claim() if async_bench.leased else None)))
    async_bench.assert_done("effect")
    assert async_bench.sync_engine.pool.checkedout() == 0


def test_the_session_refuses_work_after_the_job_but_may_be_closed(bench):
    bench.run(write)
    [session] = bench.kept
    session = session.sync_session if bench.is_async else session

    def afterwards():
        session.commit()  # as a context manager of the application's may do
        with pytest.raises(TransactionMisuse, match="the job has ended"):
            session.execute(select(1))
        session.rollback()
        session.close()

    async def async_afterwards():
        await bench.kept[0].run_sync(lambda _session: afterwards())

    bench.loop.run(async_afterwards()) if bench.is_async else afterwards()
    assert bench.sync_engine.pool.checkedout() == 0


# -------------------------------------------------------------------------------------------- connections that are lost


def killed(session, bench):
    write(session)
    bench.terminate(session.scalar(select(func.pg_backend_pid())))


def killed_and_raising(session, bench):
    killed(session, bench)
    session.execute(select(1))


def killed_and_swallowing(session, bench):
    killed(session, bench)
    with contextlib.suppress(DBAPIError):
        session.execute(select(1))


def killed_and_going_on(session, bench):
    killed_and_swallowing(session, bench)
    session.rollback()
    write(session, "more")


@pytest.mark.parametrize("body", [killed, killed_and_raising, killed_and_swallowing, killed_and_going_on])
def test_a_connection_killed_in_the_handler_is_a_counted_failure(bench, body):
    outcome = bench.run(lambda session: body(session, bench))
    assert outcome.ending is Ending.FAILED
    assert outcome.recorded is not bench.leased  # counted before the next claim, on the application's own session
    bench.assert_failed("")


def test_a_killed_connection_and_a_lethal_error_is_the_dead_letter(bench):
    def body(session):
        killed(session, bench)
        raise JobNotRunnable("no")

    bench.run(body)
    row = bench.row
    assert (row["status"], row["attempts"], row["last_error"], bench.effects) == ("failed", 1, "JobNotRunnable: no", [])


def test_a_job_that_kills_its_connection_every_time_runs_out_of_attempts(bench):
    task = bench.task(bench.handler(lambda session: killed_and_raising(session, bench)), backoff=fixed(timedelta(0)))
    bench.enqueue()
    for _ in range(3):
        bench.attempt(task)
    assert (bench.row["status"], bench.row["attempts"], len(bench.row["errors"])) == ("failed", 3, 3)
    assert bench.effects == []


def test_a_failure_that_cannot_be_counted_at_once_is_left_to_the_worker(locked):
    """Here, since the second connection is refused."""

    def body(session):
        killed(session, locked)
        event.listen(locked.sync_engine, "do_connect", refuse)
        session.execute(select(1))

    def refuse(*_args):
        raise ConnectionRefusedError

    outcome = locked.run(body, record=False)
    assert (outcome.ending, outcome.recorded, outcome.counted) == (Ending.FAILED, False, False)
    assert (locked.row["status"], locked.row["attempts"]) == ("pending", 0)
    locked.record(outcome)
    locked.assert_failed("")


def test_a_failure_is_counted_though_another_worker_has_the_job_already(locked):
    """It waits for the other one's transaction: were it given up, a job that kills its connection would go on for ever."""
    other = locked.control.connect()

    def body(session):
        killed(session, locked)
        [row] = lifecycle.claim_rows(
            other, Job, queue=locked.queue.name, kinds=("work",), limit=1, locked_by="B", lease=None
        )
        assert row["attempts"] == 1
        threading.Thread(target=let_go).start()
        session.execute(select(1))

    def let_go():
        wait_until(lambda: blocked(locked.control))
        other.rollback()

    outcome = locked.run(body)
    other.close()
    assert outcome.recorded
    locked.assert_failed("")


def blocked(engine):
    with engine.begin() as connection:
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        return connection.exec_driver_sql(waits).scalar()


def test_a_job_that_moved_on_is_not_counted(locked):
    def body(session):
        killed(session, locked)
        with locked.control.begin() as connection:  # another worker, quicker
            lifecycle.claim_rows(
                connection, Job, queue=locked.queue.name, kinds=("work",), limit=1, locked_by="B", lease=None
            )
        session.execute(select(1))

    outcome = locked.run(body)
    assert (outcome.ending, outcome.recorded, outcome.write) == (Ending.LOST, False, None)
    assert (locked.row["status"], locked.row["attempts"], locked.row["locked_by"]) == ("done", 1, "B")
    assert locked.effects == []


@pytest.mark.parametrize("way", ["session", "driver"])
def test_another_workers_success_stands_after_a_rollback_by_the_handler(locked, way):
    """It gives the row away, attempt number included: whoever claims it next has the same one."""

    def body(session):
        write(session, "stale")
        if way == "session":
            session.rollback()
        elif locked.flavour == "sync":
            session.connection().connection.driver_connection.execute("ROLLBACK")
        else:
            await_only(session.connection().connection.driver_connection.execute("ROLLBACK"))
        with locked.control.begin() as connection:  # another worker, quicker
            [row] = lifecycle.claim_rows(
                connection, Job, queue=locked.queue.name, kinds=("work",), limit=1, locked_by="B", lease=None
            )
            assert row["attempts"] == 1
            connection.execute(insert(Effect).values(what="fresh"))

    outcome = locked.run(body)
    assert (locked.row["status"], locked.row["attempts"], locked.row["locked_by"]) == ("done", 1, "B")
    assert locked.effects == ["fresh"]
    assert (outcome.ending, outcome.recorded, outcome.write) == (Ending.LOST, False, None)
    assert isinstance(outcome.error, LeaseLost)
    assert isinstance(outcome.error.__cause__, TransactionMisuse)


def test_no_connection_before_the_handler_is_not_the_jobs_fault(make_bench):
    for flavour, mode in itertools.product(FLAVOURS, MODES):
        bench = make_bench(flavour, mode, pool_size=1, max_overflow=0, pool_timeout=0.05)
        task = bench.task(order_handler(bench, Order))
        bench.enqueue(payload={"order_id": 4})
        bench.run(write, job={"attempts": 0})  # the isolation level is known from here on
        bench.queue = task.queue
        with contextlib.ExitStack() as stack:
            if bench.is_async:
                holder = bench.loop.run(bench.engine.connect().__aenter__())
                stack.callback(lambda holder=holder, bench=bench: bench.loop.run(holder.close()))
            else:
                stack.enter_context(bench.engine.connect())
            if not bench.leased:
                with pytest.raises(PoolTimeoutError):
                    bench.attempt(task)
                assert (bench.row["status"], bench.row["attempts"]) == ("pending", 0)
            else:
                outcome = bench.attempt(task)
                assert outcome.ending is Ending.RELEASED
                row = bench.row
                assert (row["status"], row["attempts"], row["max_attempts"], row["last_error"]) == (
                    "pending",
                    1,
                    4,
                    None,
                )
                assert row["wait"] > timedelta(minutes=59)
        with bench.control.begin() as connection:
            connection.execute(delete(Effect))


# ---------------------------------------------------------------------------------------------------- texts of errors


def test_last_error_is_storable_and_bounded(bench):
    def body(session):
        raise ValueError("a\x00b\ud800c" + "x" * 5000)

    bench.run(body)
    stored = bench.row["last_error"]
    assert stored.startswith("ValueError: a\ufffdb?c" + "x" * 100)
    assert (len(stored), stored[-1]) == (2000, "\u2026")
    assert bench.row["errors"][0]["error"] == stored


def duplicate(session):
    session.execute(insert(Effect).values(what="secret"))
    session.execute(insert(Effect).values(what="secret"))


def bad_number(session):
    session.execute(select(literal_column("1")).where(literal_column("'secret'::text::int") == 1))


def wrong_type(session):
    session.execute(insert(Order).values(id=5, customer="x"))
    session.execute(update(Order).values(id="secret"))


def flushed(session):
    session.add_all([Effect(what="secret"), Effect(what="secret")])
    session.flush()


def swallowed_duplicate(session):
    with swallow():
        duplicate(session)


def in_a_group(session):
    try:
        duplicate(session)
    except IntegrityError as error:
        raise ExceptionGroup("several", [error, ValueError("plain")]) from None


@pytest.mark.parametrize("body", [duplicate, bad_number, wrong_type, flushed, swallowed_duplicate, in_a_group])
def test_last_error_holds_no_values_of_statements(bench, body):
    bench.run(body)
    stored = bench.row["last_error"]
    assert "secret" not in stored
    assert "[SQL:" not in stored
    assert "DETAIL" not in stored
    assert len(stored) > 20  # and yet says something
    bench.assert_failed("")


def test_errors_of_statements_are_named_by_the_driver(bench):
    bench.run(duplicate)
    assert bench.row["last_error"] in {
        'UniqueViolation: duplicate key value violates unique constraint "effects_what_key"',
        'UniqueViolationError: duplicate key value violates unique constraint "effects_what_key"',
    }


def test_an_exception_group_tells_what_is_inside():
    group = ExceptionGroup("several", [ValueError(n) for n in range(5)])
    assert (
        describe_error(group)
        == "ExceptionGroup: several (5 sub-exceptions): ValueError: 0; ValueError: 1; ValueError: 2; ..."
    )


def test_an_error_without_a_text_or_with_a_broken_one_is_still_told():
    class Silent(Exception):
        pass

    class Broken(Exception):
        def __str__(self):
            raise ZeroDivisionError

    assert describe_error(Silent()).endswith("Silent")
    assert describe_error(Broken()).endswith("Broken: (its message could not be made)")


def test_the_history_of_errors_keeps_the_last_twenty(bench):
    failing = []

    def body(session):
        failing.append(1)
        raise ValueError(f"number {len(failing)}")

    task = bench.task(bench.handler(body), backoff=fixed(timedelta(0)))
    bench.enqueue(max_attempts=100)
    for _ in range(23):
        bench.attempt(task)
    errors = bench.row["errors"]
    assert [entry["attempt"] for entry in errors] == [*range(4, 24)]
    assert errors[-1]["error"] == "ValueError: number 23"
    assert all(set(entry) == {"attempt", "at", "error"} for entry in errors)


# -------------------------------------------------------------------------------------------------- the job, attached


class Seen:
    """Statements that an engine sent."""

    def __init__(self, engine):
        self.statements = []
        event.listen(engine, "before_cursor_execute", self.note)

    def note(self, _connection, _cursor, statement, *_rest):
        self.statements.append(" ".join(statement.split()))

    def verbs(self):
        return [statement.split()[0] for statement in self.statements]


def test_every_attribute_is_readable_and_costs_no_select(bench):
    read = {}

    def body(session):
        job = session.job
        for name in COLUMNS:
            read[name] = getattr(job, name)

    task = bench.task(bench.handler(body, plain=True))
    bench.enqueue(payload={}, meta={"tenant": 7}, priority=3)
    row = bench.claim() if bench.leased else None
    seen = Seen(bench.sync_engine)
    bench.attempt(task, row=row)
    assert (read["kind"], read["queue"], read["meta"], read["priority"]) == ("work", bench.queue.name, {"tenant": 7}, 3)
    assert (read["attempts"], read["locked_by"], read["errors"]) == (1, "A", [])
    assert len(read) == len(Job.__table__.c)
    assert seen.verbs() == ([] if bench.leased else ["WITH"])  # the claim
    bench.assert_done()


def test_the_statements_of_an_attempt(bench):
    """One claim or one fenced outcome besides the handler's own, and no probe where nothing went wrong."""
    task = bench.task(bench.handler(write))
    bench.enqueue()
    row = bench.claim() if bench.leased else None
    bench.run(lambda _session: None)  # the isolation level is asked once per engine
    bench.queue = task.queue
    seen = Seen(bench.sync_engine)
    bench.attempt(task, row=row)
    assert seen.verbs() == (["INSERT", "UPDATE"] if bench.leased else ["WITH", "SAVEPOINT", "INSERT", "RELEASE"])


@pytest.mark.parametrize("options", [{"pool_pre_ping": True}, {"pool_size": 1, "max_overflow": 0, "pool_timeout": 1}])
def test_pool_settings_do_not_matter(make_bench, options):
    for flavour, mode in itertools.product(FLAVOURS, MODES):
        bench = make_bench(flavour, mode, **options)
        read = []
        bench.run(lambda session, read=read: read.append(session.job.created_at), plain=True)
        bench.run(lambda session, what=f"{flavour} {mode}": write(session, what))
        assert bench.row["status"] == "done"
        assert f"{flavour} {mode}" in bench.effects
        assert read


def test_the_job_is_the_identity_that_queries_return(bench):
    def body(session):
        job = session.info["sqla_jobqueue.current"].job
        assert session.get(Job, job.id) is job
        assert session.scalars(select(Job).where(Job.id == job.id)).one() is job

    bench.run(body)
    bench.assert_done()


def test_the_job_may_be_written_and_read_on(bench):
    def body(session):
        job = session.job
        job.meta = {"step": 1}
        return job

    def read(session):
        for name in COLUMNS:
            getattr(session.job, name)

    async def flush(session):
        body(session)
        await session.flush()
        read(session)

    def sync_flush(session):
        body(session)
        session.flush()
        read(session)

    bench.run(task=bench.task(flush if bench.is_async else sync_flush))
    assert (bench.row["status"], bench.row["meta"]) == ("done", {"step": 1})
    bench.run(lambda session: body(session) and None, plain=True)  # unflushed
    assert (bench.row["status"], bench.row["meta"]) == ("done", {"step": 1})


def test_a_write_to_the_job_is_undone_with_a_failure(bench):
    def body(session):
        session.info["sqla_jobqueue.current"].job.meta = {"step": 1}
        session.flush()
        raise ValueError("no")

    bench.run(body)
    bench.assert_failed("ValueError: no")
    assert bench.row["meta"] == {}


def test_a_write_to_a_job_that_is_somebody_elses_is_refused(leased):
    def body(session):
        with leased.control.begin() as connection:  # reclaimed, and claimed by another worker
            connection.execute(update(Job).values(attempts=Job.attempts + 1))
        session.info["sqla_jobqueue.current"].job.meta = {"step": 1}
        write(session)

    outcome = leased.run(body, record=False)
    assert outcome.ending is Ending.FAILED
    assert "StaleDataError" in outcome.write.values["error"]
    assert (leased.row["meta"], leased.effects) == ({}, [])
    with leased.control.begin() as connection:
        assert lifecycle.record(connection, Job, [(outcome.fence, outcome.write)]) == set()


# a model with everything that a load would bring


class RichBase(DeclarativeBase):
    pass


class Customer(RichBase):
    __tablename__ = "customers"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]


class Point:
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __composite_values__(self):
        return self.x, self.y

    def __eq__(self, other):
        return (self.x, self.y) == (other.x, other.y)

    __hash__ = None


class RichJob(JobMixin, RichBase):
    __tablename__ = "rich_jobs"
    renamed: Mapped[str | None] = mapped_column("other_name", Text)
    rare: Mapped[str | None] = mapped_column(Text, deferred=True)
    tags: Mapped[dict | None] = mapped_column(MutableDict.as_mutable(JSONB))
    x: Mapped[int | None] = mapped_column(Integer)
    y: Mapped[int | None] = mapped_column(Integer)
    point: Mapped[Point] = composite("x", "y")
    customer_id: Mapped[int | None] = mapped_column(ForeignKey("customers.id"))
    customer: Mapped[Customer | None] = relationship(lazy="joined")
    lazily: Mapped[Customer | None] = relationship(viewonly=True)

    @reconstructor
    def ready(self):
        self.from_the_database = True


RichJob.shouted = column_property(func.upper(RichJob.renamed))


def test_a_job_with_all_that_a_mapping_may_have(bench):
    read = {}

    def body(session):
        job = session.job
        read.update(
            renamed=job.renamed,
            rare=job.rare,
            point=job.point,
            customer=job.customer.name,
            shouted=job.shouted,
            ready=job.from_the_database,
        )
        job.tags["seen"] = True

    columns = {"other_name": "a", "rare": "b", "x": 1, "y": 2, "customer_id": 1, "tags": {}}
    bench.run(body, plain=True, model=RichJob, job=columns)
    assert read == {
        "renamed": "a",
        "rare": "b",
        "point": Point(1, 2),
        "customer": "dave",
        "shouted": "A",
        "ready": True,
    }
    assert (bench.row["status"], bench.row["tags"]) == ("done", {"seen": True})


# class hierarchies


class SingleBase(DeclarativeBase):
    pass


class Single(JobMixin, SingleBase):
    __tablename__ = "single"
    __mapper_args__: ClassVar = {"polymorphic_on": "kind", "polymorphic_identity": "base"}


class SingleMail(Single):
    __mapper_args__: ClassVar = {"polymorphic_identity": "work"}
    address: Mapped[str | None]


class JoinedBase(DeclarativeBase):
    pass


class Joined(JobMixin, JoinedBase):
    __tablename__ = "joined"
    __mapper_args__: ClassVar = {"polymorphic_on": "kind", "polymorphic_identity": "base"}


class JoinedMail(Joined):
    __tablename__ = "joined_mail"
    __mapper_args__: ClassVar = {"polymorphic_identity": "work"}
    id: Mapped[int] = mapped_column(ForeignKey("joined.id"), primary_key=True)
    address: Mapped[str]


class DocumentBase(DeclarativeBase):
    pass


class Document(DocumentBase):
    __tablename__ = "documents"
    __mapper_args__: ClassVar = {"polymorphic_on": "sort", "polymorphic_identity": "document"}
    id: Mapped[int] = mapped_column(primary_key=True)
    sort: Mapped[str]
    title: Mapped[str]


class Export(JobStateMixin, Document):
    """A part of a hierarchy that is no queue; its key has another name than the root's."""

    __tablename__ = "exports"
    __mapper_args__: ClassVar = {"polymorphic_identity": "export"}
    document_id: Mapped[int] = mapped_column(ForeignKey("documents.id"), primary_key=True)


class YearlyExport(Export):
    __mapper_args__: ClassVar = {"polymorphic_identity": "yearly"}
    year: Mapped[int | None]


def test_a_single_table_subclass_by_kind(bench):
    seen = []
    bench.run(
        lambda session: seen.append((type(session.job), session.job.address)),
        plain=True,
        model=Single,
        job={"address": "a@b"},
    )
    assert (seen, bench.row["status"]) == ([(SingleMail, "a@b")], "done")


def test_a_joined_subclass_by_kind(bench):
    seen = []

    def body(session):
        seen.append((type(session.job), session.job.address))
        session.job.address = "c@d"

    task = bench.task(bench.handler(body, plain=True), model=Joined)
    with bench.control.begin() as connection:
        connection.execute(insert(JoinedMail.__table__).values(id=bench.enqueue(), address="a@b"))
    bench.attempt(task)
    assert (seen, bench.row["status"]) == ([(JoinedMail, "a@b")], "done")
    with bench.control.begin() as connection:
        assert connection.scalar(select(JoinedMail.__table__.c.address)) == "c@d"


@pytest.mark.parametrize("sort", [Export, YearlyExport])
def test_a_queue_in_the_middle_of_a_hierarchy(bench, sort):
    seen = []

    def body(session):
        job = session.job
        seen.append((type(job), job.title, job.status, job.document_id == job.id))

    task = bench.task(bench.handler(body, plain=True), model=Export)
    with sessionmaker(bench.control).begin() as session:
        session.add(Document(title="first"))
        session.flush()
        session.add(sort(title="all of it", queue=bench.queue.name))
    bench.attempt(task)
    assert seen == [(sort, "all of it", "running" if bench.leased else "done", True)]
    assert bench.row["status"] == "done"


class OwnBase(DeclarativeBase):
    pass


class Report(JobStateMixin, OwnBase):
    """A row that is the job itself."""

    __tablename__ = "reports"
    id: Mapped[int] = mapped_column(primary_key=True)
    title: Mapped[str]
    size: Mapped[int | None]


# --------------------------------------------------------------------------------------------------- isolation levels


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("touches_job", [False, True], ids=["", "touching the job"])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_renewal_during_the_handler_does_not_spoil_the_end(make_bench, flavour, level, touches_job):
    bench = make_bench(flavour, "leased", isolation_level=level)
    renewed = []

    def body(session):
        write(session)
        job = session.info["sqla_jobqueue.current"].job
        if touches_job:
            job.meta = {"step": 1}
            session.flush()
        fence = session.info["sqla_jobqueue.current"].fence
        with bench.control.begin() as connection:
            renewed.append(lifecycle.extend_lease(connection, Job, [fence], timedelta(minutes=9)))

    outcome = bench.run(body)
    assert outcome.recorded, outcome.error
    bench.assert_done("effect")
    [(extended, lost)] = renewed
    assert not lost
    # a row that its own handler has locked is neither renewed nor lost
    assert bool(extended) is (level == "READ COMMITTED" and not touches_job)


@pytest.mark.parametrize(
    ("options", "locked"),
    [
        ({}, False),
        ({"isolation_level": "REPEATABLE READ"}, True),
        ({"execution_options": {"isolation_level": "REPEATABLE_READ"}}, True),
        ({"connect_args": {"options": "-c default_transaction_isolation=serializable"}}, True),
    ],
    ids=["nowhere", "engine", "option", "server"],
)
def test_a_snapshot_level_is_seen_wherever_it_was_set(make_bench, options, locked):
    """The row is locked from the start then, which shows in that an expired lease is not taken back."""
    bench = make_bench("sync", "leased", **options)
    task = bench.task(lambda _session: reclaimed.append(reclaim()))
    reclaimed = []

    def reclaim():
        with bench.control.begin() as connection:
            return lifecycle.reclaim_expired(connection, Job, limit=10)

    bench.enqueue()
    outcome = bench.attempt(task, row=bench.claim(lease=timedelta(seconds=-1)), record=False)
    assert (outcome.ending, [bool(found) for found in reclaimed]) == (Ending.DONE, [not locked])


def test_the_claim_and_the_start_try_again_after_a_serialization_failure(make_bench, control):
    for flavour, mode in itertools.product(FLAVOURS, MODES):
        bench = make_bench(flavour, mode, isolation_level="SERIALIZABLE")
        bench.run(lambda _session: None)  # the level is known from here on
        task = bench.task(bench.handler(lambda session, what=f"{flavour} {mode}": write(session, what)))
        bench.enqueue()
        row = bench.claim() if bench.leased else None
        other = control.connect()
        if bench.leased:  # a renewal that has not committed yet
            fence = lifecycle.row_fence(Job, row)
            lifecycle.extend_lease(other, Job, [fence], timedelta(minutes=9))

            def let_go(other=other):
                wait_until(lambda: blocked(control))
                other.commit()

            thread = threading.Thread(target=let_go)
            thread.start()
        else:
            # the claim's first try meets a row that was changed between its snapshot and its lock
            meet_a_change(bench, control)
        outcome = bench.attempt(task, row=row)
        other.close()
        assert outcome.recorded, outcome.error
        assert bench.row["status"] == "done"
        assert f"{flavour} {mode}" in bench.effects


def meet_a_change(bench, control):
    """Take the snapshot with a statement before the claim's, and change the row in between."""
    met = []

    def before(connection, cursor, statement, *_rest):
        if statement.lstrip().startswith("WITH") and not met:
            met.append(1)
            cursor.execute("SELECT count(*) FROM jobs")
            with control.begin() as other:
                other.execute(update(Job).where(Job.queue == bench.queue.name).values(priority=Job.priority))

    event.listen(bench.sync_engine, "before_cursor_execute", before)


def test_a_transaction_that_cannot_commit_is_a_counted_failure(make_bench, control):
    """Two handlers that each read what the other writes: SERIALIZABLE refuses one of them."""
    for flavour, mode in itertools.product(FLAVOURS, MODES):
        bench = make_bench(flavour, mode, isolation_level="SERIALIZABLE")

        def body(session, what=f"{flavour} {mode}", bench=bench):
            session.scalar(select(func.count()).select_from(Effect))
            session.execute(insert(Effect).values(what=what))
            rival = bench.control.connect().execution_options(isolation_level="SERIALIZABLE")
            with rival, rival.begin():
                rival.scalar(select(func.count()).select_from(Effect))
                rival.execute(insert(Effect).values(what=f"rival of {what}"))

        bench.run(body)
        row = bench.row
        assert (row["status"], row["attempts"]) == ("pending", 1)
        assert "could not serialize access" in row["last_error"]
        assert f"{flavour} {mode}" not in bench.effects


def test_an_engine_in_autocommit_mode_is_refused(make_bench):
    for flavour in FLAVOURS:
        bench = make_bench(flavour, "one_transaction", isolation_level="AUTOCOMMIT")
        with pytest.raises(ConfigurationError, match="isolation_level AUTOCOMMIT"):
            bench.run(write)
        assert (bench.row["status"], bench.row["attempts"], bench.effects) == ("pending", 0, [])
        bench = make_bench(flavour, "leased", execution_options={"isolation_level": "AUTOCOMMIT"})
        bench.run(write)
        assert "isolation_level AUTOCOMMIT" in bench.row["last_error"]
        assert bench.effects == []


# ------------------------------------------------------------------------------------------------- sorts of sessions


def test_a_session_in_a_transaction_block_of_the_applications(bench):
    """``sessions=make_session.begin``."""
    assert bench.run(write, sessions=bench.sessions.begin).recorded
    bench.assert_done("effect")


def test_a_failure_in_a_transaction_block_of_the_applications(bench):
    def body(session):
        write(session)
        raise ValueError("no")

    bench.run(body, sessions=bench.sessions.begin)
    bench.assert_failed("ValueError: no")


def test_a_session_bound_to_a_connection(make_bench, control):
    """As tests of applications do, which roll everything back at the end."""
    for mode in MODES:
        bench = make_bench("sync", mode)
        with bench.engine.connect() as connection, connection.begin() as outer:
            make = sessionmaker(connection, class_=JobSession, join_transaction_mode="create_savepoint")

            def body(session):
                write(session, "outer")
                with swallow(), session.begin_nested():
                    write(session, "outer")

            outcome = bench.run(body, sessions=make)
            assert outcome.recorded, outcome.error
            assert connection.scalars(select(Effect.what)).all() == ["outer"]
            outer.rollback()
        assert bench.effects == []


def test_nothing_due_is_none(locked):
    task = locked.task(locked.handler(write))
    assert locked.attempt(task) is None
    assert locked.sync_engine.pool.checkedout() == 0


def test_a_row_that_is_the_job_itself(bench):
    def body(session):
        session.job.size = len(session.job.title)

    bench.run(body, plain=True, model=Report, job={"title": "all"})
    assert (bench.row["status"], bench.row["size"]) == ("done", 3)
    assert bench.row["status"] == JobStatus.DONE
