"""Enqueue: on every kind of Session, without I/O, and together with the application's rows or not at all."""

import asyncio
import contextlib
import gc
import math
import uuid
import weakref
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from types import MappingProxyType
from typing import Any

import pytest
from sqlalchemy import (
    Engine,
    ForeignKey,
    create_engine,
    event,
    func,
    insert,
    inspect,
    select,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    MappedAsDataclass,
    Session,
    mapped_column,
    relationship,
    scoped_session,
    sessionmaker,
)
from sqlmodel import Field as SQLField
from sqlmodel import Session as SQLModelSession
from sqlmodel import SQLModel

from sqla_jobqueue import (
    AsyncJobSession,
    ConfigurationError,
    EnqueueError,
    EnqueueMixin,
    JobDataclassMixin,
    JobMixin,
    JobQueue,
    JobSession,
    JobStateMixin,
    JobStatus,
    Options,
    PayloadError,
    current_job,
    enqueue,
    enqueue_all,
    ref,
)
from sqla_jobqueue.embedded import EmbeddedPostgres
from sqla_jobqueue.session import sync_session_of
from tests.helpers import open_async_engine


class Base(DeclarativeBase):
    pass


class Job(JobMixin, Base):
    __tablename__ = "jobs"


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str] = mapped_column(default="dave")
    job_id: Mapped[int | None] = mapped_column(ForeignKey("jobs.id"))
    job: Mapped[Job | None] = relationship()


class Line(Base):
    __tablename__ = "lines"
    order_id: Mapped[int] = mapped_column(ForeignKey("orders.id"), primary_key=True)
    sku: Mapped[str] = mapped_column(primary_key=True)
    order: Mapped[Order] = relationship()


class Token(Base):
    __tablename__ = "tokens"
    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, default=uuid.uuid4)


class KeyedJob(JobMixin, Base):
    __tablename__ = "keyed_jobs"
    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, default=uuid.uuid4)


class Export(JobStateMixin, Base):
    __tablename__ = "exports"
    id: Mapped[int] = mapped_column(primary_key=True)
    format: Mapped[str] = mapped_column(default="csv")


jobs = JobQueue(Job)
mail = JobQueue(Job, "mail", max_attempts=7)
keyed = JobQueue(KeyedJob)
exports = JobQueue(Export, "exports", max_attempts=9)


@mail.task
def send(session: JobSession[Job], order: Order, copies: int = 1) -> None: ...


@mail.task(priority=5, max_attempts=2)
def urgent(session: JobSession[Job], order: Order) -> None: ...


@jobs.task
def pack(session: JobSession[Job], line: Line, token: Token | None = None) -> None: ...


@jobs.task
def compare(session: JobSession[Job], left: Order, right: Order | None, note: str = "") -> None: ...


@jobs.task
def plain(session: JobSession[Job], data: Any = None) -> None: ...


@keyed.task
def send_keyed(session: JobSession[KeyedJob], order: Order) -> None: ...


@exports.task
def build(session: JobSession[Export]) -> None: ...


@pytest.fixture
def tables(engine: Engine) -> Engine:
    Base.metadata.create_all(engine)
    return engine


@pytest.fixture
def session(tables: Engine) -> Iterator[JobSession[Job]]:
    with JobSession[Job](tables) as session:
        yield session


@contextlib.contextmanager
def recorded(engine: Engine) -> Iterator[list[str]]:
    """The statements that an engine sends meanwhile."""
    sent: list[str] = []

    def note(_connection, _cursor, statement, *_rest) -> None:
        sent.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    yield sent
    event.remove(engine, "before_cursor_execute", note)


def verbs(sent: list[str]) -> list[str]:
    return [" ".join(statement.split()[: 3 if statement.startswith("INSERT") else 2]) for statement in sent]


def rows(engine: Engine, entity: Any = Job) -> list[Any]:
    """What another connection sees, detached."""
    with Session(engine, expire_on_commit=False) as other:
        return list(other.scalars(select(entity).order_by(*inspect(entity).primary_key)))


def committed_after(session: Session, error: type[Exception], act: Callable[[], object], match: str) -> None:
    """The act is refused before any SQL, and a business row of the same session commits afterwards."""
    bind: Any = session.get_bind(Order)
    known = set(session.new)
    with recorded(bind) as sent, pytest.raises(error, match=match):
        act()
    assert not sent
    assert set(session.new) == known
    session.add(Order(customer="business"))
    session.commit()
    assert "business" in [order.customer for order in rows(bind, Order)]


# Every kind of session


class ShopSession(EnqueueMixin, Session):
    pass


class RoutingSession(Session):
    """As in SQLAlchemy's documentation: what is flushed goes to the leader."""

    leader: Engine
    replica: Engine

    def get_bind(self, *_args: Any, **_kwargs: Any) -> Engine:
        return self.leader if self._flushing else self.replica


@contextlib.contextmanager
def routed(engine: Engine) -> Iterator[Session]:
    class Routed(RoutingSession):
        leader = engine
        replica = engine.execution_options(postgresql_readonly=True)

    with Routed() as session:
        yield session


@contextlib.contextmanager
def scoped(engine: Engine) -> Iterator[Any]:
    registry = scoped_session(sessionmaker(engine))
    yield registry
    registry.remove()


SESSIONS: dict[str, Callable[[Engine], Any]] = {
    "Session": Session,
    "JobSession": JobSession,
    "sessionmaker of JobSession": lambda engine: sessionmaker(engine, class_=JobSession)(),
    "own class": ShopSession,
    "scoped_session": scoped,
    "autoflush off": lambda engine: Session(engine, autoflush=False),
    "expire_on_commit off": lambda engine: Session(engine, expire_on_commit=False),
    "binds": lambda engine: Session(binds={Base: engine}),
    "get_bind overridden": routed,
    "SQLModel": SQLModelSession,
}


@pytest.mark.parametrize("opener", SESSIONS.values(), ids=SESSIONS)
def test_on_every_sync_session(tables, opener):
    with recorded(tables) as sent, opener(tables) as session:
        order = Order()
        session.add(order)
        job = enqueue(session, send, order=order, copies=2)
        assert not sent
        assert set(session.new) == {order, job}
        assert type(job) is Job
        assert job.payload == {"order_id": None, "copies": 2}
        session.flush()
        sent.clear()
        assert job.id
        assert job.payload == {"order_id": order.id, "copies": 2}
        assert (job.kind, job.queue, job.max_attempts) == ("send", "mail", 7)
        assert not sent
        session.commit()
        expected = (job.id, {"order_id": order.id, "copies": 2})
    (row,) = rows(tables)
    assert (row.id, row.payload) == expected
    assert (row.kind, row.queue, row.status, row.attempts, row.meta) == ("send", "mail", "pending", 0, {})

    with opener(tables) as session:
        session.add(order := Order())
        enqueue(session, send, order)
        session.flush()
        session.rollback()
    assert len(rows(tables)) == len(rows(tables, Order)) == 1


@pytest.mark.parametrize("mode", ["conditional_savepoint", "create_savepoint", "rollback_only"])
def test_on_a_session_of_a_connection(tables, mode):
    with tables.connect() as connection:
        with Session(connection, join_transaction_mode=mode) as session:
            transaction = connection.begin()
            session.add(order := Order())
            job = enqueue(session, send, order=order)
            session.commit()
            key = job.id
        assert not rows(tables)
        transaction.commit()
    assert [(row.id, row.payload) for row in rows(tables)] == [(key, {"order_id": 1})]


