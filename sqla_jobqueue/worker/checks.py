"""What can be wrong with a worker is said when it is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqla_jobqueue.errors import ConfigurationError
from sqla_jobqueue.tasks import JobQueue

DEFAULT_CONCURRENCY: Final = 10


def check_queues(queues: Sequence[JobQueue[Any]], *, sync: bool, asynchronous: bool) -> None:
    """Every queue once, with tasks whose signatures resolve, and the sessions that their handlers need.

    Raises:
        ConfigurationError: it is not so.
    """
    if not queues:
        raise ConfigurationError("a worker needs at least one queue")
    if len({(queue.table, queue.name) for queue in queues}) < len(queues):
        raise ConfigurationError("a queue is given to the worker twice")
    for queue in queues:
        if not queue.tasks:
            raise ConfigurationError(f"{queue!r} has no tasks: import the module that declares them")
        for task in queue.tasks.values():
            task.codec.check()
            if task.is_async and not asynchronous:
                raise ConfigurationError(f"{task!r} is async: the worker needs async_sessions=")
            if not task.is_async and not sync:
                raise ConfigurationError(f"{task!r} is sync: the worker needs sessions=")


def capacities(queues: Sequence[JobQueue[Any]], concurrency: int | Mapping[str, int]) -> dict[JobQueue[Any], int]:
    """How many jobs at once, by queue.

    Raises:
        ConfigurationError: a number out of range, or a queue that the worker does not have.
    """
    given = {} if isinstance(concurrency, int) else dict(concurrency)
    if unknown := set(given) - {queue.name for queue in queues}:
        raise ConfigurationError(f"concurrency names queues that the worker does not have: {sorted(unknown)}")
    every = concurrency if isinstance(concurrency, int) else DEFAULT_CONCURRENCY
    found = {queue: given.get(queue.name, every) for queue in queues}
    for queue, capacity in found.items():
        if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 1:
            raise ConfigurationError(f"concurrency of queue {queue.name!r} is a number from 1, not {capacity!r}")
    return found
