"""LISTEN and NOTIFY: the name of the channel, and both statements."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import ClauseElement, Executable, Select, Table, Text, bindparam, func, select
from sqlalchemy.ext.compiler import compiles

from sqla_jobqueue.model import MAX_IDENTIFIER_BYTES

if TYPE_CHECKING:
    from sqlalchemy.sql.compiler import SQLCompiler

_PREFIX: Final = "sqla_jobqueue."


def channel_name(table: Table, schema: str | None) -> str:
    """The channel of a job table: one per table, so that two of them in one database do not wake each other.

    Args:
        table: the job table.
        schema: the schema it is found in, after translation and with the connection's default filled in.

    Why hashed when long: LISTEN cuts a name at 63 bytes silently, pg_notify refuses it.
    """
    name = f"{_PREFIX}{schema or ''}.{table.name}"
    if len(name.encode()) <= MAX_IDENTIFIER_BYTES:
        return name
    return _PREFIX + hashlib.sha256(name.encode()).hexdigest()[:40]


@cache
def notify() -> Select[Any]:
    """Send a wake-up with the transaction. Parameters: ``channel``, ``queue`` (the whole message).

    Why nothing of the payload: a message is bounded to 8000 bytes, and an identical one in the same transaction is
    dropped by PostgreSQL, so a thousand jobs of a queue are one wake-up.
    """
    return select(func.pg_catalog.pg_notify(bindparam("channel", type_=Text), bindparam("queue", type_=Text)))


class Listen(Executable, ClauseElement):
    """``LISTEN "channel"``."""

    inherit_cache = False

    def __init__(self, channel: str) -> None:
        self.channel = channel


@compiles(Listen, "postgresql")
def _compile_listen(element: Listen, compiler: SQLCompiler, **_kw: Any) -> str:
    return f"LISTEN {compiler.preparer.quote_identifier(element.channel)}"
