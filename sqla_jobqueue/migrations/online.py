"""How a job table is changed while workers run on it.

Each statement is a transaction of its own, outside of Alembic's, so no lock is held longer than the statement takes:

- A change of the table waits for its lock for a second only, since everybody else queues up behind it, and tries again
  later. Columns come with a constant default, which rewrites no row.
- A check is added NOT VALID, and validated while reads and writes go on.
- An index is built concurrently, beside the one that it replaces. What an interrupted build left is dropped first.

Every change looks first at what is there and does what is missing, so that a run which failed is simply run again. A
lock that is not to be had is a `MigrationBlocked`, which names the sessions in the way.

In a transaction that somebody else began (``with engine.begin()``), a small table is changed within it, and a large one
refused. ``alembic upgrade --sql`` prints the statements for an ordinary case.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Generator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from alembic.operations import Operations
from alembic.util import CommandError
from sqlalchemy import (
    CheckConstraint,
    Connection,
    Index,
    Text,
    and_,
    column,
    exists,
    func,
    literal_column,
    or_,
    select,
    table,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import (
    CreateIndex,
    DropConstraintComment,
    DropIndex,
    ExecutableDDLElement,
    SetConstraintComment,
)

from sqla_jobqueue.migrations.catalog import Found, make_index, read, wanted
from sqla_jobqueue.migrations.ddl import (
    Action,
    AddCheck,
    AddColumn,
    AlterTable,
    DropColumn,
    DropConstraint,
    Ref,
    RenameIndex,
    ValidateConstraint,
)
from sqla_jobqueue.migrations.shape import STATUS_CHECK, IndexPart, Shape, part_name
from sqla_jobqueue.migrations.steps import marker_at
from sqla_jobqueue.model import SetStorageParameters, fitted

LOCK_TIMEOUT: Final = timedelta(seconds=1)
"""How long a change may hold up everybody else; ``context.configure(sqla_jobqueue_lock_timeout=...)``."""

LOCK_TRIES: Final = 10
"""How often it is tried, a second apart; ``sqla_jobqueue_lock_tries``."""

BUILD_TIMEOUT: Final = timedelta(hours=1)
"""How long a build waits for older transactions, which holds up nobody; ``sqla_jobqueue_build_timeout``."""

SMALL: Final = 16 * 1024 * 1024
"""Bytes of a table that may be changed within somebody else's transaction: well under a second."""

_LOCK_NOT_AVAILABLE: Final = "55P03"
_CHECK_VIOLATION: Final = "23514"
_UNIQUE_VIOLATION: Final = "23505"

logger = logging.getLogger(__name__)

_activity = table(
    "pg_stat_activity",
    *(
        column(each)
        for each in ("pid", "datname", "state", "application_name", "xact_start", "backend_xid", "backend_xmin")
    ),
    schema="pg_catalog",
)
_locks = table("pg_locks", *(column(each) for each in ("pid", "relation", "granted")), schema="pg_catalog")


class MigrationBlocked(CommandError):
    """A lock was not to be had in time. What was done is complete; run the migration again.

    Attributes:
        table: which.
        pids: the sessions in the way, those with the oldest transaction first; empty where they are not known.
    """

    def __init__(self, ref: Ref, statement: str, waited: str, blockers: Sequence[str], pids: Sequence[int]) -> None:
        found = f"; in the way: {', '.join(blockers)}" if blockers else ""
        super().__init__(
            f"{ref}: {statement} did not get its lock within {waited}{found}. Nothing is half done: end those "
            "transactions, or wait for them, and run the migration again"
        )
        self.table = str(ref)
        self.pids = tuple(pids)


