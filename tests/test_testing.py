"""`sqla_jobqueue.testing`: real jobs, run inside a transaction that is rolled back."""

import asyncio
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import ForeignKey, create_engine, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

from sqla_jobqueue import (
    AsyncJobSession,
    Cancel,
    ConfigurationError,
    EntityGone,
    JobMixin,
    JobQueue,
    JobSession,
    JobStateMixin,
    PayloadError,
    Retry,
    Snooze,
    TransactionMisuse,
    enqueue,
    fixed,
    ref,
)
from sqla_jobqueue.statements import claim, due
from sqla_jobqueue.testing import (
    advance,
    assert_enqueued,
    drain,
    enqueued,
    expire_leases,
    inline,
    perform,
    rolled_back,
)
from tests.helpers import driver_url, open_async_engine


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    state: Mapped[str] = mapped_column(default="new")


class Invoice(Base):
    __tablename__ = "invoices"
    order_id: Mapped[int] = mapped_column(ForeignKey("orders.id"), primary_key=True, autoincrement=False)
    total_cents: Mapped[int]


class Job(JobMixin, Base):
    __tablename__ = "jobs"


class Export(JobStateMixin, Base):
    __tablename__ = "exports"
    id: Mapped[int] = mapped_column(primary_key=True)
    rows: Mapped[int | None]


leased = JobQueue(Job, "leased", backoff=fixed(timedelta(minutes=1)))
together = JobQueue(Job, "together", one_transaction=True, backoff=fixed(timedelta(minutes=1)))
mixed = JobQueue(Job, "mixed")
alike = JobQueue(Job, "alike", one_transaction=True)
exports = JobQueue(Export, "exports")
ALL = (leased, together)
BOTH = pytest.mark.parametrize("queue", ALL, ids=lambda queue: queue.name)


class Mode:
    """What a handler is to do in this test, since the handlers are declared once."""

    failing: BaseException | None = None
    seen: list[object]


mode = Mode()


@pytest.fixture(autouse=True)
def fresh_mode():
    mode.failing, mode.seen = None, []


def bill(session: JobSession[Job], order: Order, total_cents: int = 100) -> int:
    mode.seen.append((session.job.kind, session.job.attempts, session.job.status))
    order.state = "billed"
    session.add(Invoice(order_id=order.id, total_cents=total_cents))
    if mode.failing is not None:
        session.flush()
        raise mode.failing
    session.enqueue(session_queue(session).kind("thank"), customer=order.customer)
    return total_cents


def thank(session: JobSession[Job], customer: str) -> None:
    mode.seen.append(("thanked", customer))


def session_queue(session):
    return {queue.name: queue for queue in ALL}[session.job.queue]


for each in ALL:
    each.task(bill)
    each.task(thank)


@exports.task
def export(session: JobSession[Export]) -> int:
    session.job.rows = 7
    return 7


async def slowly(session: AsyncJobSession[Job], order: Order) -> str:
    await session.execute(select(1))
    order.state = "slow"
    await session.flush()
    return order.customer


def quickly(session: JobSession[Job], order: Order) -> str:
    order.state += "+quick"
    return order.customer


for each in (mixed, alike):
    each.task(slowly)
    each.task(quickly)


@pytest.fixture
def tables(engine):
    Base.metadata.create_all(engine)
    return engine


@pytest.fixture
def session(tables):
    with rolled_back(tables) as session:
        yield session


def placed(session) -> Order:
    order = Order(customer="dave")
    session.add(order)
    session.commit()
    return order


def row_count(engine, model=Job) -> int:
    with Session(engine) as session:
        return session.scalar(select(func.count()).select_from(model))


# ------------------------------------------------------------------------------------------------------- rolled back


