"""The mixins that make a mapped class a job table.

A job is a class of the application's own `Base`, with whatever columns, foreign keys and relationships it needs::

    class Job(JobMixin, Base):
        __tablename__ = "jobs"

`JobMixin` is a complete job: a key, a kind, a payload, and the state of the queue. A class that declares a primary key
of its own (UUID, composite) keeps it. `JobStateMixin` brings the state alone and turns a model that exists into a
queue: the row is the job. On a `MappedAsDataclass` base, `JobDataclassMixin` and `JobStateDataclassMixin` take their
places. `JobErrorsMixin` and `JobResultMixin` add a history of errors, and a result and progress (`...DataclassMixin`).

Checks, indexes and storage parameters are attached when the mapper is made, not through ``__table_args__``, which an
application's own would replace. Types are explicit, so a ``type_annotation_map`` does not change them. The attempt
number is the mapper's version id, so an ORM write to a job that somebody else claimed meanwhile is a StaleDataError.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, cast

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    ColumnElement,
    Identity,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    event,
    func,
    inspect,
    literal_column,
)
from sqlalchemy.dialects.postgresql import DOUBLE_PRECISION, JSONB, TIMESTAMP
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Mapped, MappedAsDataclass, MappedColumn, Mapper, mapped_column
from sqlalchemy.schema import ExecutableDDLElement, conv
from sqlalchemy.types import TypeEngine

from sqla_jobqueue.errors import ConfigurationError
from sqla_jobqueue.status import LIVE, TERMINAL, JobStatus

if TYPE_CHECKING:
    from sqlalchemy.sql.compiler import DDLCompiler

DEFAULT_QUEUE: Final = "default"
DEFAULT_MAX_ATTEMPTS: Final = 3
MAX_IDENTIFIER_BYTES: Final = 63
"""PostgreSQL's NAMEDATALEN - 1: it cuts longer names silently, two of them perhaps to the same one."""

JsonValue: TypeAlias = Any
"""What `json.loads` may return."""

INFO_STORAGE: Final = "sqla_jobqueue.storage"
"""Key of ``Table.info`` under which a job table's storage parameters stand, for migrations."""

INFO_BROUGHT: Final = "sqla_jobqueue.brought"
"""Key of ``Column.info`` that tells a mixin's column from an application's own of the same name."""

INFO_PART: Final = "sqla_jobqueue.part"
"""Key of ``Index.info`` and ``CheckConstraint.info``: which of the job table's own it is, e.g. ``pending``."""

SCHEMA_VERSION: Final = 1
"""Of the job table as this release makes it: the number of the newest step in ``migrations/steps``."""

OLDEST_WORKER: Final = 0
"""The oldest schema version whose workers may run on a table of this one."""

RESERVED_KEYS: Final = frozenset({"of_queue", "kinds", "limit", "worker", "lease", "keys"})
"""Parameters of the prebuilt statements: SQLAlchemy takes a parameter called like a column for a value to SET."""

STORAGE_PARAMETERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "fillfactor": "85",
        "autovacuum_vacuum_scale_factor": "0.02",
        "autovacuum_vacuum_insert_scale_factor": "0.05",
        "autovacuum_analyze_scale_factor": "0.05",
        "autovacuum_vacuum_cost_delay": "1",
    }
)
"""A job row is updated two or three times and then deleted: room on the page for its next version, and an autovacuum
that comes after 2 % of dead rows instead of 20 %."""

TIMESTAMPTZ: Final = TIMESTAMP(timezone=True)
_DEFAULT_NAMING: Final = MetaData().naming_convention

_Spec: TypeAlias = tuple[Callable[[], TypeEngine[Any]], dict[str, Any]]

