"""What must hold at the end: each check puts a question to the database and gives a verdict.

The shop's own `Ledger` is what the answers are held against: what it committed, what it rolled back, what it knows of
the killed worker.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from sqlalchemy import Select, SQLColumnExpression, func, or_, select
from sqlalchemy.orm import Session

from examples.shop.mailer import FULL_MAILBOX
from examples.shop.models import Invoice, Job, Order, Receipt

ORDER_OF_JOB = Job.payload["order_id"].as_integer()
CREATE_INVOICE, SEND_RECEIPT = "create_invoice", "send_receipt"


@dataclass
class Ledger:
    """What the shop knows without asking the database.

    Attributes:
        committed: the customer of each order whose transaction committed.
        refused: orders whose transaction was rolled back, after the order and its jobs had been written.
        held: leased jobs that the worker was running when it was killed.
    """

    committed: dict[int, str] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Verdict:
    """What was promised, what the database says, and whether the two agree."""

    promise: str
    found: str
    holds: bool


Check = Callable[[Session, Ledger], Verdict]


def orders_are_kept(session: Session, ledger: Ledger) -> Verdict:
    found = set(session.scalars(select(Order.id)))
    lost, strange = ledger.committed.keys() - found, found - ledger.committed.keys()
    return _verdict("every committed order is there", f"{len(found)} orders", lost, strange)


def one_invoice_each(session: Session, _ledger: Ledger) -> Verdict:
    count = func.count(Invoice.order_id)
    counted = select(Order.id, count).outerjoin(Invoice, Invoice.order_id == Order.id).group_by(Order.id)
    wrong = [f"order {order}: {invoices}" for order, invoices in session.execute(counted.having(count != 1))]
    total = session.scalar(select(func.count()).select_from(Invoice))
    return _verdict("every order has exactly one invoice", f"{total} invoices", wrong)


def one_attempt_per_invoice(session: Session, _ledger: Ledger) -> Verdict:
    is_invoice = Job.kind == CREATE_INVOICE
    touched = or_(Job.status != "done", Job.attempts != 1, Job.last_error.is_not(None))
    wrong = session.scalars(select(Job.id).where(is_invoice, touched))
    total = session.scalar(select(func.count()).where(is_invoice))
    return _verdict("every invoice took one attempt: the kill left no trace", f"{total} jobs in attempt 1", wrong)


def receipt_or_dead_letter(session: Session, ledger: Ledger) -> Verdict:
    sent = set(session.scalars(select(Receipt.order_id)))
    dead = _dead_receipts(session)
    neither, both = ledger.committed.keys() - sent - dead, sent & dead
    found = f"{len(sent)} receipts, {len(dead)} dead"
    return _verdict("every order has its receipt, or a dead letter", found, neither, both)


def dead_letter_as_expected(session: Session, ledger: Ledger) -> Verdict:
    full = {order for order, customer in ledger.committed.items() if customer == FULL_MAILBOX}
    failed = session.scalar(select(func.count()).where(Job.status == "failed"))
    wrong = full ^ _dead_receipts(session)
    return _verdict(f"dead letters are {FULL_MAILBOX}'s, whose mailbox is full", f"{failed} of {len(full)} jobs", wrong)


def no_job_is_lost(session: Session, ledger: Ledger) -> Verdict:
    rows = session.execute(select(ORDER_OF_JOB, Job.kind)).all()
    expected = sorted((order, kind) for order in ledger.committed for kind in (CREATE_INVOICE, SEND_RECEIPT))
    wrong = set(expected) ^ {tuple(row) for row in rows}
    found = f"{len(rows)} jobs of {len(ledger.committed)} orders"
    doubled = [] if len(rows) == len(expected) else [f"{len(rows)} instead of {len(expected)}"]
    return _verdict("no job is lost: two for every committed order", found, sorted(wrong), doubled)


def no_ghosts(session: Session, ledger: Ledger) -> Verdict:
    columns: list[SQLColumnExpression[int]] = [ORDER_OF_JOB, Invoice.order_id, Receipt.order_id]
    ghosts = [session.scalars(select(column).where(column.in_(ledger.refused))).all() for column in columns]
    promise = f"nothing is there of the {len(ledger.refused)} rolled-back orders"
    return _verdict(promise, "no job, invoice or receipt", *ghosts)


def none_left(session: Session, _ledger: Ledger) -> Verdict:
    left = session.scalars(select(Job.id).where(Job.status.in_(["pending", "running"])))
    return _verdict("no job is left pending or running", "none", left)


def taken_over(session: Session, ledger: Ledger) -> Verdict:
    again = select(Job.id).where(Job.id.in_(ledger.held), Job.attempts >= 2, Job.status.in_(["done", "failed"]))
    missed = ledger.held - set(session.scalars(again))
    promise = f"the {len(ledger.held)} leased jobs of the killed worker ran again"
    found = f"{len(ledger.held) - len(missed)} jobs in a later attempt"
    return _verdict(promise, found, missed, [] if ledger.held else ["none was held"])


CHECKS: Sequence[Check] = (
    orders_are_kept,
    one_invoice_each,
    one_attempt_per_invoice,
    receipt_or_dead_letter,
    dead_letter_as_expected,
    no_job_is_lost,
    no_ghosts,
    none_left,
    taken_over,
)


def check_all(session: Session, ledger: Ledger) -> list[Verdict]:
    return [check(session, ledger) for check in CHECKS]


def receipts_by_attempts() -> Select[int, int]:
    """How many receipts took how many attempts."""
    return select(Receipt.attempts, func.count()).group_by(Receipt.attempts).order_by(Receipt.attempts)


def dead_letters() -> Select[int, str, int, str | None]:
    """Job, customer, attempts and error of what is in the dead letter."""
    return (
        select(Job.id, Order.customer, Job.attempts, Job.last_error)
        .join(Order, Order.id == ORDER_OF_JOB)
        .where(Job.status == "failed")
        .order_by(Job.id)
    )


def _dead_receipts(session: Session) -> set[int]:
    return set(session.scalars(select(ORDER_OF_JOB).where(Job.status == "failed", Job.kind == SEND_RECEIPT)))


def _verdict(promise: str, found: str, *wrong: Iterable[object]) -> Verdict:
    """It holds if nothing is wrong; else the first few things that are take the place of what was found."""
    things = [thing for part in wrong for thing in part]
    if not things:
        return Verdict(promise, found, holds=True)
    shown = ", ".join(map(str, things[:3])) + (", ..." if len(things) > 3 else "")
    return Verdict(promise, f"{found}; wrong: {shown}", holds=False)
