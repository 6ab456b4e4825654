"""A named queue of a job table: its settings and its tasks."""

from __future__ import annotations

import inspect as python_inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Concatenate, Final, Generic, Literal, ParamSpec, Protocol, TypeAlias, TypeVar, overload

from sqlalchemy import Table

from sqla_jobqueue.backoff import Backoff, exponential
from sqla_jobqueue.errors import ConfigurationError
from sqla_jobqueue.model import (
    DEFAULT_MAX_ATTEMPTS,
    DEFAULT_QUEUE,
    J,
    JobDataclassMixin,
    JobMixin,
    JobTable,
    job_table,
)
from sqla_jobqueue.status import TERMINAL, JobStatus
from sqla_jobqueue.tasks.options import (
    MAX_DURATION,
    MAX_INTEGER,
    MAX_KIND,
    MAX_QUEUE_NAME,
    Options,
    check_attempts,
    check_backoff,
    check_priority,
    checked_name,
    is_duration,
    is_integer,
)
from sqla_jobqueue.tasks.task import Kind, Task

P = ParamSpec("P")
R = TypeVar("R")

Keep: TypeAlias = timedelta | Mapping[JobStatus, timedelta | None] | None
"""How long finished jobs stay."""

DEFAULT_LEASE: Final = timedelta(minutes=5)
SHORTEST_LEASE: Final = timedelta(seconds=1)
"""A lease is renewed at a third of its length; below a second that would be a busy loop."""
DEFAULT_BACKOFF: Final = exponential()
DEFAULT_KEEP: Final = timedelta(days=1)
INFO_QUEUES: Final = "sqla_jobqueue.queues"
"""Key of ``Table.info`` under which the queues declared for a job table stand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """What a queue was declared with; see `JobQueue`."""

    lease: timedelta
    max_attempts: int
    one_transaction: bool
    backoff: Backoff
    notify: bool
    keep: tuple[tuple[JobStatus, timedelta], ...]
    """Statuses that are pruned, and when; a status that is not there stays for ever."""


@dataclass(slots=True)
class _Declared:
    settings: QueueSettings
    tasks: dict[str, Task[..., Any, Any]] = field(default_factory=dict[str, Task[..., Any, Any]])


class TaskDecorator(Protocol[J]):
    """What `JobQueue.task` gives when it is called with options: it keeps the handler's signature."""

    def __call__(self, handler: Callable[Concatenate[Any, P], R], /) -> Task[P, R, J]:
        """Register the handler."""
        ...