# Key, kind and payload stand before the application's own columns, the state of the queue behind them.
_COLUMNS: Final[dict[str, _Spec]] = {
    "id": (BigInteger, {"primary_key": True, "server_default": None, "sort_order": -30}),
    "kind": (Text, {"sort_order": -20}),
    "payload": (JSONB, {"sort_order": -20, "server_default": literal_column("'{}'::jsonb")}),
    "meta": (JSONB, {"sort_order": -20, "server_default": literal_column("'{}'::jsonb")}),
    "queue": (Text, {"server_default": DEFAULT_QUEUE}),
    "status": (Text, {"server_default": JobStatus.PENDING.value}),
    "priority": (Integer, {"server_default": "0"}),
    "attempts": (Integer, {"server_default": "0"}),
    "max_attempts": (Integer, {"server_default": str(DEFAULT_MAX_ATTEMPTS)}),
    "run_at": (lambda: TIMESTAMPTZ, {"server_default": func.now()}),
    "locked_until": (lambda: TIMESTAMPTZ, {"nullable": True}),
    "locked_by": (Text, {"nullable": True}),
    "last_error": (Text, {"nullable": True}),
    "unique_key": (Text, {"nullable": True}),
    "created_at": (lambda: TIMESTAMPTZ, {"server_default": func.now()}),
    "started_at": (lambda: TIMESTAMPTZ, {"nullable": True}),
    "finished_at": (lambda: TIMESTAMPTZ, {"nullable": True}),
    "errors": (JSONB, {"server_default": literal_column("'[]'::jsonb")}),
    "result": (lambda: JSONB(none_as_null=True), {"nullable": True}),
    "progress": (DOUBLE_PRECISION, {"nullable": True}),
}


def _column(name: str, **dataclass_options: Any) -> MappedColumn[Any]:
    make_type, options = _COLUMNS[name]
    arguments: list[Any] = [name, make_type()]
    options = {"nullable": False, "sort_order": 100, "info": {INFO_BROUGHT: True}, **options}
    if name == "id":
        del options["server_default"]
        arguments.append(Identity(always=True))
    return mapped_column(*arguments, **options, **dataclass_options)


class JobTable:
    """What every job model is an instance of, whichever mixin it uses. Not for use in a class statement."""

    if TYPE_CHECKING:
        queue: Mapped[str]
        status: Mapped[str]
        priority: Mapped[int]
        attempts: Mapped[int]
        max_attempts: Mapped[int]
        run_at: Mapped[datetime]
        locked_until: Mapped[datetime | None]
        locked_by: Mapped[str | None]
        last_error: Mapped[str | None]
        unique_key: Mapped[str | None]
        created_at: Mapped[datetime]
        started_at: Mapped[datetime | None]
        finished_at: Mapped[datetime | None]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if cls.__module__ != __name__:
            _refuse_clashes(cls)
        super().__init_subclass__(**kwargs)


J = TypeVar("J", bound=JobTable)


class JobStateMixin(JobTable):
    """The state of a queue, for a model that has a key and data of its own: the row itself is the job."""

    queue: Mapped[str] = _column("queue")
    """Name of the `JobQueue`. ``default`` unless told otherwise."""
    status: Mapped[str] = _column("status")
    """A `JobStatus` as text. A plain `str`, so that a state of a later version does not stop this one."""
    priority: Mapped[int] = _column("priority")
    """Smaller first: 0 before 10. (Celery and procrastinate are the other way round.)"""
    attempts: Mapped[int] = _column("attempts")
    """How often the job was claimed. Only grows; with the primary key it is the fence of every write after a claim."""
    max_attempts: Mapped[int] = _column("max_attempts")
    """A failed attempt with this number is the last. Raised, not `attempts` lowered, where an attempt is given back."""
    run_at: Mapped[datetime] = _column("run_at")
    """Not before this instant of the database's clock. Also the order within a priority."""
    locked_until: Mapped[datetime | None] = _column("locked_until")
    """End of the lease, while `running`."""
    locked_by: Mapped[str | None] = _column("locked_by")
    """Name of the worker that claimed it last. For people; ownership is the fence."""
    last_error: Mapped[str | None] = _column("last_error")
    """Type and message of the last failure, cleaned and bounded, without bound parameters."""
    unique_key: Mapped[str | None] = _column("unique_key")
    """At most one pending or running job has it."""
    created_at: Mapped[datetime] = _column("created_at")
    """When the enqueueing transaction began."""
    started_at: Mapped[datetime | None] = _column("started_at")
    """When the last attempt was claimed."""
    finished_at: Mapped[datetime | None] = _column("finished_at")
    """When the job reached `done`, `failed` or `cancelled`. Retention counts from here."""


def _column_of(value: object) -> Column[Any] | None:
    """The column that an attribute's value declares."""
    declared: object = cast("Any", value).column if isinstance(value, MappedColumn) else value
    return cast("Any", declared) if isinstance(declared, Column) else None


def _is_primary_key(value: object) -> bool:
    column = _column_of(value)
    return column is not None and column.primary_key


def _names(value: object) -> set[str]:
    """The column name that an attribute's value gives."""
    column = _column_of(value)
    return {column.name} if column is not None and column.name else set()


