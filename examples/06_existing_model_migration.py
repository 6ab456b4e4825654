"""The state of a queue for the table `exports`, whose rows stay as they are.

It is what ``alembic revision --autogenerate`` writes once the model has `JobStateMixin`, with two changes by hand:

- `status` is added as done, which the rows that are there keep, and only then becomes pending for those to come. So no
  old row is due, not even for an instant, and the index of pending jobs is built over none.
- The checks are added. Alembic does not compare those of a table that exists.

No row is rewritten: every default is a constant, or ``now()``, which is one for the whole statement.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

from sqla_jobqueue.migrations import SetStorageParametersOp

revision = "exports_queue"
down_revision = None

STATUS = sa.column("status", sa.Text())
INSTANT = sa.TIMESTAMP(timezone=True)
COLUMNS: list[sa.Column[Any]] = [
    sa.Column("queue", sa.Text(), server_default="default", nullable=False),
    sa.Column("status", sa.Text(), server_default="done", nullable=False),
    sa.Column("priority", sa.Integer(), server_default="0", nullable=False),
    sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
    sa.Column("max_attempts", sa.Integer(), server_default="3", nullable=False),
    sa.Column("run_at", INSTANT, server_default=sa.func.now(), nullable=False),
    sa.Column("locked_until", INSTANT),
    sa.Column("locked_by", sa.Text()),
    sa.Column("last_error", sa.Text()),
    sa.Column("unique_key", sa.Text()),
    sa.Column("created_at", INSTANT, server_default=sa.func.now(), nullable=False),
    sa.Column("started_at", INSTANT),
    sa.Column("finished_at", INSTANT),
]
CHECKS: dict[str, sa.ColumnElement[bool]] = {
    "status": STATUS.in_(["pending", "running", "done", "failed", "cancelled"]),
    "attempts": (sa.column("attempts") >= 0) & (sa.column("max_attempts") >= 1),
    "lease": (STATUS != "running") | sa.column("locked_until").is_not(None),
    "queue": sa.column("queue") != "",
}
INDEXES: dict[str, tuple[list[str], sa.ColumnElement[bool]]] = {
    "pending": (["queue", "priority", "run_at", "id"], STATUS == "pending"),
    "lease": (["locked_until"], STATUS == "running"),
    "finished": (["queue", "status", "finished_at"], STATUS.in_(["done", "failed", "cancelled"])),
    "unique_key": (["unique_key"], sa.column("unique_key").is_not(None) & STATUS.in_(["pending", "running"])),
}
STORAGE = {
    "fillfactor": "85",
    "autovacuum_vacuum_scale_factor": "0.02",
    "autovacuum_vacuum_insert_scale_factor": "0.05",
    "autovacuum_analyze_scale_factor": "0.05",
    "autovacuum_vacuum_cost_delay": "1",
}


def upgrade() -> None:
    for column in COLUMNS:
        op.add_column("exports", column)
    op.alter_column("exports", "status", server_default="pending")
    for name, condition in CHECKS.items():
        op.create_check_constraint(f"exports_{name}_check", "exports", condition)
    for name, (columns, rows) in INDEXES.items():
        unique = name == "unique_key"
        op.create_index(f"exports_{name}_idx", "exports", columns, unique=unique, postgresql_where=rows)
    op.invoke(SetStorageParametersOp("exports", STORAGE))


def downgrade() -> None:
    op.invoke(SetStorageParametersOp("exports", dict.fromkeys(STORAGE)))
    for column in reversed(COLUMNS):  # and, with them, their indexes and checks
        op.drop_column("exports", column.name)
