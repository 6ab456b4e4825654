"""What PostgreSQL does for each statement in a table of 100,000 jobs: which index it reads, how many pages it touches.

Twice: with statistics of today, and with those of a time when every job was done, so that the planner believes that
nothing is pending and nothing is running.
"""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, func, select
from sqlalchemy.orm import DeclarativeBase, Session

from sqla_jobqueue.model import JobMixin
from sqla_jobqueue.statements import (
    Fence,
    cancel,
    claim,
    claim_rows,
    complete,
    count_failure,
    due,
    expired,
    extend_lease,
    fail,
    fence,
    fill_payload,
    finished,
    lock_held,
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
from sqla_jobqueue.status import JobStatus

MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)


class Base(DeclarativeBase):
    pass


class Fresh(JobMixin, Base):
    __tablename__ = "fresh"


class Stale(JobMixin, Base):
    __tablename__ = "stale"


# Interleaved: 60,000 finished in the last 100,000 minutes, the oldest last; 10,000 due with priorities 0 to 4; 24,000 for later, 5,000 of
# another queue, 1,000 running of which 500 lapsed.
FILL = """
INSERT INTO fresh (kind, queue, status, priority, attempts, run_at, locked_until, finished_at)
SELECT 'k', CASE WHEN mod(n, 20) = 7 THEN 'other' ELSE 'default' END,
       CASE WHEN mod(n, 10) < 6 THEN CASE WHEN mod(n, 60) < 5 THEN 'failed' ELSE 'done' END
            WHEN mod(n, 100) = 99 THEN 'running' ELSE 'pending' END,
       mod(n, 5), (mod(n, 10) < 6 OR mod(n, 100) = 99)::int,
       now() + CASE WHEN mod(n, 10) = 6 THEN -interval '1 hour' ELSE interval '1 hour' END - n * interval '1 ms',
       CASE WHEN mod(n, 100) = 99 THEN now() + (n - 50000) * interval '1 s' END,
       CASE WHEN mod(n, 10) < 6 THEN now() - n * interval '1 minute' END
FROM generate_series(1, 100000) AS n;
"""


@pytest.fixture(scope="module")
def full(_databases) -> Iterator[Engine]:
    name = _databases.take()
    engine = create_engine(_databases.url(name))
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        for table in ("fresh", "stale"):
            connection.exec_driver_sql(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
        connection.exec_driver_sql(
            "INSERT INTO stale (kind, status, finished_at) SELECT 'k', 'done', now() FROM generate_series(1, 500)"
        )
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        connection.exec_driver_sql("VACUUM ANALYZE stale")
        connection.exec_driver_sql("TRUNCATE stale RESTART IDENTITY")
        connection.exec_driver_sql(FILL)
        names = ", ".join(column.name for column in Fresh.__table__.c)
        connection.exec_driver_sql(
            f"INSERT INTO stale ({names}) OVERRIDING SYSTEM VALUE SELECT {names} FROM fresh ORDER BY id"
        )
        connection.exec_driver_sql("VACUUM ANALYZE fresh")
    yield engine
    engine.dispose()
    _databases.give_back(name)


@pytest.fixture
def session(full: Engine) -> Iterator[Session]:
    with Session(full) as session:
        yield session  # and nothing is committed


@pytest.fixture(params=[Fresh, Stale], ids=["fresh statistics", "stale statistics"])
def model(request) -> Any:
    return request.param


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)


class Explained:
    """EXPLAIN (ANALYZE, BUFFERS) of a statement: it is run."""

    def __init__(self, session: Session, statement: Any, parameters: Any = None) -> None:
        compiled = statement.compile(session.get_bind())
        analyze = "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) "
        values = compiled.construct_params(parameters)
        ((found,),) = session.connection().exec_driver_sql(analyze + str(compiled), values).one()
        self.plan = found["Plan"]
        self.rows = self.plan["Actual Rows"]
        self.pages = self.plan["Shared Hit Blocks"] + self.plan["Shared Read Blocks"]
        found_nodes = list(nodes(self.plan))
        self.indexes = {node["Index Name"] for node in found_nodes if "Index Name" in node}
        self.sorted = any(node["Node Type"] == "Sort" and node["Actual Rows"] > 1000 for node in found_nodes)
        self.scanned = {node["Relation Name"] for node in found_nodes if node["Node Type"] == "Seq Scan"}

    def __repr__(self) -> str:
        return f"{self.rows} rows, {self.pages} pages, indexes {self.indexes}, scanned {self.scanned}: {self.plan}"


def pages_of(session: Session, model: Any) -> int:
    return session.scalar(select(func.pg_relation_size(model.__tablename__) / 8192))


def index(model: Any, suffix: str) -> str:
    return f"{model.__tablename__}_{suffix}"


def running(session: Session, model: Any, count: int) -> list[Fence]:
    found = session.execute(select(model.id, model.attempts).where(model.status == "running").limit(count)).all()
    assert len(found) == count
    return [Fence((key,), attempt) for key, attempt in found]