@BOTH
def test_a_whole_story_leaves_nothing_behind(tables, queue):
    with rolled_back(tables) as session:
        order = placed(session)
        session.enqueue(queue.tasks["bill"], order=order, total_cents=2500)
        session.commit()
        outcomes = drain(session, queue)
        assert [outcome.ending for outcome in outcomes] == ["done", "done"]
        assert mode.seen[1] == ("thanked", "dave")  # the job that the first one enqueued
        assert order.state == "billed"  # what the handler's own session wrote
        assert session.scalars(select(Invoice)).one().total_cents == 2500
        assert session.scalars(select(Job.status)).all() == ["done", "done"]
    assert [row_count(tables, model) for model in (Job, Order, Invoice)] == [0, 0, 0]


def test_nobody_else_sees_a_thing(tables, session):
    session.enqueue(leased.tasks["bill"], order=placed(session))
    drain(session, leased)
    assert row_count(tables) == 0


@BOTH
def test_the_handler_gets_a_real_attempt(session, queue):
    session.enqueue(queue.tasks["bill"], order=placed(session))
    drain(session, queue)
    assert mode.seen[0] == ("bill", 1, "running" if queue is leased else "done")
    job = session.scalars(select(Job).where(Job.kind == "bill")).one()
    assert job.locked_by == "sqla_jobqueue.testing"
    assert job.started_at is not None


def test_the_test_can_go_on_and_roll_back(session):
    order = placed(session)
    session.enqueue(leased.tasks["bill"], order=order)
    session.commit()
    drain(session, leased)
    session.add(Order(customer="eve"))
    session.flush()
    session.rollback()
    assert order.state == "billed"  # drained outside of what was rolled back
    assert session.scalars(select(Order.customer)).all() == ["dave"]


def test_what_runs_before_the_commit_is_rolled_back_with_it(session):
    order = placed(session)
    session.enqueue(leased.tasks["bill"], order=order)
    drain(session, leased)
    assert order.state == "billed"
    session.rollback()
    assert order.state == "new"
    assert enqueued(session, Job) == []


@BOTH
def test_a_session_on_an_engine_runs_jobs_in_its_own_transaction(tables, queue):
    with JobSession(tables) as session:
        order = placed(session)
        session.enqueue(queue.tasks["bill"], order=order)
        assert [outcome.ending for outcome in drain(session, queue)] == ["done", "done"]
        assert order.state == "billed"
        session.rollback()
        assert order.state == "new"
    assert row_count(tables) == 0


def test_a_connection_without_a_transaction_is_refused(tables):
    with (
        tables.connect() as connection,
        JobSession(connection) as session,
        pytest.raises(ConfigurationError, match="without a transaction"),
    ):
        drain(session, leased)


# ---------------------------------------------------------------------------------------------------------- failures


@BOTH
def test_a_failure_is_recorded_and_then_raised(session, queue):
    order = placed(session)
    session.enqueue(queue.tasks["bill"], order=order)
    session.commit()
    mode.failing = LookupError("no printer")
    with pytest.raises(LookupError, match="no printer") as caught:
        drain(session, queue)
    assert "bill" in caught.value.__notes__[0]
    job = session.scalars(select(Job)).one()
    assert (job.status, job.attempts, job.last_error) == ("pending", 1, "LookupError: no printer")
    assert order.state == "new"
    assert session.scalars(select(Invoice)).all() == []


@BOTH
def test_retries_wait_for_their_time_and_end_in_the_dead_letter(session, queue):
    session.enqueue(queue.tasks["bill"], order=placed(session))
    mode.failing = LookupError("no printer")
    assert [outcome.ending for outcome in drain(session, queue, raises=False)] == ["failed"]
    assert drain(session, queue) == []  # in a minute
    advance(session, timedelta(seconds=59), queue)
    assert drain(session, queue) == []
    advance(session, timedelta(seconds=2), queue)
    drain(session, queue, raises=False)
    advance(session, timedelta(minutes=2), queue)
    (last,) = drain(session, queue, raises=False)
    assert last.is_dead
    assert session.scalars(select(Job.status)).all() == ["failed"]
    assert [attempt for _, attempt, _ in mode.seen] == [1, 2, 3]