def test_methods_of_the_session_classes(tables):
    for cls in (JobSession, ShopSession):
        with cls(tables) as session:
            session.add(order := Order())
            job = session.enqueue(send, order=order)
            assert [each.kind for each in session.enqueue_all([send.call(order=order), urgent.call(order)])] == [
                "send",
                "urgent",
            ]
            session.commit()
            assert job.payload == {"order_id": order.id}
    assert [row.kind for row in rows(tables)] == ["send", "send", "urgent"] * 2


def async_sessions(engine: Any) -> dict[str, Callable[[], Any]]:
    class ShopAsyncSession(EnqueueMixin, AsyncSession):
        pass

    @contextlib.asynccontextmanager
    async def scoped():
        registry = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)
        yield registry
        await registry.remove()

    @contextlib.asynccontextmanager
    async def on_connection():
        async with engine.connect() as connection, AsyncSession(connection) as session:
            yield session

    return {
        "AsyncSession": lambda: AsyncSession(engine),
        "AsyncJobSession": async_sessionmaker(engine, class_=AsyncJobSession),
        "own class": lambda: ShopAsyncSession(engine),
        "async_scoped_session": scoped,
        "connection": on_connection,
        "binds": lambda: AsyncSession(binds={Base: engine}),
    }


def test_on_every_async_session(async_url, tables):
    async def main() -> None:
        async with open_async_engine(async_url) as engine:
            for number, (name, opener) in enumerate(async_sessions(engine).items(), start=1):
                with recorded(engine.sync_engine) as sent:
                    async with opener() as session:
                        session.add(order := Order())
                        job = enqueue(session, send, order=order)
                        (other,) = enqueue_all(session, [urgent.call(order)])
                        assert not sent, name
                        await session.flush()
                        sent.clear()
                        assert job.payload == other.payload == {"order_id": order.id}
                        assert job.id
                        assert not sent, name
                        await session.commit()
                assert len(rows(tables)) == 2 * number, name
                async with opener() as session:
                    session.add(order := Order())
                    enqueue(session, send, order=order)
                    await session.flush()
                    await session.rollback()
                assert len(rows(tables)) == 2 * number, name

            async with AsyncJobSession[Job](engine) as session:
                session.add(order := Order())
                assert session.enqueue(send, order=order) in session.sync_session.new
                assert session.enqueue_all([send.call(order=order)])
                await session.rollback()

    asyncio.run(main())


def test_async_refusals_leave_the_session_usable(async_url, tables):
    async def main() -> None:
        async with open_async_engine(async_url) as engine, AsyncJobSession[Job](engine) as session:
            session.add(Order(customer="business"))
            for value in ("a\0b", math.nan, "\ud800"):
                with pytest.raises(EnqueueError):
                    session.enqueue(jobs.kind("plain"), data=value)
                with pytest.raises(EnqueueError):
                    session.enqueue(plain, data=value)
            with pytest.raises(EnqueueError, match="transient"):
                session.enqueue(send, order=Order())
            await session.commit()

    asyncio.run(main())
    assert [order.customer for order in rows(tables, Order)] == ["business"]
    assert not rows(tables)


def test_what_is_no_session():
    for thing in (None, object(), create_engine("postgresql+psycopg://")):
        with pytest.raises(ConfigurationError, match="a SQLAlchemy Session or AsyncSession is needed"):
            enqueue(thing, plain)
    with pytest.raises(ConfigurationError, match="works for no job"):
        current_job(Session())


def test_the_session_behind_each(tables):
    plain_session = Session(tables)
    assert sync_session_of(plain_session) is plain_session
    registry = scoped_session(sessionmaker(tables))
    assert sync_session_of(registry) is registry()
    registry.remove()


# SQLModel, dataclasses and polymorphic models


class QueueBase(DeclarativeBase):
    registry = SQLModel._sa_registry


class Hero(SQLModel, table=True):
    __tablename__ = "enqueue_heroes"
    id: int | None = SQLField(default=None, primary_key=True)
    name: str


class HeroJob(JobMixin, QueueBase):
    __tablename__ = "enqueue_hero_jobs"


hero_jobs = JobQueue(HeroJob)


@hero_jobs.task
def greet(session: Any, hero: Hero) -> None: ...


def test_sqlmodel_entities_and_session(engine):
    SQLModel.metadata.create_all(engine, tables=[Hero.__table__, HeroJob.__table__])
    with SQLModelSession(engine) as session:
        hero = Hero(name="Dorothy")
        session.add(hero)
        job = enqueue(session, greet, hero=hero)
        session.commit()
        assert job.payload == {"hero_id": hero.id}
        assert enqueue(session, greet, hero=hero).payload == {"hero_id": hero.id}
        with pytest.raises(PayloadError, match="Hero"):
            enqueue(session, hero_jobs.kind("greet"), hero=hero)
        session.commit()
    assert [row.payload for row in rows(engine, HeroJob)] == [{"hero_id": 1}] * 2


class DataBase(MappedAsDataclass, DeclarativeBase):
    pass


class DataJob(JobDataclassMixin, DataBase):
    __tablename__ = "data_jobs"
    tenant: Mapped[str] = mapped_column(default="none")


class DemandingJob(JobDataclassMixin, DataBase, kw_only=True):
    __tablename__ = "demanding_jobs"
    tenant: Mapped[str] = mapped_column()


class DataOrder(DataBase):
    __tablename__ = "data_orders"
    id: Mapped[int] = mapped_column(primary_key=True, init=False)


data_jobs = JobQueue(DataJob, "data", max_attempts=4)
demanding = JobQueue(DemandingJob)


@data_jobs.task
def handle(session: Any, order: DataOrder) -> None: ...


def test_a_dataclass_model(engine):
    DataBase.metadata.create_all(engine)
    with Session(engine) as session:
        session.add(order := DataOrder())
        job = enqueue(session, handle, order=order)
        job.tenant = "acme"
        instance = enqueue(session, DataJob(kind="handle", payload={"order_id": 4}))
        session.commit()
        assert (job.payload, job.queue, job.max_attempts, job.tenant) == ({"order_id": 1}, "data", 4, "acme")
        assert (instance.queue, instance.max_attempts, instance.meta) == ("data", 4, {})
        with pytest.raises(EnqueueError, match=r"DemandingJob cannot be made of kind and payload alone .*tenant"):
            enqueue(session, demanding.kind("x"))
        enqueue(session, DemandingJob(kind="x", tenant="acme"))
        session.commit()
    assert [row.tenant for row in rows(engine, DemandingJob)] == ["acme"]


def polymorphic(*, joined: bool) -> tuple[type[Any], type[Any], type[Any], JobQueue[Any]]:
    class Root(DeclarativeBase):
        pass

    class Entry(Root):
        __tablename__ = "entries"
        id: Mapped[int] = mapped_column(primary_key=True)

    class Work(JobMixin, Root):
        __tablename__ = "works"
        __mapper_args__ = {"polymorphic_on": "kind"}  # noqa: RUF012  # SQLAlchemy reads it

    class Mail(Work):
        if joined:
            __tablename__ = "mails"
            id: Mapped[int] = mapped_column(ForeignKey("works.id"), primary_key=True)
            subject: Mapped[str] = mapped_column(default="hello")
        __mapper_args__ = {"polymorphic_identity": "mail"}  # noqa: RUF012  # as above

    class Report(Work):
        __mapper_args__ = {"polymorphic_identity": "report"}  # noqa: RUF012  # as above

    return Work, Mail, Report, JobQueue(Work)


