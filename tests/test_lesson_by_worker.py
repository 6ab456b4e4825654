"""The lesson's story, told by the worker: its seed, the reclaim, and who is paid, told and given up."""

from datetime import timedelta

import pytest
from sqlalchemy import ForeignKey, Text, create_engine, func, insert, select
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

from sqla_jobqueue import AsyncJobSession, JobMixin, JobQueue, JobSession, Retry, Worker, lifecycle
from tests.helpers import driver_url, wait_until

TIMEOUT = timedelta(seconds=30)
TEN_MINUTES_AGO = func.now() - timedelta(minutes=10)
FIVE_MINUTES_AGO = func.now() - timedelta(minutes=5)


class Lesson:
    """Tables and seed of the lesson, its handlers, and what they did outside the database."""

    def __init__(self, url, *, one_transaction, flavour):
        class Base(DeclarativeBase):
            pass

        class Job(JobMixin, Base):
            __tablename__ = "jobs"

        class Order(Base):
            __tablename__ = "orders"
            id: Mapped[int] = mapped_column(primary_key=True)
            customer: Mapped[str] = mapped_column(Text)
            total_cents: Mapped[int]

        class Invoice(Base):
            __tablename__ = "invoices"
            order_id: Mapped[int] = mapped_column(ForeignKey("orders.id"), primary_key=True)
            total_cents: Mapped[int]

        self.Job, self.Order, self.Invoice = Job, Order, Invoice
        self.receipts, self.synced, self.crashes = [], [], 0
        self.engine = create_engine(url)
        self.make_session = sessionmaker(self.engine, class_=JobSession)
        Base.metadata.create_all(self.engine)
        self.seed()
        self.queue = JobQueue(Job, one_transaction=one_transaction)
        self.url, self.flavour = url, flavour
        self.is_async = flavour != "sync"
        if self.is_async:
            self.declare_async()
        else:
            self.declare_sync()

    def seed(self):
        orders = [(1, "alice", 4200), (2, "bob", 1500), (3, "carol", 9900)]
        waiting = [("send_receipt", 1), ("send_receipt", 2), ("create_invoice", 3)]
        died = {"status": "running", "run_at": TEN_MINUTES_AGO, "locked_until": FIVE_MINUTES_AGO}
        with self.engine.begin() as connection:
            for key, customer, cents in orders:
                connection.execute(insert(self.Order).values(id=key, customer=customer, total_cents=cents))
            for kind, key in waiting:
                connection.execute(insert(self.Job).values(kind=kind, payload={"order_id": key}))
            for kind, payload, attempts in [
                ("send_receipt", {"order_id": 3}, 1),
                ("sync_crm", {"customer": "carol"}, 3),
            ]:
                connection.execute(insert(self.Job).values(kind=kind, payload=payload, attempts=attempts, **died))

    def declare_sync(self):
        @self.queue.task
        def send_receipt(session, order: self.Order):
            self.receipts.append((session.job.id, order.customer))

        @self.queue.task
        def create_invoice(session, order: self.Order):
            self.write_invoice(session, order)

        @self.queue.task
        def sync_crm(_session, customer: str):
            self.synced.append(customer)

    def declare_async(self):
        @self.queue.task
        async def send_receipt(session, order: self.Order):
            self.receipts.append((session.job.id, order.customer))

        @self.queue.task
        async def create_invoice(session, order: self.Order):
            self.write_invoice(session, order)
            await session.flush()

        @self.queue.task
        async def sync_crm(_session, customer: str):
            self.synced.append(customer)

    def write_invoice(self, session, order):
        session.add(self.Invoice(order_id=order.id, total_cents=order.total_cents))
        if self.crashes:
            self.crashes -= 1
            raise Retry("crashed before committing", delay=timedelta(0))

    def worker(self, queue=None, **options):
        if self.is_async:  # an async engine belongs to one loop, and each worker has its own
            engine = create_async_engine(driver_url(self.url, self.flavour))
            options["async_sessions"] = async_sessionmaker(engine, class_=AsyncJobSession)
        else:
            options["sessions"] = self.make_session
        return Worker(queue or self.queue, **options)

    def jobs(self):
        with self.make_session() as session:
            columns = ("id", "kind", "status", "attempts", "last_error")
            return session.execute(select(*(getattr(self.Job, name) for name in columns)).order_by(self.Job.id)).all()

    def invoices(self):
        with self.make_session() as session:
            return session.execute(select(self.Invoice.order_id, self.Invoice.total_cents)).all()


@pytest.fixture(params=["sync", "psycopg", "asyncpg"])
def flavour(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["leased", "one_transaction"])
def lesson(request, database_url, flavour):
    lesson = Lesson(database_url, one_transaction=request.param, flavour=flavour)
    yield lesson
    lesson.engine.dispose()