class JobMixin(JobStateMixin):
    """A complete job: key, kind, payload, meta and the state of the queue."""

    if TYPE_CHECKING:
        id: Mapped[int]

    kind: Mapped[str] = _column("kind")
    """Which task runs it. Only kinds that a worker's queues have declared are ever claimed."""
    payload: Mapped[JsonValue] = _column("payload")
    """A JSON object named after the handler's parameters; an entity parameter ``order`` stands as ``order_id``."""
    meta: Mapped[JsonValue] = _column("meta")
    """A JSON object beside the payload: tenant, trace, locale. No handler parameter is read from it."""

    @classmethod
    def __table_cls__(cls, name: str, metadata: MetaData, *args: Any, **kwargs: Any) -> Any:
        """Make the table; SQLAlchemy's hook. Adds `id` where the class brings no primary key of its own.

        Why here: only now is every way seen in which a key may be declared (column, mixin, base class, ``Annotated``,
        ``PrimaryKeyConstraint``).
        """
        make: Callable[..., Any] = getattr(super(), "__table_cls__", Table)
        has_key = any(isinstance(arg, PrimaryKeyConstraint) or _is_primary_key(arg) for arg in args)
        if has_key or any(inspect(base, raiseerr=False) is not None for base in cls.__mro__[1:]):
            return make(name, metadata, *args, **kwargs)
        if any("id" in vars(base) for base in cls.__mro__) or any(_names(arg) == {"id"} for arg in args):
            raise ConfigurationError(
                f"{cls.__qualname__}: 'id' is the key that JobMixin brings, and is declared again without "
                "primary_key=True: make it the key, or rename it"
            )
        return make(name, metadata, _column("id").column, *args, **kwargs)


class JobStateDataclassMixin(MappedAsDataclass, JobTable, kw_only=True):
    """`JobStateMixin` for a `MappedAsDataclass` base. The database sets the state; none of it is in ``__init__``."""

    queue: Mapped[str] = _column("queue", init=False)
    status: Mapped[str] = _column("status", init=False)
    priority: Mapped[int] = _column("priority", init=False)
    attempts: Mapped[int] = _column("attempts", init=False)
    max_attempts: Mapped[int] = _column("max_attempts", init=False)
    run_at: Mapped[datetime] = _column("run_at", init=False)
    locked_until: Mapped[datetime | None] = _column("locked_until", init=False)
    locked_by: Mapped[str | None] = _column("locked_by", init=False)
    last_error: Mapped[str | None] = _column("last_error", init=False)
    unique_key: Mapped[str | None] = _column("unique_key", init=False)
    created_at: Mapped[datetime] = _column("created_at", init=False)
    started_at: Mapped[datetime | None] = _column("started_at", init=False)
    finished_at: Mapped[datetime | None] = _column("finished_at", init=False)


class JobDataclassMixin(JobStateDataclassMixin, kw_only=True):
    """`JobMixin` for a `MappedAsDataclass` base: ``Job(kind=..., payload=...)``."""

    id: Mapped[int] = _column("id", init=False)
    kind: Mapped[str] = _column("kind")
    payload: Mapped[JsonValue] = _column("payload", default_factory=dict)
    meta: Mapped[JsonValue] = _column("meta", default_factory=dict)


class JobErrorsMixin:
    """Adds the history of errors."""

    errors: Mapped[JsonValue] = _column("errors")
    """One object per failed attempt, ``{"attempt", "at", "error"}``, oldest first; the last 20 are kept."""


class JobErrorsDataclassMixin(MappedAsDataclass, kw_only=True):
    """`JobErrorsMixin` for a `MappedAsDataclass` base."""

    errors: Mapped[JsonValue] = _column("errors", init=False)


class JobResultMixin:
    """Adds what a handler returned and how far it is."""

    result: Mapped[JsonValue] = _column("result")
    """JSON, written with `done`."""
    progress: Mapped[float | None] = _column("progress")
    """0 to 1."""


class JobResultDataclassMixin(MappedAsDataclass, kw_only=True):
    """`JobResultMixin` for a `MappedAsDataclass` base."""

    result: Mapped[JsonValue] = _column("result", init=False)
    progress: Mapped[float | None] = _column("progress", init=False)


