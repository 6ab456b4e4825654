"""A claims, is presumed dead, and B claims. Both write and finish: only B's effects exist, and A is told that it lost.

In every mode: under a lease (A's lease lapses) and in one transaction (A's connection is killed), on a sync session and
on async ones (psycopg, asyncpg), by the worker and by a loop made of the builders. A comes back at three moments: while B
is at work, after B has finished, and after the finished job was deleted.
"""

import asyncio
import contextlib
import itertools
import threading
from datetime import timedelta

import pytest
from sqlalchemy import create_engine, delete, func, select, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

from sqla_jobqueue import (
    AsyncJobSession,
    Cancel,
    JobMixin,
    JobQueue,
    JobSession,
    LeaseLost,
    Retry,
    Snooze,
    Worker,
    lifecycle,
)
from sqla_jobqueue.execution import Ending
from sqla_jobqueue.statements import claim, due, expired, fence_of, reclaim_expired
from sqla_jobqueue.status import JobStatus
from sqla_jobqueue.worker import WorkerHooks
from tests.helpers import driver_url, wait_until

FLAVOURS = ("sync", "psycopg", "asyncpg")
MOMENTS = ("B is at work", "B has finished", "the job is deleted")
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
LONG_AGO = func.now() - HOUR
numbers = itertools.count(1)


class Base(DeclarativeBase):
    pass


class Job(JobMixin, Base):
    __tablename__ = "jobs"


class Effect(Base):
    __tablename__ = "effects"
    id: Mapped[int] = mapped_column(primary_key=True)
    whose: Mapped[str]


class Tables:
    """What is in the database, seen and changed by a third party."""

    def __init__(self, engine):
        self.engine = engine
        Base.metadata.create_all(engine)

    def rows(self):
        with self.engine.begin() as connection:
            return connection.execute(select(Job.__table__).order_by(Job.id)).all()

    def effects(self):
        with self.engine.begin() as connection:
            return sorted(connection.scalars(select(Effect.whose)))

    def presume_dead(self, pids):
        """Move the leases of what runs into the past, or kill the connections that hold the rows."""
        with self.engine.begin() as connection:
            connection.execute(update(Job).where(Job.status == "running").values(locked_until=LONG_AGO))
            for pid in pids:
                assert connection.scalar(select(func.pg_terminate_backend(pid, 10_000)))

    def delete_finished(self):
        with self.engine.begin() as connection:
            connection.execute(delete(Job).where(Job.status == "done"))

    def blocked(self):
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        with self.engine.begin() as connection:
            return connection.exec_driver_sql(waits).scalar()


@pytest.fixture
def tables(engine):
    return Tables(engine)


@pytest.fixture(params=FLAVOURS)
def flavour(request):
    return request.param


@pytest.fixture(params=MOMENTS)
def moment(request):
    return request.param


# --- by the worker ----------------------------------------------------------------------------------------------------

HOWS = (
    "done",
    "done without a write",
    "failure",
    "retry",
    "snooze raised",
    "snooze returned",
    "cancel raised",
    "cancel returned",
)
"""How A's handlers end; B's are always done. Each is a job of its own, all at once."""


class Gate:
    """What handlers of both flavours wait for."""

    def __init__(self):
        self.is_open = threading.Event()
        self.waiting = []

    def open(self):
        self.is_open.set()
        for loop, event in self.waiting:
            loop.call_soon_threadsafe(event.set)

    def wait(self):
        assert self.is_open.wait(60)

    async def wait_async(self):
        event = asyncio.Event()
        self.waiting.append((asyncio.get_running_loop(), event))
        if not self.is_open.is_set():
            await asyncio.wait_for(event.wait(), 60)


class Seen(WorkerHooks):
    """What a worker says of its attempts."""

    def __init__(self):
        self.endings = {}

    def job_finished(self, job, ending):
        self.endings[job.row["payload"]["how"]] = (job.attempt, ending)

    def job_failed(self, job, _error, **_more):
        self.endings[job.row["payload"]["how"]] = (job.attempt, Ending.FAILED)

    def lease_lost(self, job):
        self.endings[job.row["payload"]["how"]] = (job.attempt, Ending.LOST)


