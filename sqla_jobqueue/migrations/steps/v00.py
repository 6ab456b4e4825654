"""The job table before its versions were counted. Never edited.

Columns that `JobMixin` adds beside the state (``id``, ``kind``, ``payload``, ``meta``) are the application's to
migrate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from sqlalchemy import Column, Integer, Text, and_, column, func, or_
from sqlalchemy.dialects.postgresql import TIMESTAMP

from sqla_jobqueue.migrations.shape import KEY, IndexPart, Shape, frozen

_status = column("status", Text)
_attempts = column("attempts", Integer)
_max_attempts = column("max_attempts", Integer)
_unique_key = column("unique_key", Text)
_locked_until = column("locked_until", TIMESTAMP(timezone=True))


def _column(name: str, kind: Any, default: Any = None) -> Callable[[], Column[Any]]:
    return lambda: Column(name, kind, server_default=default, nullable=default is None)


BASE: Final = Shape(
    columns=frozen(
        {
            "queue": _column("queue", Text(), "default"),
            "status": _column("status", Text(), "pending"),
            "priority": _column("priority", Integer(), "0"),
            "attempts": _column("attempts", Integer(), "0"),
            "max_attempts": _column("max_attempts", Integer(), "3"),
            "run_at": _column("run_at", TIMESTAMP(timezone=True), func.now()),
            "locked_until": _column("locked_until", TIMESTAMP(timezone=True)),
            "locked_by": _column("locked_by", Text()),
            "last_error": _column("last_error", Text()),
            "unique_key": _column("unique_key", Text()),
            "created_at": _column("created_at", TIMESTAMP(timezone=True), func.now()),
            "started_at": _column("started_at", TIMESTAMP(timezone=True)),
            "finished_at": _column("finished_at", TIMESTAMP(timezone=True)),
        }
    ),
    checks=frozen(
        {
            "status": _status.in_(["pending", "running", "done", "failed", "cancelled"]),
            "attempts": and_(_attempts >= 0, _max_attempts >= 1),
            "lease": or_(_status != "running", _locked_until.is_not(None)),
            "queue": column("queue", Text) != "",
        }
    ),
    indexes=frozen(
        {
            "pending": IndexPart(("queue", "priority", "run_at", KEY), _status == "pending"),
            "lease": IndexPart(("locked_until",), _status == "running"),
            "finished": IndexPart(("finished_at",), _status.in_(["done", "failed", "cancelled"])),
            "unique_key": IndexPart(
                ("unique_key",), and_(_unique_key.is_not(None), _status.in_(["pending", "running"])), unique=True
            ),
        }
    ),
    storage=frozen(
        {
            "fillfactor": "85",
            "autovacuum_vacuum_scale_factor": "0.02",
            "autovacuum_vacuum_insert_scale_factor": "0.05",
            "autovacuum_analyze_scale_factor": "0.05",
            "autovacuum_vacuum_cost_delay": "1",
        }
    ),
)
