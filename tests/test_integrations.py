"""Session registries, frameworks' sessions, several databases and translated schemas, each with a real worker."""

import asyncio
from contextlib import contextmanager
from datetime import timedelta

import pytest
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import create_engine, select
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker
from sqlalchemy.schema import CreateSchema

from sqla_jobqueue import JobMixin, JobQueue, JobSession, Worker, current_job, enqueue, fixed
from sqla_jobqueue.lifecycle import cancel
from tests.helpers import driver_url, open_async_engine


class Base(DeclarativeBase):
    pass


class Job(JobMixin, Base):
    __tablename__ = "jobs"


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(default="new")


class OtherBase(DeclarativeBase):
    pass


class Note(OtherBase):
    __tablename__ = "notes"
    id: Mapped[int] = mapped_column(primary_key=True)
    text: Mapped[str]


QUEUES = [
    JobQueue(Job, name, one_transaction=name == "together", max_attempts=1, backoff=fixed(timedelta(0)))
    for name in ("leased", "together")
]


@pytest.fixture(params=QUEUES, ids=lambda queue: queue.name)
def queue(request):
    yield request.param
    request.param.tasks.clear()


async def until(session, question, answer):
    """Wait for a row to be as it shall be; the caller gives the time."""
    while await session.scalar(question) != answer:
        await session.rollback()
        await asyncio.sleep(0.01)


@pytest.fixture
def tables(engine):
    Base.metadata.create_all(engine)
    return engine


def states(engine):
    with Session(engine) as session:
        return (
            session.scalars(select(Order.state).order_by(Order.id)).all(),
            session.scalars(select(Job.status).order_by(Job.id)).all(),
        )


# --------------------------------------------------------------------------------------------------- scoped sessions


def test_a_scoped_session_in_a_handler_is_the_session_of_the_job(tables, queue):
    registry = scoped_session(sessionmaker(tables))
    seen = []

    @contextmanager
    def sessions():
        yield registry
        registry.remove()

    @queue.task
    def handle(session, order: Order) -> None:
        registry.get_one(Order, order.id).state = "done"  # the global one
        seen.append((session is registry, registry() is registry(), current_job(registry).kind, order in registry))

    @queue.task
    def fail(session, order: Order) -> None:
        registry.get_one(Order, order.id).state = "half done"
        registry.flush()
        raise LookupError

    for task in (handle, fail):
        registry.add(order := Order())
        enqueue(registry, task, order=order)
    registry.commit()
    registry.remove()
    Worker(queue, sessions=sessions).drain()
    assert seen == [(True, True, "handle", True)]
    assert states(tables) == (["done", "new"], ["done", "failed"])


def test_an_async_scoped_session(database_url, async_driver, queue):
    seen = []

    async def main():
        async with open_async_engine(driver_url(database_url, async_driver)) as engine:
            async with engine.begin() as connection:
                await connection.run_sync(Base.metadata.create_all)
            registry = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)

            class Sessions:
                async def __aenter__(self):
                    return registry

                async def __aexit__(self, *_):
                    await registry.remove()

            @queue.task
            async def handle(session, order: Order) -> None:
                (await registry.get_one(Order, order.id)).state = "done"
                seen.append((session is registry, current_job(registry).kind))

            registry.add(order := Order())
            enqueue(registry, handle, order=order)
            await registry.commit()
            await registry.remove()
            async with Worker(queue, async_sessions=Sessions), AsyncSession(engine) as session:
                await until(session, select(Order.state), "done")

    asyncio.run(asyncio.wait_for(main(), 20))
    assert seen == [(True, "handle")]


# ------------------------------------------------------------------------------------------------- Flask-SQLAlchemy


@pytest.fixture
def flask(database_url, new_database, queue):
    app = Flask(__name__)
    app.config["SQLALCHEMY_DATABASE_URI"] = database_url
    app.config["SQLALCHEMY_BINDS"] = {"notes": new_database()}
    db = SQLAlchemy(app)

    class FlaskNote(db.Model):
        __bind_key__ = "notes"
        id: Mapped[int] = mapped_column(primary_key=True)
        text: Mapped[str]

    app.db, app.note = db, FlaskNote
    with app.app_context():
        Base.metadata.create_all(db.engine)
        db.create_all()
        yield app
        db.session.remove()
        for engine in db.engines.values():
            engine.dispose()


def worker_sessions(app):
    @contextmanager
    def sessions():
        with app.app_context():
            yield app.db.session

    return sessions


def flask_states(app):
    app.db.session.rollback()
    return (
        app.db.session.scalars(select(Order.state).order_by(Order.id)).all(),
        app.db.session.scalars(select(Job.status).order_by(Job.id)).all(),
        app.db.session.scalars(select(app.note.text)).all(),
    )