class Online:
    """Changes one table; see the module.

    Attributes:
        ref: the table.
        key: names of its primary key's columns.
        names: those of checks and indexes that are not called as without a naming convention.
    """

    def __init__(self, operations: Operations, ref: Ref, key: Sequence[str], names: Mapping[str, str]) -> None:
        self.ref = ref
        self.key = key
        self.names = names
        self._operations = operations
        self._context = operations.migration_context
        self._lock_timeout: timedelta = self._option("lock_timeout", LOCK_TIMEOUT)
        self._build_timeout: timedelta = self._option("build_timeout", BUILD_TIMEOUT)
        self._tries: int = self._option("lock_tries", LOCK_TRIES)
        self._concurrently = True

    def _option(self, name: str, default: Any) -> Any:
        return self._context.opts.get(f"sqla_jobqueue_{name}", default)

    @property
    def offline(self) -> bool:
        """SQL is printed; there is no database to look at."""
        return bool(self._context.as_sql)

    @property
    def connection(self) -> Connection:
        """Of the migration."""
        return self._operations.get_bind()

    @contextlib.contextmanager
    def begin(self) -> Generator[None]:
        """Outside of Alembic's transaction, if it is Alembic's."""
        if not self.offline and _is_anothers(self._context):
            self._within_anothers()
            yield
            return
        with self._context.autocommit_block():
            former = None if self.offline else self.connection.scalar(select(func.current_setting("lock_timeout")))
            try:
                yield
            finally:
                if former is not None:
                    self._set_lock_timeout(former)
                else:
                    words = _words("lock_timeout", "0")
                    self._operations.execute(select(func.set_config(*words, literal_column("false"))))

    def found(self) -> Found:
        """The table as it is now."""
        found = read(self.connection, self.ref)
        if found is None:
            raise CommandError(f"there is no table {self.ref}")
        return found

    def execute(self, ddl: ExecutableDDLElement, *, patient: bool = False) -> None:
        """Run one statement.

        Args:
            ddl: the statement.
            patient: it holds up nobody while it waits.
        """
        timeout = self._build_timeout if patient else self._lock_timeout
        tries = self._tries if self._concurrently and not patient and not self.offline else 1
        self._set_lock_timeout(f"{round(timeout.total_seconds() * 1000)}ms")
        began = time.monotonic()
        for left in reversed(range(tries)):
            try:
                self._operations.execute(ddl)
            except DBAPIError as error:
                if _state(error) != _LOCK_NOT_AVAILABLE:
                    raise
                if not left:
                    raise self._blocked(ddl, time.monotonic() - began, patient=patient) from error
                logger.info("%s is locked, trying again", self.ref)
                time.sleep(min(1.0, timeout.total_seconds()))
            else:
                return

    # ------------------------------------------------------------------------------------------------ what may change

    def alter(self, *actions: Action) -> None:
        """ALTER TABLE; all of it or nothing."""
        if actions:
            self.execute(AlterTable(self.ref, *actions))

    def converge(self, change: Shape) -> None:
        """Make the parts that a change names what it says of them."""
        if self.offline:
            self._print(change)
            return
        found = self.found()
        if found.partitioned:
            change = change.partitioned()
        target = wanted(self.connection, self.ref, change, self.key, self.names)
        new = [make() for make in change.columns.values() if make is not None]
        self.ref.table(*new)
        self._refuse_other_columns(found, target, [each.name for each in new])
        gone = [name for name, make in change.columns.items() if make is None and name in found.columns]
        self.alter(*(AddColumn(each) for each in new if each.name not in found.columns), *map(DropColumn, gone))
        for name, condition in change.checks.items():
            self.check(self.name_of(f"{name}_check"), condition, found, target)
        for name, part in change.indexes.items():
            self.index(self.name_of(f"{name}_idx"), part, target)
        storage = dict(change.storage)
        if storage:
            self.execute(SetStorageParameters(self.ref.table(), storage))

    def check(self, name: str, condition: Any, found: Found, target: Found) -> None:
        """Add, replace, validate or (None) drop a check."""
        is_there, wished = found.checks.get(name), target.checks.get(name)
        if wished is None or condition is None:
            if is_there is not None:
                self.alter(DropConstraint(name))
            return
        if is_there is None or is_there.condition != wished.condition:
            self.alter(*([] if is_there is None else [DropConstraint(name)]), AddCheck(name, condition))
        elif is_there.valid:
            return
        try:
            self.execute(AlterTable(self.ref, ValidateConstraint(name)))
        except DBAPIError as error:
            if _state(error) != _CHECK_VIOLATION:
                raise
            raise CommandError(
                f"{self.ref}: rows violate {name!r}, {wished.condition}. It holds for new rows; correct the old ones "
                "and run the migration again"
            ) from error

    def index(self, name: str, part: IndexPart | None, target: Found) -> None:
        """Build, replace or (None) drop an index; the former one serves until the new one does."""
        indexes = self.found().indexes
        beside, former = leftovers(name)
        if part is not None and indexes.get(name) != target.indexes[name]:
            if name in indexes and not indexes[name].valid:
                self._drop(name)
                indexes = self.found().indexes
            if beside in indexes and indexes[beside] != target.indexes[name]:
                self._drop(beside)
                indexes = self.found().indexes
            if name in indexes and beside not in indexes:
                self._build(beside, part)
            if name in indexes:
                self._drop_if(former, indexes)
                self.execute(RenameIndex(self.ref.schema, name, former))
            if name in indexes or beside in indexes:
                self.execute(RenameIndex(self.ref.schema, beside, name))
            else:
                self._build(name, part)
            indexes = self.found().indexes
        for each in (beside, former, *([name] if part is None else [])):
            self._drop_if(each, indexes)

    def mark(self, version: int) -> None:
        """Write the version into the comment of the check on `status`; 0 removes it."""
        check = CheckConstraint("true", name=self.name_of(STATUS_CHECK), comment=marker_at(version))
        self.ref.table().append_constraint(check)
        self.execute(SetConstraintComment(check) if version else DropConstraintComment(check))

    def name_of(self, part: str) -> str:
        """What a check or index is called."""
        return part_name(self.ref.name, part, self.names)

    # ----------------------------------------------------------------------------------------------------- internals

    def _build(self, name: str, part: IndexPart) -> None:
        index = make_index(self.ref, name, part, self.key, postgresql_concurrently=self._concurrently)
        try:
            self.execute(CreateIndex(index), patient=self._concurrently)
        except DBAPIError as error:
            if _state(error) != _UNIQUE_VIOLATION:
                raise
            columns = ", ".join(part.columns_with(self.key))
            raise CommandError(
                f"{self.ref}: live jobs share their {columns}, so {name!r} cannot be unique. Correct them and run the "
                "migration again"
            ) from error

    def _drop_if(self, name: str, indexes: Mapping[str, Any]) -> None:
        if name in indexes:
            self._drop(name)

    def _drop(self, name: str, *, if_exists: bool = False) -> None:
        index = Index(name, postgresql_concurrently=self._concurrently)
        self.ref.table().append_constraint(CheckConstraint("true"))
        index.table = self.ref.table()
        self.execute(DropIndex(index, if_exists=if_exists), patient=self._concurrently)

    def _print(self, change: Shape) -> None:
        """For ``--sql``: what `converge` does where nothing is there yet, or the former version."""
        new = [make() for make in change.columns.values() if make is not None]
        self.ref.table(*new)
        self.alter(*map(AddColumn, new), *(DropColumn(name) for name, make in change.columns.items() if make is None))
        for name, condition in change.checks.items():
            check = self.name_of(f"{name}_check")
            self.alter(DropConstraint(check), *([] if condition is None else [AddCheck(check, condition)]))
            if condition is not None:
                self.alter(ValidateConstraint(check))
        for name, part in change.indexes.items():
            self._drop(self.name_of(f"{name}_idx"), if_exists=True)
            if part is not None:
                self._build(self.name_of(f"{name}_idx"), part)
        if change.storage:
            self.execute(SetStorageParameters(self.ref.table(), change.storage))

    def _refuse_other_columns(self, found: Found, target: Found, names: Sequence[str]) -> None:
        for name in names:
            if name in found.columns and found.columns[name] != target.columns[name]:
                raise CommandError(
                    f"{self.ref} has a column {name!r} already, and not the one that a queue needs "
                    f"({target.columns[name].kind}): rename it in a revision of its own"
                )

    def _within_anothers(self) -> None:
        self._concurrently = False
        size = self.found().size
        if size > SMALL:
            raise CommandError(
                f"{self.ref} has {size // 2**20} MB, too much to be changed within a transaction that was begun "
                "outside of Alembic: hand Alembic a connection without one (engine.connect(), not engine.begin())"
            )

    def _set_lock_timeout(self, value: str) -> None:
        local = "false" if self._concurrently else "true"
        self._operations.execute(select(func.set_config(*_words("lock_timeout", value), literal_column(local))))

    def _blocked(self, ddl: ExecutableDDLElement, seconds: float, *, patient: bool) -> MigrationBlocked:
        rows: Sequence[Any] = []
        if self._concurrently:  # else the transaction is over, and answers nothing
            rows = _blockers(self.connection, self.found().oid, builds=patient)
        said = [
            f"pid {row.pid} ({row.state}, {row.application_name or 'no application_name'}, in a transaction since "
            f"{row.xact_start:%Y-%m-%d %H:%M:%S %Z})"
            for row in rows
        ]
        statement = str(ddl.compile(dialect=self._context.dialect)).split(" (", maxsplit=1)[0]
        return MigrationBlocked(self.ref, statement, f"{seconds:.1f} s", said, [row.pid for row in rows])