ENDED = [
    (1, "send_receipt", "done", 1, None),
    (2, "send_receipt", "done", 1, None),
    (3, "create_invoice", "done", 1, None),
    (4, "send_receipt", "done", 2, "lease expired"),
    (5, "sync_crm", "failed", 3, "lease expired"),
]


def assert_ended(lesson, jobs=ENDED):
    assert lesson.jobs() == jobs
    assert lesson.invoices() == [(3, 9900)]
    assert sorted(lesson.receipts) == [(1, "alice"), (2, "bob"), (4, "carol")]
    assert lesson.synced == []  # out of attempts


def test_reclaim_and_drain(lesson):
    with lesson.make_session.begin() as session:
        reclaimed = lifecycle.reclaim_expired(session, lesson.Job, limit=10)
    assert [
        (fence.key, fence.attempt, status) for fence, status in sorted(reclaimed, key=lambda pair: pair[0].key)
    ] == [
        ((4,), 1, "pending"),
        ((5,), 3, "failed"),
    ]
    lesson.worker().drain(timeout=TIMEOUT)
    assert_ended(lesson)


def test_a_running_worker_reclaims_by_itself(lesson):
    with lesson.worker():
        wait_until(lambda: [job.status for job in lesson.jobs()] == ["done"] * 4 + ["failed"])
    assert_ended(lesson)


def test_two_workers_share_the_jobs(lesson):
    with lesson.worker(name="A", concurrency=1), lesson.worker(name="B", concurrency=1):
        wait_until(lambda: [job.status for job in lesson.jobs()] == ["done"] * 4 + ["failed"])
    assert_ended(lesson)


def test_delivered_twice_invoiced_once(lesson):
    lesson.crashes = 1
    with lesson.worker(poll_interval=timedelta(seconds=0.1)):
        wait_until(lambda: [job.status for job in lesson.jobs()] == ["done"] * 4 + ["failed"])
    third = (3, "create_invoice", "done", 2, "crashed before committing")
    assert_ended(lesson, [third if job[0] == 3 else job for job in ENDED])


def test_the_backoff_of_the_lesson(lesson):
    """2, 4 seconds, and the dead letter: the third attempt is the last. The jitter adds a tenth at most."""
    lesson.crashes = 0
    waits = []
    failing = JobQueue(lesson.Job, "failing", one_transaction=lesson.queue.settings.one_transaction)

    def fail_sync(_session):
        raise TimeoutError("SMTP timeout")

    async def fail_async(_session):
        raise TimeoutError("SMTP timeout")

    task = failing.task(name="fail")(fail_async if lesson.is_async else fail_sync)
    with lesson.make_session.begin() as session:
        session.enqueue(task)
    job = lesson.Job.__table__
    for _ in range(3):
        lesson.worker(failing).drain(timeout=TIMEOUT)
        with lesson.engine.begin() as connection:
            mine = job.c.queue == "failing"
            row = connection.execute(select(job, (job.c.run_at - func.now()).label("wait")).where(mine)).one()
            waits.append((row.status, row.attempts, row.last_error))
            if row.status == "pending":
                assert timedelta(seconds=2**row.attempts - 1) < row.wait <= timedelta(seconds=2**row.attempts * 1.1)
            connection.execute(job.update().where(mine).values(run_at=func.now()))
    error = "TimeoutError: SMTP timeout"
    assert waits == [("pending", 1, error), ("pending", 2, error), ("failed", 3, error)]


def test_one_event_many_consumers_enqueued_with_its_order(lesson):
    """No order without its jobs, no jobs without their order; each copy ends on its own."""
    tasks = lesson.queue.tasks
    with lesson.worker(poll_interval=timedelta(minutes=1)):
        wait_until(lambda: len(lesson.receipts) == 3)
        for commits in (False, True):
            with lesson.make_session() as session:
                order = lesson.Order(id=4, customer="dave", total_cents=2500)
                session.add(order)
                session.enqueue_all(
                    [
                        tasks["send_receipt"].call(order=order),
                        tasks["create_invoice"].call(order=order),
                        tasks["sync_crm"].call(customer=order.customer),
                    ]
                )
                session.flush()
                if commits:
                    session.commit()  # and wakes the worker, long before it would look
        wait_until(lambda: len(lesson.jobs()) == 8 and {job.status for job in lesson.jobs()[5:]} == {"done"})
    assert sorted(lesson.invoices()) == [(3, 9900), (4, 2500)]
    assert (len(lesson.receipts), lesson.synced) == (4, ["dave"])
