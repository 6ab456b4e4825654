"""A worker of your own, from the builders alone: each is a plain SQLAlchemy statement that you may print and extend.

You will see: worker A is slow, its lease lapses, and B takes its job back. Then A comes with its result and is refused,
its invoice rolled back: it holds attempt 1, and the job is in attempt 2. B does both jobs; then they are deleted.
"""

from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import Engine, select
from sqlalchemy.exc import NoResultFound
from sqlalchemy.orm import Session

from examples.common import shop_engine
from examples.shop.models import Invoice, Job, Order
from sqla_jobqueue.statements import claim, complete, due, expired, fence, finished, prune, reclaim_expired


def take(engine: Engine, worker: str, lease: timedelta = timedelta(minutes=5)) -> Sequence[Job]:
    """Take back what lost workers held, then claim a job. That is committed before the work begins."""
    with Session(engine, expire_on_commit=False) as session, session.begin():
        for lost in session.scalars(reclaim_expired(expired(Job))):
            print(f"{worker} takes back job {lost.id}, which was in attempt {lost.attempts}: {lost.last_error}")
        mine = due(Job).where(Job.kind == "create_invoice")  # conditions go into the candidates
        return session.scalars(claim(mine, lease=lease, locked_by=worker)).all()


def work(engine: Engine, worker: str, job: Job) -> None:
    """The work and `done`, in one transaction."""
    try:
        with Session(engine) as session, session.begin():
            session.add(Invoice(order_id=job.payload["order_id"], total_cents=1500))
            session.execute(complete(Job), fence(job)).one()
    except NoResultFound:  # the job is somebody else's
        print(f"{worker} is refused with attempt {job.attempts} of job {job.id}")
    else:
        print(f"{worker} did job {job.id} in attempt {job.attempts}")


def main(engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        for number in (1, 2):
            session.add(Order(id=number, customer="bob", total_cents=1500))
            session.add(Job(kind="create_invoice", payload={"order_id": number}))  # an INSERT in SQL would do, too
    [late] = take(engine, "A", lease=timedelta(0))
    [job] = take(engine, "B")
    work(engine, "A", late)
    work(engine, "B", job)
    while jobs := take(engine, "B"):  # the whole of a worker
        work(engine, "B", jobs[0])
    with Session(engine) as session, session.begin():
        print("invoices:", session.scalars(select(Invoice.order_id).order_by(Invoice.order_id)).all())
        deleted = session.scalars(prune(finished(Job, older_than=timedelta(0)), limit=1000))
        print("deleted jobs:", sorted(deleted))


if __name__ == "__main__":
    with shop_engine() as engine:
        main(engine)
