"""A schema per tenant by `schema_translate_map`, and one table of jobs for all, whose ``meta`` says whose a job is.

You will see: two tenants have a parcel each, number 1 in both schemas. One worker does both jobs, each in the schema of
its tenant, which is set when the transaction begins: before the first entity is loaded. The queue is leased, since in
one-transaction mode the claim begins the transaction, when the job is not known yet.
"""

from sqlalchemy import Connection, Engine, event, select
from sqlalchemy.orm import Mapped, Session, mapped_column, sessionmaker
from sqlalchemy.schema import CreateSchema

from examples.common import empty_engine
from examples.shop.models import Base, Job
from sqla_jobqueue import JobQueue, JobSession, Worker, current_job


class Parcel(Base):  # the shop's own tables, jobs among them, are in the default schema, which is not translated
    __tablename__ = "parcels"
    __table_args__ = {"schema": "tenant"}  # noqa: RUF012  SQLAlchemy's; stands for the schema of each
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(default="new")


jobs = JobQueue(Job)
make_session = sessionmaker(class_=JobSession)


@event.listens_for(make_session, "after_begin")
def choose_schema(session: Session, _transaction: object, connection: Connection) -> None:
    job = current_job(session, None)
    connection.execution_options(schema_translate_map={"tenant": job.meta["tenant"] if job else session.info.get("of")})


@jobs.task
def ship(session: JobSession[Job], parcel: Parcel) -> None:
    parcel.state = f"shipped by {session.job.meta['tenant']}"


def main(engine: Engine) -> None:
    make_session.configure(bind=engine)
    for tenant in ("acme", "bolt"):
        with engine.begin() as connection:
            connection.execute(CreateSchema(tenant))
            Base.metadata.create_all(connection.execution_options(schema_translate_map={"tenant": tenant}))
        with make_session(info={"of": tenant}) as session, session.begin():
            session.add(parcel := Parcel())
            session.enqueue(ship.options(meta={"tenant": tenant}), parcel=parcel)
    Worker(jobs, sessions=make_session).drain()
    for tenant in ("acme", "bolt"):
        with make_session(info={"of": tenant}) as session:
            print(tenant, session.execute(select(Parcel.id, Parcel.state)).all())


if __name__ == "__main__":
    with empty_engine() as engine:
        main(engine)
