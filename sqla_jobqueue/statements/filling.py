"""Keys of entities, put into payloads at the flush."""

from __future__ import annotations

from sqlalchemy import (
    Update,
    bindparam,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB

from sqla_jobqueue.model import JobTable, cached, job_table, key_columns


@cached
def fill_payload(model: type[JobTable]) -> Update:
    """Put the keys of entities that were flushed together with their jobs into the payloads.

    Parameters per job: ``id_0``, ``id_1``... (the primary key) and ``keys``, a JSON object.

    Why: an entity has no key before the flush, and a job that waited for a second flush would be lost by a savepoint
    rollback in between, and leave foreign keys to it NULL.
    """
    table = job_table(model)
    mine = (column == bindparam(f"id_{n}", type_=column.type) for n, column in enumerate(key_columns(table)))
    return update(table).where(*mine).values(payload=table.c.payload.concat(bindparam("keys", type_=JSONB)))
