"""Every builder against a real server: what it changes, what it leaves, and whom it neither waits for nor disturbs."""

import asyncio
import inspect as python
import random
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import (
    Engine,
    ForeignKey,
    Integer,
    Interval,
    Text,
    bindparam,
    create_engine,
    func,
    insert,
    literal,
    select,
    update,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, aliased, mapped_column
from sqlalchemy.schema import CreateSchema

from sqla_jobqueue import statements
from sqla_jobqueue.errors import ConfigurationError
from sqla_jobqueue.model import JobErrorsMixin, JobMixin, JobResultMixin
from sqla_jobqueue.statements import (
    KEPT_ERRORS,
    LEASE_EXPIRED,
    Fence,
    Listen,
    cancel,
    channel_name,
    claim,
    claim_rows,
    complete,
    count_failure,
    due,
    expired,
    extend_lease,
    fail,
    fence,
    fence_of,
    fences_with,
    fill_payload,
    finished,
    lock_done,
    lock_held,
    notify,
    prune,
    prune_rows,
    reclaim_expired,
    reclaim_rows,
    release,
    requeue,
    retry,
    snooze,
    still_held,
    summary,
)
from sqla_jobqueue.status import CHANGES, LIVE, TERMINAL, JobStatus
from tests.helpers import open_async_engine

SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
LAPSED = -SECOND
"""A lease that is over when it begins."""


class Base(DeclarativeBase):
    pass


class Tenant(Base):
    __tablename__ = "tenants"

    id: Mapped[int] = mapped_column(primary_key=True)
    active: Mapped[bool] = mapped_column(default=True)


class Job(JobMixin, Base):
    __tablename__ = "jobs"

    tenant_id: Mapped[int | None] = mapped_column(ForeignKey(Tenant.id))


class Note(Base):
    """What references a job by a foreign key."""

    __tablename__ = "notes"

    id: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[int] = mapped_column(ForeignKey(Job.id))


class Step(JobErrorsMixin, JobMixin, Base):
    """A composite key, and a history of errors."""

    __tablename__ = "steps"

    tenant: Mapped[str] = mapped_column(Text, primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)


class Ticket(JobResultMixin, JobMixin, Base):
    __tablename__ = "tickets"

    uid: Mapped[uuid.UUID] = mapped_column(primary_key=True, default=uuid.uuid4)


@pytest.fixture(scope="module")
def tables(_databases) -> Iterator[Engine]:
    """One database for the file. A statement that waits for a lock fails instead of hanging."""
    name = _databases.take()
    engine = create_engine(_databases.url(name), connect_args={"options": "-c lock_timeout=5s -c jit=off"})
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()
    _databases.give_back(name)


@pytest.fixture
def engine(tables) -> Engine:
    with tables.begin() as connection:
        names = ", ".join(table.name for table in Base.metadata.sorted_tables)
        connection.exec_driver_sql(f"TRUNCATE {names} RESTART IDENTITY")
    return tables


@pytest.fixture
def a(engine) -> Iterator[Session]:
    with Session(engine) as session:
        yield session


@pytest.fixture
def b(engine) -> Iterator[Session]:
    with Session(engine) as session:
        yield session


def add(session: Session, count: int = 1, model: Any = Job, **values: Any) -> list[Any]:
    """Insert jobs; return their keys."""
    rows = [{"kind": "k", **values} for _ in range(count)]
    key = next(iter(model.__table__.primary_key))
    keys = session.scalars(insert(model.__table__).values(rows).returning(key)).all()
    session.commit()
    return sorted(keys)


def take(
    session: Session, count: int = 1, model: Any = Job, lease: timedelta | None = MINUTE, **options: Any
) -> list[Fence]:
    """Claim and commit; return the fences, in order."""
    jobs = session.scalars(claim(due(model), limit=count, lease=lease, **options)).all()
    fences = sorted((fence_of(job) for job in jobs), key=lambda each: each.key)
    session.commit()
    assert len(fences) == count
    return fences


def row(session: Session, key: int) -> Any:
    """All that is committed of a job."""
    session.commit()
    found = session.execute(select(Job.__table__).where(Job.id == key)).one_or_none()
    session.commit()
    return found


def clock(session: Session) -> Any:
    return session.scalar(select(func.clock_timestamp()))


# --- due, claim -------------------------------------------------------------------------------------------------------


def test_priority_then_time_then_key(a: Session):
    now = clock(a)
    places = [(1, -9), (0, -5), (0, -5), (-3, -1), (0, -7), (2**31 - 1, -99)]
    for priority, minutes in places:
        add(a, priority=priority, run_at=now + minutes * MINUTE)
    order = [take(a)[0].key[0] for _ in places]
    assert order == [4, 5, 2, 3, 1, 6]
    assert a.scalars(due(Job)).all() == []


def test_only_what_is_pending_and_due(a: Session):
    for status in JobStatus:
        add(a, status=status, locked_until=clock(a), finished_at=clock(a) if status in TERMINAL else None)
    add(a, run_at=clock(a) + HOUR)
    assert [each.key for each in take(a)] == [(1,)]
    assert a.scalars(claim(due(Job), limit=9, lease=MINUTE)).all() == []


def test_a_time_to_come_comes(a: Session):
    (job,) = add(a, run_at=clock(a) + HOUR)
    a.execute(update(Job).values(run_at=Job.run_at - HOUR))
    assert [each.key for each in take(a)] == [(job,)]


def test_one_queue_and_the_known_kinds(a: Session):
    for queue in ("mail", "default"):
        for kind in ("send", "resend", "se'nd"):
            add(a, queue=queue, kind=kind)
    assert len(a.scalars(due(Job)).all()) == 6
    assert [job.id for job in a.scalars(due(Job, queue="mail"))] == [1, 2, 3]
    assert [job.id for job in a.scalars(due(Job, kinds=["send", "se'nd"]))] == [1, 3, 4, 6]
    assert a.scalars(due(Job, kinds=[])).all() == []
    assert a.scalars(due(Job, queue="")).all() == []
    with_parameters = due(
        Job, queue=bindparam("where", type_=Text), kinds=bindparam("which", type_=postgresql.ARRAY(Text))
    )
    claimed = a.scalars(claim(with_parameters, limit=9, lease=MINUTE), {"where": "mail", "which": ["resend"]}).one()
    assert (claimed.queue, claimed.kind) == ("mail", "resend")


def test_what_a_claim_writes(a: Session):
    add(a, payload={"n": 1})
    before = clock(a)
    job = a.scalars(claim(due(Job), lease=MINUTE, locked_by="w-1")).one()
    after = clock(a)
    assert (job.status, job.attempts, job.max_attempts, job.locked_by) == ("running", 1, 3, "w-1")
    assert (job.payload, job.finished_at, job.last_error) == ({"n": 1}, None, None)
    assert before <= job.started_at <= after
    assert before + MINUTE <= job.locked_until <= after + MINUTE


def test_a_claim_without_a_lease_leaves_the_status(a: Session, b: Session):
    (key,) = add(a)
    job = a.scalars(claim(due(Job), lease=None)).one()
    assert (job.status, job.attempts, job.locked_until) == ("pending", 1, None)
    assert b.scalars(claim(due(Job), lease=None)).all() == []
    b.rollback()
    a.rollback()
    assert (row(a, key).attempts, row(a, key).started_at) == (0, None)


def test_a_claim_refreshes_what_the_session_knows(a: Session):
    (key,) = add(a)
    known = a.get(Job, key)
    assert known.attempts == 0
    assert a.scalars(claim(due(Job), lease=MINUTE)).one() is known
    assert known.attempts == 1


def test_locked_jobs_are_passed_over(a: Session, b: Session):
    first, second, third = add(a, 3)
    assert [job.id for job in a.scalars(claim(due(Job), lease=None))] == [first]
    assert [job.id for job in b.scalars(claim(due(Job), limit=9, lease=MINUTE))] == [second, third]
    with Session(a.get_bind()) as c:
        assert c.scalars(claim(due(Job), limit=9, lease=MINUTE)).all() == []


def test_conditions_belong_into_the_candidates(a: Session):
    a.add_all([Tenant(id=1), Tenant(id=7)])
    a.flush()
    add(a, 10, tenant_id=1)
    (wanted,) = add(a, tenant_id=7)
    outside = claim(due(Job), limit=1, lease=MINUTE).where(Job.tenant_id == 7)
    assert a.scalars(outside).all() == []  # tried after the LIMIT
    a.rollback()
    inside = claim(due(Job).where(Job.tenant_id == 7), limit=1, lease=MINUTE)
    assert [job.id for job in a.scalars(inside)] == [wanted]


def test_an_order_of_ones_own(a: Session):
    add(a, 3)
    latest = due(Job).order_by(None).order_by(Job.id.desc())
    assert [job.id for job in a.scalars(claim(latest, lease=MINUTE))] == [3]


def test_joins_in_the_candidates_lock_the_job_alone(a: Session, b: Session):
    a.add_all([Tenant(id=1), Tenant(id=2, active=False)])
    a.flush()
    add(a, 2, tenant_id=2)
    add(a, 2, tenant_id=1)
    add(a, 2)
    candidates = due(Job).join(Tenant, Tenant.id == Job.tenant_id).where(Tenant.active)
    assert sorted(job.id for job in a.scalars(claim(candidates, limit=9, lease=MINUTE))) == [3, 4]
    b.execute(update(Tenant).values(active=False))  # is not locked
    b.commit()


NESTED_LOOPS = ["enable_hashjoin", "enable_mergejoin", "enable_material", "enable_memoize"]
PLANS = {
    "as planned": [],
    "nested loops": NESTED_LOOPS,
    "nested loops over a sequential scan": [
        *NESTED_LOOPS,
        "enable_indexscan",
        "enable_bitmapscan",
        "enable_indexonlyscan",
    ],
    "merge joins": ["enable_hashjoin", "enable_nestloop"],
    "hash joins": ["enable_mergejoin", "enable_nestloop"],
}


@pytest.mark.parametrize("off", PLANS.values(), ids=PLANS)
def test_the_limit_is_exact_whatever_the_plan(a: Session, off: list[str]):
    """With statistics from when the table was empty, and every way to join."""
    connection = a.connection()
    connection.exec_driver_sql("ALTER TABLE jobs SET (autovacuum_enabled = off)")
    connection.exec_driver_sql("ANALYZE jobs")
    a.commit()
    add(a, 300)
    a.connection().exec_driver_sql("".join(f"SET {name} = off;" for name in off))
    assert len(a.scalars(claim(due(Job), limit=10, lease=LAPSED)).all()) == 10
    parameters = {"of_queue": "default", "limit": 10, "worker": "w", "lease": LAPSED}
    assert len(a.execute(claim_rows(Job, kinds=("k",), done=False), parameters).all()) == 10
    assert a.scalar(select(func.sum(Job.attempts))) == 20
    a.commit()
    assert len(a.scalars(reclaim_expired(expired(Job), limit=3)).all()) == 3
    assert len(a.execute(reclaim_rows(Job), {"limit": 3}).all()) == 3
    a.execute(update(Job).values(status="done", finished_at=func.now()))
    a.commit()
    assert len(a.execute(prune(finished(Job, older_than=timedelta(0)), limit=7)).all()) == 7
    parameters = {"of_queue": "default", "older_than": timedelta(0), "limit": 7}
    assert len(a.execute(prune_rows(Job, JobStatus.DONE), parameters).all()) == 7
    assert a.scalar(select(func.count()).select_from(Job)) == 286
    a.connection().exec_driver_sql("RESET ALL")


def test_limits_and_leases_as_parameters(a: Session):
    add(a, 5)
    statement = claim(due(Job), limit=bindparam("most", type_=Integer), lease=bindparam("long", type_=Interval))
    for most in (0, 2, 9):
        before = clock(a)
        jobs = a.scalars(statement, {"most": most, "long": HOUR}).all()
        assert len(jobs) == min(most, 3)
        assert all(before + HOUR <= job.locked_until <= clock(a) + HOUR for job in jobs)


def test_the_workers_claim(a: Session, b: Session):
    add(a, queue="mail", kind="send")
    add(a, queue="mail", kind="unknown")
    add(a, queue="other", kind="send")
    parameters = {"of_queue": "mail", "limit": 9, "worker": "w", "lease": MINUTE}
    claimed = a.execute(claim_rows(Job, kinds=("send",), done=False), parameters).one()
    assert list(claimed._mapping) == [column.name for column in Job.__table__.c]
    assert (claimed.id, claimed.status, claimed.attempts, claimed.locked_by) == (1, "running", 1, "w")
    del parameters["lease"]
    at_once = a.execute(claim_rows(Job, kinds=None, done=True), parameters).one()
    assert (at_once.id, at_once.status, at_once.attempts, at_once.locked_until) == (2, "done", 1, None)
    assert at_once.finished_at is not None
    assert row(b, 2).status == "pending"  # nobody sees it
    a.rollback()
    assert [row(a, key).attempts for key in (1, 2, 3)] == [0, 0, 0]


@pytest.mark.parametrize(
    "build", [lambda c: claim(c, lease=MINUTE), reclaim_expired, prune], ids=["claim", "reclaim", "prune"]
)
def test_candidates_that_are_no_jobs(build: Callable[[Any], Any]):
    nonsense = [
        select(Tenant),
        select(Tenant.id),
        select(literal(1)),
        select(func.count()),
        select(),
        select(Job.__table__),
    ]
    for candidates in (*nonsense, select(aliased(Job)), "jobs", None):
        with pytest.raises(ConfigurationError, match="takes a select of a job model"):
            build(candidates)


# --- expired, reclaim -------------------------------------------------------------------------------------------------


def test_reclaimed_jobs_wait_again_or_are_dead(a: Session):
    add(a, 2)
    add(a, max_attempts=1)
    add(a, attempts=7)  # of a time when more were allowed
    take(a, 4, lease=LAPSED)
    add(a)
    take(a, lease=MINUTE)
    was = {key: row(a, key) for key in (1, 3)}
    back = a.scalars(reclaim_expired(expired(Job).where(Job.id != 2))).all()
    found = {job.id: (job.status, job.attempts, job.locked_until, job.last_error) for job in back}
    assert found == {
        1: ("pending", 1, None, LEASE_EXPIRED),
        3: ("failed", 1, None, LEASE_EXPIRED),
        4: ("failed", 8, None, LEASE_EXPIRED),
    }
    a.commit()
    assert row(a, 1).finished_at is None
    assert row(a, 1).run_at == was[1].run_at
    assert row(a, 3).finished_at is not None
    assert row(a, 3).locked_by == was[3].locked_by
    assert (row(a, 2).status, row(a, 5).status) == ("running", "running")


def test_reclaim_passes_over_a_row_that_its_handler_has_locked(a: Session, b: Session):
    add(a, 2)
    held, _ = take(a, 2, lease=LAPSED)
    assert a.execute(lock_held(Job), fence(held)).one().id == 1
    assert [job.id for job in b.scalars(reclaim_expired(expired(Job)))] == [2]
    b.commit()
    a.commit()
    assert [job.id for job in b.scalars(reclaim_expired(expired(Job)))] == [1]


def test_the_longest_lapsed_come_first(a: Session):
    add(a, 3)
    for key, lease in ((1, -5 * SECOND), (2, -9 * SECOND), (3, -SECOND)):
        a.scalars(claim(due(Job).where(Job.id == key), lease=lease)).one()
    a.commit()
    assert [job.id for job in a.scalars(expired(Job))] == [2, 1, 3]
    assert a.execute(reclaim_rows(Job), {"limit": 1}).one()[:3] == (2, 1, "pending")


# --- the fence --------------------------------------------------------------------------------------------------------

HELD: dict[str, tuple[Any, dict[str, Any]]] = {
    "complete": (complete, {}),
    "retry": (retry, {"delay": MINUTE, "error": "stale"}),
    "fail": (fail, {"error": "stale"}),
    "snooze": (snooze, {"delay": MINUTE}),
    "release": (release, {}),
    "cancel by its holder": (lambda model: cancel(model, JobStatus.RUNNING), {"error": "stale"}),
    "extend_lease": (extend_lease, {}),
    "still_held": (still_held, {}),
    "lock_held": (lock_held, {}),
}
OPERATORS: dict[str, tuple[Any, dict[str, Any]]] = {
    "cancel": (cancel, {"error": "stale"}),
    "requeue": (requeue, {"more": 3}),
}
BY_KEY = HELD | OPERATORS


def send(session: Session, verb: str, *fences: Fence, model: Any = Job) -> list[Any]:
    builder, values = BY_KEY[verb]
    parameters = fence(*fences, **values)
    if verb == "extend_lease":
        parameters["lease"] = HOUR
    return list(session.execute(builder(model), parameters))


@pytest.mark.parametrize("verb", HELD)
def test_a_stale_attempt_changes_nothing(a: Session, b: Session, verb: str):
    """R02: while the row waits again, while B has it, after B finished, after it was pruned."""
    (key,) = add(a)
    (stale,) = take(a, lease=LAPSED)

    def refused() -> None:
        before = row(b, key)
        assert send(a, verb, stale) == []
        a.commit()
        assert row(b, key) == before

    b.scalars(reclaim_expired(expired(Job))).one()
    refused()  # the same attempt number, but the status says that nobody has it
    (owner,) = take(b)
    assert owner.attempt == 2
    refused()
    b.execute(complete(Job), fence(owner)).one()
    refused()
    b.execute(prune(finished(Job, older_than=timedelta(0)))).all()
    b.commit()
    b.execute(prune(finished(Job, older_than=timedelta(0)))).one_or_none()
    refused()
    assert row(b, key) is None


@pytest.mark.parametrize("verb", BY_KEY)
def test_an_attempt_number_that_is_not_the_rows(a: Session, verb: str):
    (key,) = add(a)
    (held,) = take(a)
    if verb == "requeue":
        a.execute(complete(Job), fence(held)).one()
    before = row(a, key)
    for attempt in (0, 2, -1, 2**31 - 1):
        assert send(a, verb, Fence(held.key, attempt)) == []
    assert send(a, verb, Fence((key + 1,), held.attempt)) == []
    assert row(a, key) == before
    assert len(send(a, verb, held)) == 1


ALLOWED = {
    **{verb: {JobStatus.RUNNING} for verb in HELD},
    "cancel": set(LIVE),
    "requeue": set(TERMINAL),
}


@pytest.mark.parametrize("verb", BY_KEY)
def test_each_verb_asks_for_its_statuses(a: Session, verb: str):
    for status in JobStatus:
        (key,) = add(a, status=status, locked_until=clock(a), finished_at=clock(a))
        before = row(a, key)
        changed = send(a, verb, Fence((key,), 0))
        assert bool(changed) == (status in ALLOWED[verb]), status
        after = row(a, key)
        if not changed or verb in ("still_held", "lock_held"):
            assert after == before
        elif after.status != status:
            assert JobStatus(after.status) in CHANGES[status]


@pytest.mark.parametrize("held", [JobStatus.PENDING, JobStatus.DONE])
@pytest.mark.parametrize(
    "builder", [complete, retry, fail, snooze, release, cancel], ids=lambda builder: builder.__name__
)
def test_a_holder_in_one_transaction_asks_for_what_its_claim_left(a: Session, builder: Any, held: JobStatus):
    values = {
        name: {"delay": MINUTE, "error": "e"}[name]
        for name in ("delay", "error")
        if f"given_{name}" in str(builder(Job, held))
    }
    for status in JobStatus:
        (key,) = add(a, attempts=1, status=status, locked_until=clock(a), finished_at=clock(a))
        changed = a.execute(builder(Job, held), fence(Fence((key,), 1), **values)).all()
        assert bool(changed) == (status is held)


@pytest.mark.parametrize("verb", HELD)
def test_pairs_are_never_crossed(a: Session, verb: str):
    add(a, 2)
    take(a, lease=LAPSED)
    a.scalars(reclaim_expired(expired(Job))).one()
    first, second = take(a, 2)
    assert {(*first.key, first.attempt), (*second.key, second.attempt)} == {(1, 2), (2, 1)}
    crossed = [Fence(first.key, second.attempt), Fence(second.key, first.attempt)]
    assert send(a, verb, *crossed) == []
    mixed = [Fence((1,), 1), Fence((2,), 1), Fence((3,), 1)]
    assert [found[:2] for found in send(a, verb, *mixed)] == [(2, 1)]
    a.rollback()
    assert sorted(found[:2] for found in send(a, verb, first, second)) == [(1, 2), (2, 1)]
    a.rollback()
    assert [found[:2] for found in send(a, verb, first, first)][:1] == [(1, 2)]  # named twice


def test_values_stay_with_their_job(a: Session):
    add(a, 3)
    fences = take(a, 3)
    wanted = [(one, {"delay": n * HOUR, "error": f"error {n}"}) for n, one in enumerate(fences, 1)]
    random.Random(5).shuffle(wanted)  # noqa: S311
    now = clock(a)
    assert len(a.execute(retry(Job), fences_with(wanted)).all()) == 3
    for n in (1, 2, 3):
        found = row(a, n)
        assert found.last_error == f"error {n}"
        assert n * HOUR <= found.run_at - now < n * HOUR + MINUTE


def test_a_fence_is_taken_from_what_is_loaded(a: Session, b: Session):
    with pytest.raises(ConfigurationError, match="not in the database yet"):
        fence_of(Job(kind="k"))
    add(a)
    job = a.scalars(claim(due(Job), lease=LAPSED)).one()
    held = fence_of(job)
    assert (held, held.key, held.attempt) == (Fence((1,), 1), (1,), 1)
    a.commit()  # expires what was loaded
    b.scalars(reclaim_expired(expired(Job))).one()
    (owner,) = take(b)
    with pytest.raises(ConfigurationError, match=r"take fence\(job\) before the commit"):
        fence(job)  # read anew, it would be the new owner's number
    assert a.execute(complete(Job), fence(held)).all() == []
    a.refresh(job)
    assert fence_of(job) == owner
    with Session(a.get_bind(), expire_on_commit=False) as c:
        add(a)
        job = c.scalars(claim(due(Job), lease=MINUTE)).one()
        c.commit()
        assert fence_of(job) == Fence((2,), 1)


# --- what each verb writes --------------------------------------------------------------------------------------------


def test_complete(a: Session):
    add(a)
    (held,) = take(a)
    assert a.execute(complete(Job), fence(held)).one()[:3] == (1, 1, "done")
    found = row(a, 1)
    assert (found.status, found.locked_until, found.last_error) == ("done", None, None)
    assert found.started_at < found.finished_at


def test_retry_waits_or_gives_up(a: Session):
    add(a, max_attempts=2)
    was = row(a, 1)
    (held,) = take(a)
    parameters = fence(held, delay=HOUR, error="one")
    written = a.execute(retry(Job), parameters).one()
    assert (written.status, written.attempts) == ("pending", 1)
    found = row(a, 1)
    assert written.run_at == found.run_at > clock(a) + HOUR - MINUTE
    assert (found.locked_until, found.finished_at, found.last_error) == (None, None, "one")
    a.execute(update(Job).values(run_at=was.run_at))
    (held,) = take(a)
    assert a.execute(retry(Job), fence(held, delay=HOUR, error="two")).one().status == "failed"
    found = row(a, 1)
    assert (found.locked_until, found.last_error, found.run_at) == (None, "two", was.run_at)
    assert found.finished_at is not None


def test_fail_does_not_count_what_is_left(a: Session):
    add(a)
    (held,) = take(a)
    assert a.execute(fail(Job), fence(held, error="no such order")).one().status == "failed"
    found = row(a, 1)
    assert (found.attempts, found.max_attempts, found.last_error, found.locked_until) == (1, 3, "no such order", None)
    assert found.finished_at is not None


@pytest.mark.parametrize("verb", ["snooze", "release"])
def test_snooze_and_release_cost_no_attempt(a: Session, verb: str):
    """R13: with one attempt allowed, the job still runs."""
    add(a, max_attempts=1)
    was = row(a, 1)
    for turn in (1, 2, 3):
        (held,) = take(a)
        assert held.attempt == turn  # only grows, so that no stale number comes back
        (written,) = send(a, verb, held)
        assert (written.status, written.attempts) == ("pending", turn)
        found = row(a, 1)
        assert (found.max_attempts, found.locked_until, found.finished_at, found.last_error) == (
            1 + turn,
            None,
            None,
            None,
        )
        if verb == "snooze":
            assert MINUTE - SECOND < found.run_at - clock(a) <= MINUTE
            a.execute(update(Job).values(run_at=was.run_at))
        else:
            assert found.run_at == was.run_at
    (held,) = take(a)
    assert a.execute(retry(Job), fence(held, delay=MINUTE, error="e")).one().status == "failed"


def test_cancel(a: Session):
    add(a, 2)
    (held,) = take(a)
    fences = [held, Fence((2,), 0)]
    assert {found.status for found in a.execute(cancel(Job), fence(*fences, error="not wanted"))} == {"cancelled"}
    for key in (1, 2):
        found = row(a, key)
        assert (found.status, found.last_error, found.locked_until) == ("cancelled", "not wanted", None)
        assert found.finished_at is not None
    assert a.execute(complete(Job), fence(held)).all() == []


def test_requeue_allows_more_attempts_from_now_on(a: Session):
    now = clock(a)
    add(a, status="failed", attempts=3, run_at=now - HOUR, finished_at=now, last_error="e", priority=5)
    add(a, status="done", attempts=9, finished_at=now)
    add(a, status="cancelled", attempts=0, finished_at=now, max_attempts=50)
    fences = [(Fence((1,), 3), {"more": 3}), (Fence((2,), 9), {"more": 1}), (Fence((3,), 0), {"more": 2})]
    assert len(a.execute(requeue(Job), fences_with(fences)).all()) == 3
    assert [row(a, key).max_attempts for key in (1, 2, 3)] == [6, 10, 2]
    found = row(a, 1)
    assert (found.status, found.attempts, found.finished_at, found.last_error) == ("pending", 3, None, "e")
    assert now <= found.run_at <= clock(a)
    assert take(a, 3)[0].attempt == 4


def test_requeue_leaves_a_job_whose_unique_key_is_taken(a: Session):
    now = clock(a)
    for key in ("taken", "running", "free", None):
        add(a, status="failed", unique_key=key, finished_at=now)
    add(a, unique_key="taken")
    add(a, unique_key="running", status="running", locked_until=now)
    add(a, status="done", unique_key="free", finished_at=now)
    fences = [Fence((key,), 0) for key in (1, 2, 3, 4)]
    changed = a.execute(requeue(Job), fence(*fences, more=3)).all()
    assert sorted(found.id for found in changed) == [3, 4]
    assert [row(a, key).status for key in (1, 2)] == ["failed", "failed"]


def test_requeue_of_several_with_one_unique_key_brings_back_one(a: Session):
    now = clock(a)
    add(a, 3, status="failed", unique_key="same", finished_at=now)
    add(a, 2, status="failed", finished_at=now)
    fences = [Fence((key,), 0) for key in (5, 4, 3, 2, 1)]
    changed = a.execute(requeue(Job), fence(*fences, more=3)).all()
    assert sorted(found.id for found in changed) == [1, 4, 5]


def test_count_failure_counts_what_a_rollback_took_back(a: Session):
    add(a, 3, max_attempts=2)
    job = a.scalars(claim(due(Job), lease=None)).one()
    held = fence_of(job)
    a.rollback()
    was = row(a, 1)
    parameters = fence(held, delay=HOUR, error="boom", lethal=0)
    written = a.execute(count_failure(Job), parameters).one()
    assert written[:3] == (1, 1, "pending")
    found = row(a, 1)
    assert (found.last_error, found.finished_at) == ("boom", None)
    assert found.run_at > was.run_at + HOUR - MINUTE
    assert a.execute(count_failure(Job), parameters).all() == []  # counted once
    again = fence(Fence((1,), 2), delay=HOUR, error="last", lethal=0)
    assert a.execute(count_failure(Job), again).one()[:3] == (1, 2, "failed")
    assert row(a, 1).finished_at is not None
    lethal = fence(Fence((2,), 1), delay=HOUR, error="never", lethal=1)
    assert a.execute(count_failure(Job), lethal).one()[:3] == (2, 1, "failed")
    a.commit()
    (other,) = take(a)  # claimed by somebody else meanwhile: its outcome stands
    assert other == Fence((3,), 1)
    assert a.execute(count_failure(Job), fence(other, delay=HOUR, error="late", lethal=0)).all() == []


def test_fill_payload(a: Session):
    add(a, 2, payload={"n": 1, "order_id": None})
    a.execute(fill_payload(Job), [{"id_0": 1, "keys": {"order_id": 4}}, {"id_0": 2, "keys": {"order_id": [1, "x"]}}])
    assert [row(a, key).payload for key in (1, 2)] == [{"n": 1, "order_id": 4}, {"n": 1, "order_id": [1, "x"]}]


# --- keys of other kinds ----------------------------------------------------------------------------------------------


def test_composite_keys(a: Session):
    for tenant, number in (("a", 1), ("a", 2), ("b", 1)):
        a.add(Step(tenant=tenant, number=number, kind="k"))
    a.commit()
    jobs = a.scalars(claim(due(Step), limit=9, lease=MINUTE)).all()
    fences = [fence_of(job) for job in jobs]
    assert sorted(each.key for each in fences) == [("a", 1), ("a", 2), ("b", 1)]
    a.commit()
    crossed = [Fence(("b", 2), 1), Fence((":", 1), 1)]
    assert send(a, "complete", *crossed, model=Step) == []
    one, two, three = sorted(fences, key=lambda each: each.key)
    assert [tuple(found[:3]) for found in send(a, "extend_lease", one, *crossed, model=Step)] == [("a", 1, 1)]
    assert [tuple(found[:4]) for found in send(a, "complete", one, model=Step)] == [("a", 1, 1, "done")]
    assert send(a, "retry", two, model=Step)[0].status == "pending"
    assert send(a, "cancel", three, model=Step)[0].status == "cancelled"
    assert sorted(found.number for found in send(a, "requeue", one, three, model=Step)) == [1, 1]
    a.commit()
    errors = a.scalars(select(Step.errors).where(Step.number == 2)).one()
    assert [(entry["attempt"], entry["error"]) for entry in errors] == [(1, "stale")]
    failed = fence(Fence(("a", 2), 2), delay=MINUTE, error="counted", lethal=1)
    assert a.execute(count_failure(Step), failed).one().status == "failed"
    errors = a.scalars(select(Step.errors).where(Step.number == 2)).one()
    assert [(entry["attempt"], entry["error"]) for entry in errors] == [(1, "stale"), (2, "counted")]
    a.execute(fill_payload(Step), {"id_0": "a", "id_1": 2, "keys": {"x": 1}})
    assert a.scalars(select(Step.payload).order_by(Step.tenant, Step.number)).all() == [{}, {"x": 1}, {}]
    a.commit()
    assert a.execute(prune(finished(Step, older_than=timedelta(0)))).all() == [("a", 2)]


def test_uuid_keys(a: Session):
    a.add_all([Ticket(kind="k") for _ in range(3)])
    a.commit()
    jobs = a.scalars(claim(due(Ticket), limit=9, lease=LAPSED)).all()
    done, lost, stale = (fence_of(job) for job in jobs)
    assert isinstance(done.key[0], uuid.UUID)
    a.commit()
    assert [found.uid for found in send(a, "complete", done, Fence((uuid.uuid4(),), 1), model=Ticket)] == [*done.key]
    a.commit()
    back = a.execute(reclaim_rows(Ticket), {"limit": 9}).all()
    assert {found.uid for found in back} == {*lost.key, *stale.key}
    assert send(a, "retry", lost, stale, model=Ticket) == []


# --- neither waiting nor blocking -------------------------------------------------------------------------------------


def test_a_renewal_passes_over_a_locked_row_and_tells_that_it_still_holds(a: Session, b: Session):
    add(a, 3)
    fences = take(a, 3)
    locked, free, _ = fences
    lost = Fence((3,), 9)
    a.execute(lock_held(Job), fence(locked)).one()  # its own handler
    before = row(b, 1)
    parameters = {**fence(locked, free, lost), "lease": HOUR}
    assert [found[:2] for found in b.execute(extend_lease(Job), parameters)] == [(2, 1)]
    b.commit()
    assert [found[:2] for found in b.execute(still_held(Job), fence(locked, lost))] == [(1, 1)]
    b.commit()
    assert row(b, 1) == before
    assert row(b, 2).locked_until > before.locked_until + HOUR - 2 * MINUTE
    a.execute(complete(Job), fence(locked)).one()


@pytest.mark.parametrize("verb", ["cancel", "requeue"])
def test_an_operator_passes_over_a_locked_row(a: Session, b: Session, verb: str):
    status = JobStatus.PENDING if verb == "cancel" else JobStatus.FAILED
    add(a, 3, status=status, finished_at=None if verb == "cancel" else clock(a))
    a.execute(select(Job).where(Job.id == 2).with_for_update()).one()
    fences = [Fence((key,), 0) for key in (1, 2, 3)]
    assert sorted(found.id for found in send(b, verb, *fences)) == [1, 3]
    b.commit()
    a.commit()
    assert [found.id for found in send(b, verb, *fences)] == [2]


def referenced(session: Session, key: int) -> None:
    session.execute(insert(Note.__table__).values(job_id=key))


CANDIDATES: dict[str, Callable[[Session], Any]] = {
    "claim": lambda session: session.scalars(claim(due(Job), lease=MINUTE)).one().id,
    "claim in one transaction": lambda session: session.scalars(claim(due(Job), lease=None)).one().id,
    "claim_rows": lambda session: session.execute(
        claim_rows(Job, kinds=None, done=True), {"of_queue": "default", "limit": 1, "worker": "w"}
    ).one().id,
    "cancel": lambda session: send(session, "cancel", Fence((1,), 0))[0].id,
}  # fmt: skip


@pytest.mark.parametrize("act", CANDIDATES.values(), ids=CANDIDATES)
def test_an_open_reference_neither_hides_a_job_nor_is_blocked(a: Session, b: Session, act: Callable[[Session], Any]):
    add(a, 2)
    referenced(b, 1)  # not committed: FOR UPDATE SKIP LOCKED would pass over job 1
    assert act(a) == 1
    a.rollback()
    b.rollback()
    assert act(a) == 1
    referenced(b, 1)  # FOR UPDATE would make it wait
    b.commit()
    a.commit()


def test_an_open_reference_to_a_running_job(a: Session, b: Session):
    add(a, 2)
    first, second = take(a, 2, lease=LAPSED)
    referenced(b, 1)
    assert len(send(a, "extend_lease", first)) == 1
    assert len(send(a, "lock_held", first)) == 1
    a.rollback()
    assert {job.id for job in a.scalars(reclaim_expired(expired(Job)))} == {1, 2}
    a.rollback()
    assert len(send(a, "complete", first, second)) == 2
    a.commit()
    assert len(send(a, "requeue", first, second)) == 2


def test_prune_does_not_wait_for_an_open_reference(a: Session, b: Session):
    add(a, 2, status="done", finished_at=clock(a))
    referenced(b, 1)
    assert a.execute(prune(finished(Job, older_than=timedelta(0)))).all() == [(2,)]
    a.commit()
    b.rollback()
    assert a.execute(prune(finished(Job, older_than=timedelta(0)))).all() == [(1,)]


def test_bulk_statements_in_any_order_do_not_deadlock(engine: Engine):
    """R20: random batches of cancel, requeue, claim, complete, renew, reclaim, prune, and inserts that reference jobs."""
    with Session(engine) as session:
        add(session, 60)
        start = session.scalar(select(func.max(Job.id)))
    failures: list[BaseException] = []

    def loop(seed: int) -> None:
        drawn = random.Random(seed)  # noqa: S311
        try:
            with Session(engine) as session:
                for _ in range(25):
                    known = session.execute(select(Job.id, Job.attempts)).all()
                    some = [Fence((key,), attempts) for key, attempts in drawn.sample(known, min(20, len(known)))]
                    if some:
                        send(session, drawn.choice(["cancel", "requeue"]), *some)
                        send(session, drawn.choice(["extend_lease", "cancel", "requeue"]), *reversed(some))
                    mine = session.scalars(claim(due(Job), limit=5, lease=drawn.choice([LAPSED, MINUTE]))).all()
                    session.execute(reclaim_expired(expired(Job), limit=5)).all()
                    if mine:
                        send(session, drawn.choice(["complete", "retry", "release"]), *map(fence_of, mine))
                    session.execute(prune(finished(Job, older_than=HOUR), limit=2)).all()
                    if drawn.random() < 0.3:
                        session.execute(insert(Note.__table__).values(job_id=drawn.randint(1, start)))
                    session.commit()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=loop, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    with engine.connect() as connection:
        query = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        assert connection.exec_driver_sql(query).scalar() == 0


# --- finished, prune --------------------------------------------------------------------------------------------------


def test_prune_takes_what_finished_long_enough_ago(a: Session):
    now = clock(a)
    for status in JobStatus:
        for age in (2 * HOUR, MINUTE):
            add(a, status=status, finished_at=now - age, locked_until=now - age, run_at=now + HOUR)
    old = {status: 2 * n + 1 for n, status in enumerate(JobStatus)}
    everything = a.execute(prune(finished(Job, older_than=HOUR))).all()
    assert sorted(key for (key,) in everything) == [old[status] for status in JobStatus if status in TERMINAL]
    a.rollback()
    for status in TERMINAL:
        assert a.execute(prune(finished(Job, older_than=HOUR, statuses=[status]))).all() == [(old[status],)]
    assert a.scalar(select(func.count()).select_from(Job)) == 7
    a.commit()
    assert len(a.execute(prune(finished(Job, older_than=timedelta(0)))).all()) == 3  # none of the live ones


def test_prune_by_queue_and_condition(a: Session):
    now = clock(a)
    for queue in ("mail", "other"):
        for status in ("done", "failed"):
            add(a, queue=queue, status=status, finished_at=now - HOUR)
            add(a, queue=queue, status=status, finished_at=now - 2 * HOUR)
    oldest = finished(Job, older_than=MINUTE, queue="mail", statuses=[JobStatus.DONE])
    assert a.execute(prune(oldest, limit=1)).all() == [(2,)]
    assert a.execute(prune(oldest, limit=1)).all() == [(1,)]
    a.rollback()
    parameters = {"of_queue": "other", "older_than": MINUTE, "limit": 9}
    assert sorted(a.execute(prune_rows(Job, JobStatus.FAILED), parameters).all()) == [(7,), (8,)]
    a.rollback()
    assert a.execute(prune(finished(Job, older_than=MINUTE).where(Job.id == 5))).all() == [(5,)]


def test_two_prune_side_by_side(a: Session, b: Session):
    add(a, 4, status="done", finished_at=clock(a))
    first = a.execute(prune(finished(Job, older_than=timedelta(0)), limit=2)).all()
    second = b.execute(prune(finished(Job, older_than=timedelta(0)), limit=9)).all()
    assert sorted(key for (key,) in [*first, *second]) == [1, 2, 3, 4]
    a.commit()
    b.commit()


@pytest.mark.parametrize("status", LIVE)
def test_finished_is_about_terminal_states(status: JobStatus):
    with pytest.raises(ConfigurationError, match=f"terminal states, not {status}"):
        finished(Job, older_than=HOUR, statuses=[JobStatus.DONE, status])


# --- the clock --------------------------------------------------------------------------------------------------------


def test_deadlines_move_on_within_a_transaction(a: Session):
    """R08: `now()` stands still from the transaction's begin on."""
    add(a, 6)
    began = a.scalar(select(func.now()))

    def measured(act: Callable[[], Any], column: Any, key: int, delay: timedelta) -> Any:
        a.execute(select(func.pg_sleep(0.02)))
        before = clock(a)
        act()
        found = a.scalar(select(column).where(Job.id == key))
        assert began + timedelta(seconds=0.02) + delay < before + delay <= found <= clock(a) + delay

    def claims(key: int, lease: timedelta = MINUTE) -> Fence:
        return fence_of(a.scalars(claim(due(Job).where(Job.id == key), lease=lease)).one())

    first = Fence((1,), 1)
    measured(lambda: claims(1), Job.locked_until, 1, MINUTE)
    measured(lambda: send(a, "extend_lease", first), Job.locked_until, 1, HOUR)
    measured(lambda: send(a, "retry", first), Job.run_at, 1, MINUTE)
    measured(lambda: claims(2), Job.started_at, 2, timedelta(0))
    measured(lambda: send(a, "snooze", Fence((2,), 1)), Job.run_at, 2, MINUTE)
    claims(3)
    measured(lambda: send(a, "complete", Fence((3,), 1)), Job.finished_at, 3, timedelta(0))
    measured(lambda: send(a, "requeue", Fence((3,), 1)), Job.run_at, 3, timedelta(0))
    measured(lambda: send(a, "cancel", Fence((4,), 0)), Job.finished_at, 4, timedelta(0))
    counted = fence(Fence((5,), 1), delay=MINUTE, error="e", lethal=0)
    measured(lambda: a.execute(count_failure(Job), counted), Job.run_at, 5, MINUTE)
    parameters = {"of_queue": "default", "limit": 1, "worker": "w"}
    measured(lambda: a.execute(claim_rows(Job, kinds=None, done=True), parameters), Job.finished_at, 6, timedelta(0))
    assert a.scalar(select(func.now())) == began


@pytest.mark.parametrize("zone", ["Asia/Kathmandu", "America/St_Johns", "UTC"])
def test_the_sessions_time_zone_does_not_matter(a: Session, b: Session, zone: str):
    add(a)
    add(a, run_at=clock(a) + 5 * SECOND)
    b.connection().exec_driver_sql(f"SET TIME ZONE '{zone}'")
    job = b.scalars(claim(due(Job), limit=9, lease=MINUTE)).one()
    assert timedelta(0) < job.locked_until - clock(a) <= MINUTE
    b.commit()
    assert a.scalars(reclaim_expired(expired(Job))).all() == []
    b.execute(complete(Job), fence(Fence((1,), 1))).one()
    b.commit()
    assert b.execute(prune(finished(Job, older_than=SECOND * 30))).all() == []
    b.connection().exec_driver_sql("RESET TIME ZONE")


# --- summary ----------------------------------------------------------------------------------------------------------


def figures(session: Session, **options: Any) -> dict[tuple[str, str], tuple[int, int, timedelta | None]]:
    found = session.execute(summary(Job, **options)).all()
    assert [tuple(each[:2]) for each in found] == sorted(tuple(each[:2]) for each in found)
    return {(each.queue, each.status): (each.jobs, each.due, each.oldest_due_age) for each in found}


def test_summary(a: Session):
    assert figures(a) == {}
    now = clock(a)
    add(a, 3, run_at=now - MINUTE)
    add(a, 1, run_at=now - HOUR, priority=7)
    add(a, 2, run_at=now + HOUR, priority=-1)
    add(a, 1, run_at=now + HOUR, queue="later")
    add(a, 2, status="running", locked_until=now - 5 * MINUTE)
    add(a, 3, status="running", locked_until=now + HOUR)
    add(a, 1, status="running", locked_until=now + HOUR, queue="mail")
    add(a, 4, status="done", finished_at=now)
    add(a, 2, status="failed", finished_at=now, queue="mail")
    add(a, 1, status="cancelled", finished_at=now)
    found = figures(a)
    ages = {key: age for key, (_, _, age) in found.items()}
    assert {key: counts[:2] for key, counts in found.items()} == {
        ("default", "pending"): (6, 4),
        ("default", "running"): (5, 2),
        ("default", "done"): (4, 0),
        ("default", "cancelled"): (1, 0),
        ("later", "pending"): (1, 0),
        ("mail", "running"): (1, 0),
        ("mail", "failed"): (2, 0),
    }
    assert HOUR <= ages.pop(("default", "pending")) < HOUR + MINUTE
    assert 5 * MINUTE <= ages.pop(("default", "running")) < 6 * MINUTE
    assert set(ages.values()) == {None}


def test_summary_counts_up_to_its_cap_and_the_age_is_exact(a: Session):
    now = clock(a)
    add(a, 9, run_at=now - MINUTE)
    add(a, 1, run_at=now - HOUR)
    add(a, 9, run_at=now + HOUR, priority=1)
    add(a, 9, status="running", locked_until=now + HOUR)
    add(a, 9, status="running", locked_until=now - MINUTE)
    add(a, 1, status="running", locked_until=now - HOUR)
    add(a, 9, status="done", finished_at=now)
    found = figures(a, cap=4)
    assert found["default", "pending"][:2] == (8, 4)  # of two priorities, four each
    assert found["default", "running"][:2] == (4, 4)
    assert found["default", "done"] == (4, 0, None)
    for status in ("pending", "running"):
        assert HOUR <= found["default", status][2] < HOUR + MINUTE


# --- names and places -------------------------------------------------------------------------------------------------


def test_schema_translate_map(engine: Engine):
    with engine.begin() as connection:
        for schema in ("one", "two"):
            connection.execute(CreateSchema(schema))
            Base.metadata.create_all(connection.execution_options(schema_translate_map={None: schema}))
    with Session(engine) as session:
        add(session, 2)
    for schema in ("one", "two"):  # the same cached statements, elsewhere
        there = engine.execution_options(schema_translate_map={None: schema})
        with Session(there) as session:
            everything(session)
        with engine.connect() as connection:
            for table in ("jobs", "steps", "tickets"):
                assert connection.exec_driver_sql(f"SELECT count(*) FROM {schema}.{table}").scalar() == 0
    with Session(engine) as session:
        assert session.scalars(select(Job.attempts)).all() == [0, 0]


def test_channels():
    names = {channel_name(model.__table__, schema) for model in (Job, Step) for schema in (None, "app", "x" * 63)}
    assert len(names) == 6
    assert all(len(name.encode()) <= 63 for name in names)
    assert str(Listen('a"b').compile(dialect=postgresql.dialect())) == 'LISTEN "a""b"'


# --- every builder, on every driver -----------------------------------------------------------------------------------


def everything(session: Session) -> None:
    """Each builder at least once, on three kinds of keys, leaving no row behind."""
    for model, keys in (
        (Job, [{}] * 14),
        (Step, [{"tenant": "t\"'", "number": n} for n in range(14)]),
        (Ticket, [{}] * 14),
    ):
        session.add_all([model(kind="k", payload={"n": n, "ö": None}, **key) for n, key in enumerate(keys)])
        session.commit()
        width = len(model.__table__.primary_key)

        def held(rows: Any, width: int = width) -> list[Fence]:
            return [Fence(tuple(each[:width]), each[width]) for each in rows]

        def run(statement: Any, parameters: Any) -> list[Any]:
            return list(session.execute(statement, parameters))

        candidates = due(model, queue="default", kinds=["k", "other"])
        jobs = session.scalars(claim(candidates, limit=2, lease=LAPSED, locked_by="w")).all()
        assert [job.payload["ö"] for job in jobs] == [None, None]
        session.commit()
        assert len(session.scalars(reclaim_expired(expired(model), limit=1)).all()) == 1
        assert len(run(reclaim_rows(model), {"limit": 5})) == 1
        parameters = {"of_queue": "default", "limit": 12, "worker": "w", "lease": MINUTE}
        rows = [each._mapping for each in run(claim_rows(model, kinds=("k",), done=False), parameters)]
        names = [column.name for column in model.__table__.primary_key]
        fences = [Fence(tuple(each[name] for name in names), each["attempts"]) for each in rows]
        assert len(fences) == 12
        assert len(run(extend_lease(model), {**fence(*fences), "lease": HOUR})) == 12
        assert len(run(still_held(model), fence(*fences))) == 12
        assert len(run(lock_held(model), fence(*fences))) == 12
        done, again, dead, later, back, gone, *rest = fences
        assert len(run(retry(model), fence(again, delay=MINUTE, error="r"))) == 1
        assert len(run(snooze(model), fence(later, delay=HOUR + timedelta(days=40, microseconds=7)))) == 1
        assert len(run(release(model), fence(back))) == 1
        assert len(run(cancel(model, JobStatus.RUNNING), fence(gone, error="c"))) == 1
        assert len(run(cancel(model), fence(again, later, back, error="c"))) == 3
        assert len(run(fail(model), fence(dead, error="f"))) == 1
        assert len(run(complete(model), fence(done, *rest))) == 7
        claimed_at = dict(zip(fences, (each["started_at"] for each in rows), strict=True))
        assert run(lock_done(model), fence(done)) == [(claimed_at[done],)]
        assert run(lock_done(model), fence(dead)) == []
        assert len(held(run(requeue(model), fence(done, more=3)))) == 1
        session.commit()
        parameters = {"of_queue": "default", "limit": 1, "worker": "w"}
        assert len(run(claim_rows(model, kinds=None, done=True), parameters)) == 1
        session.rollback()
        job = session.scalars(claim(due(model), lease=None)).one()
        failed = fence_of(job)
        session.rollback()
        parameters = fence(failed, delay=HOUR, error="x", lethal=0)
        assert len(run(count_failure(model), parameters)) == 1
        keyed = {f"id_{n}": part for n, part in enumerate(failed.key)}
        session.execute(fill_payload(model), {**keyed, "keys": {"order_id": 1, "uid": str(uuid.UUID(int=0))}})
        counts = session.execute(summary(model)).all()
        assert sum(each.jobs for each in counts) == 14
        assert all(each.oldest_due_age is None or isinstance(each.oldest_due_age, timedelta) for each in counts)
        session.execute(notify(), {"channel": channel_name(model.__table__, "public"), "queue": "default"})
        for each in session.scalars(select(model).where(model.status.in_(["pending", "running"]))):
            session.execute(cancel(model), fence(each, error="c")).one()
        session.commit()
        pruned = run(
            prune_rows(model, JobStatus.DONE), {"of_queue": "default", "older_than": timedelta(0), "limit": 99}
        )
        pruned += run(prune(finished(model, older_than=timedelta(0)), limit=99), {})
        assert len(pruned) == 14
        session.commit()


def test_every_builder_on_the_sync_driver(a: Session):
    everything(a)


def test_every_builder_on_the_async_drivers(async_url: str):
    async def main() -> None:
        async with open_async_engine(async_url) as engine:
            async with engine.begin() as connection:
                await connection.run_sync(Base.metadata.create_all)
            async with AsyncSession(engine) as session:
                await session.run_sync(everything)

    asyncio.run(main())


# --- what they print --------------------------------------------------------------------------------------------------

PRINTED: dict[str, Any] = {
    "due": lambda: due(Job, queue="mail", kinds=["k"]),
    "expired": lambda: expired(Job),
    "finished": lambda: finished(Job, older_than=HOUR, queue="mail"),
    "claim": lambda: claim(due(Job), limit=3, lease=MINUTE),
    "reclaim_expired": lambda: reclaim_expired(expired(Job)),
    "prune": lambda: prune(finished(Job, older_than=HOUR), limit=3),
    "extend_lease": lambda: extend_lease(Job),
    "complete": lambda: complete(Job),
    "retry": lambda: retry(Job),
    "claim_rows": lambda: claim_rows(Job, kinds=("k",), done=False),
    "reclaim_rows": lambda: reclaim_rows(Job),
    "prune_rows": lambda: prune_rows(Job, JobStatus.DONE),
    "still_held": lambda: still_held(Job),
    "lock_done": lambda: lock_done(Job),
    "lock_held": lambda: lock_held(Job),
    "fail": lambda: fail(Job),
    "snooze": lambda: snooze(Job),
    "release": lambda: release(Job),
    "cancel": lambda: cancel(Job),
    "requeue": lambda: requeue(Job),
    "fill_payload": lambda: fill_payload(Job),
    "count_failure": lambda: count_failure(Job),
    "summary": lambda: summary(Job),
    "notify": notify,
}


def canonical(sql: str) -> str:
    """SQL without what tells nothing: spaces, parentheses, the table's name, the names of parameters, figures."""
    sql = re.sub(r"::[A-Z]+(\[\])?", "", sql)
    sql = re.sub(r":\w+|\b\d+\b", "?", re.sub(r"\bjobs\.(?!\*)", "", sql))
    return re.sub(r"\bAS\b|[\s()]", "", sql).upper()


@pytest.mark.parametrize("name", PRINTED)
def test_each_builder_prints_what_its_docstring_says(name: str):
    statement = PRINTED[name]()
    printed = str(statement.compile(dialect=postgresql.dialect(paramstyle="named")))
    assert str(statement)  # without a dialect, too
    documented = re.findall(
        r"::\n\n((?:        .*\n?|\n)+)", python.getdoc(getattr(statements, name)).replace("\n    ", "\n        ")
    )
    rest = canonical(printed)
    parts = [canonical(part) for block in documented for part in re.split(r"\.\.\.|<fence>|[\[\]]|jobs\.\*", block)]
    for part in filter(None, parts):
        before, found, rest = rest.partition(part)
        assert found, f"{part!r} is not in {printed}"
        assert "RETURNING" not in before
    assert bool(documented) == (name in list(PRINTED)[:9])


def test_the_builders_that_depend_on_the_model_alone_are_built_once():
    for builder in (extend_lease, complete, retry, fail, snooze, release, cancel, requeue, count_failure, reclaim_rows):
        assert builder(Job) is builder(Job)
        assert builder(Job) is not builder(Step)
    assert claim_rows(Job, kinds=("k",), done=False) is claim_rows(Job, kinds=("k",), done=False)


def test_the_history_of_errors_is_bounded_in_the_statement():
    assert f"last - {KEPT_ERRORS - 1} to last" in str(retry(Step))
    assert "jsonpath" not in str(retry(Job))


def test_a_statement_that_waits_fails_here(a: Session, b: Session):
    """The guard of this file: without SKIP LOCKED, a test would fail, not hang."""
    add(a)
    b.connection().exec_driver_sql("SET LOCAL lock_timeout = '10ms'")
    a.execute(select(Job).with_for_update()).one()
    with pytest.raises(DBAPIError, match="lock timeout"):
        b.execute(select(Job).with_for_update()).one()
