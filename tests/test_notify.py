"""Wake-ups: one per transaction and queue, at commit only, heard on a real LISTEN."""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import Connection, Engine, MetaData, create_engine, event, insert, make_url, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.schema import CreateSchema

from sqla_jobqueue import AsyncJobSession, JobMixin, JobQueue, JobSession, JobStateMixin, enqueue
from sqla_jobqueue.embedded import EmbeddedPostgres
from sqla_jobqueue.session import NOTIFY_OPTION, channel_of, notifying
from sqla_jobqueue.statements import Listen, channel_name
from tests.helpers import driver_url, open_async_engine


class Base(DeclarativeBase):
    pass


class Job(JobMixin, Base):
    __tablename__ = "jobs"


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


class OtherJob(JobMixin, Base):
    __tablename__ = "other_jobs"


class Lazy(JobMixin, Base):
    __tablename__ = "lazy_jobs"
    __mapper_args__ = {"eager_defaults": False}  # noqa: RUF012  # SQLAlchemy reads it


class Export(JobStateMixin, Base):
    __tablename__ = "exports"
    id: Mapped[int] = mapped_column(primary_key=True)


jobs = JobQueue(Job)
mail = JobQueue(Job, "mail")
silent = JobQueue(Job, "silent", notify=False)


@jobs.task
def work(session: JobSession[Job], order: Order | None = None, data: Any = None) -> None: ...


@mail.task
def send(session: JobSession[Job]) -> None: ...


@pytest.fixture
def tables(engine: Engine) -> Engine:
    Base.metadata.create_all(engine)
    return engine


class Ear:
    """Listens on a connection of its own, and tells what came in since it was asked last."""

    def __init__(self, engine: Engine, *channels: str) -> None:
        self.connection = psycopg.connect(driver_url(engine.url.render_as_string(hide_password=False), ""))
        self.connection.autocommit = True
        for channel in channels:
            self.connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        self.channels = channels

    def heard(self) -> list[str]:
        """Queues in the order of their wake-ups. What was committed before is here: a marker is sent behind it."""
        with psycopg.connect(self.connection.info.dsn, password=self.connection.info.password) as other:
            other.execute("SELECT pg_notify(%s, '')", [self.channels[0]])
        came: list[str] = []
        for notification in self.connection.notifies(timeout=20):
            assert notification.channel in self.channels
            if not notification.payload:
                return came
            came.append(notification.payload)
        raise AssertionError("the marker did not come")


@contextlib.contextmanager
def listening(engine: Engine, *channels: str) -> Iterator[Ear]:
    ear = Ear(engine, *(channels or ["sqla_jobqueue.public.jobs"]))
    try:
        yield ear
    finally:
        ear.connection.close()


@pytest.fixture
def ear(tables: Engine) -> Iterator[Ear]:
    with listening(tables) as ear:
        yield ear


@contextlib.contextmanager
def notifies_of(engine: Engine) -> Iterator[list[Any]]:
    """The NOTIFYs that an engine sends meanwhile, committed or not."""
    sent: list[Any] = []

    def note(_connection, _cursor, statement, parameters, *_rest) -> None:
        if "pg_notify" in statement:
            sent.append(parameters)

    event.listen(engine, "before_cursor_execute", note)
    yield sent
    event.remove(engine, "before_cursor_execute", note)


def test_at_commit_and_not_before(tables, ear):
    with Session(tables) as session:
        enqueue(session, work)
        session.flush()
        assert ear.heard() == []
        session.commit()
    assert ear.heard() == ["default"]


def test_a_plain_add_on_a_plain_session_counts(tables, ear):
    with Session(tables) as session:
        session.add(Job(kind="work"))
        session.add(Job(kind="work", queue="undeclared"))
        session.commit()
        session.add(Job(kind="work", queue="mail"))
        session.commit()
    assert sorted(ear.heard()[:2]) == ["default", "undeclared"]
    assert ear.heard() == []


@pytest.mark.parametrize("way", ["add_all", "enqueue", "flush by flush"])
def test_many_jobs_are_one_wakeup(tables, ear, way):
    with Session(tables) as session, notifies_of(tables) as sent:
        if way == "add_all":
            session.add_all([Job(kind="work", queue="mail" if n % 2 else "default") for n in range(10_000)])
        elif way == "enqueue":
            for n in range(2_000):
                enqueue(session, send if n % 2 else work)
        else:
            for n in range(200):
                enqueue(session, send if n % 2 else work)
                session.flush()
        session.commit()
    assert len(sent) == 2
    assert sorted(ear.heard()) == ["default", "mail"]