@pytest.mark.parametrize("joined", [False, True], ids=["single table", "joined"])
def test_polymorphic_models_build_the_subclass_of_the_kind(engine, joined):
    model, mail_class, report_class, queue = polymorphic(joined=joined)
    entry_class = next(m.class_ for m in model.registry.mappers if m.class_.__name__ == "Entry")
    model.metadata.create_all(engine)

    def handler(session, entry): ...

    handler.__annotations__ = {"entry": entry_class}
    task = queue.task(name="mail")(handler)
    with Session(engine) as session, recorded(engine) as sent:
        session.add(entry := entry_class())
        made = enqueue(session, task, entry=entry)
        also = enqueue(session, task, entry=entry)
        report = enqueue(session, queue.kind("report"), year=2025)
        assert (type(made), type(also), type(report)) == (mail_class, mail_class, report_class)
        session.flush()
        assert len([each for each in sent if each.startswith("UPDATE")]) == 1
        assert made.payload == also.payload == {"entry_id": entry.id}
        sent.clear()
        if joined:
            assert made.subject == "hello"
        assert not sent
        with pytest.raises(EnqueueError, match="no subclass is mapped to 'fax'"):
            enqueue(session, queue.kind("fax"))
        narrow = JobQueue(report_class)
        assert type(enqueue(session, narrow.kind("report"))) is report_class
        with pytest.raises(EnqueueError, match="Report is polymorphic on kind, and no subclass is mapped to 'mail'"):
            enqueue(session, narrow.kind("mail"))
        session.commit()
    assert [(type(row), row.payload) for row in rows(engine, model)] == [
        (mail_class, {"entry_id": 1}),
        (mail_class, {"entry_id": 1}),
        (report_class, {"year": 2025}),
        (report_class, {}),
    ]


# No I/O, no early flush, the application's own order


def test_nothing_is_sent_at_the_call_and_the_flush_is_the_applications(session, tables):
    with recorded(tables) as sent:
        session.add(order := Order())
        session.flush()
        sent.clear()
        session.add(dirty := Order())
        order.customer = "changed"
        job = session.enqueue(compare, left=order, right=dirty)
        session.enqueue_all([send.call(order=order), pack.call(line=Line(order=order, sku="x"))][:1])
        session.enqueue(jobs.kind("plain"), data=1)
        session.enqueue(Job(kind="plain"))
        session.enqueue(send.options(delay=timedelta(minutes=1)), order=order)
        assert not sent
        assert dirty.id is None
        assert order in session.dirty
        assert job in session.new
        assert not session.in_nested_transaction()
        session.flush()
        # The application's own statements in their own order, the jobs, one wake-up per queue, one UPDATE.
        assert verbs(sent)[:2] == ["UPDATE orders", "INSERT INTO orders"] or verbs(sent)[:2] == [
            "INSERT INTO jobs",
            "INSERT INTO jobs",
        ]
        assert verbs(sent).count("UPDATE jobs") == 1
        assert verbs(sent)[-1] == "UPDATE jobs"
        assert not [each for each in sent if each.startswith("SELECT") and "pg_notify" not in each]
        session.commit()


def test_the_order_of_the_applications_statements_is_untouched(tables):
    def story(act: Callable[[Session, Order], object]) -> list[str]:
        with recorded(tables) as sent, Session(tables) as session:
            first = Order(customer="first")
            session.add(first)
            session.add(Line(order=first, sku="a"))
            act(session, first)
            session.add(Token())
            session.add(Order(customer="second"))
            session.flush()
            sent.append("flushed")
            first.customer = "changed"
            act(session, first)
            session.commit()
        return verbs(sent)

    added = story(lambda session, _order: session.add(Job(kind="send", payload={}, queue="mail")))
    enqueued = story(lambda session, order: enqueue(session, send, order=order))
    assert enqueued.pop(enqueued.index("flushed") - 1) == "UPDATE jobs"
    assert enqueued == added


def test_foreign_keys_to_the_job(session, tables):
    order = Order()
    session.add(order)
    order.job = session.enqueue(send, order=order)  # each needs the other's key
    session.commit()
    (stored,) = rows(tables, Order)
    (row,) = rows(tables)
    assert (stored.job_id, row.payload) == (row.id, {"order_id": stored.id})


def test_a_relationship_on_the_job_model(engine):
    class Root(DeclarativeBase):
        pass

    class Customer(Root):
        __tablename__ = "customers"
        id: Mapped[int] = mapped_column(primary_key=True)

    class Work(JobMixin, Root):
        __tablename__ = "works"
        customer_id: Mapped[int | None] = mapped_column(ForeignKey("customers.id"))
        customer: Mapped[Customer | None] = relationship()

    Root.metadata.create_all(engine)
    queue = JobQueue(Work)
    with Session(engine) as session:
        job = enqueue(session, queue.kind("x"))
        job.customer = Customer()
        enqueue(session, Work(kind="y", customer=job.customer))
        session.commit()
        assert job.customer_id == 1
        with Session(engine) as other:
            foreign = Customer()
            other.add(foreign)
            broken = Work(kind="z", customer=foreign)
            committed = Work(kind="w")
            session.add(committed)
            with pytest.raises(EnqueueError, match="already attached to session"):
                enqueue(session, broken)
            assert list(session.new) == [committed]
        session.commit()
    assert [row.kind for row in rows(engine, Work)] == ["x", "y", "w"]


# Entities


def test_entities_pending_persistent_composite_and_with_a_client_default(session, tables):
    order, line, token = Order(), Line(sku="a"), Token()
    line.order = order
    session.add_all([order, line, token])
    both = session.enqueue(pack, line=line, token=token)
    three = session.enqueue(compare, order, order, note="same")
    none = session.enqueue(compare, left=order, right=None)
    session.flush()
    assert both.payload == {"line_id": [order.id, "a"], "token_id": str(token.id)}
    assert three.payload == {"left_id": order.id, "right_id": order.id, "note": "same"}
    assert none.payload == {"left_id": order.id, "right_id": None}
    session.commit()
    with recorded(tables) as sent:
        later = session.enqueue(pack, line=line, token=token)  # expired, their keys are known
        assert later.payload == {"line_id": [1, "a"], "token_id": str(inspect(token).identity[0])}
        by_key = session.enqueue(pack, line=ref(Line, (1, "a")))
        assert by_key.payload == {"line_id": [1, "a"]}
        assert not sent
    session.commit()
    assert [row.payload for row in rows(tables)] == [
        {"line_id": [1, "a"], "token_id": str(token.id)},
        {"left_id": 1, "right_id": 1, "note": "same"},
        {"left_id": 1, "right_id": None},
        {"line_id": [1, "a"], "token_id": str(token.id)},
        {"line_id": [1, "a"]},
    ]


def test_one_update_for_all_jobs_of_a_flush(session, tables):
    orders = [Order() for _ in range(50)]
    session.add_all(orders)
    enqueued = [session.enqueue(send, order=order) for order in reversed(orders)]
    with recorded(tables) as sent:
        session.commit()
    assert verbs(sent).count("UPDATE jobs") == 1
    assert [job.payload for job in enqueued] == [{"order_id": order.id} for order in reversed(orders)]
    assert [row.payload for row in rows(tables)] == [{"order_id": key} for key in range(50, 0, -1)]


