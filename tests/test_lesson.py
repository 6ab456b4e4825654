"""The lesson that the library is made from, step by step, with the very rows that it shows.

Sessions A to D are connections of their own, driven in turn by one thread. Each mechanism runs twice: in the lesson's
SQL, on the library's table, and by the library's builders.
"""

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from sqlalchemy import (
    ARRAY,
    ForeignKey,
    Text,
    create_engine,
    exists,
    func,
    insert,
    literal,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqla_jobqueue.backoff import exponential
from sqla_jobqueue.model import JobMixin
from sqla_jobqueue.statements import (
    LEASE_EXPIRED,
    Fence,
    Listen,
    channel_name,
    claim,
    complete,
    due,
    expired,
    fence,
    finished,
    is_expired,
    notify,
    prune,
    reclaim_expired,
    retry,
)
from sqla_jobqueue.status import JobStatus
from tests.helpers import driver_url


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    customer: Mapped[str] = mapped_column(Text)
    total_cents: Mapped[int]


class Job(JobMixin, Base):
    __tablename__ = "jobs"


class Invoice(Base):
    __tablename__ = "invoices"

    order_id: Mapped[int] = mapped_column(ForeignKey(Order.id), primary_key=True)
    total_cents: Mapped[int]


SEED = """
INSERT INTO orders (id, customer, total_cents)
VALUES
  (1, 'alice', 4200),
  (2, 'bob', 1500),
  (3, 'carol', 9900);

-- Three jobs waiting to run.
INSERT INTO jobs (kind, payload)
VALUES
  ('send_receipt', '{"order_id": 1}'),
  ('send_receipt', '{"order_id": 2}'),
  ('create_invoice', '{"order_id": 3}');

-- Two jobs whose workers died ten minutes ago, so their leases have expired.
INSERT INTO jobs (kind, payload, status, attempts, run_at, locked_until)
VALUES
  ('send_receipt', '{"order_id": 3}', 'running', 1,
   now() - interval '10 minutes', now() - interval '5 minutes'),
  ('sync_crm', '{"customer": "carol"}', 'running', 3,
   now() - interval '10 minutes', now() - interval '5 minutes');
"""

FIRST_DUE = """
WHERE id = (
  SELECT id
  FROM jobs
  WHERE status = 'pending'
    AND run_at <= now()
    {and_kind}
  ORDER BY run_at, id
  LIMIT 1
  FOR UPDATE SKIP LOCKED
)
RETURNING id, kind, payload, attempts
"""
IN_ONE_TRANSACTION = "UPDATE jobs SET attempts = attempts + 1" + FIRST_DUE
WITH_A_LEASE = """
UPDATE jobs
SET status = 'running',
    attempts = attempts + 1,
    locked_until = now() + interval '5 minutes'
""" + FIRST_DUE.format(and_kind="")
RECLAIM = """
UPDATE jobs
SET status = CASE WHEN attempts >= max_attempts THEN 'failed' ELSE 'pending' END,
    locked_until = NULL,
    last_error = 'lease expired'
WHERE status = 'running'
  AND locked_until < now()
RETURNING id, kind, status, attempts
"""
DONE = "UPDATE jobs SET status = 'done', locked_until = NULL WHERE id = {} AND attempts = {} RETURNING id, status"
RETRY = """
UPDATE jobs
SET status = CASE WHEN attempts >= max_attempts THEN 'failed' ELSE 'pending' END,
    run_at = now() + interval '1 second' * power(2, attempts),
    locked_until = NULL,
    last_error = 'SMTP timeout'
WHERE id = {}
  AND attempts = {}
RETURNING id, status
"""
FIVE_MINUTES = timedelta(minutes=5)
RECEIPT_1 = (1, "send_receipt", {"order_id": 1})
RECEIPT_2 = (2, "send_receipt", {"order_id": 2})
INVOICE_3 = (3, "create_invoice", {"order_id": 3})
RECEIPT_4 = (4, "send_receipt", {"order_id": 3})


def rows(session: Session, statement: Any) -> list[tuple[Any, ...]]:
    if isinstance(statement, str):
        return [tuple(row) for row in session.connection().exec_driver_sql(statement)]
    return [tuple(row) for row in session.execute(statement)]


class TheSql:
    """The lesson's own statements."""

    def claim(self, session: Session, kind: str = "") -> list[tuple[Any, ...]]:
        return rows(session, IN_ONE_TRANSACTION.format(and_kind=f"AND kind = '{kind}'" if kind else ""))

    def finish(self, session: Session, job: int, _attempt: int) -> None:
        session.connection().exec_driver_sql(f"UPDATE jobs SET status = 'done' WHERE id = {job}")

    def claim_with_a_lease(self, session: Session) -> list[tuple[Any, ...]]:
        return rows(session, WITH_A_LEASE)

    def reclaim(self, session: Session) -> list[tuple[Any, ...]]:
        return sorted(rows(session, RECLAIM))

    def report_done(self, session: Session, job: int, attempt: int) -> list[tuple[Any, ...]]:
        return rows(session, DONE.format(job, attempt))

    def report_error(self, session: Session, job: int, attempt: int) -> list[tuple[Any, ...]]:
        return rows(session, RETRY.format(job, attempt))


class TheBuilders:
    """The library's."""

    backoff = staticmethod(exponential(jitter=0))

    def claim(self, session: Session, kind: str = "") -> list[tuple[Any, ...]]:
        candidates = due(Job).where(Job.kind == kind) if kind else due(Job)
        return self._shown(session.scalars(claim(candidates, lease=None)))

    def finish(self, session: Session, job: int, attempt: int) -> None:
        assert session.execute(complete(Job, JobStatus.PENDING), fence(Fence((job,), attempt))).one().status == "done"

    def claim_with_a_lease(self, session: Session) -> list[tuple[Any, ...]]:
        return self._shown(session.scalars(claim(due(Job), lease=FIVE_MINUTES)))

    def reclaim(self, session: Session) -> list[tuple[Any, ...]]:
        jobs = session.scalars(reclaim_expired(expired(Job)))
        return sorted((job.id, job.kind, job.status, job.attempts) for job in jobs)

    def report_done(self, session: Session, job: int, attempt: int) -> list[tuple[Any, ...]]:
        return [(row.id, row.status) for row in session.execute(complete(Job), fence(Fence((job,), attempt)))]

    def report_error(self, session: Session, job: int, attempt: int) -> list[tuple[Any, ...]]:
        parameters = fence(Fence((job,), attempt), delay=self.backoff(attempt), error="SMTP timeout")
        return [(row.id, row.status) for row in session.execute(retry(Job), parameters)]

    def _shown(self, jobs: Any) -> list[tuple[Any, ...]]:
        return [(job.id, job.kind, job.payload, job.attempts) for job in jobs]


@pytest.fixture(params=[TheSql(), TheBuilders()], ids=["sql", "builders"])
def by(request) -> Any:
    return request.param


@pytest.fixture
def sessions(database_url) -> Iterator[Any]:
    """A, B, C, D; a statement that waits for a lock fails instead of hanging."""
    engine = create_engine(database_url, connect_args={"options": "-c lock_timeout=5s"})
    with engine.begin() as connection:
        Base.metadata.create_all(connection)
    with engine.begin() as connection:
        connection.exec_driver_sql(SEED)
    connections = [engine.connect() for _ in range(4)]
    named = SimpleNamespace(**{name: Session(each) for name, each in zip("abcd", connections, strict=True)})
    yield named
    for each in connections:
        each.close()
    engine.dispose()


def outcome(session: Session, job: int) -> tuple[Any, ...]:
    """What is committed of a job."""
    session.rollback()
    found = session.execute(select(Job.status, Job.attempts, Job.last_error).where(Job.id == job)).one()
    session.rollback()
    return tuple(found)


def test_each_session_is_a_real_connection(sessions):
    pids = {session.scalar(select(func.pg_backend_pid())) for session in vars(sessions).values()}
    assert len(pids) == 4


def test_the_naive_queue_hands_a_job_out_twice(sessions):
    look = select(Job.id, Job.kind, Job.payload).where(Job.status == "pending").order_by(Job.id).limit(1)
    take = (
        update(Job)
        .where(Job.id == 1)
        .values(status="running", locked_until=func.now() + FIVE_MINUTES)
        .returning(Job.id, Job.status)
        .execution_options(synchronize_session=False)
    )
    assert rows(sessions.a, look) == [RECEIPT_1]
    assert rows(sessions.b, look) == [RECEIPT_1]
    assert rows(sessions.a, take) == [(1, "running")]
    sessions.a.commit()
    assert rows(sessions.b, take) == [(1, "running")]  # both own job 1: Alice gets two receipts
    sessions.b.commit()


def test_the_table_refuses_the_naive_claim_that_nobody_could_take_back(sessions):
    with pytest.raises(IntegrityError, match="jobs_lease_check"):
        sessions.a.execute(update(Job).where(Job.id == 1).values(status="running"))


def test_claiming_with_skip_locked(sessions, by):
    assert by.claim(sessions.a) == [(*RECEIPT_1, 1)]
    assert by.claim(sessions.b) == [(*RECEIPT_2, 1)]  # job 1 is locked
    assert by.claim(sessions.c) == [(*INVOICE_3, 1)]
    assert by.claim(sessions.d) == []  # everything is locked: no job, no waiting

    by.finish(sessions.a, 1, 1)
    sessions.a.commit()
    sessions.b.rollback()  # a crash

    assert by.claim(sessions.d) == [(*RECEIPT_2, 1)]  # nothing is lost, but attempts is 1 again
    assert outcome(sessions.a, 1) == ("done", 1, None)
    assert outcome(sessions.a, 2) == ("pending", 0, None)
    assert outcome(sessions.a, 3) == ("pending", 0, None)


def test_leases(sessions, by):
    a, b, c, d = sessions.a, sessions.b, sessions.c, sessions.d
    assert by.claim_with_a_lease(a) == [(*RECEIPT_1, 1)]
    a.commit()
    assert not a.in_transaction()  # none stays open while the worker works

    lapsed = is_expired(Job.__table__).label("lease_expired")
    running = select(Job.id, Job.kind, Job.attempts, lapsed).where(Job.status == "running").order_by(Job.id)
    assert rows(b, running) == [(1, "send_receipt", 1, False), (4, "send_receipt", 1, True), (5, "sync_crm", 3, True)]
    assert by.reclaim(b) == [(4, "send_receipt", "pending", 1), (5, "sync_crm", "failed", 3)]
    b.commit()
    assert outcome(b, 4) == ("pending", 1, LEASE_EXPIRED)
    assert outcome(b, 5) == ("failed", 3, LEASE_EXPIRED)  # the dead letter

    assert by.claim_with_a_lease(c) == [(*RECEIPT_4, 2)]  # the counter survived the crash
    c.commit()
    assert by.report_done(d, 4, 1) == []  # job 4's first worker was only slow: fenced off
    d.commit()
    assert outcome(d, 4) == ("running", 2, LEASE_EXPIRED)
    assert by.report_done(a, 1, 1) == [(1, "done")]
    a.commit()
    assert outcome(d, 1) == ("done", 1, None)


def test_backoff_doubles_until_the_dead_letter(sessions, by):
    a = sessions.a
    a.execute(update(Job).where(Job.id == 1).values(max_attempts=4))
    a.execute(update(Job).where(Job.id.in_([2, 3])).values(run_at=func.now() + timedelta(hours=1)))
    a.commit()
    for attempt, seconds in ((1, 2), (2, 4), (3, 8)):
        assert by.claim_with_a_lease(a) == [(*RECEIPT_1, attempt)]
        a.commit()
        before = a.scalar(select(func.now()))
        assert by.report_error(a, 1, attempt) == [(1, "pending")]
        after = a.scalar(select(func.clock_timestamp()))
        run_at = a.scalar(select(Job.run_at).where(Job.id == 1))
        assert before + timedelta(seconds=seconds) <= run_at <= after + timedelta(seconds=seconds)
        assert by.claim_with_a_lease(a) == []  # not yet
        a.commit()
        a.execute(update(Job).where(Job.id == 1).values(run_at=func.now()))  # that time has passed
        a.commit()
    assert by.claim_with_a_lease(a) == [(*RECEIPT_1, 4)]
    assert by.report_error(a, 1, 4) == [(1, "failed")]
    a.commit()
    assert outcome(a, 1) == ("failed", 4, "SMTP timeout")


def test_exactly_once_processing(sessions, by):
    a, b, c = sessions.a, sessions.b, sessions.c
    of_order_3 = select(Order.id, Order.total_cents).where(Order.id == 3)
    write = insert(Invoice).from_select(["order_id", "total_cents"], of_order_3)
    write = write.returning(Invoice.order_id, Invoice.total_cents)

    assert by.claim(a, "create_invoice") == [(*INVOICE_3, 1)]
    assert rows(a, write) == [(3, 9900)]
    a.rollback()  # it crashes before committing: the invoice goes together with the claim

    assert by.claim(b, "create_invoice") == [(*INVOICE_3, 1)]
    assert rows(b, write) == [(3, 9900)]
    by.finish(b, 3, 1)
    b.commit()

    invoiced = select(Invoice.order_id, Invoice.total_cents, Job.status).join(Job, Job.id == 3)
    assert rows(c, invoiced.where(Invoice.order_id == 3)) == [(3, 9900, "done")]  # delivered twice, invoiced once


def test_enqueue_with_your_data(sessions):
    a, b = sessions.a, sessions.b
    both = select(
        exists().where(Order.id == 4), exists().where(Job.kind == "send_receipt", Job.payload == {"order_id": 4})
    )
    for end, there in ((a.rollback, False), (a.commit, True)):
        a.add(Order(id=4, customer="dave", total_cents=2500))
        a.flush()
        a.add(Job(kind="send_receipt", payload={"order_id": 4}))
        a.flush()
        assert rows(b, both) == [(False, False)]  # nobody sees it before
        assert b.scalars(claim(due(Job).where(Job.payload == {"order_id": 4}), lease=None)).all() == []
        b.rollback()
        end()
        assert rows(b, both) == [(there, there)]  # no order without its job, no job without its order
        b.rollback()


def test_notify_wakes_on_commit_and_only_then(sessions, database_url):
    a = sessions.a
    enqueue = insert(Job).values(kind="send_receipt", payload={"order_id": 4})
    channel = channel_name(Job.__table__, "public")
    with psycopg.connect(driver_url(database_url, ""), autocommit=True) as listener:
        listener.execute(str(Listen(channel).compile(a.get_bind())))

        def wake_up(queue: str) -> None:
            a.execute(enqueue)
            a.execute(notify(), {"channel": channel, "queue": queue})

        wake_up("rolled back")
        a.rollback()
        wake_up("committed")
        wake_up("committed")
        listener.execute("SELECT 1")
        assert list(listener.notifies(timeout=0)) == []  # nothing before the commit
        a.commit()
        heard = list(listener.notifies(timeout=20, stop_after=1)) + list(listener.notifies(timeout=0))
    assert [(each.channel, each.payload) for each in heard] == [(channel, "committed")]  # two are one


def test_one_event_many_consumers(sessions):
    a, b = sessions.a, sessions.b
    kinds = func.unnest(literal(["send_receipt", "create_invoice", "sync_crm"], ARRAY(Text))).column_valued("kind")
    copies = select(kinds, literal({"order_id": 4}, JSONB))
    made = a.execute(insert(Job).from_select(["kind", "payload"], copies).returning(Job.id, Job.kind)).all()
    a.commit()
    assert sorted(kind for _, kind in made) == ["create_invoice", "send_receipt", "sync_crm"]

    fresh = due(Job).where(Job.payload == {"order_id": 4})
    first = a.scalars(claim(fresh, lease=FIVE_MINUTES)).one()
    second, third = b.scalars(claim(fresh, limit=2, lease=FIVE_MINUTES))
    a.execute(complete(Job), fence(first)).one()
    b.execute(retry(Job), fence(second, delay=timedelta(0), error="SMTP timeout")).one()
    ids = {first.id, second.id, third.id}
    a.commit()
    b.commit()
    assert ids == {job for job, _ in made}
    copies = select(Job.status, Job.attempts).where(Job.id.in_(ids)).order_by(Job.status)
    assert rows(a, copies) == [("done", 1), ("pending", 1), ("running", 1)]  # each on its own


def test_finished_jobs_are_deleted(sessions):
    a = sessions.a
    done = a.scalars(claim(due(Job), lease=FIVE_MINUTES)).one()
    a.execute(complete(Job), fence(done)).one()
    a.commit()
    assert rows(a, prune(finished(Job, older_than=timedelta(minutes=1)))) == []
    assert rows(a, prune(finished(Job, older_than=timedelta(0)))) == [(1,)]
    a.commit()
    assert rows(a, select(Job.id).order_by(Job.id)) == [(2,), (3,), (4,), (5,)]