class Story:
    """A queue, a job for each way to end, and what its two workers did."""

    def __init__(self, flavour, tables, *, one_transaction):
        self.flavour, self.tables, self.one_transaction = flavour, tables, one_transaction
        self.url = tables.engine.url.render_as_string(hide_password=False)
        self.gates = {"A": Gate(), "B": Gate()}
        self.began = {"A": {}, "B": {}}
        """By worker and job, the process of its connection where it holds one."""
        self.told = []
        self.seen = {"A": Seen(), "B": Seen()}
        self.queue = JobQueue(Job, f"queue {next(numbers)}", one_transaction=one_transaction)
        task = self.queue.task(name="work")(self.handle if flavour == "sync" else self.handle_async)
        with JobSession(tables.engine) as session, session.begin():
            for how in HOWS:
                session.enqueue(task, how=how)

    @contextlib.contextmanager
    def worker(self, name):
        often = timedelta(milliseconds=20)  # in one transaction, each look takes one job more
        options = {
            "poll_interval": often if self.one_transaction else HOUR,
            "concurrency": len(HOWS),
            "name": name,
            "hooks": [self.seen[name]],
        }
        if self.flavour == "sync":
            engine = create_engine(self.url, pool_size=len(HOWS))
            options["sessions"] = sessionmaker(engine, class_=JobSession)
        else:
            engine = create_async_engine(driver_url(self.url, self.flavour), pool_size=len(HOWS))
            options["async_sessions"] = async_sessionmaker(engine, class_=AsyncJobSession)
        with Worker(self.queue, **options) as worker:
            try:
                yield worker
            finally:
                self.gates[name].open()
        if self.flavour == "sync":
            engine.dispose()

    def begin(self, session, how):
        name = session.job.locked_by
        if how != "done without a write":
            session.add(Effect(whose=f"{name}: {how}, at the beginning"))
            session.flush()
        self.began[name][how] = session.scalar(select(func.pg_backend_pid())) if self.one_transaction else None
        return name

    def end(self, session, how):
        if session.job.locked_by == "B":
            return None
        try:
            session.raise_if_lost()
        except LeaseLost:
            self.told.append(how)  # and goes on as if nothing were
        if how == "done":
            session.add(Effect(whose=f"A: {how}, at the end"))
            session.flush()
        match how:
            case "failure":
                raise ValueError(how)
            case "retry":
                raise Retry(delay=timedelta(0))
            case "snooze raised":
                raise Snooze(timedelta(0))
            case "snooze returned":
                return Snooze(timedelta(0))
            case "cancel raised":
                raise Cancel
            case "cancel returned":
                return Cancel()

    def handle(self, session: JobSession[Job], how: str):
        self.gates[self.begin(session, how)].wait()
        return self.end(session, how)

    async def handle_async(self, session: AsyncJobSession[Job], how: str):
        name = await session.run_sync(self.begin, how)
        await self.gates[name].wait_async()
        return await session.run_sync(self.end, how)

    def all_began(self, name):
        wait_until(lambda: len(self.began[name]) == len(HOWS), f"{name} is at work")

    def all_ended(self, name):
        wait_until(lambda: len(self.seen[name].endings) == len(HOWS), f"{name} has ended")

    def assert_only_bs(self, attempt, *, deleted):
        assert self.seen["A"].endings == dict.fromkeys(HOWS, (1, Ending.LOST))
        assert self.seen["B"].endings == dict.fromkeys(HOWS, (attempt, Ending.DONE))
        written = [how for how in HOWS if how != "done without a write"]
        assert self.tables.effects() == sorted(f"B: {how}, at the beginning" for how in written)
        rows = self.tables.rows()
        assert len(rows) == (0 if deleted else len(HOWS))
        for row in rows:
            assert (row.status, row.attempts, row.max_attempts, row.locked_by) == ("done", attempt, 3, "B")
            assert row.locked_until is None


@pytest.mark.parametrize("told", [False, True], ids=["A does not know", "A is told"])
def test_a_lapsed_lease(flavour, tables, moment, told):
    story = Story(flavour, tables, one_transaction=False)
    with story.worker("A") as a:
        story.all_began("A")
        tables.presume_dead([])
        with story.worker("B"):
            story.all_began("B")  # its housekeeping has taken the jobs back
            if moment != "B is at work":
                story.gates["B"].open()
                story.all_ended("B")
            if moment == "the job is deleted":
                tables.delete_finished()
            held = list(a._leases._held.values())
            assert len(held) == len(HOWS)
            if told:
                a._leases._loop.wake()  # the renewal, before its time
                wait_until(lambda: all(lease.lost.is_set() for lease in held), "A has asked for its leases")
            story.gates["A"].open()
            story.all_ended("A")
            story.gates["B"].open()
            story.all_ended("B")
    story.assert_only_bs(2, deleted=moment == "the job is deleted")
    # an async handler is cancelled as soon as the lease is known to be lost
    assert sorted(story.told) == (sorted(HOWS) if told and flavour == "sync" else [])


def test_a_killed_connection(flavour, tables, moment):
    story = Story(flavour, tables, one_transaction=True)
    with story.worker("A"):
        story.all_began("A")
        tables.presume_dead(story.began["A"].values())
        with story.worker("B"):
            story.all_began("B")
            if moment != "B is at work":
                story.gates["B"].open()
                story.all_ended("B")
            if moment == "the job is deleted":
                tables.delete_finished()
            story.gates["A"].open()
            if moment == "B is at work":  # whether A's failure counts is open as long as B's transaction is
                wait_until(lambda: tables.blocked() == len(HOWS), "A asks for rows that B holds")
                assert story.seen["A"].endings == {}
                story.gates["B"].open()
            story.all_ended("A")
            story.all_ended("B")
    story.assert_only_bs(1, deleted=moment == "the job is deleted")
    assert story.told == []


