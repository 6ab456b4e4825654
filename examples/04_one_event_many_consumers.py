"""One event, many consumers: a job for each, that is claimed, retried and failed by itself.

You will see: one order, three jobs with the same payload. The invoice and the receipt are done; the customer database
has moved, so its job uses up its attempts and goes to the dead letter, where an operator finds it with its error, and
queues it again once the address is right.
"""

import logging
from datetime import timedelta

from sqlalchemy import Engine, select
from sqlalchemy.orm import sessionmaker

from examples.common import shop_engine
from examples.shop.models import Invoice, Job, Order
from sqla_jobqueue import JobQueue, JobSession, Worker, fixed
from sqla_jobqueue.lifecycle import requeue

jobs = JobQueue(Job, max_attempts=2, backoff=fixed(timedelta(0)))
crm = {"address": "old"}


@jobs.task
def create_invoice(session: JobSession[Job], order: Order) -> None:
    session.add(Invoice(order_id=order.id, total_cents=order.total_cents))


@jobs.task
def send_receipt(_session: JobSession[Job], order: Order) -> None:
    print(f"to {order.customer}: thank you for {order.total_cents} cents")


@jobs.task
def sync_crm(_session: JobSession[Job], order: Order) -> None:
    if crm["address"] == "old":
        raise ConnectionRefusedError(f"nobody answers about {order.customer}")


def main(engine: Engine) -> None:
    logging.getLogger("sqla_jobqueue").setLevel(logging.ERROR)  # each failure is logged with its traceback, else
    make_session = sessionmaker(engine, class_=JobSession)
    with make_session.begin() as session:
        session.add(order := Order(customer="dave", total_cents=2500))
        session.enqueue_all(consumer.call(order=order) for consumer in (create_invoice, send_receipt, sync_crm))
    Worker(jobs, sessions=make_session).drain()
    with make_session.begin() as session:
        for job in session.scalars(select(Job).order_by(Job.id)):
            print(job.kind, job.payload, job.status, job.attempts, job.last_error)
        crm["address"] = "new"
        requeue(session, *session.scalars(select(Job).where(Job.status == "failed")))
    Worker(jobs, sessions=make_session).drain()
    with make_session() as session:
        print(session.execute(select(Job.kind, Job.status, Job.attempts).order_by(Job.id)).all())


if __name__ == "__main__":
    with shop_engine() as engine:
        main(engine)