def leftovers(name: str) -> tuple[str, str]:
    """What an index is called while it is built beside the one that it replaces, and that one when it is replaced."""
    return fitted(name, name, "_new"), fitted(name, name, "_old")


def _words(*values: str) -> list[Any]:
    return [literal_column(f"'{value}'", Text) for value in values]


def _is_anothers(context: Any) -> bool:
    """Whether the connection is in a transaction that Alembic did not begin, and so cannot leave for a while.

    Why getattr: Alembic asks itself the same, and has no public name for the answer.
    """
    return context.connection.in_transaction() and getattr(context, "_transaction", None) is None


def _state(error: DBAPIError) -> str | None:
    return getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)


def _blockers(connection: Connection, oid: int, *, builds: bool) -> Sequence[Any]:
    """Other sessions with an open transaction that has a lock on the table or, for a build, a snapshot."""
    a = _activity.c
    locks = exists().where(_locks.c.pid == a.pid, _locks.c.granted.is_(True), _locks.c.relation == oid)
    snapshot = or_(a.backend_xid.is_not(None), a.backend_xmin.is_not(None))
    others = and_(a.datname == func.current_database(), a.pid != func.pg_backend_pid(), a.xact_start.is_not(None))
    in_the_way = or_(locks, snapshot) if builds else locks
    query = select(a.pid, a.state, a.application_name, a.xact_start).where(others, in_the_way)
    return connection.execute(query.order_by(a.xact_start).limit(5)).all()