def test_an_entity_that_was_flushed_alone_in_between(session, tables):
    session.add(order := Order())
    with session.no_autoflush:
        job = session.enqueue(send, order=order)
        session.expunge(job)
        session.flush()
        session.add(job)
        session.commit()
        assert job.payload == {"order_id": order.id}
    assert [row.payload for row in rows(tables)] == [{"order_id": 1}]


def test_a_payload_that_the_application_changes_before_the_flush(session, tables):
    session.add(order := Order())
    changed = session.enqueue(send, order=order)
    changed.payload = {**changed.payload, "copies": 3}
    computed = session.enqueue(send, order=order)
    computed.payload = func.jsonb_build_object("copies", 4)
    session.flush()
    assert changed.payload == {"order_id": order.id, "copies": 3}
    assert computed.payload == {"order_id": order.id, "copies": 4}
    session.commit()
    assert [row.payload for row in rows(tables)] == [changed.payload, computed.payload]


def test_a_key_that_a_listener_sets_at_the_last_moment(session, tables):
    def number(_mapper, _connection, order) -> None:
        order.id = 77

    event.listen(Order, "before_insert", number)
    try:
        session.add(order := Order())
        job = session.enqueue(send, order=order)
        session.commit()
        assert job.payload == {"order_id": 77}
    finally:
        event.remove(Order, "before_insert", number)


def unusable(session: Session, engine: Engine) -> dict[str, tuple[Callable[[], Order], str]]:
    def stored() -> Order:
        order = Order(customer="stored")
        session.add(order)
        session.commit()
        return order

    def other_session() -> Order:
        other = Session(engine)
        order = Order()
        other.add(order)
        session.info["keep"] = other
        return order

    def other_row() -> Order:
        key = stored().id
        other = session.info["keep"] = Session(engine)
        return other.get_one(Order, key)

    def detached() -> Order:
        order = stored()
        session.expunge(order)
        return order

    def rolled_back() -> Order:
        session.add(order := Order())
        session.flush()
        session.rollback()
        assert order.id  # the key of a row that never came to be
        return order

    def rolled_back_to_savepoint() -> Order:
        with session.begin_nested() as savepoint:
            session.add(order := Order())
            session.flush()
            savepoint.rollback()
        return order

    def marked() -> Order:
        order = stored()
        session.refresh(order)
        session.delete(order)
        return order

    def deleted() -> Order:
        order = stored()
        session.delete(order)
        session.flush()
        return order

    def gone() -> Order:
        order = deleted()
        session.commit()
        return order

    return {
        "transient": (Order, "transient, no session holds it"),
        "other session, pending": (other_session, "in another session"),
        "other session, persistent": (other_row, r"in another session: pass ref\(Order, key\)"),
        "detached": (detached, "detached: pass ref"),
        "rolled back": (rolled_back, "transient"),
        "rolled back to a savepoint": (rolled_back_to_savepoint, "transient"),
        "marked as deleted": (marked, "deleted in this session"),
        "deleted": (deleted, "deleted in this session"),
        "deleted and committed": (gone, "Order is (deleted|detached)"),
    }


@pytest.mark.parametrize("state", unusable(Session(), create_engine("postgresql+psycopg://")))
def test_entities_that_no_job_could_find(session, tables, state):
    make, message = unusable(session, tables)[state]
    order = make()
    try:
        for act in (
            lambda: session.enqueue(send, order=order),
            lambda: enqueue(session, send.call(order=order)),
            lambda: session.enqueue_all([plain.call(), send.call(order=order)]),
        ):
            committed_after(session, EnqueueError, act, f"send: order_id: Order is .*{message}|send.*{message}")
        assert not rows(tables)
    finally:
        if "keep" in session.info:
            session.info.pop("keep").close()


def test_an_entity_expunged_before_the_flush(session, tables):
    session.add(Order(customer="business"))
    session.add(order := Order(customer="gone"))
    job = session.enqueue(send, order=order)
    session.expunge(order)
    with recorded(tables) as sent:
        for act in (session.flush, session.commit, lambda: session.scalar(select(Order))):
            with pytest.raises(EnqueueError, match="Order left the session after Job was enqueued with it as order_id"):
                act()
    assert not sent
    session.expunge(job)
    session.commit()
    assert [row.customer for row in rows(tables, Order)] == ["business"]
    assert not rows(tables)

    session.add(order)  # the other way out
    session.add(job)
    session.commit()
    assert [row.payload for row in rows(tables)] == [{"order_id": order.id}]


def test_an_entity_that_a_flush_drops_as_an_orphan(engine):
    class Root(DeclarativeBase):
        pass

    class Parent(Root):
        __tablename__ = "parents"
        id: Mapped[int] = mapped_column(primary_key=True)
        children: Mapped[list["Child"]] = relationship(cascade="all, delete-orphan")

    class Child(Root):
        __tablename__ = "children"
        id: Mapped[int] = mapped_column(primary_key=True)
        parent_id: Mapped[int] = mapped_column(ForeignKey("parents.id"))

    class Work(JobMixin, Root):
        __tablename__ = "works"

    def handler(session, child): ...

    handler.__annotations__ = {"child": Child}
    Root.metadata.create_all(engine)
    task = JobQueue(Work).task(handler)
    with Session(engine) as session:
        parent, child = Parent(), Child()
        parent.children.append(child)
        session.add(parent)
        job = enqueue(session, task, child=child)
        parent.children.remove(child)
        with pytest.raises(EnqueueError, match="Child left the session"):
            session.commit()
        session.rollback()
        parent.children.append(child)
        session.add_all([parent])
        session.commit()
        assert job not in session
    assert not rows(engine, Work)


def test_jobs_that_are_rolled_back_and_added_again_get_the_new_keys(tables):
    def fail(*_args) -> None:
        raise ArithmeticError

    with Session(tables) as session:
        order = Order()
        session.add(order)
        job = enqueue(session, send_keyed, order=order)
        session.flush()
        dead = job.payload["order_id"]
        session.rollback()
        del order.id
        session.add_all([order, job])
        session.commit()
        assert job.payload == {"order_id": order.id}
        assert order.id != dead
        assert [row.payload for row in rows(tables, KeyedJob)] == [{"order_id": order.id}]

        session.add(other := Order())
        job = enqueue(session, send_keyed, order=other)
        event.listen(session, "after_flush", fail, once=True)
        with pytest.raises(ArithmeticError):
            session.flush()
        session.rollback()
        session.add(other)
        assert enqueue(session, job) is job  # by the primitive, too
        session.commit()
        assert job.payload == {"order_id": other.id}
        keys = {order.id, other.id}
    assert {row.payload["order_id"] for row in rows(tables, KeyedJob)} == keys


def test_a_rolled_back_job_with_a_key_of_the_database_is_refused(session, tables):
    job = session.enqueue(plain)
    session.flush()
    session.rollback()
    committed_after(session, EnqueueError, lambda: session.enqueue(job), "Job has the key 1 already, .* new instance")
    committed_after(session, EnqueueError, lambda: session.enqueue(Job(id=9, kind="x")), "has the key 9 already")
    assert not rows(tables)


# Savepoints


