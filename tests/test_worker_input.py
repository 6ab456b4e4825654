"""What a worker is given: declarations that it refuses, and rows that only the table knows."""

import datetime as dt
import sys
import time
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Integer, create_engine, event, func, insert, select, text, update  # noqa: TID251  as a person would
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, sessionmaker
from sqlalchemy.schema import CreateSchema

from sqla_jobqueue import (
    AsyncJobSession,
    ConfigurationError,
    JobMixin,
    JobQueue,
    JobSession,
    Snooze,
    Worker,
    fixed,
    lifecycle,
)
from sqla_jobqueue.statements import claim, due, fence_of
from sqla_jobqueue.worker import WorkerHooks
from tests.helpers import driver_url, wait_until

MODES = pytest.mark.parametrize("one_transaction", [False, True], ids=["leased", "one_transaction"])
AT_ONCE = fixed(timedelta(0))
TIMEOUT = timedelta(seconds=30)
OFTEN = timedelta(milliseconds=10)
SELDOM = timedelta(hours=1)


def job_class(name="jobs", **table):
    """A job model on a Base of its own, as another process has it."""

    class Base(DeclarativeBase):
        pass

    class Job(JobMixin, Base):
        __tablename__ = name
        __table_args__ = table

    return Job


@pytest.fixture
def model(engine):
    job = job_class()
    job.metadata.create_all(engine)
    return job


@pytest.fixture
def make_session(engine):
    return sessionmaker(engine, class_=JobSession)


def fetch(engine, statement):
    with engine.begin() as connection:
        return connection.execute(statement).all()


def states(engine, job, *columns):
    table = job.__table__
    return fetch(engine, select(*(table.c[name] for name in columns or ("kind", "status", "attempts"))).order_by("id"))


# --- declarations -----------------------------------------------------------------------------------------------------


def declared(**tasks):
    queue = JobQueue(job_class())
    for name, handler in tasks.items():
        queue.task(name=name)(handler)
    return queue


def sync_handler(session): ...
async def async_handler(session): ...
def unresolvable(session, it: "Nowhere"): ...  # noqa: F821  the case


