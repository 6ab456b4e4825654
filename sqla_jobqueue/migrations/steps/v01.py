"""Schema version 1. Never edited."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Text, column

from sqla_jobqueue.migrations.shape import IndexPart, Shape, Step, frozen

_TERMINAL = column("status", Text).in_(["done", "failed", "cancelled"])

STEP: Final = Step(
    number=1,
    summary=(
        "The index of finished jobs leads with queue and status, since retention and the summary ask by them: with "
        "finished_at alone, a dead letter that is kept for ever is read through at every prune."
    ),
    change=Shape(indexes=frozen({"finished": IndexPart(("queue", "status", "finished_at"), _TERMINAL)})),
)
