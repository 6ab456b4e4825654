"""Run one claimed job, and turn what happened into one `Outcome`.

The body of a run is a plain function of a sync Session, the same for both modes and both flavours: an async handler is
awaited from within ``AsyncSession.run_sync``. Its steps: attach the job, decode the payload and load the entities, call
the handler, look whether its transaction is still the one it was given, and write the outcome as the last statement of
that very transaction, under the fence. What cannot be written there (a failure, whose transaction is rolled back) is
returned as data, for the worker to record on a connection of its own.
"""

from __future__ import annotations

from sqla_jobqueue.execution.attempt import (
    AttemptTimeout,
    Invoke,
    failed,
    run_claimed,
    run_in_one_transaction,
)
from sqla_jobqueue.execution.guard import Guard
from sqla_jobqueue.execution.isolation import isolation_of
from sqla_jobqueue.execution.outcome import Ending, Outcome, describe_error

__all__ = [
    "AttemptTimeout",
    "Ending",
    "Guard",
    "Invoke",
    "Outcome",
    "describe_error",
    "failed",
    "isolation_of",
    "run_claimed",
    "run_in_one_transaction",
]