def job_mapper(model: type[JobTable]) -> Mapper[Any]:
    """The mapper whose table holds the job's state: the model's own, or an ancestor's in a class hierarchy.

    Raises:
        ConfigurationError: the class is not mapped, or has no job mixin.
    """
    mapper = inspect(model, raiseerr=False)
    if not isinstance(mapper, Mapper) or not issubclass(mapper.class_, JobTable):
        raise ConfigurationError(
            f"{getattr(model, '__qualname__', model)!r} is no job model: "
            "mix JobMixin or JobStateMixin into a mapped class"
        )
    return [step for step in mapper.iterate_to_root() if issubclass(step.class_, JobTable)][-1]


def job_table(model: type[JobTable]) -> Table:
    """The table that holds the job's state."""
    table = job_mapper(model).local_table
    if not isinstance(table, Table):
        raise ConfigurationError(f"{model.__qualname__} is mapped to {table!r}: a job model needs a table")
    return cast("Table", table)


def key_columns(table: Table) -> tuple[Column[Any], ...]:
    """The primary key of a job table, in its order."""
    return tuple(table.primary_key.columns)


class SetStorageParameters(ExecutableDDLElement):
    """``ALTER TABLE ... SET (...), RESET (...)``: storage parameters of an existing table; None resets one.

    Why: SQLAlchemy 2.0 drops ``postgresql_with`` on a table silently, so both versions set them this way.
    """

    inherit_cache = False

    def __init__(self, table: Table, parameters: Mapping[str, str | None]) -> None:
        self.table = table
        self.parameters = dict(parameters)


@compiles(SetStorageParameters, "postgresql")
def _compile_set_storage(element: SetStorageParameters, compiler: DDLCompiler, **_kw: Any) -> str:
    def quoted(name: str) -> str:
        return ".".join(compiler.preparer.quote(part) for part in name.split("."))  # toast.autovacuum_enabled

    def literal(value: str) -> str:
        return compiler.sql_compiler.render_literal_value(str(value), Text())

    new = [f"{quoted(name)} = {literal(value)}" for name, value in element.parameters.items() if value is not None]
    gone = [quoted(name) for name, value in element.parameters.items() if value is None]
    changes = [f"{verb} ({', '.join(names)})" for verb, names in (("SET", new), ("RESET", gone)) if names]
    return f"ALTER TABLE {compiler.preparer.format_table(element.table)} {', '.join(changes)}"


def _own_attributes(cls: type) -> dict[str, object]:
    """What a class body declares: annotated or assigned."""
    return {**dict.fromkeys(vars(cls).get("__annotations__", {})), **vars(cls)}


def _refuse_clashes(cls: type) -> None:
    brought = {
        name
        for base in cls.__mro__
        if base.__module__ == __name__
        for name in _own_attributes(base)
        if name in _COLUMNS and name != "id"  # a key of one's own may be called so
    }
    for base in cls.__mro__:
        if base.__module__ == __name__ or (issubclass(base, JobTable) and inspect(base, raiseerr=False) is not None):
            continue
        for name, value in _own_attributes(base).items():
            for clash in ({name} | _names(value)) & brought:
                raise ConfigurationError(
                    f"{cls.__qualname__}: column {clash!r} is brought by the job mixin and declared again by "
                    f"{base.__qualname__}: rename one's own, or map it under another attribute and column name"
                )


def fitted(name: str, digested: str, ending: str = "") -> str:
    """A name with its ending, within 63 bytes: a digest takes the place of what is too much."""
    if len((name + ending).encode()) <= MAX_IDENTIFIER_BYTES:
        return name + ending
    ending = f"_{hashlib.sha256(digested.encode()).hexdigest()[:8]}{ending}"
    return name.encode()[: MAX_IDENTIFIER_BYTES - len(ending)].decode(errors="ignore") + ending


def _name(table: Table, kind: type[Index | CheckConstraint], suffix: str) -> str | None:
    """What to call an index or check before the application's naming convention, if it has one, gives its name."""
    short, ending = ("ix", "idx") if kind is Index else ("ck", "check")
    conventions = cast("Mapping[Any, Any]", table.metadata.naming_convention)
    template: Any = conventions.get(short) or conventions.get(kind)
    if template is None or template == _DEFAULT_NAMING.get(short):
        return fitted(table.name, table.name, f"_{suffix}_{ending}")
    return suffix if "constraint_name" in str(template) else None