def test_none_on_rollback(tables, ear):
    with Session(tables) as session:
        enqueue(session, work)
        session.flush()
        session.rollback()
        enqueue(session, work)
        session.flush()
    assert ear.heard() == []
    with Session(tables) as session:  # one of a pooled connection's next transaction
        enqueue(session, work)
        session.commit()
        enqueue(session, work)
        session.commit()
    assert ear.heard() == ["default"] * 2


def test_savepoints(tables, ear):
    with Session(tables) as session:
        with session.begin_nested() as savepoint:
            enqueue(session, work)
            session.flush()
            savepoint.rollback()
        session.add(Order())
        session.commit()
        assert ear.heard() == []

        with session.begin_nested() as savepoint:  # the inner one is gone, the outer one's own is sent
            enqueue(session, work)
            session.flush()
            savepoint.rollback()
        enqueue(session, work)
        session.commit()
        assert ear.heard() == ["default"]

        enqueue(session, work)  # the outer one first
        with session.begin_nested() as savepoint:
            enqueue(session, work)
            session.flush()
            savepoint.rollback()
        session.commit()
        assert ear.heard() == ["default"]

        with session.begin_nested():
            with session.begin_nested() as savepoint:
                enqueue(session, work)
                session.flush()
                savepoint.rollback()
            with session.begin_nested():
                enqueue(session, work)
        enqueue(session, work)
        session.commit()
        assert ear.heard() == ["default"]


def test_many_savepoints_send_one_statement_once_the_transaction_has(tables, ear):
    with Session(tables) as session, notifies_of(tables) as sent:
        enqueue(session, work)
        session.flush()
        for _ in range(20):
            with session.begin_nested():
                enqueue(session, work)
        session.commit()
    assert len(sent) == 1
    assert ear.heard() == ["default"]


def test_only_jobs_that_are_due(tables, ear):
    later = datetime(2131, 1, 1, tzinfo=UTC)
    with Session(tables) as session:
        enqueue(session, work.options(delay=timedelta(seconds=1)))
        enqueue(session, work.options(run_at=later))
        session.add(Job(kind="work", run_at=later))
        session.add(Job(kind="work", status="done"))
        session.add(Job(kind="work", status="cancelled", queue="mail"))
        session.commit()
        assert ear.heard() == []
        enqueue(session, work.options(delay=timedelta(0)))
        session.commit()
        assert ear.heard() == ["default"]
        enqueue(session, send.options(run_at=datetime(2021, 1, 1, tzinfo=UTC)))
        session.commit()
        assert ear.heard() == ["mail"]
        session.add(Job(kind="work", run_at=datetime(2131, 1, 1)))  # noqa: DTZ001  # nothing to compare: a wake-up is harmless
        session.commit()
        assert ear.heard() == ["default"]
        session.add(Job(kind="work", priority=-7, status="pending"))
        session.commit()
        assert ear.heard() == ["default"]


def test_a_mapper_that_fetches_no_defaults(tables):
    with listening(tables, "sqla_jobqueue.public.lazy_jobs") as ear, Session(tables) as session:
        session.add(Lazy(kind="x"))
        session.add(Lazy(kind="x", queue="mail"))
        session.commit()
        assert sorted(ear.heard()) == ["default", "mail"]


def test_rows_that_are_the_jobs_themselves(tables):
    with listening(tables, "sqla_jobqueue.public.exports") as ear, Session(tables) as session:
        session.add(Export(queue="exports"))
        session.commit()
        assert ear.heard() == ["exports"]


def test_the_message_is_the_queue_alone(tables, ear):
    with Session(tables) as session:
        enqueue(session, work, data="x" * 1_000_000)
        enqueue(session, JobQueue(Job, "é🎉 'quoted' %s \\ \"x\"").kind("work"), data="y" * 10_000)
        enqueue(session, JobQueue(Job, "🎉" * 128).kind("work"))  # 512 bytes
        session.commit()
    assert sorted(ear.heard()) == sorted(["default", "é🎉 'quoted' %s \\ \"x\"", "🎉" * 128])


def test_off_for_a_queue(tables, ear):
    with Session(tables) as session, notifies_of(tables) as sent:
        enqueue(session, silent.kind("x"))
        session.add(Job(kind="x", queue="silent"))
        session.commit()
    assert (sent, ear.heard()) == ([], [])


