"""What can be enqueued: tasks, kinds, and calls of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

from sqla_jobqueue.backoff import Backoff
from sqla_jobqueue.errors import EnqueueError
from sqla_jobqueue.model import J
from sqla_jobqueue.tasks.options import Options, merged

if TYPE_CHECKING:
    from sqla_jobqueue.payload import Bound, Codec
    from sqla_jobqueue.tasks.queue import JobQueue

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Call(Generic[J]):
    """A task and a checked payload: what the plural verbs take."""

    of: Producer[J]
    bound: Bound


class Producer(Generic[J]):
    """What can be enqueued: a queue, a kind and options. `Task` and `Kind` are the two sorts.

    Attributes:
        queue: where the jobs go.
        kind: what they are called in the table.
        options_set: how they are enqueued; changed by ``options(...)``, which gives a new one.
    """

    def __init__(self, queue: JobQueue[J], kind: str, options: Options) -> None:
        self.queue = queue
        self.kind = kind
        self.options_set = options

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound:
        """Check and encode a payload. Sends nothing."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.kind!r} of queue {self.queue.name!r}>"


class Kind(Producer[J]):
    """A kind by its name: its payload is taken as JSON, since the handler's signature is not at hand."""

    def options(
        self,
        *,
        delay: timedelta | None = None,
        run_at: datetime | None = None,
        priority: int | None = None,
        max_attempts: int | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> Kind[J]:
        """The same kind with other options; see `Options`."""
        given = Options(delay=delay, run_at=run_at, priority=priority, max_attempts=max_attempts, meta=meta)
        return Kind(self.queue, self.kind, merged(self.options_set, given))

    def call(self, /, **payload: Any) -> Call[J]:
        """Kind and checked payload, for the plural verbs."""
        return Call(self, self.bind((), payload))

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound:
        """Check a payload. Sends nothing."""
        from sqla_jobqueue.payload import Bound, check_json  # noqa: PLC0415  brings pydantic

        if args:
            raise EnqueueError(
                f"the payload of {self!r} is given by keyword: its handler's signature is not known here"
            )
        return Bound(values=check_json(kwargs), entities={})


class Task(Producer[J], Generic[P, R, J]):
    """A handler and how its jobs are run. Made by `@queue.task`; calling it calls the handler.

    Attributes:
        handler: the function itself.
        backoff: attempt number that failed -> delay.
        timeout: how long an attempt may take; None for as long as it likes.
        is_async: whether the handler is a coroutine function.
    """

    def __init__(
        self,
        queue: JobQueue[J],
        kind: str,
        options: Options,
        *,
        handler: Callable[Concatenate[Any, P], R],
        backoff: Backoff,
        timeout: timedelta | None,
        codec: Codec,
    ) -> None:
        super().__init__(queue, kind, options)
        self.handler = handler
        self.backoff = backoff
        self.timeout = timeout
        self.codec = codec
        self.is_async = codec.is_async
        self.__doc__ = handler.__doc__
        self.__name__ = kind

    def __call__(self, session: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the handler directly, as a unit test does. No job, no queue."""
        return self.handler(session, *args, **kwargs)

    def options(
        self,
        *,
        delay: timedelta | None = None,
        run_at: datetime | None = None,
        priority: int | None = None,
        max_attempts: int | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> Task[P, R, J]:
        """The same task with other options for the jobs enqueued through it; see `Options`."""
        given = Options(delay=delay, run_at=run_at, priority=priority, max_attempts=max_attempts, meta=meta)
        return Task(
            self.queue,
            self.kind,
            merged(self.options_set, given),
            handler=self.handler,
            backoff=self.backoff,
            timeout=self.timeout,
            codec=self.codec,
        )

    def call(self, /, *args: P.args, **kwargs: P.kwargs) -> Call[J]:
        """Task and checked payload, for the plural verbs."""
        return Call(self, self.bind(args, kwargs))

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound:
        """Check and encode a payload against the handler's signature. Sends nothing."""
        return self.codec.bind(args, kwargs)
