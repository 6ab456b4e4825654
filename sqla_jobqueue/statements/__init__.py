"""Every statement the queue sends, as plain SQLAlchemy constructs: no Session, no clock, no I/O.

Three *candidate selects* say which jobs a verb may touch. They take further conditions, joins and orders like any
select: `due`, `expired`, `finished`. Three builders act on candidates: `claim`, `reclaim_expired`, `prune`::

    claim(due(Job, queue="mail").where(Job.tenant_id == 7), limit=10, lease=timedelta(minutes=5))

Conditions belong into the candidates. On the UPDATE they would be tried after the LIMIT: with ten rows of others in
front, such a claim finds nothing, for ever.

The other builders act on jobs that somebody holds or names: `extend_lease`, `complete`, `retry`, `fail`, `snooze`,
`release`, `cancel`, `requeue`. They depend on the model alone, so they are built once and cached, and take one job or a
thousand as arrays of keys and attempt numbers. `fence` makes those parameters from a job::

    held = fence(job)                                # before the commit, which expires the attempt number
    session.execute(complete(Job), held).one()       # no row: the lease is lost

Common to all but `prune`: SKIP LOCKED comes with FOR NO KEY UPDATE, so that a job row which another transaction merely
references by a foreign key is not skipped, and its insert not blocked. Deadlines come from ``clock_timestamp()``, as
``now()`` stands still in a transaction; conditions that an index serves compare with ``now()``, which is stable.
"""

from __future__ import annotations

from sqla_jobqueue.statements.candidates import (
    claim,
    claim_rows,
    due,
    expired,
    finished,
    prune,
    prune_rows,
    reclaim_expired,
    reclaim_rows,
)
from sqla_jobqueue.statements.common import (
    KEPT_ERRORS,
    LEASE_EXPIRED,
    is_due,
    is_expired,
    is_finished,
    is_pending,
)
from sqla_jobqueue.statements.ending import complete, count_failure, fail, release, retry, snooze
from sqla_jobqueue.statements.fences import Fence, fence, fence_of, fences_with
from sqla_jobqueue.statements.filling import fill_payload
from sqla_jobqueue.statements.holding import extend_lease, lock_done, lock_held, still_held
from sqla_jobqueue.statements.moving import advance, expire_leases, settle
from sqla_jobqueue.statements.operator import cancel, requeue
from sqla_jobqueue.statements.overview import DEFAULT_COUNT_CAP, summary
from sqla_jobqueue.statements.wakeup import Listen, channel_name, notify

__all__ = [
    "DEFAULT_COUNT_CAP",
    "KEPT_ERRORS",
    "LEASE_EXPIRED",
    "Fence",
    "Listen",
    "advance",
    "cancel",
    "channel_name",
    "claim",
    "claim_rows",
    "complete",
    "count_failure",
    "due",
    "expire_leases",
    "expired",
    "extend_lease",
    "fail",
    "fence",
    "fence_of",
    "fences_with",
    "fill_payload",
    "finished",
    "is_due",
    "is_expired",
    "is_finished",
    "is_pending",
    "lock_done",
    "lock_held",
    "notify",
    "prune",
    "prune_rows",
    "reclaim_expired",
    "reclaim_rows",
    "release",
    "requeue",
    "retry",
    "settle",
    "snooze",
    "still_held",
    "summary",
]
