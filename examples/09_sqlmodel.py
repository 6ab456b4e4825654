"""SQLModel: its entities are payload, and its Session takes jobs.

The job model is on a declarative base of its own, which shares SQLModel's metadata: one ``create_all``, one set of
migrations. You will see: a hero is registered and a letter waits; the worker writes it, with the key that the hero got
in the flush, and counts it on the hero's row.
"""

from typing import Any

from sqlalchemy import Engine
from sqlalchemy.orm import DeclarativeBase, sessionmaker
from sqlmodel import Field, Session, SQLModel, select

from examples.common import empty_engine
from sqla_jobqueue import EnqueueMixin, JobMixin, JobQueue, Worker, enqueue


class Base(DeclarativeBase):
    metadata = SQLModel.metadata


class Job(JobMixin, Base):
    __tablename__ = "jobs"


class Hero(SQLModel, table=True):
    id: int | None = Field(default=None, primary_key=True)
    name: str
    letters: int = 0


class HeroSession(EnqueueMixin, Session): ...


letters = JobQueue(Job, "letters")


@letters.task
def write_letter(_session: Session, hero: Hero, closing: str = "Yours") -> None:
    print(f"Dear {hero.name}, you are number {hero.id}. {closing}, the bureau")
    hero.letters += 1


def main(engine: Engine) -> None:
    SQLModel.metadata.create_all(engine)
    with HeroSession(engine) as session:
        session.add(hero := Hero(name="Deadpond"))
        job: Any = session.enqueue(write_letter, hero=hero)
        enqueue(session, write_letter, hero=hero, closing="Again")  # the same, without a session class of one's own
        session.commit()
        print("waiting:", job.kind, job.payload)
    Worker(letters, sessions=sessionmaker(engine, class_=Session), concurrency=1).drain()
    with Session(engine) as session:
        print("letters:", session.exec(select(Hero.letters)).all())


if __name__ == "__main__":
    with empty_engine() as engine:
        main(engine)