def test_entity_and_job_inside_a_savepoint_that_is_rolled_back(session, tables):
    session.add(Order(customer="outer"))
    with session.begin_nested() as savepoint:
        session.add(order := Order(customer="inner"))
        job = session.enqueue(send, order=order)
        assert session.scalar(select(func.count(Job.id))) == 1  # autoflush, inside of it
        assert job.payload == {"order_id": order.id}
        savepoint.rollback()
    kept = session.enqueue(plain)
    session.commit()
    assert [row.customer for row in rows(tables, Order)] == ["outer"]
    assert [row.id for row in rows(tables)] == [kept.id]


def test_job_with_a_pending_entity_before_a_savepoint_is_written_outside_of_it(session, tables):
    session.add(order := Order())
    job = session.enqueue(send, order=order)
    with session.begin_nested() as savepoint:
        assert job.payload == {"order_id": order.id}  # begin_nested flushes first
        savepoint.rollback()
    session.commit()
    assert [row.payload for row in rows(tables)] == [{"order_id": order.id}]


def test_job_outside_entity_inside_a_savepoint(session, tables):
    with session.begin_nested():
        session.add(order := Order())
    kept = session.enqueue(send, order=order)
    with session.begin_nested() as savepoint:
        session.add(other := Order())
        session.flush()
        savepoint.rollback()
    with pytest.raises(EnqueueError, match="transient"):
        session.enqueue(send, order=other)
    session.commit()
    assert [row.payload for row in rows(tables)] == [{"order_id": order.id}] == [kept.payload]


def test_entity_outside_job_inside_a_savepoint(session, tables):
    session.add(order := Order())
    with session.begin_nested() as savepoint:
        session.enqueue(send, order=order)
        savepoint.rollback()
    with session.begin_nested():
        with session.begin_nested():
            inner = session.enqueue(send, order=order, copies=2)
        session.enqueue(send, order=order, copies=3)
    session.commit()
    assert [row.payload for row in rows(tables)] == [{"order_id": order.id, "copies": n} for n in (2, 3)]
    assert inner.payload == {"order_id": order.id, "copies": 2}


def test_without_a_commit_there_is_no_job(tables):
    def broken() -> None:
        with sessionmaker(tables).begin() as session:
            session.add(order := Order())
            enqueue(session, send, order=order)
            session.flush()
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        broken()
    with Session(tables) as session:
        enqueue(session, plain)
        session.flush()
    with Session(tables) as session:
        enqueue(session, plain)
        session.flush()
        session.add(Order(job_id=12345))  # a later flush fails
        with pytest.raises(DBAPIError):
            session.commit()
    with Session(tables) as session:
        enqueue(session, plain)
        session.flush()
        assert not rows(tables)  # nobody sees it before the commit
        session.commit()
        assert len(rows(tables)) == 1


# R33: no SELECT and no MissingGreenlet of the library's own


def test_after_a_commit_nothing_is_loaded_by_the_library(session, tables):
    session.add(order := Order())
    job = session.enqueue(send, order=order)
    session.commit()
    assert not inspect(job).dict.keys() & {"payload", "status"}
    with recorded(tables) as sent:
        again = session.enqueue(send, order=order)
        session.enqueue_all([send.call(order=order)])
        assert again.payload == {"order_id": inspect(order).identity[0]}
        repr(job)
        with pytest.raises(EnqueueError, match=r"Job \(1,\) is a row already"):
            session.enqueue(job)
        with pytest.raises(EnqueueError, match="is no JSON: annotate the handler's parameter with Order"):
            session.enqueue(plain, data=order)
        assert not sent
        session.commit()
        assert not [each for each in sent if each.startswith("SELECT") and "pg_notify" not in each]
    assert job.payload == {"order_id": 1}  # the application's own access loads it


def test_after_an_async_commit_nothing_is_loaded_by_the_library(async_url, tables):
    async def main() -> None:
        async with open_async_engine(async_url) as engine, AsyncJobSession[Job](engine) as session:
            session.add(order := Order())
            job = session.enqueue(send, order=order)
            await session.commit()
            with recorded(engine.sync_engine) as sent:
                again = session.enqueue(send, order=order)  # expired: a load here would be a MissingGreenlet
                with pytest.raises(EnqueueError, match="is a row already"):
                    session.enqueue(job)
                assert again.payload == {"order_id": 1}
                assert not sent
                await session.commit()
                assert not [each for each in sent if each.startswith("SELECT") and "pg_notify" not in each]

    asyncio.run(main())
    assert len(rows(tables)) == 2


# Options


def test_defaults_of_queue_task_and_call(session, tables):
    session.add(order := Order())
    session.enqueue(send, order=order)
    session.enqueue(urgent, order=order)
    session.enqueue(urgent.options(priority=-3, max_attempts=1, meta={"tenant": 7}), order=order)
    session.enqueue(urgent.options(max_attempts=4).options(priority=1), order)
    session.enqueue(urgent.options(max_attempts=None, priority=None).call(order=order))
    session.enqueue(mail.kind("send").options(priority=8), order_id=1)
    session.enqueue(plain)
    session.commit()
    assert [(row.queue, row.priority, row.max_attempts, row.meta) for row in rows(tables)] == [
        ("mail", 0, 7, {}),
        ("mail", 5, 2, {}),
        ("mail", -3, 1, {"tenant": 7}),
        ("mail", 1, 4, {}),
        ("mail", 5, 2, {}),
        ("mail", 8, 7, {}),
        ("default", 0, 3, {}),
    ]


def test_options_are_new_objects_and_share_nothing(session, tables):
    meta = {"trace": ["a"]}
    optioned = plain.options(meta=meta, priority=9)
    meta["trace"].append("b")
    assert plain.options_set == Options()
    assert optioned.options_set.priority == 9
    assert optioned.handler is plain.handler
    assert optioned is not plain
    with pytest.raises(AttributeError):
        optioned.options_set.priority = 1
    first, second = session.enqueue(optioned), session.enqueue(optioned)
    first.meta["trace"].append("c")
    assert first.meta == {"trace": ["a", "c"]}
    assert second.meta == {"trace": ["a"]}

    data = {"items": [1]}
    call = plain.call(data=data)
    data["items"].append(2)
    one, _ = session.enqueue(call), session.enqueue(call)
    one.payload["data"]["items"].append(3)
    kind_call = jobs.kind("plain").call(data=data)
    data["items"].append(4)
    three, four = session.enqueue_all([kind_call, kind_call])
    three.payload["data"]["items"].append(5)
    session.commit()
    assert [row.payload for row in rows(tables)] == [
        {},
        {},
        {"data": {"items": [1, 3]}},
        {"data": {"items": [1]}},
        {"data": {"items": [1, 2, 5]}},
        {"data": {"items": [1, 2]}},
    ]
    assert four.payload == {"data": {"items": [1, 2]}}
    assert session.enqueue(plain.options(meta=MappingProxyType({"a": 1}))).meta == {"a": 1}


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/New_York"])
def test_a_delay_is_measured_by_the_clock_of_the_database_at_the_flush(tables, zone):
    with Session(tables, autoflush=False) as session:
        session.execute(select(func.set_config("timezone", zone, True)))
        began = session.scalar(select(func.now()))
        job = enqueue(session, plain.options(delay=timedelta(seconds=5)))
        session.execute(select(func.pg_sleep(0.1)))
        before = session.scalar(select(func.clock_timestamp()))
        session.flush()
        after = session.scalar(select(func.clock_timestamp()))
        assert before <= job.run_at - timedelta(seconds=5) <= after
        assert job.run_at - began > timedelta(seconds=5.1)
        assert job.created_at == began
        with Session(tables) as other:  # the process' clock and zone take no part
            assert other.scalar(select(func.now())) < job.run_at
        session.commit()


