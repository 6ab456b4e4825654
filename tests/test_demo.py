"""The demo ends with 0 when all holds, and with another code when anything does not."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy import (
    delete,
    func,
    insert,
    text,  # noqa: TID251  as somebody who tampers would type it
    update,
)

from examples.common import URL_VARIABLE
from examples.demo import __main__ as demo
from examples.demo.checks import CHECKS, Ledger, check_all
from examples.demo.screen import Screen
from examples.demo.story import Story, StoryError
from examples.shop.mailer import FULL_MAILBOX
from examples.shop.models import Base, Invoice, Job, Order, Receipt
from sqla_jobqueue import JobSession

ROOT = Path(__file__).parent.parent

ORDERS = {1: "alice", 2: FULL_MAILBOX, 4: "bob"}
REFUSED = 3
HELD = 2
"""The job that the killed worker had: alice's receipt."""


def add_job(session, kind, order, status, attempts, **columns):
    values = {"kind": kind, "payload": {"order_id": order}, "status": status, "attempts": attempts, **columns}
    session.execute(insert(Job).values(values))


def add_order(session, number, customer="nobody"):
    session.execute(insert(Order).values(id=number, customer=customer, total_cents=100))


def add_invoice(session, order):
    session.execute(insert(Invoice).values(order_id=order, total_cents=100))


def add_receipt(session, order, job):
    session.execute(insert(Receipt).values(order_id=order, job_id=job, attempts=1))


def as_promised(session):
    """The tables as they should be in the end."""
    for number, customer in ORDERS.items():
        add_order(session, number, customer)
        add_invoice(session, number)
        add_job(session, "create_invoice", number, "done", 1)
        dead = customer == FULL_MAILBOX
        add_job(session, "send_receipt", number, "failed" if dead else "done", 5 if dead else 2)
    add_receipt(session, 1, 2)
    add_receipt(session, 4, 6)
    return Ledger(committed=dict(ORDERS), refused={REFUSED}, held={HELD})


def change_job(session, key, **values):
    session.execute(update(Job).where(Job.id == key).values(values))


def remove(session, what):
    session.execute(delete(what.__table__).where(what.order_id == 4))


def lose_an_order(session, _ledger):
    remove(session, Invoice)
    remove(session, Receipt)
    session.execute(delete(Order).where(Order.id == 4))


def keep_a_refused_order(session, _ledger):
    add_order(session, REFUSED)
    add_invoice(session, REFUSED)


def keep_a_refused_receipt(session, _ledger):
    add_order(session, REFUSED)
    add_invoice(session, REFUSED)
    add_receipt(session, REFUSED, 99)


def invoice_twice(session, _ledger):
    session.execute(text("ALTER TABLE invoices DROP CONSTRAINT invoices_pkey"))
    add_invoice(session, 4)


def leave_pending(session, _ledger):
    change_job(session, 6, status="pending")


def leave_running(session, _ledger):
    change_job(session, 6, status="running", locked_until=func.now())


TAMPERED = {
    "an order lost": (lose_an_order, {"orders_are_kept", "receipt_or_dead_letter"}),
    "an order that was rolled back": (keep_a_refused_order, {"orders_are_kept", "no_ghosts"}),
    "a receipt of an order that was rolled back": (keep_a_refused_receipt, {"orders_are_kept", "no_ghosts"}),
    "a job of an order that was rolled back": (
        lambda session, _: add_job(session, "create_invoice", REFUSED, "done", 1),
        {"no_job_is_lost", "no_ghosts"},
    ),
    "an invoice missing": (lambda session, _: remove(session, Invoice), {"one_invoice_each"}),
    "an invoice twice": (invoice_twice, {"one_invoice_each"}),
    "an invoice in two attempts": (lambda session, _: change_job(session, 1, attempts=2), {"one_attempt_per_invoice"}),
    "an invoice after an error": (
        lambda session, _: change_job(session, 1, last_error="lease expired"),
        {"one_attempt_per_invoice"},
    ),
    "an invoice's job in the dead letter": (
        lambda session, _: change_job(session, 1, status="failed"),
        {"one_attempt_per_invoice"},
    ),
    "a receipt missing": (lambda session, _: remove(session, Receipt), {"receipt_or_dead_letter"}),
    "a receipt and a dead letter": (lambda session, _: add_receipt(session, 2, 4), {"receipt_or_dead_letter"}),
    "a dead letter of somebody else's": (
        lambda session, _: change_job(session, 6, status="failed"),
        {"receipt_or_dead_letter", "dead_letter_as_expected"},
    ),
    "no dead letter": (
        lambda session, _: change_job(session, 4, status="done"),
        {"receipt_or_dead_letter", "dead_letter_as_expected"},
    ),
    "a job lost": (lambda session, _: session.execute(delete(Job).where(Job.id == 6)), {"no_job_is_lost"}),
    "a job twice": (lambda session, _: add_job(session, "send_receipt", 4, "done", 1), {"no_job_is_lost"}),
    "a job left pending": (leave_pending, {"none_left"}),
    "a job left running": (leave_running, {"none_left"}),
    "a job of the killed worker's that nobody took over": (
        lambda session, _: change_job(session, HELD, attempts=1),
        {"taken_over"},
    ),
    "a worker killed with nothing in hand": (lambda _, ledger: ledger.held.clear(), {"taken_over"}),
}


