"""What the type checkers must refuse: each line that is marked, and no other."""

# ruff: noqa: B018, F841  # only the type checkers look at it

from datetime import timedelta

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from sqla_jobqueue import AsyncJobSession, JobQueue, JobSession, enqueue, enqueue_all, ref
from sqla_jobqueue.testing import perform
from tests.typing.shop import Base, Customer, Export, Job, Order, build, create_invoice, fetch, jobs, send


def methods(session: JobSession[Job], async_session: AsyncJobSession[Job], order: Order) -> None:
    session.enqueue(send, order=4)  # error
    session.enqueue(send, order=Customer())  # error
    session.enqueue(send, order=ref(Customer, 4))  # error
    session.enqueue(send, order=None)  # error
    session.enqueue(send, ordr=order)  # error
    session.enqueue(send)  # error
    session.enqueue(send, order, copies="2")  # error
    session.enqueue(send, order, 2, "note is by keyword")  # error
    session.enqueue(send.options(priority=1), order=order, copies="2")  # error
    session.enqueue(send.call(order), copies=2)  # error
    session.enqueue(create_invoice, order, copies=2)  # error
    session.enqueue(fetch, urls=[1])  # error
    session.enqueue(build, 1)  # error
    session.enqueue(jobs.kind("x"), 1)  # error
    session.enqueue(Job(kind="x"), a=1)  # error
    session.enqueue(order)  # error
    session.enqueue("send", order=order)  # error
    session.enqueue(send.handler, order=order)  # error
    session.enqueue_all([send])  # error
    session.enqueue_all(send.call(order))  # error
    async_session.enqueue(send, order=4)  # error


def functions(session: Session, engine: Engine, order: Order) -> None:
    enqueue(session, send, order=4)  # error
    enqueue(session, send, ordr=order)  # error
    enqueue(session, send)  # error
    enqueue(session, create_invoice, order, copies=2)  # error
    enqueue(session, Base())  # error
    enqueue(engine, send, order=order)  # error
    enqueue_all(session, [order])  # error


def calls(order: Order) -> None:
    send.call()  # error
    send.call(4)  # error
    send.call(order=order, copies="2")  # error
    send.call(order=order, cc=2)  # error
    fetch.call(urls=["x"], order=Customer())  # error
    send.options(priority=1).call(order=4)  # error
    send.options(priority=1).options(delay=timedelta(1)).call()  # error
    jobs.kind("x").call(1)  # error
    send.options(delay=5)  # error
    send.options(run_at="tomorrow")  # error
    send.options(retries=2)  # error


def results(session: JobSession[Job], async_session: AsyncJobSession[Job], order: Order) -> None:
    session.enqueue(send, order=order).tennant  # error
    session.enqueue(Export()).payload  # error
    session.job.tennant  # error
    send(session, 4)  # error
    order_id: int = ref(Order, 4)  # error
    number: int = fetch(async_session, ["x"])  # error


def in_a_test(session: Session, order: Order) -> None:
    perform(session, send, order=4)  # error
    perform(session, send.call(order), order=order)  # error


def declarations() -> None:
    JobQueue(Order)  # error
    JobQueue(Job, "mail", lease=5)  # error
    JobQueue(Job, "mail", keep="for ever")  # error
    JobQueue(Job, "mail", 5)  # error


@jobs.task  # error
def without_a_session() -> None: ...


@jobs.task(timeout=5)  # error
def wrong_option(session: JobSession[Job]) -> None: ...


@jobs.task(retries=5)  # error
def unknown_option(session: JobSession[Job]) -> None: ...