@BOTH
def test_a_retry_at_once_is_due_although_now_stands_still(session, queue):
    session.enqueue(queue.tasks["bill"].options(max_attempts=2), order=placed(session))
    mode.failing = Retry(delay=timedelta(0))
    assert [outcome.ending for outcome in drain(session, queue)] == ["failed", "failed"]  # asked for: not raised


@BOTH
def test_a_database_error_of_a_handler_leaves_the_test_its_transaction(session, queue):
    order = placed(session)
    session.add(Invoice(order_id=order.id, total_cents=1))
    session.enqueue(queue.tasks["bill"], order=order)
    session.commit()
    with pytest.raises(IntegrityError):
        drain(session, queue)
    assert session.scalars(select(Invoice.total_cents)).all() == [1]
    assert order.state == "new"


@BOTH
def test_a_commit_by_a_handler_is_refused(session, queue):
    def commits(session: JobSession[Job]) -> None:
        session.add(Order(customer="eve"))
        session.commit()

    task = queue.task(commits)
    try:
        session.enqueue(task)
        with pytest.raises(TransactionMisuse, match="begin_nested"):
            drain(session, queue)
        assert session.scalars(select(Order)).all() == []
    finally:
        del queue.tasks["commits"]


def test_a_deleted_entity_is_found_gone(session):
    session.enqueue(leased.tasks["bill"], order=ref(Order, 4))
    with pytest.raises(EntityGone):
        drain(session, leased)
    assert session.scalars(select(Job.status)).all() == ["failed"]


def test_a_job_that_enqueues_itself_meets_the_limit(session):
    def endless(session: JobSession[Job]) -> None:
        session.enqueue(leased.kind("endless"))

    task = leased.task(endless)
    try:
        session.enqueue(task)
        with pytest.raises(AssertionError, match=r"'endless'.*enqueue itself"):
            drain(session, leased, limit=5)
        assert len(session.scalars(select(Job)).all()) == 7  # six ran, each left one
    finally:
        del leased.tasks["endless"]


def test_a_killed_worker_and_its_job(session):
    session.enqueue(leased.tasks["bill"], order=placed(session))
    mode.failing = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        drain(session, leased)
    assert session.scalars(select(Job.status)).all() == ["running"]
    mode.failing = None
    assert drain(session, leased) == []  # its lease holds
    assert expire_leases(session, leased) == 1
    assert [outcome.ending for outcome in drain(session, leased)] == ["done", "done"]
    assert session.scalars(select(Job.attempts).where(Job.kind == "bill")).all() == [2]


def test_leases_lapse_with_time(session):
    session.enqueue(leased.tasks["thank"], customer="dave")
    session.flush()
    session.scalars(claim(due(Job), lease=timedelta(minutes=5))).one()
    advance(session, timedelta(minutes=4), leased)
    assert drain(session, leased) == []
    advance(session, timedelta(minutes=2), leased)
    assert [outcome.fence.attempt for outcome in drain(session, leased)] == [2]


# ------------------------------------------------------------------------------------------------------------ moving


def test_advance_moves_every_instant_and_nothing_else(session):
    session.enqueue(leased.tasks["thank"].options(delay=timedelta(hours=1)), customer="dave")
    session.enqueue(leased.tasks["thank"], customer="eve")
    drain(session, leased)
    jobs = session.scalars(select(Job).order_by(Job.id)).all()
    names = ("run_at", "created_at", "started_at", "finished_at")
    before = [[getattr(job, name) for name in names] for job in jobs]
    assert advance(session, timedelta(hours=2), leased) == 2
    for job, instants in zip(jobs, before, strict=True):
        for name, instant in zip(names, instants, strict=True):
            moved = getattr(job, name)
            assert moved == (None if instant is None else instant - timedelta(hours=2)), name
    assert [outcome.ending for outcome in drain(session, leased)] == ["done"]