def test_delay_and_run_at(session, tables):
    noon = datetime(2031, 5, 4, 12, tzinfo=timezone(timedelta(hours=5, minutes=30)))
    session.enqueue(plain.options(run_at=noon))
    session.enqueue(plain.options(delay=timedelta(hours=1)).options(run_at=noon))
    delayed = session.enqueue(plain.options(run_at=noon).options(delay=timedelta(hours=1)))
    at_once = session.enqueue(plain.options(run_at=noon).options(delay=timedelta(0)))
    session.enqueue(plain.options(run_at=datetime(9998, 12, 31, tzinfo=UTC)))
    session.enqueue(plain.options(run_at=datetime(2, 1, 1, tzinfo=UTC)))
    session.enqueue(plain.options(delay=timedelta(days=36_500)))
    session.commit()
    assert delayed.run_at - delayed.created_at >= timedelta(hours=1)
    assert at_once.run_at == at_once.created_at
    for zone in ("UTC", "Pacific/Kiritimati", "Etc/GMT+12"):
        session.execute(select(func.set_config("timezone", zone, True)))
        session.expire_all()
        assert [row.run_at for row in session.scalars(select(Job).order_by(Job.id))][:2] == [noon, noon]


BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "naive": ({"run_at": datetime(2031, 1, 1)}, "run_at needs a timezone"),  # noqa: DTZ001  # the case
    "date": ({"run_at": datetime(2031, 1, 1, tzinfo=UTC).date()}, "run_at is a datetime"),
    "text": ({"run_at": "2031-01-01T00:00:00Z"}, "run_at is a datetime"),
    "beyond": ({"run_at": datetime.max.replace(tzinfo=UTC)}, "run_at is beyond"),
    "before": ({"run_at": datetime.min.replace(tzinfo=UTC)}, "run_at is beyond"),
    "both": ({"run_at": datetime(2031, 1, 1, tzinfo=UTC), "delay": timedelta(1)}, "delay or run_at, not both"),
    "seconds": ({"delay": 5}, "delay is a timedelta"),
    "negative": ({"delay": timedelta(seconds=-1)}, "delay is a timedelta from zero"),
    "endless": ({"delay": timedelta.max}, "delay is a timedelta from zero to 36500 days"),
    "attempts 0": ({"max_attempts": 0}, "max_attempts is a number from 1 to 2147483647, not 0"),
    "attempts -1": ({"max_attempts": -1}, "max_attempts is a number"),
    "attempts huge": ({"max_attempts": 2**40}, "max_attempts is a number"),
    "attempts True": ({"max_attempts": True}, "max_attempts is a number"),
    "attempts float": ({"max_attempts": 3.0}, "max_attempts is a number"),
    "priority huge": ({"priority": 2**31}, "priority is a number"),
    "priority True": ({"priority": True}, "priority is a number"),
    "meta list": ({"meta": [1]}, "meta is a JSON object"),
    "meta NaN": ({"meta": {"a": math.nan}}, "a: nan is no JSON number"),
    "meta NUL": ({"meta": {"a": ["\0"]}}, "NUL"),
    "meta key": ({"meta": {1: 1}}, "a key is int"),
}


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_bad_options_are_refused_where_they_are_given(options, message):
    for producer in (plain, jobs.kind("plain")):
        with pytest.raises(EnqueueError, match=message):
            producer.options(**options)


# Kinds, calls and instances


def test_a_kind_needs_no_handler(session, tables):
    session.enqueue(jobs.kind("elsewhere"))
    session.enqueue(mail.kind("elsewhere"), self=1, session=2, what=3, order_id=4, nested={"a": [None, True, 1.5, "é"]})
    session.enqueue_all([jobs.kind("x").call(self=1), jobs.kind("y").options(priority=3).call(**{"a-b": {}})])
    session.commit()
    assert [(row.queue, row.kind, row.priority, row.payload) for row in rows(tables)] == [
        ("default", "elsewhere", 0, {}),
        (
            "mail",
            "elsewhere",
            0,
            {"self": 1, "session": 2, "what": 3, "order_id": 4, "nested": {"a": [None, True, 1.5, "é"]}},
        ),
        ("default", "x", 0, {"self": 1}),
        ("default", "y", 3, {"a-b": {}}),
    ]
    with pytest.raises(EnqueueError, match="given by keyword"):
        session.enqueue(jobs.kind("x"), 1)
    assert repr(mail.kind("x")) == "<Kind 'x' of queue 'mail'>"


BAD_JSON: dict[str, Any] = {
    "NaN": math.nan,
    "infinity": -math.inf,
    "nested": {"a": [1, {"b": math.nan}]},
    "NUL": "a\0b",
    "NUL in a key": {"a\0b": 1},
    "surrogate": "\ud800",
    "surrogate in a key": {"\udfff": 1},
    "int key": {1: 1},
    "tuple": (1, 2),
    "object": object(),
    "type": dict,
    "datetime": datetime(2031, 1, 1, tzinfo=UTC),
    "float that jsonb turns into an int": 1e300,
    "int of 5000 digits": 10**5000,
    "cycle": (cycle := []) or cycle.append(cycle) or cycle,
}


def test_what_is_no_json_is_refused_before_any_sql(session, tables):
    kind = jobs.kind("plain")
    ways: list[Callable[[Any], object]] = [
        lambda value: session.enqueue(kind, data=value),
        lambda value: kind.call(data=value),
        lambda value: session.enqueue(plain, data=value),
        lambda value: session.enqueue_all([plain.call(), plain.call(data=value)]),
        lambda value: session.enqueue(Job(kind="plain", payload={"data": value})),
        lambda value: session.enqueue(Job(kind="plain", meta={"data": value})),
    ]
    session.add(Order(customer="before"))
    with recorded(tables) as sent:
        for name, value in BAD_JSON.items():
            for number, way in enumerate(ways):
                with pytest.raises(PayloadError, match="data"):
                    pytest.fail(f"{name} was taken by way {number}: {way(value)}")
        assert not sent
    session.commit()
    assert len(rows(tables, Order)) == 1
    assert not rows(tables)


def test_big_ints_come_back_exactly(session, tables):
    session.enqueue(plain, data=2**70)
    session.enqueue(jobs.kind("plain"), data=[2**70, -(10**400)])
    session.commit()
    assert [row.payload for row in rows(tables)] == [{"data": 2**70}, {"data": [2**70, -(10**400)]}]


def test_payloads_that_do_not_fit(session, tables):
    session.add(order := Order())
    session.commit()
    for act, message in [
        (lambda: session.enqueue(send), "misses 'order'"),
        (lambda: session.enqueue(send, order=order, copy=2), "no parameter 'copy'"),
        (lambda: session.enqueue(send, order=order, copies="2"), "copies: Input should be a valid integer"),
        (lambda: session.enqueue(send, order=1), "takes an instance of Order"),
        (lambda: session.enqueue(send, order=None), "is None"),
        (lambda: session.enqueue(send, order=ref(Line, (1, "a"))), "takes Order"),
        (lambda: session.enqueue(send, order, 1, 2), "positional"),
        (lambda: session.enqueue(send, order, order=order), "twice"),
        (lambda: ref(Order, None), "None"),
        (lambda: ref(Line, (1, None)), "None"),
        (lambda: ref(Order, 2**80), "key of Order"),
    ]:
        committed_after(session, PayloadError, act, message)
    assert not rows(tables)


