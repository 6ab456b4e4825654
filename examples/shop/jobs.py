"""The shop's queues and tasks: what its producers and its workers import.

Leases and backoff are short, so that the demo need not wait for them. Minutes are usual.
"""

import time
from datetime import timedelta

from examples.shop.mailer import deliver
from examples.shop.models import Invoice, Job, Order, Receipt
from sqla_jobqueue import JobQueue, JobSession, exponential

invoices = JobQueue(Job, "invoices", one_transaction=True)
mail = JobQueue(Job, "mail", lease=timedelta(seconds=2), max_attempts=5)


@invoices.task
def create_invoice(session: JobSession[Job], order: Order) -> None:
    """Short work inside the database: claim, invoice and `done` are one transaction."""
    session.add(Invoice(order_id=order.id, total_cents=order.total_cents))
    session.flush()
    time.sleep(0.04)  # something to watch: the invoice is written, and not committed


@mail.task(backoff=exponential(unit=timedelta(milliseconds=200)), timeout=timedelta(seconds=10))
def send_receipt(session: JobSession[Job], order: Order) -> None:
    """Long work outside of it: under a lease, with the job's id as the key that tells a second mail from a first."""
    deliver(order.customer, key=str(session.job.id), attempt=session.job.attempts)
    session.add(Receipt(order_id=order.id, job_id=session.job.id, attempts=session.job.attempts))
