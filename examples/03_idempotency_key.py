"""What happens outside the database happens at least once: give the job's id along as an idempotency key.

You will see: the card is charged, the line goes dead before the answer, and the attempt fails, although the money is
taken. The second attempt comes with the same key, so the bank knows it and charges nothing. Receipt and `done` are one
transaction again: there is one receipt, and it says two attempts.
"""

import logging
from datetime import timedelta

from sqlalchemy import Engine, select
from sqlalchemy.orm import sessionmaker

from examples.common import shop_engine
from examples.shop.models import Job, Order, Receipt
from sqla_jobqueue import JobQueue, JobSession, Worker, fixed

payments = JobQueue(Job, "payments", lease=timedelta(minutes=2), backoff=fixed(timedelta(0)))  # retried at once


class Bank:
    """Somebody else's service: slow, and not always there when it should answer."""

    def __init__(self) -> None:
        self.charges: dict[str, int] = {}

    def charge(self, cents: int, idempotency_key: str) -> None:
        """Charge the card once, however often it is asked to with the same key."""
        print("bank: asked to charge", cents, "with key", idempotency_key)
        if idempotency_key not in self.charges:
            self.charges[idempotency_key] = cents
            raise ConnectionResetError("the line went dead")
        print("bank: was charged before, nothing to do")


bank = Bank()


@payments.task
def charge_card(session: JobSession[Job], order: Order) -> None:  # the claim is committed: others see `running`
    bank.charge(order.total_cents, idempotency_key=str(session.job.id))
    session.add(Receipt(order_id=order.id, job_id=session.job.id, attempts=session.job.attempts))


def main(engine: Engine) -> None:
    logging.getLogger("sqla_jobqueue").setLevel(logging.ERROR)  # the failure is logged with its traceback, else
    with JobSession(engine) as session, session.begin():
        session.add(order := Order(customer="alice", total_cents=4200))
        session.enqueue(charge_card, order=order)
    Worker(payments, sessions=sessionmaker(engine, class_=JobSession)).drain()
    print("charges:", bank.charges)
    with JobSession(engine) as session:
        print("receipts:", session.execute(select(Receipt.order_id, Receipt.attempts)).all())
        print("jobs:", session.execute(select(Job.status, Job.attempts, Job.last_error)).all())


if __name__ == "__main__":
    with shop_engine() as engine:
        main(engine)
