"""The job queue.

Revision: 0002
Revises: 0001
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    empty = sa.literal_column("'{}'::jsonb")
    now = sa.func.now()
    op.create_table(
        "jobs",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("payload", postgresql.JSONB(), server_default=empty, nullable=False),
        sa.Column("meta", postgresql.JSONB(), server_default=empty, nullable=False),
        sa.Column("queue", sa.Text(), server_default="default", nullable=False),
        sa.Column("status", sa.Text(), server_default="pending", nullable=False),
        sa.Column("priority", sa.Integer(), server_default="0", nullable=False),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("max_attempts", sa.Integer(), server_default="3", nullable=False),
        sa.Column("run_at", postgresql.TIMESTAMP(timezone=True), server_default=now, nullable=False),
        sa.Column("locked_until", postgresql.TIMESTAMP(timezone=True)),
        sa.Column("locked_by", sa.Text()),
        sa.Column("last_error", sa.Text()),
        sa.Column("unique_key", sa.Text()),
        sa.Column("created_at", postgresql.TIMESTAMP(timezone=True), server_default=now, nullable=False),
        sa.Column("started_at", postgresql.TIMESTAMP(timezone=True)),
        sa.Column("finished_at", postgresql.TIMESTAMP(timezone=True)),
        sa.PrimaryKeyConstraint("id"),
        sa.CheckConstraint("status IN ('pending', 'running', 'done', 'failed', 'cancelled')", name="jobs_status_check"),
        sa.CheckConstraint("attempts >= 0 AND max_attempts >= 1", name="jobs_attempts_check"),
        sa.CheckConstraint("status != 'running' OR locked_until IS NOT NULL", name="jobs_lease_check"),
        sa.CheckConstraint("queue != ''", name="jobs_queue_check"),
    )
    op.set_storage_parameters(
        "jobs",
        {
            "fillfactor": "85",
            "autovacuum_vacuum_scale_factor": "0.02",
            "autovacuum_vacuum_insert_scale_factor": "0.05",
            "autovacuum_analyze_scale_factor": "0.05",
            "autovacuum_vacuum_cost_delay": "1",
        },
    )
    status = sa.column("status")
    pending = status == "pending"
    running = status == "running"
    terminal = status.in_(["done", "failed", "cancelled"])
    live = sa.column("unique_key").is_not(None) & status.in_(["pending", "running"])
    op.create_index("jobs_pending_idx", "jobs", ["queue", "priority", "run_at", "id"], postgresql_where=pending)
    op.create_index("jobs_lease_idx", "jobs", ["locked_until"], postgresql_where=running)
    op.create_index("jobs_finished_idx", "jobs", ["queue", "status", "finished_at"], postgresql_where=terminal)
    op.create_index("jobs_unique_key_idx", "jobs", ["unique_key"], unique=True, postgresql_where=live)


def downgrade() -> None:
    op.drop_table("jobs")