@pytest.mark.parametrize("delta", [timedelta(0), timedelta(seconds=-1)])
def test_time_does_not_go_back(session, delta):
    with pytest.raises(ValueError, match="above zero"):
        advance(session, delta, leased)


# ------------------------------------------------------------------------------------------------------------ asking


def test_enqueued_gives_the_jobs_in_their_order(session):
    order = placed(session)
    later = session.enqueue(leased.tasks["bill"].options(priority=5), order=order)
    first = session.enqueue(leased.tasks["bill"].options(delay=timedelta(days=1)), order=order, total_cents=7)
    other = session.enqueue(together.tasks["bill"], order=order)
    assert enqueued(session, leased.tasks["bill"]) == [first, later]
    assert enqueued(session, leased) == [first, later]
    assert enqueued(session, leased.kind("bill"), order_id=order.id) == [first, later]
    assert enqueued(session, leased.tasks["bill"], total_cents=7) == [first]
    assert set(enqueued(session, Job)) == {first, later, other}
    assert enqueued(
        session,
        together,
    ) == [other]
    assert enqueued(session, leased.tasks["thank"]) == []
    drain(session, leased)
    assert enqueued(session, leased.tasks["bill"]) == [first]


def test_assert_enqueued_gives_the_job_or_says_what_there_is(session):
    order = placed(session)
    with pytest.raises(AssertionError, match="none at all"):
        assert_enqueued(session, leased.tasks["bill"], order=order)
    job = session.enqueue(leased.tasks["bill"].options(priority=3), order=order)
    found = assert_enqueued(session, leased.tasks["bill"], order=order)
    assert found is job
    assert found.priority == 3
    assert_enqueued(session, leased.tasks["bill"], order=ref(Order, order.id))
    for wrong in ({"order": ref(Order, 99)}, {"order": order, "total_cents": 100}):  # the default was not stored
        with pytest.raises(AssertionError, match=rf"bill {{'order_id': {order.id}}} in 'leased'"):
            assert_enqueued(session, leased.tasks["bill"], **wrong)
    with pytest.raises(AssertionError):
        assert_enqueued(session, together.tasks["bill"], order=order)
    with pytest.raises(PayloadError, match="no parameter 'oder'"):
        assert_enqueued(session, leased.tasks["bill"], oder=order)
    with pytest.raises(PayloadError, match="total_cents"):
        assert_enqueued(session, leased.tasks["bill"], total_cents="1")


def test_an_entity_without_a_key_yet_can_be_asked_for(session):
    order = Order(customer="dave")
    session.add(order)
    job = session.enqueue(leased.tasks["bill"], order=order)
    assert assert_enqueued(session, leased.tasks["bill"], order=order) is job


def test_a_row_written_by_hand_is_no_surprise(session):
    session.add(Job(kind="bill", queue="leased", payload=["total_cents"]))
    assert enqueued(session, leased.tasks["bill"], total_cents=1) == []


def test_what_is_asked_for_must_be_something(session):
    with pytest.raises(ConfigurationError, match="a task, a kind, a queue or a job model"):
        enqueued(session, "bill")
    with pytest.raises(ConfigurationError, match="belongs to a task or a kind"):
        enqueued(session, leased, order_id=1)


# ----------------------------------------------------------------------------------------------------------- perform


@BOTH
def test_perform_runs_this_job_and_no_other(session, queue):
    order = placed(session)
    waiting = session.enqueue(queue.tasks["thank"].options(priority=-9), customer="eve")
    assert perform(session, queue.tasks["bill"].options(delay=timedelta(days=1)), order, total_cents=3) == 3
    assert order.state == "billed"
    assert waiting.status == "pending"
    assert [job.kind for job in enqueued(session, queue)] == ["thank", "thank"]
    assert session.scalars(select(Job.status).where(Job.kind == "bill")).all() == ["done"]