def failing(session, ledger):
    verdicts = check_all(session, ledger)
    return {check.__name__ for check, verdict in zip(CHECKS, verdicts, strict=True) if not verdict.holds}


@pytest.fixture
def session(engine):
    Base.metadata.create_all(engine)
    with JobSession(engine) as session:
        yield session


def test_all_holds_on_tables_as_promised(session):
    assert failing(session, as_promised(session)) == set()


@pytest.mark.parametrize("tampering", TAMPERED)
def test_it_sees_what_was_tampered_with(session, tampering):
    tamper, expected = TAMPERED[tampering]
    ledger = as_promised(session)
    tamper(session, ledger)
    session.flush()
    assert failing(session, ledger) == expected


def test_each_check_is_seen_to_fail():
    assert set.union(*(expected for _, expected in TAMPERED.values())) == {check.__name__ for check in CHECKS}


@pytest.mark.parametrize(("tamper", "code"), [(lambda *_: None, 0), (leave_running, 1)], ids=["holds", "tampered"])
def test_the_verdicts_decide_the_exit_code(monkeypatch, database_url, capsys, tamper, code):
    def run(story):
        with story.make_session.begin() as session:
            story.ledger = as_promised(session)
            tamper(session, story.ledger)
        return story.report()

    monkeypatch.setattr(Story, "run", run)
    monkeypatch.setattr(sys, "argv", ["demo"])
    monkeypatch.setenv(URL_VARIABLE, database_url)
    assert demo.main() == code
    said = capsys.readouterr().out
    assert ("NO" in said, "no job is left pending or running" in said) == (bool(code), True), said


def a_story(engine, *processes):
    return Story(engine, SimpleNamespace(processes=processes), Screen(), 10)


def test_a_worker_that_ends_by_itself_ends_the_story(engine):
    Base.metadata.create_all(engine)
    alive, dead = SimpleNamespace(name="1", is_alive=True), SimpleNamespace(name="2", is_alive=False, was_killed=False)
    with pytest.raises(StoryError, match="2 ended by itself"):
        a_story(engine, alive, dead).show()


def test_a_story_without_an_end_is_ended(session, engine):
    as_promised(session)
    leave_pending(session, None)
    session.commit()
    story = a_story(engine)
    assert story.show()
    story.deadline = 0
    with pytest.raises(StoryError, match="1 jobs are left"):
        story.show()


def test_a_database_in_use_is_refused(monkeypatch, session, database_url):
    monkeypatch.setenv(URL_VARIABLE, database_url)
    session.commit()
    with pytest.raises(SystemExit, match="is not empty"):
        demo.run(10)


def test_the_whole_story(database_url):
    """A worker is killed in the middle of its work, and nothing is lost or done twice."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-m", "examples.demo", "--orders", "30"],
        cwd=ROOT,
        env={**os.environ, URL_VARIABLE: database_url},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    assert "worker 1 is killed" in ended.stdout
    assert "worker 1 -9, worker 2 0, worker 3 0" in ended.stdout
    assert ended.stdout.count("│ yes") == len(CHECKS), ended.stdout
