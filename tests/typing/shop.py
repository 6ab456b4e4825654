"""The models and tasks that the typing cases are about."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqla_jobqueue import AsyncJobSession, JobMixin, JobQueue, JobSession, JobStateMixin, exponential


class Base(DeclarativeBase):
    pass


class Job(JobMixin, Base):
    __tablename__ = "jobs"
    tenant: Mapped[int | None] = mapped_column()


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


class Rush(Order):
    pass


class Customer(Base):
    __tablename__ = "customers"
    id: Mapped[int] = mapped_column(primary_key=True)


class Export(JobStateMixin, Base):
    __tablename__ = "exports"
    id: Mapped[int] = mapped_column(primary_key=True)


jobs = JobQueue(Job)
mail = JobQueue(Job, "mail", lease=timedelta(minutes=2), max_attempts=10)
exports = JobQueue(Export, "exports")


@jobs.task
def create_invoice(session: JobSession[Job], order: Order) -> None: ...


@mail.task(backoff=exponential(), timeout=timedelta(seconds=30), priority=3)
def send(session: JobSession[Job], order: Order, copies: int = 1, *, note: str | None = None) -> int:
    return copies


@jobs.task()
async def fetch(session: AsyncJobSession[Job], urls: Sequence[str], order: Order | None = None) -> str:
    return urls[0]


@jobs.task
async def ping(session: AsyncSession) -> None: ...


@jobs.task
def on_any_session(session: Session, data: Any) -> None: ...


@exports.task
def build(session: JobSession[Export]) -> None: ...
