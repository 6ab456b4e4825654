"""The shop's tables. The queue is one of them: a mapped class on the shop's own `Base`."""

from datetime import datetime

from sqlalchemy import BigInteger, DateTime, ForeignKey, Identity, func
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqla_jobqueue import JobMixin


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    customer: Mapped[str]
    total_cents: Mapped[int]


class Invoice(Base):
    __tablename__ = "invoices"

    order_id: Mapped[int] = mapped_column(ForeignKey("orders.id"), primary_key=True, autoincrement=False)
    total_cents: Mapped[int]


class Receipt(Base):
    """A receipt that went out, written in one transaction with its job's `done`."""

    __tablename__ = "receipts"

    order_id: Mapped[int] = mapped_column(ForeignKey("orders.id"), primary_key=True, autoincrement=False)
    job_id: Mapped[int] = mapped_column(BigInteger, unique=True)
    """Its idempotency key at the mail server. No foreign key: finished jobs are deleted one day, receipts are not."""
    attempts: Mapped[int]
    """How many attempts it took: more than one where a worker died or the mail server did not answer."""
    sent_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.clock_timestamp())


class Job(JobMixin, Base):
    __tablename__ = "jobs"