# --- by the builders --------------------------------------------------------------------------------------------------


class Party:
    """A session on a connection of its own."""

    def __init__(self, name, flavour, url):
        self.name, self.flavour = name, flavour
        if flavour == "sync":
            self.engine = create_engine(url)
            self.session = JobSession(self.engine, expire_on_commit=False)
        else:
            self.runner = asyncio.Runner()
            self.engine = create_async_engine(driver_url(url, flavour))
            self.session = AsyncJobSession(self.engine, expire_on_commit=False)

    def do(self, body, *args, **kwargs):
        if self.flavour == "sync":
            return body(self.session, *args, **kwargs)
        return self.runner.run(self.session.run_sync(body, *args, **kwargs))

    def close(self):
        if self.flavour == "sync":
            self.session.close()
            self.engine.dispose()
        else:
            with contextlib.suppress(DBAPIError):
                self.runner.run(self.session.close())
            self.runner.run(self.engine.dispose())
            self.runner.close()

    def claim(self, lease):
        def body(session):
            session.scalars(reclaim_expired(expired(Job))).all()
            job = session.scalars(claim(due(Job), lease=lease, locked_by=self.name)).one()
            if lease is not None:
                session.commit()
            session.expunge(job)  # a rollback would expire its attempt number
            return job

        return self.do(body)

    def write(self):
        def body(session):
            session.add(Effect(whose=self.name))
            session.flush()

        self.do(body)

    def commit(self):
        self.do(lambda session: session.commit())

    def rollback(self):
        self.do(lambda session: session.rollback())


FINISHING = {
    "done": lifecycle.complete,
    "failure": lambda session, job, **held: lifecycle.retry(session, job, delay=MINUTE, error="stale", **held),
    "last failure": lambda session, job, **held: lifecycle.fail(session, job, error="stale", **held),
    "snooze": lambda session, job, **held: lifecycle.snooze(session, job, delay=MINUTE, **held),
    "release": lifecycle.release,
}
"""Each raises if the job is not this attempt's any more."""


@pytest.fixture
def parties(flavour, tables):
    with JobSession(tables.engine) as session, session.begin():
        session.add(Job(kind="work"))
    url = tables.engine.url.render_as_string(hide_password=False)
    with contextlib.ExitStack() as stack:
        both = []
        for name in "AB":
            both.append(Party(name, flavour, url))
            stack.callback(both[-1].close)
        yield both


def test_a_loop_of_builders_under_a_lease(tables, parties, moment):
    a, b = parties
    stale = a.claim(MINUTE)
    tables.presume_dead([])
    fresh = b.claim(MINUTE)
    b.write()
    if moment != "B is at work":
        b.do(lifecycle.complete, fresh)
        b.commit()
    if moment == "the job is deleted":
        tables.delete_finished()
    before = tables.rows()
    for finish in FINISHING.values():
        a.write()
        with pytest.raises(LeaseLost) as refused:
            a.do(finish, stale)
        assert (refused.value.key, refused.value.attempt) == ((stale.id,), 1)
        a.rollback()
    assert a.do(lifecycle.extend_lease, Job, [fence_of(stale)], MINUTE) == (set(), {fence_of(stale)})
    assert a.do(lifecycle.cancel, stale) == [False]
    assert a.do(lifecycle.requeue, stale) == [False]
    with pytest.raises(LeaseLost):
        a.do(lifecycle.lock_held, Job, fence_of(stale))
    a.commit()
    assert tables.rows() == before
    if moment == "B is at work":
        b.do(lifecycle.complete, fresh)
        b.commit()
    assert tables.effects() == ["B"]
    assert [(row.status, row.attempts) for row in tables.rows()] == (
        [] if moment == "the job is deleted" else [("done", 2)]
    )


def test_a_loop_of_builders_in_one_transaction(tables, parties, moment):
    a, b = parties
    stale = a.claim(None)
    a.write()
    tables.presume_dead([a.do(lambda session: session.scalar(select(func.pg_backend_pid())))])
    fresh = b.claim(None)
    b.write()
    b.do(lifecycle.complete, fresh, held=JobStatus.PENDING)
    if moment != "B is at work":
        b.commit()
    if moment == "the job is deleted":
        tables.delete_finished()
    with pytest.raises(DBAPIError):
        a.do(lifecycle.complete, stale, held=JobStatus.PENDING)
    a.rollback()
    before = tables.rows()
    for finish in FINISHING.values():  # in a new transaction, as if nothing had happened
        a.write()
        with pytest.raises(LeaseLost):
            a.do(finish, stale, held=JobStatus.PENDING)
        a.rollback()
    assert tables.rows() == before
    b.commit()
    assert tables.effects() == ["B"]
    assert [(row.status, row.attempts) for row in tables.rows()] == (
        [] if moment == "the job is deleted" else [("done", 1)]
    )