@BOTH
def test_perform_takes_a_pending_job(session, queue):
    session.enqueue(queue.tasks["bill"].options(delay=timedelta(days=1)), order=placed(session), total_cents=9)
    job = assert_enqueued(session, queue.tasks["bill"])
    assert perform(session, job) == 9
    assert job.status == "done"
    with pytest.raises(AssertionError, match="not pending"):
        perform(session, job)
    assert perform(session, queue.tasks["thank"].call("dave")) is None


@BOTH
def test_perform_raises_what_the_handler_raised(session, queue):
    order = placed(session)
    for raised, status in [
        (LookupError("no"), "pending"),
        (Retry(), "pending"),
        (Snooze(timedelta(1)), "pending"),
        (Cancel("not any more"), "cancelled"),
    ]:
        mode.failing = raised
        with pytest.raises(type(raised)) as caught:
            perform(session, queue.tasks["bill"], order=order)
        assert caught.value is raised
        assert session.scalars(select(Job.status).order_by(Job.id.desc())).first() == status
    assert order.state == "new"


def test_perform_of_a_row_that_is_the_job(session):
    session.add(row := Export(queue="exports"))
    assert perform(session, row) == 7
    assert (row.status, row.rows) == ("done", 7)
    fresh = Export()
    assert perform(session, fresh) == 7
    assert fresh.status == "done"


# ------------------------------------------------------------------------------------------------------------ inline


@BOTH
def test_inline_runs_jobs_at_the_commit(session, queue):
    order = placed(session)
    with inline(session, queue) as outcomes:
        session.enqueue(queue.tasks["bill"], order=order)
        session.flush()
        with session.begin_nested():
            pass
        assert order.state == "new"
        session.commit()
        assert order.state == "billed"
        assert [outcome.ending for outcome in outcomes] == ["done", "done"]
        session.enqueue(queue.tasks["thank"], customer="eve")
        session.rollback()
    session.enqueue(queue.tasks["thank"], customer="eve")
    session.commit()
    assert len(outcomes) == 2
    assert len(enqueued(session, queue)) == 1


def test_inline_runs_nothing_at_a_rollback(session):
    session.enqueue(leased.tasks["thank"], customer="dave")
    session.commit()
    with inline(session, leased) as outcomes:
        with session.begin_nested():
            session.add(Order(customer="eve"))
        session.rollback()
        assert outcomes == []
        session.commit()
        assert len(outcomes) == 1


def test_inline_hears_of_other_sessions_on_the_connection_only(tables, session):
    order = placed(session)
    mine = sessionmaker(session.bind, join_transaction_mode="create_savepoint")
    with inline(session, leased) as outcomes:
        with mine.begin() as request:
            enqueue(request, leased.tasks["bill"], order=ref(Order, order.id))
        assert len(outcomes) == 2
        session.enqueue(leased.tasks["thank"], customer="eve")
        session.flush()
        with Session(tables) as elsewhere:
            elsewhere.execute(select(1))
            elsewhere.commit()
        assert len(outcomes) == 2


def test_inline_raises_at_the_end_and_does_not_disturb(session):
    order = placed(session)
    mode.failing = LookupError("no printer")

    def place(times):
        with inline(session, leased):
            for _ in range(times):
                session.enqueue(leased.tasks["bill"], order=order)
                session.commit()
            assert order.state == "new"

    with pytest.raises(LookupError, match="no printer"):
        place(1)
    with pytest.raises(ExceptionGroup) as caught:
        place(2)
    assert len(caught.value.exceptions) == 2
    with inline(session, leased, raises=False) as outcomes:
        session.enqueue(leased.tasks["bill"], order=order)
        session.commit()
    assert [outcome.ending for outcome in outcomes] == ["failed"]