@pytest.mark.parametrize("where", ["create_engine", "engine", "connection"])
def test_off_for_an_engine_or_connection(tables, ear, database_url, where):
    option = {NOTIFY_OPTION: False}
    assert option == {"sqla_jobqueue_notify": False}
    engine = create_engine(database_url, **({"execution_options": option} if where == "create_engine" else {}))
    try:
        with notifies_of(engine) as sent:
            if where == "connection":
                with engine.connect().execution_options(**option) as connection, Session(connection) as session:
                    enqueue(session, work)
                    session.commit()
                    connection.commit()
            else:
                with Session(engine.execution_options(**option) if where == "engine" else engine) as session:
                    enqueue(session, work)
                    session.commit()
        assert (sent, ear.heard()) == ([], [])
    finally:
        engine.dispose()
    with Session(tables) as session:
        assert session.scalar(select(Job.kind)) == "work"  # it is there, polling finds it


def test_on_every_async_session(async_url, tables, ear):
    async def main() -> None:
        async with open_async_engine(async_url) as engine:
            async with AsyncJobSession[Job](engine) as session:
                session.enqueue_all([work.call(), work.call(), send.call()])
                await session.flush()
                assert ear.heard() == []
                await session.commit()
            async with AsyncSession(engine) as session:
                session.add(Job(kind="x", queue="plain"))
                async with session.begin_nested() as savepoint:
                    enqueue(session, work)
                    await session.flush()
                    await savepoint.rollback()
                await session.commit()
                enqueue(session, work)
                await session.flush()
                await session.rollback()
            async with engine.execution_options(sqla_jobqueue_notify=False).connect() as connection:
                async with AsyncSession(connection) as session:
                    enqueue(session, work)
                    await session.commit()
                await connection.commit()

    asyncio.run(main())
    came = ear.heard()
    assert sorted(came[:2]) == ["default", "mail"]
    assert came[2:] == ["plain"]


def test_a_session_on_a_connection(tables, ear):
    with tables.connect() as connection, connection.begin() as transaction:
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            enqueue(session, work)
            session.commit()
            enqueue(session, work)
            session.rollback()
            enqueue(session, work)
            session.commit()
        assert ear.heard() == []
        transaction.commit()
    assert ear.heard() == ["default"]


def test_entities_and_statements_beside_it(tables, ear):
    with Session(tables) as session:
        session.add(order := Order())
        enqueue(session, work, order=order)
        session.execute(insert(Job), [{"kind": "x", "queue": "mail"}])  # no mapper event: polling finds it
        session.commit()
    assert ear.heard() == ["default"]


# Channels


def test_two_tables_do_not_wake_each_other(tables, ear):
    with listening(tables, "sqla_jobqueue.public.other_jobs") as other, Session(tables) as session:
        session.add(Job(kind="x", queue="here"))
        session.add(OtherJob(kind="x", queue="there"))
        session.commit()
        assert ear.heard() == ["here"]
        assert other.heard() == ["there"]


def model_named(table: str, schema: str | None = None) -> Any:
    class Root(DeclarativeBase):
        metadata = MetaData(schema=schema)

    class Work(JobMixin, Root):
        __tablename__ = table

    return Work


NAMES = {
    "quoted": ("Order; --", None),
    "double quote": ('a"b', None),
    "percent": ("50%s %(x)s", None),
    "reserved": ("select", None),
    "60 characters": ("t" * 60, None),
    "63 bytes": ("é" * 31, None),
    "schema": ("jobs", "My Schema"),
    "long schema": ("jobs", "s" * 63),
    "both long": ("t" * 63, "s" * 63),
}


@pytest.mark.parametrize(("table", "schema"), NAMES.values(), ids=NAMES)
def test_channels_are_the_same_for_listen_and_notify(engine, table, schema):
    model = model_named(table, schema)
    with engine.begin() as connection:
        if schema:
            connection.execute(CreateSchema(schema))
        model.metadata.create_all(connection)
        channel = channel_of(connection, model.__table__)
    assert len(channel.encode()) <= 63
    assert channel == channel_name(model_named(table, schema).__table__, schema or "public")  # in any process
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as listener:
        listener.execute(Listen(channel))
        assert listener.exec_driver_sql("SELECT pg_listening_channels()").scalars().all() == [channel]
        with Session(engine) as session:
            session.add(model(kind="x", queue="mail"))
            session.commit()
        driver_connection: Any = listener.connection.driver_connection
        assert [n.payload for n in driver_connection.notifies(timeout=20, stop_after=1)] == ["mail"]
        listener.invalidate()


def test_long_names_do_not_meet():
    channels = {
        channel_name(model_named(table, schema).__table__, schema)
        for table, schema in [("t" * 60, "a"), ("t" * 61, "a"), ("t" * 60, "b"), ("t" * 59 + "u", "a"), ("jobs", "a")]
    }
    assert len(channels) == 5
    assert "sqla_jobqueue.a.jobs" in channels


