"""Flask-SQLAlchemy: a request enqueues on ``db.session``; in a handler, ``db.session`` is the session of the job.

Start it with ``python examples/08_flask.py``. You will see a server: ``curl -X POST
'localhost:5000/orders?customer=dave&total_cents=2500'`` is answered at once with the id of the job; a moment later
``curl localhost:5000/invoices`` shows the order's number. The worker runs beside the requests here; in production it is
a process of its own that calls ``Worker(...).run()``.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flask import Flask, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import select
from sqlalchemy.orm import Session, scoped_session

from examples.common import shop_engine
from examples.shop.models import Invoice, Job, Order
from sqla_jobqueue import JobQueue, Worker, enqueue

app = Flask(__name__)
db = SQLAlchemy()  # models may be on db.Model as well: class Job(JobMixin, db.Model)
invoices = JobQueue(Job, "invoices", one_transaction=True)


@invoices.task
def create_invoice(_session: Session, order: Order) -> None:
    db.session.add(Invoice(order_id=order.id, total_cents=order.total_cents))  # committed with the job, or not at all


@contextmanager
def worker_sessions() -> Iterator[scoped_session[Any]]:
    with app.app_context():  # ends with the job, and its session with it
        yield db.session


@app.post("/orders")
def place_order() -> dict[str, int]:
    order = Order(customer=request.args["customer"], total_cents=int(request.args["total_cents"]))
    db.session.add(order)
    job = enqueue(db.session, create_invoice, order=order)
    db.session.commit()
    return {"order": order.id, "job": job.id}


@app.get("/invoices")
def read_invoices() -> list[int]:
    return list(db.session.scalars(select(Invoice.order_id)))


if __name__ == "__main__":
    with shop_engine() as tables:
        app.config["SQLALCHEMY_DATABASE_URI"] = tables.url
        db.init_app(app)
        with Worker(invoices, sessions=worker_sessions):
            app.run(port=int(sys.argv[1]) if sys.argv[1:] else 5000)
