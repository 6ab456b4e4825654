"""How an attempt ends, as data; and `record`, which writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final

from sqla_jobqueue import statements
from sqla_jobqueue.lifecycle.sending import Executor, execute, fences_in
from sqla_jobqueue.model import (
    JobTable,
)
from sqla_jobqueue.statements import Fence, fences_with
from sqla_jobqueue.status import JobStatus

MAX_ERROR: Final = 2000
"""Characters of `last_error`."""
LONGEST_DELAY: Final = timedelta(days=36_525)
"""A century. A timedelta may be so long that no timestamp is."""


class Verb(StrEnum):
    """How an attempt may end."""

    COMPLETE = "complete"
    RETRY = "retry"
    FAIL = "fail"
    SNOOZE = "snooze"
    RELEASE = "release"
    CANCEL = "cancel"


_BUILDERS: Final = {
    Verb.COMPLETE: statements.complete,
    Verb.RETRY: statements.retry,
    Verb.FAIL: statements.fail,
    Verb.SNOOZE: statements.snooze,
    Verb.RELEASE: statements.release,
    Verb.CANCEL: statements.cancel,
}


@dataclass(frozen=True, slots=True)
class Write:
    """A verb and what it writes.

    Attributes:
        verb: which.
        values: what its statement asks for besides the fence, e.g. ``{"delay": ..., "error": ...}``.
    """

    verb: Verb
    values: Mapping[str, Any]


def storable(text: str) -> str:
    """Text that PostgreSQL stores: no NUL, no lone surrogates, bounded."""
    clean = text.replace("\x00", "\ufffd").encode("utf-8", "replace").decode("utf-8")
    return clean if len(clean) <= MAX_ERROR else clean[: MAX_ERROR - 1] + "\u2026"


def storable_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a verb, errors as `storable` text, delays within what a timestamp can hold."""
    checked = dict(values)
    if "error" in checked:
        checked["error"] = storable(checked["error"])
    if "delay" in checked:
        checked["delay"] = min(max(checked["delay"], timedelta(0)), LONGEST_DELAY)
    return checked


def record(
    executor: Executor,
    model: type[JobTable],
    writes: Sequence[tuple[Fence, Write]],
    *,
    held: JobStatus = JobStatus.RUNNING,
) -> set[Fence]:
    """Write how attempts ended, one statement per verb; return the fences that still held.

    Those missing from the result are lost: somebody else owns the job, and its outcome.
    """
    kept: set[Fence] = set()
    for verb in dict.fromkeys(write.verb for _, write in writes):
        mine = [(fence, storable_values(write.values)) for fence, write in writes if write.verb is verb]
        rows = execute(executor, model, _BUILDERS[verb](model, held), fences_with(mine))
        kept |= fences_in(model, rows)
    return kept
