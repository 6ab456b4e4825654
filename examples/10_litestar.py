"""Litestar with advanced-alchemy and asyncpg: a request enqueues on ``db_session``, a worker beside it does the job.

Start it with ``python -m uvicorn examples.10_litestar:app``. You will see a server: ``curl -X POST
'localhost:8000/orders?customer=dave&total_cents=2500'`` is answered at once with the order's number; a moment later
``curl localhost:8000/invoices`` shows it. Order and job are committed by the plugin, after a good answer and no other.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from advanced_alchemy.extensions.litestar import AsyncSessionConfig, SQLAlchemyAsyncConfig, SQLAlchemyPlugin
from litestar import Litestar, get, post
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from examples.common import shop_engine
from examples.shop.models import Invoice, Job, Order
from sqla_jobqueue import JobQueue, Worker, enqueue

config = SQLAlchemyAsyncConfig(
    connection_string="postgresql+asyncpg://",  # given at start, below
    before_send_handler="autocommit",
    session_config=AsyncSessionConfig(expire_on_commit=False),
)
invoices = JobQueue(Job, "invoices", one_transaction=True)


@invoices.task
async def create_invoice(session: AsyncSession, order: Order) -> None:
    session.add(Invoice(order_id=order.id, total_cents=order.total_cents))


@asynccontextmanager
async def worker(_app: Litestar) -> AsyncIterator[None]:
    async with Worker(invoices, async_sessions=config.create_session_maker()):
        yield


@asynccontextmanager
async def database(_app: Litestar) -> AsyncIterator[None]:
    with shop_engine() as tables:
        config.engine_instance = create_async_engine(tables.url.set(drivername="postgresql+asyncpg"))
        yield


@post("/orders")
async def place_order(db_session: AsyncSession, customer: str, total_cents: int) -> dict[str, int]:
    db_session.add(order := Order(customer=customer, total_cents=total_cents))
    enqueue(db_session, create_invoice, order=order)
    await db_session.flush()
    return {"order": order.id}


@get("/invoices")
async def read_invoices(db_session: AsyncSession) -> list[int]:
    return list(await db_session.scalars(select(Invoice.order_id)))


app = Litestar([place_order, read_invoices], plugins=[SQLAlchemyPlugin(config)], lifespan=[database, worker])
