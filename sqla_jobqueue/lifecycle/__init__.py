"""One plain function per verb: send its statement, read the rows, raise.

They take a Session or a Connection and neither commit nor flush. An AsyncSession runs them through ``run_sync``::

    lifecycle.requeue(session, job)
    await async_session.run_sync(lifecycle.requeue, job)

The worker's verbs (`complete`, `retry`, `fail`, `snooze`, `release`) raise `LeaseLost` when the job is not theirs any
more. The operator's (`cancel`, `requeue`) return whether they changed anything. `record` writes the outcomes of many
jobs of a model in one statement per verb.
"""

from __future__ import annotations

from sqla_jobqueue.lifecycle.operator import cancel, prune, reclaim_expired, requeue, summary
from sqla_jobqueue.lifecycle.owner import (
    claim_rows,
    complete,
    count_failure,
    extend_lease,
    fail,
    lock_done,
    lock_held,
    release,
    retry,
    snooze,
)
from sqla_jobqueue.lifecycle.schema import check_schema
from sqla_jobqueue.lifecycle.sending import Executor, row_fence
from sqla_jobqueue.lifecycle.writes import LONGEST_DELAY, MAX_ERROR, Verb, Write, record, storable

__all__ = [
    "LONGEST_DELAY",
    "MAX_ERROR",
    "Executor",
    "Verb",
    "Write",
    "cancel",
    "check_schema",
    "claim_rows",
    "complete",
    "count_failure",
    "extend_lease",
    "fail",
    "lock_done",
    "lock_held",
    "prune",
    "reclaim_expired",
    "record",
    "release",
    "requeue",
    "retry",
    "row_fence",
    "snooze",
    "storable",
    "summary",
]