def test_inline_needs_a_connection(tables):
    with (
        JobSession(tables) as session,
        pytest.raises(ConfigurationError, match="bound to a connection"),
        inline(session, leased),
    ):
        pass


# ---------------------------------------------------------------------------------------------- sessions of the jobs


def test_any_session_class_will_do(tables):
    class Own(Session):
        pass

    def handler(session: Session, order: Order) -> None:
        mode.seen.append(isinstance(session, Own))
        order.state = "seen"

    task = leased.task(handler)
    try:
        with rolled_back(tables, Own) as session:
            order = placed(session)
            enqueue(session, task, order=order)
            drain(session, leased)
            assert (mode.seen, order.state) == ([True], "seen")
    finally:
        del leased.tasks["handler"]


def test_a_scoped_session(tables):
    with rolled_back(tables) as bound:
        registry = scoped_session(sessionmaker(bound.bind, class_=JobSession, join_transaction_mode="create_savepoint"))
        order = placed(registry)
        enqueue(registry, leased.tasks["bill"], order=order)
        registry.commit()
        assert len(drain(registry, leased)) == 2
        assert order.state == "billed"
        registry.remove()


def test_several_connections(tables, new_database):
    other = create_engine(new_database())

    class Elsewhere(DeclarativeBase):
        pass

    class Note(Elsewhere):
        __tablename__ = "notes"
        id: Mapped[int] = mapped_column(primary_key=True)

    Elsewhere.metadata.create_all(other)

    def noting(session: JobSession[Job]) -> None:
        session.add(Note())

    task = leased.task(noting)
    try:
        with tables.connect() as here, other.connect() as there:
            here.begin()
            there.begin()
            with JobSession(binds={Base: here, Note: there}, join_transaction_mode="create_savepoint") as session:
                session.enqueue(task)
                session.commit()
                assert len(drain(session, leased)) == 1
                assert len(session.scalars(select(Note)).all()) == 1
        assert row_count(other, Note) == 0
    finally:
        del leased.tasks["noting"]
        other.dispose()


def test_sessions_of_the_application(tables, session):
    order = placed(session)
    make = sessionmaker(session.bind, class_=JobSession, join_transaction_mode="create_savepoint", info={"from": "app"})

    def looks(session: JobSession[Job]) -> None:
        mode.seen.append(session.info["from"])

    task = leased.task(looks)
    try:
        session.enqueue(task)
        session.enqueue(leased.tasks["bill"], order=order)
        drain(session, leased, sessions=make)
        assert mode.seen[0] == "app"
        for wrong, complaint in [
            (sessionmaker(tables, class_=JobSession), "not on the connection"),
            (sessionmaker(session.bind, class_=JobSession), "create_savepoint"),
        ]:
            session.enqueue(task)
            with pytest.raises(ConfigurationError, match=complaint):
                drain(session, leased, sessions=wrong)
    finally:
        del leased.tasks["looks"]


def test_a_session_that_cannot_be_made_again(tables):
    class Demanding(JobSession):
        def __init__(self, secret, **options):
            super().__init__(info={"secret": secret}, **options)

    with tables.connect() as connection:
        connection.begin()
        with Demanding("x", bind=connection, join_transaction_mode="create_savepoint") as session:
            session.enqueue(leased.tasks["thank"], customer="dave")
            with pytest.raises(ConfigurationError, match="sessions="):
                drain(session, leased)


# ------------------------------------------------------------------------------------------------------------- async


def run_async(database_url, driver, scenario):
    async def main():
        async with open_async_engine(driver_url(database_url, driver)) as engine:
            async with engine.begin() as connection:
                await connection.run_sync(Base.metadata.create_all)
            async with rolled_back(engine) as session:
                await scenario(session)
            async with AsyncSession(engine) as session:
                assert await session.scalar(select(func.count()).select_from(Job)) == 0

    asyncio.run(main())