def test_all_or_none(session, tables):
    session.add(order := Order())
    gone = Order()
    for bad, message in [
        ([plain.call(), send.call(order=gone)], "transient"),
        ([plain.call(), build.call()], "rows are the jobs themselves"),
        ([plain.call(), plain], r"takes task.call\(...\), not <Task 'plain'"),
        ([plain.call(), Job(kind="x")], "takes task.call"),
        ("plain", "takes task.call"),
    ]:
        committed_after(session, EnqueueError, lambda bad=bad: session.enqueue_all(bad), message)
    assert session.enqueue_all([]) == []
    made = enqueue_all(session, (call for call in (send.call(order=order), plain.call(data=1))))
    assert [job.kind for job in made] == ["send", "plain"]
    session.commit()
    assert len(rows(tables)) == 2


def test_what_cannot_be_enqueued(session, tables):
    session.add(order := Order())
    session.commit()
    call = send.call(order=order)
    for act, message in [
        (lambda: session.enqueue(send.handler, order=order), "brings its own payload|cannot enqueue"),
        (lambda: session.enqueue(send.handler), "cannot enqueue <function send"),
        (lambda: session.enqueue("send"), "cannot enqueue 'send'"),
        (lambda: session.enqueue(None), "cannot enqueue None"),
        (lambda: session.enqueue(Job), "cannot enqueue <class"),
        (lambda: session.enqueue(order), "cannot enqueue <tests.test_enqueue.Order"),
        (lambda: session.enqueue(call, order=order), "Call brings its own payload"),
        (lambda: session.enqueue(call, 1), "Call brings its own payload"),
        (lambda: session.enqueue(Job(kind="x"), a=1), "Job brings its own payload"),
    ]:
        committed_after(session, EnqueueError, act, message)
    assert not rows(tables)


def test_instances_and_plain_rows_are_enough(session, tables):
    session.enqueue(Job(kind="plain", payload={"data": 1}, priority=4, run_at=datetime(2031, 1, 1, tzinfo=UTC)))
    session.enqueue(Job(kind="plain", queue="mail"))
    session.enqueue(Job(kind="plain", queue="undeclared"))
    session.enqueue(
        Job(kind="plain", payload=func.jsonb_build_object("data", 2), run_at=func.now(), max_attempts=func.abs(-5))
    )
    pending = Job(kind="plain", max_attempts=11)
    session.add(pending)
    assert session.enqueue(pending) is session.enqueue(pending) is pending
    session.add(Job(kind="plain", payload={"data": 3}))
    session.flush()
    session.execute(insert(Job.__table__), [{"kind": "plain", "payload": {"data": 4}}])
    session.connection().exec_driver_sql("INSERT INTO jobs (kind, payload) VALUES ('plain', '{\"data\": 5}')")
    session.commit()
    assert [(row.queue, row.payload, row.max_attempts, row.status) for row in rows(tables)] == [
        ("default", {"data": 1}, 3, "pending"),
        ("mail", {}, 7, "pending"),
        ("undeclared", {}, 3, "pending"),
        ("default", {"data": 2}, 5, "pending"),
        ("default", {}, 11, "pending"),
        ("default", {"data": 3}, 3, "pending"),
        ("default", {"data": 4}, 3, "pending"),
        ("default", {"data": 5}, 3, "pending"),
    ]


BAD_INSTANCES: dict[str, tuple[dict[str, Any], str]] = {
    "no kind": ({"payload": {}}, "a kind is a non-empty string, not None"),
    "empty kind": ({"kind": ""}, "a kind is a non-empty string"),
    "kind with NUL": ({"kind": "a\0"}, "no NUL"),
    "long kind": ({"kind": "x" * 256}, "at most 255 characters"),
    "long queue": ({"kind": "x", "queue": "q" * 129}, "a queue name has at most 128"),
    "empty queue": ({"kind": "x", "queue": ""}, "a queue name is a non-empty string"),
    "no attempts": ({"kind": "x", "max_attempts": 0}, "max_attempts"),
    "too many attempts": ({"kind": "x", "max_attempts": 2**40}, "max_attempts"),
    "naive run_at": ({"kind": "x", "run_at": datetime(2031, 1, 1)}, "run_at needs a timezone"),  # noqa: DTZ001  # the case
    "priority": ({"kind": "x", "priority": 2**31}, "priority"),
    "list as payload": ({"kind": "x", "payload": [1]}, r"payload is a JSON object, a dict, not \[1\]"),
    "no payload": ({"kind": "x", "payload": None}, "payload is a JSON object"),
    "text as meta": ({"kind": "x", "meta": "a"}, "meta is a JSON object"),
    "running": ({"kind": "x", "status": "running"}, "enqueued as pending, not 'running'"),
    "done": ({"kind": "x", "status": JobStatus.DONE}, "enqueued as pending"),
}


def test_bad_instances_are_refused_at_the_call(session, tables):
    for values, message in BAD_INSTANCES.values():
        committed_after(session, EnqueueError, lambda values=values: session.enqueue(Job(**values)), message)
    assert not rows(tables)


def test_an_instance_that_is_a_row_already(session, tables):
    job, export = session.enqueue(plain), session.enqueue(Export())
    session.commit()
    session.refresh(job)
    committed_after(session, EnqueueError, lambda: session.enqueue(job), r"Job \(1,\) is a row already: it is in the q")
    session.refresh(export)
    export.status = JobStatus.DONE
    session.commit()
    session.refresh(export)
    committed_after(session, EnqueueError, lambda: session.enqueue(export), "use requeue to run a finished job again")
    with Session(tables) as other:
        theirs = other.get_one(Job, job.id)
        other.expunge(theirs)
        committed_after(session, EnqueueError, lambda: session.enqueue(theirs), "is a row already")
        other.add(pending := Job(kind="x"))
        committed_after(session, EnqueueError, lambda: session.enqueue(pending), "already attached to session")
        assert pending in other.new


def test_rows_that_are_the_jobs_themselves(session, tables):
    export = session.enqueue(Export(format="xlsx"))
    assert (export.queue, export.max_attempts) == ("exports", 9)
    session.enqueue(Export(max_attempts=2, queue="exports"))
    session.add(Export())
    session.commit()
    assert [(row.format, row.queue, row.max_attempts) for row in rows(tables, Export)] == [
        ("xlsx", "exports", 9),
        ("csv", "exports", 2),
        ("csv", "default", 3),
    ]
    committed_after(session, EnqueueError, lambda: session.enqueue(build), "Export rows are the jobs themselves")
    committed_after(session, EnqueueError, lambda: session.enqueue(build.call()), "Export rows are the jobs themselves")
    with pytest.raises(ConfigurationError, match="Export has no kinds: enqueue the row itself"):
        exports.kind("x")


