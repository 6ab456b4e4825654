"""What the type checkers must take, and as what."""

from collections.abc import Awaitable, Coroutine
from typing import Any, assert_type

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from sqla_jobqueue import (
    AsyncJobSession,
    Call,
    EnqueueMixin,
    JobQueue,
    JobSession,
    Kind,
    Task,
    current_job,
    enqueue,
    enqueue_all,
    ref,
)
from sqla_jobqueue.testing import Outcome, assert_enqueued, drain, enqueued, inline, perform, rolled_back
from tests.typing.shop import (
    Customer,
    Export,
    Job,
    Order,
    Rush,
    build,
    create_invoice,
    exports,
    fetch,
    jobs,
    mail,
    on_any_session,
    ping,
    send,
)


class ShopSession(EnqueueMixin, Session):
    pass


def queues() -> None:
    assert_type(jobs, JobQueue[Job])
    assert_type(exports, JobQueue[Export])
    assert_type(jobs.kind("x"), Kind[Job])
    assert_type(jobs.kind("x").options(priority=1), Kind[Job])
    assert_type(jobs.kind("x").call(anything=1), Call[Job])


def decorated(session: JobSession[Job], async_session: AsyncJobSession[Job], order: Order) -> None:
    assert_type(create_invoice(session, order), None)
    assert_type(send(session, order, 2, note="x"), int)
    coroutines: tuple[Coroutine[Any, Any, str], Coroutine[Any, Any, None]]
    coroutines = fetch(async_session, ["x"]), ping(async_session)
    del coroutines
    assert_type(send.call(order), Call[Job])
    assert_type(send.call(order=order, copies=2, note=None), Call[Job])
    assert_type(send.options(priority=1).call(order, 2), Call[Job])
    assert_type(fetch.call(urls=("x", "y")), Call[Job])
    assert_type(ping.call(), Call[Job])
    assert_type(build.call(), Call[Export])
    assert_type(send.kind, str)
    assert_type(send.is_async, bool)
    kept: Task[[Order], None, Job] = create_invoice
    kept.call(order)


def methods(session: JobSession[Job], order: Order) -> None:
    assert_type(session.enqueue(create_invoice, order), Job)
    assert_type(session.enqueue(create_invoice, order=order), Job)
    assert_type(session.enqueue(create_invoice, order=Rush()), Job)
    assert_type(session.enqueue(create_invoice, order=ref(Order, 4)), Job)
    assert_type(session.enqueue(send, order, copies=2, note="x"), Job)
    assert_type(session.enqueue(send.options(max_attempts=1), order=order), Job)
    assert_type(session.enqueue(fetch, urls=["x"], order=None), Job)
    assert_type(session.enqueue(ping), Job)
    assert_type(session.enqueue(on_any_session, data=object()), Job)
    assert_type(session.enqueue(send.call(order)), Job)
    assert_type(session.enqueue(mail.kind("send"), order_id=4, anything=[1]), Job)
    assert_type(session.enqueue(Job(kind="x")), Job)
    assert_type(session.enqueue(Export()), Export)
    assert_type(session.enqueue_all([send.call(order), create_invoice.call(order), mail.kind("x").call()]), list[Job])
    assert_type(session.enqueue_all(send.call(each) for each in [order]), list[Job])
    assert_type(session.enqueue(send, order).tenant, int | None)


def functions(session: Session, order: Order) -> None:
    assert_type(enqueue(session, create_invoice, order), Job)
    assert_type(enqueue(session, send, order=order, copies=2), Job)
    assert_type(enqueue(session, send.call(order)), Job)
    assert_type(enqueue(session, fetch, ["x"]), Job)
    assert_type(enqueue(session, jobs.kind("x"), a=1), Job)
    assert_type(enqueue(session, Export()), Export)
    assert_type(enqueue_all(session, [send.call(order)]), list[Job])
    assert_type(ref(Customer, 4), Customer)
    assert_type(ref(Customer, (4,)), Customer)


def sessions(engine: Engine, async_engine: AsyncEngine, order: Order) -> None:
    maker = sessionmaker(engine, class_=JobSession)
    with maker.begin() as made:
        assert_type(made.enqueue(send, order=order), Job)
    typed: sessionmaker[JobSession[Job]] = sessionmaker(engine, class_=JobSession)
    with typed() as job_session:
        assert_type(job_session.job, Job)
    async_maker = async_sessionmaker(async_engine, class_=AsyncJobSession)
    assert_type(async_maker().enqueue(send, order=order), Job)
    assert_type(ShopSession(engine).enqueue(send, order=order), Job)
    assert_type(enqueue(scoped_session(maker), send, order=order), Job)
    assert_type(enqueue(async_scoped_session(async_maker, scopefunc=object), send, order=order), Job)
    assert_type(enqueue(AsyncSession(async_engine), send, order=order), Job)


@jobs.task
def bare(session: JobSession) -> None:
    assert_type(session.job, Any)


def in_a_handler(session: JobSession[Job], async_session: AsyncJobSession[Export]) -> None:
    assert_type(session.job, Job)
    assert_type(session.job.tenant, int | None)
    assert_type(session.job.payload, Any)
    assert_type(session.job.id, int)
    assert_type(async_session.job, Export)
    assert_type(session.job_is_lost, bool)
    assert_type(session.raise_if_lost(), None)
    assert_type(current_job(session), Any)


async def in_a_test(engine: Engine, async_engine: AsyncEngine, order: Order) -> None:
    with rolled_back(engine) as session, inline(session) as outcomes:
        assert_type(session, JobSession[Any])
        assert_type(outcomes, list[Outcome])
        assert_type(drain(session, jobs), list[Outcome])
        assert_type(enqueued(session, send), list[Job])
        assert_type(enqueued(session, jobs), list[Job])
        assert_type(enqueued(session, Export), list[Export])
        assert_type(assert_enqueued(session, send, order=order), Job)
        assert_type(perform(session, send, order=order), int)
        assert_type(perform(session, create_invoice, order), None)
    with rolled_back(engine, ShopSession) as own:
        assert_type(own, ShopSession)
    async with rolled_back(async_engine) as async_session:
        assert_type(async_session, AsyncJobSession[Any])
        assert_type(drain(async_session), Awaitable[list[Outcome]])
        assert_type(await enqueued(async_session, send), list[Job])
        assert_type(await assert_enqueued(async_session, send), Job)
        assert_type(await perform(async_session, fetch, ["x"]), str)
        assert_type(await perform(async_session, send, order=order), int)