@pytest.mark.parametrize("queue", [mixed, alike], ids=lambda queue: queue.name)
def test_async_runs_both_flavours(database_url, async_driver, queue):
    async def scenario(session):
        order = Order(customer="dave")
        session.add(order)
        session.enqueue(queue.tasks["slowly"], order=order)
        await session.commit()
        assert await assert_enqueued(session, queue.tasks["slowly"], order=order)
        assert [outcome.ending for outcome in await drain(session, queue)] == ["done"]
        assert order.state == "slow"  # loaded anew: nothing could load it here
        assert await perform(session, queue.tasks["slowly"], order=order) == "dave"
        assert await perform(session, queue.tasks["quickly"], order=order) == "dave"
        assert order.state == "slow+quick"
        assert await enqueued(session, queue) == []

    run_async(database_url, async_driver, scenario)


@BOTH
def test_async_failures_leases_and_time(database_url, async_driver, queue):
    async def scenario(session):
        order = Order(customer="dave")
        session.add(order)
        session.enqueue(queue.tasks["bill"], order=order)
        await session.commit()
        assert order.customer == "dave"  # not expired: nothing could load it here
        mode.failing = LookupError("no printer")
        with pytest.raises(LookupError):
            await drain(session, queue)
        assert order.state == "new"
        mode.failing = None
        assert await advance(session, timedelta(minutes=2), queue) == 1
        if queue is leased:
            await session.scalars(claim(due(Job), lease=timedelta(minutes=5)))
            assert await drain(session, queue) == []
            assert await expire_leases(session, queue) == 1
        assert len(await drain(session, queue)) == 2
        assert order.state == "billed"

    run_async(database_url, async_driver, scenario)


@pytest.mark.parametrize("queue", [mixed, alike], ids=lambda queue: queue.name)
def test_async_inline(database_url, async_driver, queue):
    async def scenario(session):
        order = Order(customer="dave")
        session.add(order)
        make = async_sessionmaker(session.bind, class_=AsyncJobSession, join_transaction_mode="create_savepoint")
        with inline(session, queue) as outcomes:
            await session.commit()
            async with make.begin() as request:
                request.enqueue(queue.tasks["slowly"], order=ref(Order, order.id))
            assert [outcome.ending for outcome in outcomes] == ["done"]
        assert order.state == "slow"

    run_async(database_url, async_driver, scenario)


def test_async_sessions_of_the_application(database_url, async_driver):
    async def scenario(session):
        options = {"class_": AsyncJobSession, "join_transaction_mode": "create_savepoint", "info": {"from": "app"}}

        async def looks(session: AsyncJobSession[Job]) -> None:
            mode.seen.append(session.info["from"])

        task = mixed.task(looks)
        try:
            session.enqueue(task)
            await drain(session, mixed, async_sessions=async_sessionmaker(session.bind, **options))
            assert mode.seen == ["app"]
        finally:
            del mixed.tasks["looks"]

    run_async(database_url, async_driver, scenario)


def test_an_async_handler_needs_an_async_session(session):
    session.enqueue(mixed.tasks["slowly"], order=placed(session))
    with pytest.raises(ConfigurationError, match="give an AsyncSession"):
        drain(session, mixed)


# ------------------------------------------------------------------------------------- left to find the queues itself

MODELS = """
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqla_jobqueue import JobMixin, JobQueue, JobSession

class Base(DeclarativeBase):
    pass

class Job(JobMixin, Base):
    __tablename__ = "jobs"

class Missing(JobMixin, Base):
    __tablename__ = "missing"

class Note(Base):
    __tablename__ = "notes"
    id: Mapped[int] = mapped_column(primary_key=True)
    text: Mapped[str]

jobs = JobQueue(Job)
quick = JobQueue(Job, "quick", one_transaction=True)
unused = JobQueue(Job, "unused")
missing = JobQueue(Missing)

@missing.task
def never(session: JobSession[Missing]) -> None: ...

@jobs.task
def note(session: JobSession[Job], text: str) -> None:
    session.add(Note(text=text))

@quick.task
def forward(session: JobSession[Job], text: str) -> None:
    session.enqueue(note, text=text)
"""