def test_flasks_global_session_is_that_of_the_job(flask, queue):
    db = flask.db
    seen = []

    @queue.task
    def handle(session, order: Order) -> None:
        db.session.get_one(Order, order.id).state = "done"
        db.session.add(flask.note(text="done"))
        seen.append((current_job(db.session).kind, order in db.session))

    @queue.task
    def fail(session, order: Order) -> None:
        order.state = "half done"
        db.session.add(flask.note(text="half done"))
        db.session.flush()
        raise LookupError

    @queue.task
    def commit(session, order: Order) -> None:
        order.state = "committed"
        db.session.commit()

    @flask.post("/orders/<kind>")
    def post(kind):
        db.session.add(order := Order())
        enqueue(db.session, queue.tasks[kind], order=order)
        db.session.commit()
        return {"order": order.id}

    client = flask.test_client()
    assert [client.post(f"/orders/{kind}").json["order"] for kind in ("handle", "fail", "commit")] == [1, 2, 3]
    Worker(queue, sessions=worker_sessions(flask)).drain()
    assert seen == [("handle", True)]
    assert flask_states(flask) == (["done", "new", "new"], ["done", "failed", "failed"], ["done"])
    error = db.session.scalar(select(Job.last_error).where(Job.kind == "commit"))
    assert error.startswith("TransactionMisuse: a handler must not commit its session")


def test_flasks_global_session_is_fenced(flask):
    leased = JobQueue(Job, "fenced", max_attempts=1)

    @leased.task
    def handle(session, order: Order) -> None:
        flask.db.session.get_one(Order, order.id).state = "done"
        with Session(flask.db.engine) as operator:
            cancel(operator, operator.scalars(select(Job)).one())
            operator.commit()

    flask.db.session.add(order := Order())
    enqueue(flask.db.session, handle, order=order)
    flask.db.session.commit()
    Worker(leased, sessions=worker_sessions(flask)).drain()
    assert flask_states(flask) == (["new"], ["cancelled"], [])
    leased.tasks.clear()


# ------------------------------------------------------------------------------------------------- several databases


def test_a_session_of_two_databases(tables, new_database, queue):
    other = create_engine(new_database())
    OtherBase.metadata.create_all(other)
    make_session = sessionmaker(binds={Base: tables, OtherBase: other}, class_=JobSession)

    @queue.task
    def handle(session: JobSession[Job], order: Order, note: Note, then: str) -> None:
        order.state = note.text
        session.add(Note(text=then))
        session.flush()
        if then == "fail":
            raise LookupError

    with make_session.begin() as session:
        session.add(note := Note(text="noted"))
        for then in ("end", "fail"):
            session.add(order := Order())
            session.enqueue(handle, order=order, note=note, then=then)
    Worker(queue, sessions=make_session).drain()
    assert states(tables) == (["noted", "new"], ["done", "failed"])
    with Session(other) as session:
        assert session.scalars(select(Note.text).order_by(Note.id)).all() == ["noted", "end"]
    other.dispose()


# ------------------------------------------------------------------------------------------------ translated schemas


def translated(engine):
    return engine.execution_options(schema_translate_map={None: "acme"})


def in_a_schema(engine):
    with engine.begin() as connection:
        connection.execute(CreateSchema("acme"))
        Base.metadata.create_all(connection.execution_options(schema_translate_map={None: "acme"}))


def test_a_worker_on_an_engine_that_translates_schemas(engine, queue):
    in_a_schema(engine)
    make_session = sessionmaker(translated(engine), class_=JobSession)

    @queue.task
    def handle(session: JobSession[Job], order: Order) -> None:
        order.state = "done"

    with make_session.begin() as session:
        session.add(order := Order())
        session.enqueue(handle, order=order)
    Worker(queue, sessions=make_session).drain()
    assert states(translated(engine)) == (["done"], ["done"])


def test_an_async_worker_on_an_engine_that_translates_schemas(database_url, engine, async_driver, queue):
    in_a_schema(engine)

    async def main():
        async with open_async_engine(driver_url(database_url, async_driver)) as plain:
            make_session = async_sessionmaker(translated(plain))

            @queue.task
            async def handle(session: AsyncSession, order: Order) -> None:
                order.state = "done"

            async with make_session.begin() as session:
                session.add(order := Order())
                enqueue(session, handle, order=order)
            async with Worker(queue, async_sessions=make_session), make_session() as session:
                await until(session, select(Job.status), "done")

    asyncio.run(asyncio.wait_for(main(), 20))
    assert states(translated(engine)) == (["done"], ["done"])
