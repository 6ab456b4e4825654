"""An existing table becomes a queue: the row itself is the job, and none of the old rows becomes due.

The migration, in ``06_existing_model_migration.py``, adds the state of a queue to a table of a thousand old exports.

You will see: the new export is built, and an old one that is asked for again; the others are left alone.
"""

import runpy
from pathlib import Path

import sqlalchemy as sa
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

from examples.common import empty_database
from sqla_jobqueue import JobQueue, JobSession, JobStateMixin, Worker
from sqla_jobqueue.lifecycle import requeue


class Base(DeclarativeBase):
    pass


class Export(JobStateMixin, Base):
    __tablename__ = "exports"
    id: Mapped[int] = mapped_column(sa.Identity(), primary_key=True)
    file: Mapped[str | None]


exports = JobQueue(Export)


@exports.task
def build(session: JobSession[Export]) -> None:
    session.job.file = f"export-{session.job.id}.csv"


def main(url: str) -> None:
    engine = sa.create_engine(url)
    migration = runpy.run_path(str(Path(__file__).with_name("06_existing_model_migration.py")))
    with engine.begin() as connection, Operations.context(MigrationContext.configure(connection)) as op:
        op.create_table("exports", sa.Column("id", sa.Integer, sa.Identity()), sa.Column("file", sa.String))
        connection.execute(sa.insert(sa.table("exports", sa.column("file"))), [{"file": None}] * 1000)
        migration["upgrade"]()

    make_session = sessionmaker(engine, class_=JobSession)
    with make_session.begin() as session:
        session.enqueue(Export())
        requeue(session, session.get_one(Export, 7))
    Worker(exports, sessions=make_session).drain()
    with make_session() as session:
        print(session.scalars(sa.select(Export.file).where(Export.file.is_not(None)).order_by(Export.id)).all())
    engine.dispose()


if __name__ == "__main__":
    with empty_database() as url:
        main(url)