SYNC, ASYNC = {"sessions": JobSession}, {"async_sessions": AsyncJobSession}
REFUSED = {
    "no queue": (list, SYNC, "at least one queue"),
    "a queue twice": (lambda: [declared(a=sync_handler)] * 2, SYNC, "given to the worker twice"),
    "no task": (lambda: [declared()], SYNC, "has no tasks: import the module"),
    "sync without sessions": (lambda: [declared(a=sync_handler)], ASYNC, "is sync: the worker needs sessions="),
    "async without sessions": (lambda: [declared(a=async_handler)], SYNC, "is async: the worker needs async_sessions="),
    "one of both": (lambda: [declared(a=sync_handler, b=async_handler)], SYNC, "'b'.* is async: the worker needs"),
    "unresolvable": (lambda: [declared(a=unresolvable)], SYNC, "Nowhere"),
    "concurrency 0": (lambda: [declared(a=sync_handler)], {**SYNC, "concurrency": 0}, "a number from 1, not 0"),
    "concurrency -1": (lambda: [declared(a=sync_handler)], {**SYNC, "concurrency": {"default": -1}}, "from 1, not -1"),
    "concurrency True": (lambda: [declared(a=sync_handler)], {**SYNC, "concurrency": True}, "from 1, not True"),
    "concurrency of whom": (
        lambda: [declared(a=sync_handler)],
        {**SYNC, "concurrency": {"x": 1}},
        r"not have: \['x'\]",
    ),
    "poll 0": (lambda: [declared(a=sync_handler)], {**SYNC, "poll_interval": timedelta(0)}, "above zero"),
    "grace below 0": (lambda: [declared(a=sync_handler)], {**SYNC, "grace": timedelta(-1)}, "zero or more"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_worker_declared_wrongly_is_refused_when_it_is_made(case):
    queues, options, message = REFUSED[case]
    with pytest.raises(ConfigurationError, match=message):
        Worker(*queues(), **options)


def test_sessions_that_reach_no_queue_are_refused_at_the_start(engine, new_database, make_session):
    other = create_engine(new_database())
    with pytest.raises(ConfigurationError, match=r"own connections reach database.*control="):
        Worker(declared(a=sync_handler), sessions=make_session, control=other).drain()
    other.dispose()
    elsewhere = create_engine("sqlite://")
    with pytest.raises(ConfigurationError, match="jobs need PostgreSQL, the session is bound to sqlite"):
        Worker(declared(a=sync_handler), sessions=sessionmaker(elsewhere, class_=JobSession)).drain()
    elsewhere.dispose()
    autocommit = sessionmaker(engine.execution_options(isolation_level="AUTOCOMMIT"), class_=JobSession)
    with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
        Worker(declared(a=sync_handler), sessions=autocommit).drain()


def test_a_worker_runs_once(model, make_session):
    queue = JobQueue(model)
    queue.task(sync_handler)
    worker = Worker(queue, sessions=make_session)
    worker.drain()
    with pytest.raises(ConfigurationError, match="a worker runs once"):
        worker.drain()


# --- rows -------------------------------------------------------------------------------------------------------------

UNREADABLE = ["null", '"text"', "[1]", "{}", '{"n": 1, "extra": 2}', '{"number": 1}', '{"n": "x"}', '{"n": null}']


class Failures(WorkerHooks):
    def __init__(self):
        self.jobs = []

    def job_failed(self, job, error, *, dead):
        self.jobs.append((job, error, dead))


@MODES
def test_payloads_that_cannot_be_read_fail_and_the_others_run(engine, model, make_session, one_transaction):
    queue = JobQueue(model, one_transaction=one_transaction)
    ran, hook = [], Failures()

    @queue.task
    def work(_session, n: int):
        ran.append(n)

    with engine.begin() as connection:
        for n, payload in enumerate(UNREADABLE):
            for row in (payload, f'{{"n": {n}}}'):
                connection.execute(text("INSERT INTO jobs (kind, payload) VALUES ('work', :row)"), {"row": row})
    Worker(queue, sessions=make_session, concurrency=1, hooks=[hook]).drain(timeout=TIMEOUT)
    assert sorted(ran) == [*range(len(UNREADABLE))]
    rows = states(engine, model, "status", "attempts", "last_error")
    assert [tuple(row)[:2] for row in rows] == [("failed", 1), ("done", 1)] * len(UNREADABLE)
    assert all(row.last_error.startswith("PayloadNotReadable: ") for row in rows[::2])
    assert [job.row["payload"] for job, _, _ in hook.jobs] == [
        None,
        "text",
        [1],
        {},
        {"n": 1, "extra": 2},
        {"number": 1},
        {"n": "x"},
        {"n": None},
    ]
    assert all(dead and type(error).__name__ == "PayloadNotReadable" for _, error, dead in hook.jobs)


def test_what_a_hook_gets_is_detached_from_everything(engine, model, make_session):
    """Sessions expire at commit, the connection is looked at before each use, and nothing is loaded for a hook."""
    queue, seen = JobQueue(model, max_attempts=1), []

    class Hook(WorkerHooks):
        def job_started(self, job):
            seen.append(job)

        def job_finished(self, job, _ending):
            seen.append(job)

        def job_failed(self, job, _error, **_more):
            seen.append(job)

    @queue.task
    def work(session, secret: str):
        session.job.priority = 7
        if secret == "bad":
            raise ValueError

    pinged = create_engine(engine.url, pool_pre_ping=True)
    with make_session.begin() as session:
        session.enqueue_all(work.call(secret=secret) for secret in ("good", "bad"))
    Worker(queue, sessions=sessionmaker(pinged, class_=JobSession), hooks=[Hook()]).drain(timeout=TIMEOUT)
    pinged.dispose()
    assert len(seen) == 4
    for job in seen:
        assert set(job.row) == {column.name for column in model.__table__.c}
        assert (job.queue, job.kind, job.attempt, job.max_attempts, job.row["priority"]) == ("default", "work", 1, 1, 0)
        assert job.row["payload"]["secret"] not in repr(job)


HARMLESS = {
    "n": 1,
    "it": {"__reduce__": ["os.system", ["true"]], "$type": "os.system", "py/object": "antigravity.fly", "!!python": 1},
}


@MODES
def test_nothing_in_a_row_becomes_code(engine, model, make_session, one_transaction):
    queue, ran = JobQueue(model, one_transaction=one_transaction), []

    @queue.task
    def work(_session, n: int, it: dict):
        ran.append((n, it))

    kinds = ["os.system", "__import__", "antigravity", "this.s", "tests.helpers:wait_until", "work.__globals__"]
    kinds += ["sync_handler", "handler", "cos\nsystem\n(S'true'\ntR.", "work", "WORK", " work", "work "]
    with engine.begin() as connection:
        connection.execute(insert(model), [{"kind": kind, "payload": HARMLESS} for kind in kinds])
    before = set(sys.modules)
    Worker(queue, sessions=make_session).drain(timeout=TIMEOUT)
    assert ran == [(1, HARMLESS["it"])]
    assert states(engine, model) == [
        (kind, "done", 1) if kind == "work" else (kind, "pending", 0) for kind in kinds
    ]  # an unknown kind is somebody else's
    assert not {"antigravity", "this"} & (set(sys.modules) - before)


@MODES
@pytest.mark.parametrize("flavour", ["sync", "asyncpg"])
def test_kinds_that_only_a_newer_worker_knows_are_left_to_it(engine, database_url, one_transaction, flavour):
    old_job, new_job = job_class(), job_class()
    old_job.metadata.create_all(engine)
    old, new = (JobQueue(job, one_transaction=one_transaction, backoff=AT_ONCE) for job in (old_job, new_job))
    for queue, kinds in ((old, "a"), (new, "ab")):
        for kind in kinds:
            queue.task(name=kind)(sync_handler if flavour == "sync" else async_handler)

    def worker(queue, **options):
        if flavour == "sync":
            return Worker(queue, sessions=sessionmaker(engine, class_=JobSession), **options)
        async_engine = create_async_engine(driver_url(database_url, flavour))
        return Worker(queue, async_sessions=async_sessionmaker(async_engine, class_=AsyncJobSession), **options)

    died = {"status": "running", "attempts": 1, "locked_until": func.now() - timedelta(minutes=1)}
    with JobSession(engine) as session, session.begin():
        for _ in range(20):
            session.enqueue(old.kind("b"))  # a producer need not know the handler
            session.enqueue(old.kind("a"))
        for _ in range(2):
            session.execute(insert(old_job).values(kind="b", **died))
    with worker(old, poll_interval=OFTEN):
        wait_until(lambda: {row.status for row in states(engine, old_job) if row.kind == "a"} == {"done"})
        wait_until(lambda: "running" not in {row.status for row in states(engine, old_job)}, "reclaimed")
    assert sorted(states(engine, old_job)) == sorted(
        [("a", "done", 1)] * 20 + [("b", "pending", 0)] * 20 + [("b", "pending", 1)] * 2
    )
    with worker(old, poll_interval=OFTEN), worker(new, poll_interval=OFTEN):
        wait_until(lambda: {row.status for row in states(engine, old_job)} == {"done"})
    assert sorted(row.attempts for row in states(engine, old_job)) == [1] * 40 + [2] * 2


@MODES
def test_a_status_of_a_later_version_is_left_alone(engine, model, make_session, one_transaction):
    queue = JobQueue(model, one_transaction=one_transaction)
    queue.task(name="work")(sync_handler)
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE jobs DROP CONSTRAINT jobs_status_check"))
        connection.execute(insert(model), [{"kind": "work", "status": "paused"}, {"kind": "work", "status": "pending"}])
        connection.execute(update(model).values(locked_until=func.now() - SELDOM, finished_at=func.now() - SELDOM * 99))
    with Worker(queue, sessions=make_session, poll_interval=OFTEN):
        wait_until(lambda: states(engine, model)[1].status == "done")
    assert states(engine, model) == [("work", "paused", 0), ("work", "done", 1)]


# --- attempts ---------------------------------------------------------------------------------------------------------


@MODES
def test_the_accounting_of_attempts(engine, model, make_session, one_transaction):
    queue = JobQueue(model, one_transaction=one_transaction, backoff=AT_ONCE)
    runs, naps = [], []

    @queue.task
    def fails(session):
        runs.append(session.job.id)
        raise ValueError

    @queue.task
    def naps_first(session):
        naps.append(session.job.attempts)
        if len(naps) <= 5:
            raise Snooze(timedelta(0))

    with make_session.begin() as session:
        session.enqueue(fails.options(max_attempts=1))
        session.enqueue(fails)
        session.execute(insert(model).values(kind="fails", attempts=7, max_attempts=3))  # lowered while it was tried
        session.execute(insert(model).values(kind="fails", attempts=1, max_attempts=2**31 - 1))
        session.enqueue(naps_first.options(max_attempts=1))
        session.execute(update(model).where(model.id == 4).values(max_attempts=2))
    Worker(queue, sessions=make_session, concurrency=1).drain(timeout=TIMEOUT)
    assert states(engine, model, "status", "attempts", "max_attempts", "last_error") == [
        ("failed", 1, 1, "ValueError"),
        ("failed", 3, 3, "ValueError"),
        ("failed", 8, 3, "ValueError"),
        ("failed", 2, 2, "ValueError"),
        ("done", 6, 6, None),
    ]
    assert sorted(runs) == [1, 2, 2, 2, 3, 4]
    assert naps == [1, 2, 3, 4, 5, 6]


# --- visible with the commit, not before ------------------------------------------------------------------------------


@MODES
def test_a_job_starts_after_its_commit_and_only_then(engine, model, make_session, one_transaction):
    queue, ran = JobQueue(model, one_transaction=one_transaction), []

    @queue.task
    def work(_session, name: str):
        ran.append(name)

    def look_around(marker):
        """The worker has looked at the queue since, and done what it found."""
        with make_session.begin() as session:
            session.enqueue(work, name=marker)
        wait_until(lambda: marker in ran)

    with Worker(queue, sessions=make_session, poll_interval=OFTEN, concurrency=1):
        for number, end in enumerate(["commit", "rollback", "close", "invalidate"]):
            with make_session() as session:
                job = session.enqueue(work.options(priority=-1), name=end)  # it would be the first
                session.flush()
                assert job.id
                look_around(f"{number}, before the {end}")
                assert end not in ran
                getattr(session, end)()
            look_around(f"{number}, after the {end}")
    assert [name for name in ran if "," not in name] == ["commit"]
    assert {row.status for row in states(engine, model)} == {"done"}


# --- clocks and names -------------------------------------------------------------------------------------------------


@pytest.fixture(params=[1, -1], ids=["ahead", "behind"])
def wrong_clock(request, monkeypatch):
    """The application's clock is off by an hour, in a time zone of its own; the database's is right."""
    real_time, real_datetime = time.time, datetime
    shift = timedelta(hours=request.param)

    class Meta(type):
        def __instancecheck__(cls, value):
            return isinstance(value, real_datetime)

    class Wrong(real_datetime, metaclass=Meta):
        @classmethod
        def now(cls, tz=None):
            return real_datetime.now(tz) + shift

        @classmethod
        def utcnow(cls):
            return (real_datetime.now(UTC) + shift).replace(tzinfo=None)

    monkeypatch.setenv("TZ", "Pacific/Chatham")
    time.tzset()
    monkeypatch.setattr(time, "time", lambda: real_time() + shift.total_seconds())
    monkeypatch.setattr(dt, "datetime", Wrong)
    for name, module in list(sys.modules.items()):
        if name.startswith("sqla_jobqueue") and getattr(module, "datetime", None) is real_datetime:
            monkeypatch.setattr(module, "datetime", Wrong)
    yield
    monkeypatch.undo()
    time.tzset()


@MODES
def test_the_clock_of_the_database_decides(engine, model, database_url, one_transaction, wrong_clock):
    queue = JobQueue(model, one_transaction=one_transaction, backoff=fixed(timedelta(seconds=5)), keep=SELDOM)

    @queue.task
    def fails(_session):
        raise ValueError

    zoned = create_engine(database_url, connect_args={"options": "-c TimeZone=Asia/Kathmandu"})
    make_session = sessionmaker(zoned, class_=JobSession)
    with make_session.begin() as session:
        session.enqueue(fails)
        session.enqueue(fails.options(delay=timedelta(seconds=5)))
        session.add(model(kind="held"))
        for minutes in (50, 70):
            ended = {"status": "done", "finished_at": func.now() - timedelta(minutes=minutes)}
            session.execute(insert(model).values(kind=f"ended {minutes} minutes ago", **ended))
    with make_session.begin() as session:
        held = due(model).where(model.kind == "held")
        fence = fence_of(session.scalars(claim(held, lease=timedelta(minutes=1))).one())
    with Worker(queue, sessions=make_session, poll_interval=OFTEN):
        wait_until(lambda: len(states(engine, model)) == 4, "pruned")
        wait_until(lambda: states(engine, model, "attempts")[0].attempts == 1, "failed")
    with make_session.begin() as session:
        assert lifecycle.extend_lease(session, model, [fence], timedelta(minutes=1)) == ({fence}, set())
    away = {}
    for kind, column in (("fails", model.run_at), ("held", model.locked_until)):
        seconds = func.extract("epoch", column - func.clock_timestamp()).cast(Integer)
        away[kind] = [row[0] for row in fetch(engine, select(seconds).where(model.kind == kind).order_by(model.id))]
    assert all(3 <= seconds <= 5 for seconds in away["fails"])
    assert all(58 <= seconds <= 60 for seconds in away["held"])
    assert states(engine, model) == [
        ("fails", "pending", 1),
        ("fails", "pending", 0),
        ("held", "running", 1),
        ("ended 50 minutes ago", "done", 0),
    ]
    zoned.dispose()


@MODES
@pytest.mark.parametrize(
    ("schema", "table"), [("My \"Schema'", 'a"b %(x)s :y'), ("select", "Order"), ("app", "x" * 60)], ids=repr
)
def test_any_name_lives_from_enqueue_to_prune(engine, database_url, one_transaction, schema, table):
    """A table of the same name stands earlier on the search path, and another queue in the same database."""
    job = job_class(table, schema=schema)
    decoy = job_class(table, schema="decoy")
    with engine.begin() as connection:
        for name in (schema, "decoy"):
            connection.execute(CreateSchema(name))
    job.metadata.create_all(engine)
    decoy.metadata.create_all(engine)
    queue = JobQueue(job, '\'; DROP TABLE "x" %(q)s :q \\ 📬', one_transaction=one_transaction, keep=timedelta(0))
    kind, ran = 'k "%s" \n $$ 📬' * 9, []

    @queue.task(name=kind)
    def work(_session, it: str):
        ran.append(it)

    astray = create_engine(database_url, connect_args={"options": "-c search_path=decoy"})
    make_session = sessionmaker(astray, class_=JobSession)
    statements = []
    with make_session.begin() as session:
        session.add(decoy(kind=kind, queue=queue.name, payload={"it": "decoy"}))
    with Worker(queue, sessions=make_session, poll_interval=SELDOM) as worker:
        event.listen(astray, "before_cursor_execute", lambda *args: statements.append(args[2]))
        wait_until(lambda: worker._lanes[0].empty_at >= 0 and not worker._lanes[0].hot, "it has looked once")
        with make_session.begin() as session:
            session.enqueue(work, it="'; --")
        wait_until(lambda: ran == ["'; --"], "woken by NOTIFY")
    assert any("pg_notify" in statement for statement in statements)
    with JobSession(astray) as session, session.begin():
        [counted] = lifecycle.summary(session, job)
        assert (counted.queue, counted.status, counted.jobs) == (queue.name, "done", 1)
        gone = {"queue": queue.name, "status": counted.status, "older_than": timedelta(0), "limit": 9}
        assert lifecycle.prune(session, job, **gone) == 1
    assert (states(engine, job), states(engine, decoy)) == ([], [(kind, "pending", 0)])
    astray.dispose()
