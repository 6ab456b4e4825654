"""The story: orders, two workers, a kill in the middle, a replacement, and the verdicts."""

import contextlib
import time

from sqlalchemy import Engine, cast, column, func, select, table
from sqlalchemy.dialects.postgresql import REGCLASS
from sqlalchemy.orm import sessionmaker

from examples.demo.checks import CREATE_INVOICE, SEND_RECEIPT, Ledger, check_all, dead_letters, receipts_by_attempts
from examples.demo.processes import WorkerProcess, Workers
from examples.demo.screen import Screen, State
from examples.shop.jobs import create_invoice, mail, send_receipt
from examples.shop.mailer import FULL_MAILBOX
from examples.shop.models import Invoice, Job, Order
from sqla_jobqueue import JobSession

CUSTOMERS = ("alice", "bob", "carol", "dave", "erin", "frank", "grace")
SECONDS_IN_ALL = 55


class StoryError(Exception):
    """It came to no end: a worker ended by itself, or jobs are left after `SECONDS_IN_ALL`."""


class CardRefusedError(Exception):
    """The order cannot be paid: its transaction is rolled back."""


class Story:
    """The story, told by `run`."""

    def __init__(self, engine: Engine, workers: Workers, screen: Screen, orders: int) -> None:
        self.make_session = sessionmaker(engine, class_=JobSession)
        self.workers = workers
        self.screen = screen
        self.orders = orders
        self.ledger = Ledger()
        self.deadline = time.monotonic() + SECONDS_IN_ALL

    def run(self) -> bool:
        """Tell it; whether all that was promised holds."""
        victim, second = self.workers.start(), self.workers.start()
        for worker in (victim, second):
            worker.wait_until_ready()
            self.screen.say(f"{worker.name} is at work: process {worker.pid}")
        number = 0
        while number < self.orders or victim.is_alive:
            number += 1
            self.place_order(number)
            if number > self.orders * 0.4 and victim.is_alive:
                self.kill_in_the_middle(victim)
            if number % 5 == 0:
                self.show()
        self.screen.say(f"{len(self.ledger.committed)} orders are committed, {len(self.ledger.refused)} rolled back")
        while self.show():
            time.sleep(0.1)
        codes = self.workers.stop()
        self.screen.say(f"all jobs have ended; exit codes: {', '.join(f'{n} {code}' for n, code in codes.items())}")
        return self.report() and all(code == 0 for name, code in codes.items() if name != victim.name)

    def place_order(self, number: int) -> None:
        """An order and its two jobs, in one transaction. Every ninth fails after all of it was written."""
        is_unreachable = number % max(self.orders // 4, 5) == 4
        customer = FULL_MAILBOX if is_unreachable else CUSTOMERS[number % len(CUSTOMERS)]
        with contextlib.suppress(CardRefusedError), self.make_session.begin() as session:
            session.add(order := Order(customer=customer, total_cents=100 * number))
            session.enqueue_all([create_invoice.call(order=order), send_receipt.call(order=order)])
            session.flush()
            placed = order.id
            if number % 9 == 0:
                self.ledger.refused.add(placed)
                raise CardRefusedError
        if placed not in self.ledger.refused:
            self.ledger.committed[placed] = customer

    def kill_in_the_middle(self, victim: WorkerProcess) -> None:
        """Freeze the worker and look: kill it if it is in the middle of jobs of both sorts, else let it go on."""
        victim.freeze()
        time.sleep(0.01)  # what it had sent to the server is answered by now
        activity = table("pg_stat_activity", column("pid"), column("application_name"), column("state"))
        locks = table("pg_locks", column("pid"), column("relation"), column("mode"))
        its_own = activity.c.application_name == victim.name
        uncommitted = (
            select(func.count())
            .join_from(locks, activity, locks.c.pid == activity.c.pid)
            .where(its_own, activity.c.state == "idle in transaction", locks.c.mode == "RowExclusiveLock")
            .where(locks.c.relation == cast(Invoice.__tablename__, REGCLASS))
        )
        its_jobs = select(Job.id).where(Job.queue == mail.name, Job.locked_by == victim.name)
        with self.make_session() as session:
            written = session.scalar(uncommitted)
            held = set(session.scalars(its_jobs.where(Job.status == "running")))
        if not written or not held:
            victim.thaw()
            return
        victim.kill()
        with self.make_session() as session:
            while session.scalar(select(func.count()).select_from(activity).where(its_own)):
                session.rollback()  # each look at pg_stat_activity by a transaction of its own
            self.ledger.held = held - set(session.scalars(its_jobs.where(Job.status == "done")))
        self.screen.say(
            f"{victim.name} is killed: {len(held)} leased jobs were running, {written} invoices not yet committed",
            style="bold red",
        )
        self.screen.say(f"{self.workers.start().name} takes its place")

    def show(self) -> bool:
        """Show how far it is; whether jobs are left."""
        is_kind, is_done = Job.kind.__eq__, Job.status == "done"
        counts = select(
            func.count().filter(is_kind(CREATE_INVOICE), is_done).label("invoices"),
            func.count().filter(is_kind(SEND_RECEIPT), is_done).label("receipts"),
            func.count().filter(Job.status == "pending", Job.attempts > 0).label("retrying"),
            func.count().filter(Job.status == "failed").label("dead"),
            func.count().filter(Job.status.in_(["pending", "running"])).label("left"),
        )
        with self.make_session() as session:
            found = session.execute(counts).one()
        for worker in self.workers.processes:
            if not worker.is_alive and not worker.was_killed:
                raise StoryError(f"{worker.name} ended by itself")
        if time.monotonic() > self.deadline:
            raise StoryError(f"{found.left} jobs are left after {SECONDS_IN_ALL} s")
        placed = len(self.ledger.committed) + len(self.ledger.refused)
        self.screen.show(
            State(
                placed=placed,
                planned=max(self.orders, placed),
                refused=len(self.ledger.refused),
                orders=len(self.ledger.committed),
                invoices=found.invoices,
                receipts=found.receipts,
                retrying=found.retrying,
                dead=found.dead,
                workers={worker.name: worker.is_alive for worker in self.workers.processes},
            )
        )
        return bool(found.left)

    def report(self) -> bool:
        """The verdicts, by SQL."""
        with self.make_session() as session:
            verdicts = check_all(session, self.ledger)
            attempts = session.execute(receipts_by_attempts()).all()
            dead = session.execute(dead_letters()).all()
        self.screen.report(verdicts, attempts, dead)
        return all(verdict.holds for verdict in verdicts)
