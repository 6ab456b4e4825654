"""FastAPI with AsyncSession: a request enqueues; a worker beside the requests, on their event loop, does the job.

Start it with ``python -m uvicorn examples.07_fastapi:app``. You will see a server: ``curl -X POST
'localhost:8000/orders?customer=dave&total_cents=2500'`` is answered at once with the id of the job; a moment later
``curl localhost:8000/invoices`` shows the order's number.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI
from sqlalchemy import select
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from examples.common import shop_engine
from examples.shop.models import Invoice, Job, Order
from sqla_jobqueue import AsyncJobSession, JobQueue, Worker

make_session = async_sessionmaker(class_=AsyncJobSession[Job], expire_on_commit=False)
invoices = JobQueue(Job, "invoices", one_transaction=True)


@invoices.task
async def create_invoice(session: AsyncJobSession[Job], order: Order) -> None:
    session.add(Invoice(order_id=order.id, total_cents=order.total_cents))


@asynccontextmanager
async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
    with shop_engine() as tables:
        engine = create_async_engine(tables.url)
        make_session.configure(bind=engine)
        async with Worker(invoices, async_sessions=make_session):
            yield
        await engine.dispose()


async def get_session() -> AsyncIterator[AsyncJobSession[Job]]:
    async with make_session() as session:
        yield session


app = FastAPI(lifespan=lifespan)
GivenSession = Annotated[AsyncJobSession[Job], Depends(get_session)]


@app.post("/orders")
async def place_order(session: GivenSession, customer: str, total_cents: int) -> dict[str, int]:
    async with session.begin():  # committed before the answer goes out
        session.add(order := Order(customer=customer, total_cents=total_cents))
        job = session.enqueue(create_invoice, order=order)  # no await: it is `session.add` for jobs
    return {"order": order.id, "job": job.id}


@app.get("/invoices")
async def read_invoices(session: GivenSession) -> list[int]:
    return list(await session.scalars(select(Invoice.order_id)))