def _settle_name(item: Index | CheckConstraint, table: Table, suffix: str) -> None:
    """Replace a conventional name that does not serve.

    Why: ``ix_%(column_0_label)s`` names two of our indexes alike; and PostgreSQL cuts what is longer than 63 bytes,
    two names perhaps to the same one, where SQLAlchemy counts characters.
    """
    given = str(item.name)
    name = fitted(given, given)
    taken = {other.name for others in (table.indexes, table.constraints) for other in others if other is not item}
    if item.name is None or name in taken:
        name = fitted(table.name, table.name, f"_{suffix}_{'idx' if isinstance(item, Index) else 'check'}")
    if name != given:
        item.name = conv(name)


def schema_marker(version: int, oldest_worker: int) -> str:
    """The comment on a job table's check of `status` that tells its version.

    Why there: it is dumped and restored, Alembic leaves it alone, and the table's own comment is the application's.
    """
    return f"sqla_jobqueue schema {version}, for workers from {oldest_worker}"


def _check(table: Table, suffix: str, condition: ColumnElement[bool], comment: str | None = None) -> None:
    name = _name(table, CheckConstraint, suffix)
    check = CheckConstraint(condition, name=name, info={INFO_PART: suffix}, comment=comment)
    table.append_constraint(check)
    _settle_name(check, table, suffix)


def _index(table: Table, suffix: str, columns: tuple[Column[Any], ...], **options: Any) -> None:
    index = Index(_name(table, Index, suffix), *columns, info={INFO_PART: suffix}, **options)
    _settle_name(index, table, suffix)


def equip(table: Table) -> None:
    """Attach the checks, indexes and storage parameters of a job table.

    A partitioned one goes without the unique index, since its columns are not those of the partitions, and without
    storage parameters, which only the partitions have.
    """
    c = table.c
    partitioned = bool(table.dialect_options["postgresql"]["partition_by"])
    marker = schema_marker(SCHEMA_VERSION, OLDEST_WORKER)
    _check(table, "status", c.status.in_([status.value for status in JobStatus]), marker)
    _check(table, "attempts", (c.attempts >= 0) & (c.max_attempts >= 1))
    _check(table, "lease", (c.status != JobStatus.RUNNING.value) | c.locked_until.is_not(None))
    _check(table, "queue", c.queue != "")
    pending = c.status == JobStatus.PENDING.value
    live = c.unique_key.is_not(None) & c.status.in_([status.value for status in LIVE])
    terminal = c.status.in_([status.value for status in TERMINAL])
    in_order = (c.queue, c.priority, c.run_at, *key_columns(table))
    _index(table, "pending", in_order, postgresql_where=pending)
    _index(table, "lease", (c.locked_until,), postgresql_where=c.status == JobStatus.RUNNING.value)
    _index(table, "finished", (c.queue, c.status, c.finished_at), postgresql_where=terminal)
    table.info[INFO_STORAGE] = {} if partitioned else dict(STORAGE_PARAMETERS)
    if partitioned:
        return
    _index(table, "unique_key", (c.unique_key,), unique=True, postgresql_where=live)
    set_storage = SetStorageParameters(table, STORAGE_PARAMETERS)
    event.listen(table, "after_create", set_storage.execute_if(dialect="postgresql"))


@event.listens_for(JobTable, "after_mapper_constructed", propagate=True)
def _equip_mapper(mapper: Mapper[Any], cls: type[JobTable]) -> None:
    if mapper.concrete:
        raise ConfigurationError(
            f"{cls.__qualname__}: a job class takes no part in concrete inheritance, since its rows would be in two "
            "queues: make it a job class of its own"
        )
    if mapper is not job_mapper(cls):
        return
    table = job_table(cls)
    keys = key_columns(table)
    if mapper.inherits is None and tuple(mapper.primary_key) != keys:
        raise ConfigurationError(f"{cls.__qualname__} is mapped under another primary key than its table's")
    if len(keys) > 1 and any(INFO_BROUGHT in column.info for column in keys):
        raise ConfigurationError(
            f"{cls.__qualname__}: JobDataclassMixin brings the key 'id': call one's own key so, or use "
            "JobStateDataclassMixin and declare kind, payload and meta"
        )
    if reserved := RESERVED_KEYS.intersection(table.c.keys()):
        name = min(reserved)
        raise ConfigurationError(
            f"{cls.__qualname__}: {name!r} names a parameter of the queue's statements: give the column another "
            f"key, mapped_column({name!r}, key='{name}_')"
        )
    if INFO_STORAGE not in table.info:
        equip(table)
    if mapper.version_id_col is None:
        mapper.version_id_col = table.c.attempts
        mapper.version_id_generator = False