def test_schema_translate_map(engine):
    model = model_named("jobs", "tenant")
    tenants = [engine.execution_options(schema_translate_map={"tenant": name}) for name in ("one", "two")]
    for tenant, name in zip(tenants, ("one", "two"), strict=True):
        with tenant.begin() as connection:
            connection.execute(CreateSchema(name))
            model.metadata.create_all(connection)
            assert channel_of(connection, model.__table__) == f"sqla_jobqueue.{name}.jobs"
    with listening(engine, "sqla_jobqueue.one.jobs") as one, listening(engine, "sqla_jobqueue.two.jobs") as two:
        with Session(tenants[0]) as session:
            session.add(model(kind="x", queue="first"))
            session.commit()
        with Session(tenants[1]) as session:
            session.add(model(kind="x", queue="second"))
            session.commit()
        assert (one.heard(), two.heard()) == (["first"], ["second"])


def test_the_default_schema_of_a_role(engine, database_url):
    with engine.begin() as connection:
        connection.execute(CreateSchema("app"))
    url = make_url(database_url).update_query_dict({"options": "-csearch_path=app"})
    theirs = create_engine(url)
    try:
        Base.metadata.create_all(theirs)
        with listening(engine, "sqla_jobqueue.app.jobs") as ear, Session(theirs) as session:
            enqueue(session, work)
            session.commit()
            assert ear.heard() == ["default"]
    finally:
        theirs.dispose()


# What PostgreSQL refuses


def test_none_in_a_two_phase_transaction():
    with EmbeddedPostgres(settings={"max_prepared_transactions": "5", "fsync": "off"}) as server:
        engine = create_engine(server.url())
        Base.metadata.create_all(engine)
        with listening(engine) as ear, notifies_of(engine) as sent, Session(engine, twophase=True) as session:
            enqueue(session, work)
            with session.begin_nested():
                enqueue(session, work)
            session.prepare()  # PREPARE TRANSACTION refuses one that has executed NOTIFY
            session.commit()
            assert (sent, ear.heard()) == ([], [])
        with Session(engine) as session:
            assert session.scalars(select(Job.kind)).all() == ["work"] * 2
        engine.dispose()


@pytest.fixture
def restricted(tables: Engine, database_url: str) -> Iterator[Engine]:
    """The engine of a role that may not call pg_notify."""
    role = make_url(database_url).database + "_role"
    with tables.begin() as connection:
        execute = connection.exec_driver_sql
        execute(f"CREATE ROLE {role} LOGIN PASSWORD 'secret'")
        execute(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}")
        execute(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {role}")
        execute("REVOKE EXECUTE ON FUNCTION pg_catalog.pg_notify(text, text) FROM PUBLIC")
    engine = create_engine(make_url(database_url).set(username=role, password="secret"))
    try:
        yield engine
    finally:
        engine.dispose()
        with tables.begin() as connection:
            connection.exec_driver_sql("GRANT EXECUTE ON FUNCTION pg_catalog.pg_notify(text, text) TO PUBLIC")
            connection.exec_driver_sql(f"DROP OWNED BY {role}")
            connection.exec_driver_sql(f"DROP ROLE {role}")


def test_a_role_that_may_not_notify_needs_it_off(restricted, tables):
    with Session(restricted) as session:
        enqueue(session, work)
        with pytest.raises(DBAPIError, match="permission denied for function pg_notify"):
            session.flush()
        session.rollback()
        session.add(Order())
        enqueue(session, silent.kind("x"))  # off per queue
        session.commit()
    with Session(restricted.execution_options(sqla_jobqueue_notify=False)) as session:  # off for the engine
        enqueue(session, work)
        session.commit()
    with Session(tables) as session:
        assert session.scalars(select(Job.queue).order_by(Job.id)).all() == ["silent", "default"]


# The memory of what was sent


def test_transactions_are_released(tables):
    transactions: list[weakref.ref[Any]] = []

    def remember(connection: Connection, *_rest: Any) -> None:
        transactions.append(weakref.ref(connection.get_transaction()))

    gc.collect()
    known = len(notifying._sent)
    with Session(tables) as session:
        event.listen(tables, "before_cursor_execute", remember)
        for ending in (session.commit, session.rollback, session.close) * 5:
            enqueue(session, work)
            with session.begin_nested():
                enqueue(session, send)
            ending()
        event.remove(tables, "before_cursor_execute", remember)
    gc.collect()
    assert len(transactions) > 15
    assert [ref() for ref in transactions if ref() is not None] == []
    assert len(notifying._sent) == known