CONFTEST = """
import pytest
from models import Base

@pytest.fixture(scope="session")
def jobqueue_metadata():
    tables = [table for table in Base.metadata.tables.values() if table.name != "missing"]
    Base.metadata.remove(Base.metadata.tables["missing"])
    return Base.metadata
"""

TEST = """
import pytest
from datetime import timedelta
from models import Job, Note, forward, note
from sqlalchemy import select
from sqla_jobqueue.testing import advance, assert_enqueued, drain, enqueued, expire_leases, inline

@pytest.mark.parametrize("again", [1, 2])
def test_drain(jobqueue_session, again):
    jobqueue_session.enqueue(forward, text="hello")
    jobqueue_session.commit()
    assert len(enqueued(jobqueue_session)) == 1
    assert advance(jobqueue_session, timedelta(1)) == 1
    assert expire_leases(jobqueue_session) == 0
    assert len(drain(jobqueue_session)) == 2
    assert jobqueue_session.scalars(select(Note.text)).all() == ["hello"]

def test_inline(jobqueue_session):
    with inline(jobqueue_session):
        jobqueue_session.enqueue(note, text="now")
        jobqueue_session.commit()
    assert jobqueue_session.scalars(select(Note.text)).all() == ["now"]
"""


def run_pytest(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:faker", "-W", "error", *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=100)
    return result.stdout + result.stderr


@pytest.fixture
def project(tmp_path):
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TEST)
    return tmp_path


def test_the_plugin_gives_a_session_and_drain_finds_the_queues(project, database_url):
    assert "3 passed" in run_pytest(project, f"--jobqueue-url={database_url}")
    engine = create_engine(database_url)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM notes").scalar() == 0
    engine.dispose()


def test_the_plugin_has_a_server_of_its_own(project):
    assert "1 passed" in run_pytest(project, "-k", "test_inline")


def test_the_plugin_says_what_it_needs(project, database_url):
    (project / "conftest.py").unlink()
    assert "override the session-scoped fixture jobqueue_metadata" in run_pytest(
        project, f"--jobqueue-url={database_url}"
    )


def test_two_models_on_one_table_must_be_told_apart(tables, session):
    class OtherBase(DeclarativeBase):
        pass

    class Twin(JobMixin, OtherBase):
        __tablename__ = "jobs"

    twins = JobQueue(Twin)

    @twins.task
    def nothing(session: JobSession[Twin]) -> None: ...

    with pytest.raises(ConfigurationError, match="say which queues"):
        drain(session)


def test_the_library_does_not_import_it():
    code = "import sys, sqla_jobqueue, sqla_jobqueue.worker, sqla_jobqueue.migrations; print([m for m in sys.modules if 'sqla_jobqueue.testing' in m or m == 'pytest'])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
    code = "import sys, sqla_jobqueue.testing; print('pytest' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


# ---------------------------------------------------------------------------------------------------------- the docs

DOCS = (Path(__file__).parent.parent / "docs" / "testing.md").read_text()


def test_the_code_of_the_docs_runs(tmp_path, database_url):
    for name, code in re.findall(r"```python\n# (\S+)\n(.*?)```", DOCS, flags=re.DOTALL):
        (tmp_path / name).write_text(code)
    assert {path.name for path in tmp_path.iterdir()} >= {
        "test_shop.py",
        "test_async.py",
        "test_fastapi.py",
        "test_flask.py",
    }
    # Starlette's test client warns of the HTTP client that it will want some day.
    result = run_pytest(tmp_path, f"--jobqueue-url={database_url}", "-W", "default")
    assert re.search(r"\b9 passed", result), result