def test_the_queue_of_an_instance(engine):
    class Root(DeclarativeBase):
        pass

    class Work(JobMixin, Root):
        __tablename__ = "works"

    Root.metadata.create_all(engine)
    with Session(engine) as session:
        assert enqueue(session, Work(kind="x")).queue == "default"  # none is declared here
        JobQueue(Work, "b", max_attempts=6)
        alone = enqueue(session, Work(kind="x"))
        assert (alone.queue, alone.max_attempts) == ("b", 6)
        JobQueue(Work, "c")
        with pytest.raises(EnqueueError, match="Work has the queues b, c: say which"):
            enqueue(session, Work(kind="x"))
        JobQueue(Work, max_attempts=8)
        assert enqueue(session, Work(kind="x")).max_attempts == 8
        session.commit()
    assert [row.queue for row in rows(engine, Work)] == ["default", "b", "default"]


# Sessions that cannot commit job and data together


@pytest.mark.parametrize(
    "options",
    [
        {"isolation_level": "AUTOCOMMIT"},
        {"execution_options": {"isolation_level": "AUTOCOMMIT"}},
        {"execution_options": {"postgresql_readonly": True}},
    ],
    ids=["AUTOCOMMIT", "AUTOCOMMIT by execution option", "read-only"],
)
@pytest.mark.parametrize("connected", [False, True])
def test_engines_that_are_refused(tables, database_url, options, connected):
    engine = create_engine(database_url, **options)
    try:
        if connected:
            engine.connect().close()
        message = "read-only" if "postgresql_readonly" in str(options) else "AUTOCOMMIT"
        with Session(engine) as session:
            for act in (
                lambda: enqueue(session, plain),
                lambda: enqueue_all(session, [plain.call()]),
                lambda: enqueue(session, Job(kind="x")),
            ):
                with pytest.raises(EnqueueError, match=message):
                    act()
            assert not session.new
            assert session.scalar(select(1)) == 1
        with (
            engine.connect() as connection,
            Session(connection) as session,
            pytest.raises(EnqueueError, match=message),
        ):
            enqueue(session, plain)
    finally:
        engine.dispose()
    assert not rows(tables)


@pytest.mark.parametrize("by_option", [False, True])
def test_a_transactional_connection_of_an_autocommit_engine(tables, database_url, by_option):
    autocommit = {"isolation_level": "AUTOCOMMIT"}
    engine = create_engine(database_url, **({"execution_options": autocommit} if by_option else autocommit))
    try:
        with engine.connect().execution_options(isolation_level="READ COMMITTED") as connection:
            with Session(connection) as session:
                enqueue(session, plain)
                session.flush()
            assert not rows(tables)
            with Session(connection) as session:
                enqueue(session, plain)
                session.commit()
        with Session(engine.execution_options(isolation_level="SERIALIZABLE")) as session:
            enqueue(session, plain)
            session.commit()
    finally:
        engine.dispose()
    assert len(rows(tables)) == 2


def test_the_connection_counts_where_the_call_cannot_know_it(tables):
    class Routed(RoutingSession):
        leader = tables.execution_options(isolation_level="AUTOCOMMIT")
        replica = tables

    with Routed() as session:
        enqueue(session, plain)
        with pytest.raises(EnqueueError, match="AUTOCOMMIT"):
            session.flush()
        session.rollback()
    with Session(tables) as session:
        session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
        enqueue(session, plain)
        with pytest.raises(EnqueueError, match="AUTOCOMMIT"):
            session.flush()
        session.rollback()
        session.add(Job(kind="x"))  # as plain as SQL: not looked at
        session.commit()
    assert len(rows(tables)) == 1


def test_unbound_and_closed_sessions(tables):
    with pytest.raises(EnqueueError, match="the session has no engine for Job"):
        enqueue(Session(), plain)
    with pytest.raises(EnqueueError, match="the session has no engine for Job"):
        enqueue(Session(binds={Order: tables}), plain)
    closed = Session(tables, close_resets_only=False)
    closed.close()
    with pytest.raises(EnqueueError, match="the session takes no job: This Session has been permanently closed"):
        enqueue(closed, plain)
    manual = Session(tables, autobegin=False)
    with pytest.raises(EnqueueError, match="the session takes no job: Autobegin is disabled"):
        enqueue_all(manual, [plain.call()])
    with manual.begin():
        enqueue(manual, plain)
    with Session(tables) as session:
        session.close()  # resets it, as by default
        enqueue(session, plain)
        session.commit()
    assert len(rows(tables)) == 2


def test_a_transaction_that_the_server_made_read_only(tables):
    with Session(tables) as session:
        session.connection().exec_driver_sql("SET TRANSACTION READ ONLY")
        enqueue(session, plain)
        with pytest.raises(DBAPIError, match="read-only transaction"):
            session.commit()
        session.rollback()
        session.add(Order())
        session.commit()
    assert len(rows(tables, Order)) == 1


def test_a_session_whose_flush_failed(session, tables):
    session.add(Order(job_id=12345))
    with pytest.raises(DBAPIError):
        session.flush()
    for act in (lambda: session.enqueue(plain), lambda: session.enqueue(Job(kind="x"))):
        with pytest.raises(EnqueueError, match=r"session.rollback\(\) first"):
            act()
    session.rollback()
    session.enqueue(plain)
    with session.begin_nested() as savepoint:
        session.add(Order(job_id=12345))
        with pytest.raises(DBAPIError):
            session.flush()
        with pytest.raises(EnqueueError, match=r"session.rollback\(\) first"):
            session.enqueue(plain)
        savepoint.rollback()
    session.commit()
    assert len(rows(tables)) == 1


def test_two_phase(tmp_path):
    with EmbeddedPostgres(settings={"max_prepared_transactions": "5", "fsync": "off"}) as server:
        engine = create_engine(server.url())
        Base.metadata.create_all(engine)
        with Session(engine, twophase=True) as session:
            session.add(order := Order())
            job = enqueue(session, send, order=order)
            session.flush()
            assert job.payload == {"order_id": order.id}
            session.prepare()
            assert not rows(engine)
            session.commit()
            session.add(order := Order())
            enqueue(session, send, order=order)
            session.prepare()
            session.rollback()
            with session.begin_nested():
                enqueue(session, send, order=session.get_one(Order, 1))
            session.commit()
        assert [row.payload for row in rows(engine)] == [{"order_id": 1}] * 2
        engine.dispose()


# Sessions are left as they were


def test_sessions_and_jobs_are_released(tables):
    session = Session(tables)
    session.add(order := Order())
    job = enqueue(session, send, order=order)
    session.commit()
    known = [weakref.ref(thing) for thing in (session, job, order)]
    assert not [key for key in session.info if "sqla_jobqueue" in key]
    session.close()
    del session, job, order
    gc.collect()
    assert [ref() for ref in known] == [None] * 3


def test_info_of_a_session_after_a_failed_flush(tables):
    with Session(tables) as session:
        session.add(order := Order())
        enqueue(session, send, order=order)
        session.add(Line(order_id=999, sku="x"))
        with pytest.raises(DBAPIError):
            session.flush()
        session.rollback()
        session.add(order := Order())
        job = enqueue(session, send, order=order)
        session.commit()
        assert job.payload == {"order_id": order.id}
    assert len(rows(tables)) == 1


def test_names_may_hold_anything_that_postgresql_can_store(session, tables):
    for name in ("'; DROP TABLE jobs; --", 'a"b', "%s %(x)s :x $$ \\", "new\nline", "é🎉", "x" * 128):
        queue = JobQueue(Job, name)
        assert session.enqueue(queue.kind(name), **{name: name}).queue == name
    session.commit()
    assert [row.payload for row in rows(tables)] == [{row.kind: row.queue} for row in rows(tables)]