class JobQueue(Generic[J]):
    """A named queue in a job table.

    Args:
        model: the job model.
        name: stored in the column ``queue``; 1 to 128 characters.
        lease: how long a claim lasts without renewal. A live worker renews it; the jobs of a lost one come back after
            it. At least a second. Without meaning in one-transaction mode.
        max_attempts: default for its jobs: the attempt with this number is the last.
        one_transaction: claim, work and `done` are one transaction. For short work inside the database: a crash leaves
            no trace, and costs no attempt.
        backoff: default for its tasks; 2, 4, 8... seconds, up to an hour.
        keep: how long finished jobs stay. A timedelta is about `done` and `cancelled`; the dead letter stays until
            somebody acts. A mapping by status says it for each. None: for ever. Left out: a day, and for ever where
            the model is an existing one, whose rows are business data.
        notify: wake idle workers at commit. Off, they find the jobs by polling.

    Attributes:
        settings: all of these.
        tasks: by kind.

    Raises:
        ConfigurationError: an argument out of range, no job model, or the queue is declared with other settings.
    """

    def __init__(
        self,
        model: type[J],
        name: str = DEFAULT_QUEUE,
        *,
        lease: timedelta = DEFAULT_LEASE,
        max_attempts: int = DEFAULT_MAX_ATTEMPTS,
        one_transaction: bool = False,
        backoff: Backoff = DEFAULT_BACKOFF,
        keep: Keep | Literal["default"] = "default",
        notify: bool = True,
    ) -> None:
        self.model = model
        self.table = job_table(model)
        self.name = checked_name("queue name", name, MAX_QUEUE_NAME)
        self.has_kinds = has_kinds(model)
        if not is_duration(lease, SHORTEST_LEASE):
            raise ConfigurationError(
                f"a lease is a timedelta from {SHORTEST_LEASE} to {MAX_DURATION.days} days, not {lease!r}"
            )
        if not is_integer(max_attempts, 1):
            raise ConfigurationError(f"max_attempts is a number from 1 to {MAX_INTEGER}, not {max_attempts!r}")
        if backoff is None:
            raise ConfigurationError("a queue needs a backoff; leave it out for the default")
        check_backoff(backoff)
        if keep == "default":
            keep = DEFAULT_KEEP if self.has_kinds else None
        self.settings = QueueSettings(
            lease=lease,
            max_attempts=max_attempts,
            one_transaction=one_transaction,
            backoff=backoff,
            notify=notify,
            keep=_checked_keep(keep),
        )
        queues: dict[str, _Declared] = self.table.info.setdefault(INFO_QUEUES, {})
        declared = queues.setdefault(self.name, _Declared(self.settings))
        if declared.settings != self.settings:
            raise ConfigurationError(
                f"queue {self.name!r} of {model.__qualname__} is declared twice with different settings: "
                "declare it once and import it"
            )
        self.tasks = declared.tasks

    def __repr__(self) -> str:
        return f"<JobQueue {self.name!r} of {self.model.__qualname__}>"

    @overload
    def task(self, handler: Callable[Concatenate[Any, P], R], /) -> Task[P, R, J]: ...

    @overload
    def task(
        self,
        /,
        *,
        name: str | None = None,
        backoff: Backoff | None = None,
        timeout: timedelta | None = None,
        priority: int | None = None,
        max_attempts: int | None = None,
    ) -> TaskDecorator[J]: ...

    def task(
        self,
        handler: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        backoff: Backoff | None = None,
        timeout: timedelta | None = None,
        priority: int | None = None,
        max_attempts: int | None = None,
    ) -> Any:
        """Register a handler: a function of a session and the payload, plain or async.

        Args:
            handler: the function, when used without parentheses.
            name: its kind in the table; the function's name by default. Keep it when the function is renamed.
            backoff: attempt number that failed -> delay; the queue's by default.
            timeout: how long an attempt may take. An async handler is cancelled then; a sync one is told by
                ``session.job_is_lost``, and its result is refused.
            priority: default for its jobs; smaller first.
            max_attempts: default for its jobs; the queue's by default.

        Raises:
            ConfigurationError: the signature cannot be a handler's, an option is out of range, or the kind is taken.
        """
        check_attempts(max_attempts, ConfigurationError)
        check_priority(priority, ConfigurationError)
        check_backoff(backoff)
        if timeout is not None and (not isinstance(timeout, timedelta) or timeout <= timedelta(0)):
            raise ConfigurationError(f"a timeout is a timedelta above zero, not {timeout!r}")

        def register(function: Callable[..., Any]) -> Task[..., Any, J]:
            from sqla_jobqueue.payload import Codec  # noqa: PLC0415  brings pydantic: not before a task is declared

            if isinstance(function, Task):
                raise ConfigurationError(f"{function!r} is a task already: register its `handler`, the function itself")
            given = getattr(function, "__name__", None) if name is None else name
            if given is None:
                raise ConfigurationError(f"{function!r} has no __name__ to be its kind: give it a name=")
            kind = checked_name("kind", given, MAX_KIND)
            if kind in self.tasks:
                raise ConfigurationError(f"{self!r} has a task {kind!r} already: give one of them a name=")
            codec = Codec(function, kind)
            if not self.has_kinds and (self.tasks or len(python_inspect.signature(function).parameters) > 1):
                raise ConfigurationError(
                    f"{self.model.__qualname__} has no kind and no payload, the row itself is the job: its queue has "
                    "one task, whose handler takes the session alone and reads session.job"
                )
            task: Task[..., Any, J] = Task(
                self,
                kind,
                Options(priority=priority, max_attempts=max_attempts),
                handler=function,
                backoff=self.settings.backoff if backoff is None else backoff,
                timeout=timeout,
                codec=codec,
            )
            self.tasks[kind] = task
            return task

        return register if handler is None else register(handler)

    def kind(self, name: str) -> Kind[J]:
        """A kind by its name, for a producer that does not import the handler.

        Raises:
            ConfigurationError: the model has no kinds, or the name cannot be stored.
        """
        if not self.has_kinds:
            raise ConfigurationError(f"{self.model.__qualname__} has no kinds: enqueue the row itself")
        return Kind(self, checked_name("kind", name, MAX_KIND), Options())

    def task_for(self, job: Mapping[str, Any]) -> Task[..., Any, J] | None:
        """The task that runs a job row, None where this process does not know its kind."""
        if self.has_kinds:
            return self.tasks.get(job["kind"])
        return next(iter(self.tasks.values()), None)


def has_kinds(model: type[JobTable]) -> bool:
    """Whether jobs of the model have a kind and a payload; else the row itself is the job."""
    return issubclass(model, (JobMixin, JobDataclassMixin))


def declared_queues(table: Table) -> list[tuple[str, QueueSettings]]:
    """The queues that this process has declared for a job table."""
    declared: dict[str, _Declared] = table.info.get(INFO_QUEUES, {})
    return [(name, one.settings) for name, one in declared.items()]


def queues_with_tasks(table: Table) -> list[JobQueue[Any]]:
    """The queues of a job table for which this process has declared tasks."""
    declared: dict[str, _Declared] = table.info.get(INFO_QUEUES, {})
    return [next(iter(one.tasks.values())).queue for one in declared.values() if one.tasks]


def queue_settings(table: Table, name: str) -> QueueSettings | None:
    """Settings of a queue as this process declared it, None where it did not."""
    declared: _Declared | None = table.info.get(INFO_QUEUES, {}).get(name)
    return declared.settings if declared else None


def _checked_keep(keep: Keep) -> tuple[tuple[JobStatus, timedelta], ...]:
    if keep is None:
        return ()
    if isinstance(keep, timedelta):
        keep = {JobStatus.DONE: keep, JobStatus.CANCELLED: keep}
    if not isinstance(keep, Mapping):
        raise ConfigurationError(f"keep is a timedelta, a mapping of one by status, or None; not {keep!r}")
    for status, age in keep.items():
        if status not in TERMINAL:
            raise ConfigurationError(f"keep is about {', '.join(TERMINAL)}, not {status!r}")
        if age is not None and not is_duration(age, timedelta(0)):
            raise ConfigurationError(
                f"keep needs a timedelta from zero to {MAX_DURATION.days} days, or None, not {age!r}"
            )
    return tuple(sorted((JobStatus(status), age) for status, age in keep.items() if age is not None))