def test_a_claim_reads_the_pending_index_and_a_bounded_number_of_pages(session: Session, model: Any):
    assert pages_of(session, model) > 1000
    values = {"of_queue": "default", "limit": 10, "worker": "w", "lease": MINUTE}
    one_queue = due(model, queue="default", kinds=["k"])
    for statement, parameters in (
        (claim(one_queue, limit=10, lease=MINUTE), None),
        (claim(one_queue, limit=10, lease=None), None),
        (claim_rows(model, kinds=("k",), done=False), values),
        (claim_rows(model, kinds=None, done=True), values),
    ):
        found = Explained(session, statement, parameters)
        assert found.rows == 10, found
        assert index(model, "pending_idx") in found.indexes, found
        assert not found.scanned, found
        assert not found.sorted, found
        assert found.pages < 700, found


def test_a_claim_while_nothing_is_due_reads_the_index_alone(session: Session, model: Any):
    found = Explained(session, claim(due(model, queue="other"), limit=10, lease=MINUTE))
    assert found.rows == 0, found
    assert found.indexes >= {index(model, "pending_idx")}, found
    assert found.pages < 100, found


def test_a_hundred_claims_of_ten_cost_the_same_each(session: Session, model: Any):
    """Dead versions of claimed rows are in the way of the next claim until a vacuum: not one by one."""
    statement = claim_rows(model, kinds=None, done=False)
    values = {"of_queue": "default", "limit": 10, "worker": "w", "lease": MINUTE}
    first = Explained(session, statement, values)
    for _ in range(98):
        assert len(session.execute(statement, values).all()) == 10
    last = Explained(session, statement, values)
    assert last.rows == 10, last
    assert last.pages < 1000 + 10 * first.pages, last


def by_key(model: Any) -> dict[str, tuple[Any, dict[str, Any]]]:
    return {
        "complete": (complete(model), {}),
        "retry": (retry(model), {"delay": MINUTE, "error": "e"}),
        "fail": (fail(model), {"error": "e"}),
        "snooze": (snooze(model), {"delay": MINUTE}),
        "release": (release(model), {}),
        "cancel": (cancel(model), {"error": "e"}),
        "cancel by its holder": (cancel(model, JobStatus.RUNNING), {"error": "e"}),
        "extend_lease": (extend_lease(model), {}),
        "still_held": (still_held(model), {}),
        "lock_held": (lock_held(model), {}),
    }


@pytest.mark.parametrize("count", [1, 100])
@pytest.mark.parametrize("verb", by_key(Fresh))
def test_what_goes_by_key_reads_the_primary_key(session: Session, model: Any, verb: str, count: int):
    statement, values = by_key(model)[verb]
    parameters = fence(*running(session, model, count), **values)
    found = Explained(session, statement, {**parameters, "lease": HOUR} if verb == "extend_lease" else parameters)
    assert found.rows == count, found
    assert index(model, "pkey") in found.indexes, found
    assert index(model, "lease_idx") not in found.indexes, found
    assert not found.scanned, found
    assert found.pages < 60 * count + 100, found


def test_the_other_statements_by_key(session: Session, model: Any):
    dead = select(model.id).where(model.status == "failed").limit(100)
    fences = [Fence((key,), 1) for key in session.scalars(dead)]
    waiting = select(model.id).where(model.status == "pending").limit(100)
    failures = [Fence((key,), 1) for key in session.scalars(waiting)]
    for statement, parameters, rows in (
        (requeue(model), fence(*fences, more=3), 100),
        (count_failure(model), fence(*failures, delay=MINUTE, error="e", lethal=0), 100),
        (fill_payload(model), {"id_0": 7, "keys": "{}"}, 0),
    ):
        found = Explained(session, statement, parameters)
        assert found.rows == rows, found
        assert index(model, "pkey") in found.indexes, found
        assert not found.scanned, found


def test_reclaim_reads_the_lease_index(session: Session, model: Any):
    for statement, parameters in (
        (reclaim_expired(expired(model), limit=10), None),
        (reclaim_rows(model), {"limit": 10}),
    ):
        found = Explained(session, statement, parameters)
        assert found.rows == 10, found
        assert index(model, "lease_idx") in found.indexes, found
        assert not found.scanned, found
        assert not found.sorted, found
        assert found.pages < 700, found


def test_prune_reads_the_finished_index(session: Session, model: Any):
    one_queue = {"of_queue": "default", "older_than": 60_000 * MINUTE, "limit": 10}
    for statement, parameters in (
        (prune_rows(model, JobStatus.DONE), one_queue),
        (
            prune(finished(model, older_than=60_000 * MINUTE, queue="default", statuses=[JobStatus.DONE]), limit=10),
            None,
        ),
    ):
        found = Explained(session, statement, parameters)
        assert found.rows == 10, found
        assert index(model, "finished_idx") in found.indexes, found
        assert not found.scanned, found
        assert found.pages < 300, found


def test_summary_touches_few_pages_whatever_the_table_holds(session: Session, model: Any):
    found = Explained(session, summary(model, cap=100))
    assert found.rows == 5, found
    assert not found.scanned, found
    assert {index(model, "pending_idx"), index(model, "finished_idx"), index(model, "lease_idx")} <= found.indexes, (
        found
    )
    assert found.pages < 2000, found
    counted = {(row.queue, row.status): row.jobs for row in session.execute(summary(model, cap=100))}
    assert counted == {
        ("default", "done"): 100,
        ("default", "failed"): 100,
        ("default", "pending"): 400,
        ("default", "running"): 100,
        ("other", "pending"): 100,
    }
