"""An order and its job are one transaction: both are there, or neither is.

You will see: dave's order is committed, and its job with it; erin's is rolled back, and so is her job. Then a worker
writes the one invoice.
"""

from sqlalchemy import Engine, select
from sqlalchemy.orm import sessionmaker

from examples.common import shop_engine
from examples.shop.models import Invoice, Job, Order  # the queue: class Job(JobMixin, Base)
from sqla_jobqueue import JobQueue, JobSession, Worker

invoices = JobQueue(Job, "invoices", one_transaction=True)  # claim, work and done in one transaction


@invoices.task
def create_invoice(session: JobSession[Job], order: Order) -> None:
    session.add(Invoice(order_id=order.id, total_cents=order.total_cents))


def main(engine: Engine) -> None:
    make_session = sessionmaker(engine, class_=JobSession)

    with make_session.begin() as session:
        order = Order(customer="dave", total_cents=2500)
        session.add(order)
        session.enqueue(create_invoice, order=order)  # no flush, no key needed yet

    with make_session() as session:
        order = Order(customer="erin", total_cents=9900)
        session.add(order)
        job = session.enqueue(create_invoice, order=order)
        session.flush()
        print("erin's job, before the rollback:", job.id, job.payload)
        session.rollback()  # her card was refused

    with make_session() as session:
        print("orders:", session.scalars(select(Order.customer)).all())
        print("jobs:", session.execute(select(Job.kind, Job.payload, Job.status)).all())

    Worker(invoices, sessions=make_session).drain()  # in production .run(), until SIGTERM

    with make_session() as session:
        print("invoices:", session.execute(select(Invoice.order_id, Invoice.total_cents)).all())
        print("jobs:", session.execute(select(Job.kind, Job.payload, Job.status)).all())


if __name__ == "__main__":
    with shop_engine() as engine:
        main(engine)
