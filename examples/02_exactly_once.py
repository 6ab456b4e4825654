"""In one-transaction mode claim, work and `done` commit together: a worker that is killed leaves no trace.

You will see: a worker writes the invoice and is killed before the commit. There is no invoice then, and the job waits
as if it had never been touched. The next worker writes the invoice: delivered twice, invoiced once.
"""

import os
import signal

from sqlalchemy import Engine, create_engine, select
from sqlalchemy.orm import sessionmaker

from examples.common import shop_engine
from examples.shop.models import Invoice, Job, Order
from sqla_jobqueue import JobQueue, JobSession, Worker

invoices = JobQueue(Job, "invoices", one_transaction=True)


@invoices.task
def create_invoice(session: JobSession[Job], order: Order) -> None:
    session.add(Invoice(order_id=order.id, total_cents=order.total_cents))
    session.flush()
    print(session.job.locked_by, "worker: the invoice of order", order.id, "is written", flush=True)
    if session.job.locked_by == "unlucky":
        os.kill(os.getpid(), signal.SIGKILL)


def work(engine: Engine, name: str) -> None:
    Worker(invoices, sessions=sessionmaker(engine, class_=JobSession), name=name).drain()


def work_and_die(engine: Engine) -> None:
    if (child := os.fork()) == 0:
        work(create_engine(engine.url), "unlucky")  # connections are not shared between processes
    print("unlucky worker: killed by signal", os.waitpid(child, 0)[1])


def show(engine: Engine) -> None:
    with JobSession(engine) as session:
        jobs = select(Job.status, Job.attempts).with_for_update()  # waits until the dead one's transaction is gone
        print("jobs:", session.execute(jobs).all())
        print("invoices:", session.execute(select(Invoice.order_id, Invoice.total_cents)).all())


def main(engine: Engine) -> None:
    with JobSession(engine) as session, session.begin():
        session.add(order := Order(customer="carol", total_cents=9900))
        session.enqueue(create_invoice, order=order)
    work_and_die(engine)
    show(engine)
    work(engine, "second")
    show(engine)


if __name__ == "__main__":
    with shop_engine() as engine:
        main(engine)
