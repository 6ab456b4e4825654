"""The README's code runs, in its order, as it stands."""

import re
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import ForeignKey, func, select
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

import sqla_jobqueue
from sqla_jobqueue.statements import claim, due

README = Path(__file__).parent.parent / "README.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def columns(block: str) -> list[str]:
    """A block of two columns, side by side, as two blocks."""
    lines = block.splitlines()
    split = max(line.find("async ") for line in lines)
    return ["\n".join(line[:split].rstrip() for line in lines), "\n".join(line[split:] for line in lines)]


@pytest.fixture
def story(engine):
    """What the README takes for granted: a Base, an Order, an Invoice, somebody who sends mail."""

    class Base(DeclarativeBase):
        pass

    class Order(Base):
        __tablename__ = "orders"
        id: Mapped[int] = mapped_column(primary_key=True)
        customer: Mapped[str]
        total_cents: Mapped[int]

    class Invoice(Base):
        __tablename__ = "invoices"
        order_id: Mapped[int] = mapped_column(ForeignKey("orders.id"), primary_key=True)
        total_cents: Mapped[int]

    class Smtp:
        def __init__(self):
            self.sent = []

        def send(self, to, key):
            self.sent.append((to, key))

    return {
        **{name: getattr(sqla_jobqueue, name) for name in sqla_jobqueue.__all__},
        "Base": Base,
        "Order": Order,
        "Invoice": Invoice,
        "smtp": Smtp(),
        "timedelta": timedelta,
        "engine": engine,
        "claim": claim,
        "due": due,
    }


def run(block: str, story: dict) -> None:
    exec(compile(block, "README.md", "exec"), story)  # noqa: S102  the README is ours


def test_the_readme_tells_a_story_that_runs(engine, story):
    example, enqueueing, working, _side_by_side, builder = blocks()
    model, use = example.split("with make_session", 1)
    run(model, story)
    job = story["Job"]
    story["Base"].metadata.create_all(engine)
    story["make_session"] = sessionmaker(engine, class_=sqla_jobqueue.JobSession)
    run("with make_session" + use, story)
    with story["make_session"]() as session:
        assert session.scalars(select(story["Invoice"].total_cents)).all() == [2500]
        assert session.scalars(select(job.status)).all() == ["done"]

    declared, worker = working.rsplit("\n\n", 1)
    run(declared, story)
    with story["make_session"].begin() as session:
        story |= {"session": session, "order": session.scalars(select(story["Order"])).one(), "db": story_db(session)}
        run(enqueueing.replace("order_id=4", "order_id=1").replace("Order, 4", "Order, 1"), story)
        waiting = session.scalar(select(func.count()).where(job.status == "pending"))
        assert waiting == 6
    run(worker.replace(".run()", ".drain()"), story)
    assert [to for to, _key in story["smtp"].sent] == ["dave"]
    with story["make_session"]() as session:
        left = session.execute(select(job.kind, job.priority).where(job.status == "pending")).all()
        assert [tuple(row) for row in left if row.priority == 10] == [("create_invoice", 10)]  # in five minutes
        assert "FOR NO KEY UPDATE" in str(builder_statement(builder, story))


def builder_statement(block: str, story: dict):
    """The README adds a column of the application's own; here the table has none, so its condition is left out."""
    expression = (
        block.strip().removeprefix("session.scalars(").removesuffix(")").replace(".where(Job.tenant_id == 7)", "")
    )
    from sqlalchemy.dialects import postgresql

    return eval(expression, story).compile(dialect=postgresql.dialect())  # noqa: S307  the README is ours


def story_db(session):
    class Db:
        pass

    Db.session = session
    return Db


def test_both_columns_are_code(story):
    left, right = columns(blocks()[3])
    for code in (left, right):
        compile(code, "README.md", "exec", flags=0x2000)  # PyCF_ALLOW_TOP_LEVEL_AWAIT: `async with` stands alone
    assert "AsyncJobSession" in right
    assert "AsyncJobSession" not in left


def test_the_readme_is_short_and_its_links_lead_somewhere():
    text = README.read_text()
    assert len(text.splitlines()) <= 140
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (README.parent / link).exists(), link
