"""The columns of a job table: names, types, defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from sqlalchemy import (
    BigInteger,
    Identity,
    Integer,
    Text,
    func,
    literal_column,
)
from sqlalchemy.dialects.postgresql import DOUBLE_PRECISION, JSONB, TIMESTAMP
from sqlalchemy.orm import MappedColumn, mapped_column
from sqlalchemy.types import TypeEngine

from sqla_jobqueue.status import JobStatus

DEFAULT_QUEUE: Final = "default"
DEFAULT_MAX_ATTEMPTS: Final = 3
JsonValue: TypeAlias = Any
"""What `json.loads` may return."""

INFO_BROUGHT: Final = "sqla_jobqueue.brought"
"""Key of ``Column.info`` that tells a mixin's column from an application's own of the same name."""

TIMESTAMPTZ: Final = TIMESTAMP(timezone=True)

Spec: TypeAlias = tuple[Callable[[], TypeEngine[Any]], dict[str, Any]]

# Key, kind and payload stand before the application's own columns, the state of the queue behind them.
COLUMNS: Final[dict[str, Spec]] = {
    "id": (BigInteger, {"primary_key": True, "server_default": None, "sort_order": -30}),
    "kind": (Text, {"sort_order": -20}),
    "payload": (JSONB, {"sort_order": -20, "server_default": literal_column("'{}'::jsonb")}),
    "meta": (JSONB, {"sort_order": -20, "server_default": literal_column("'{}'::jsonb")}),
    "queue": (Text, {"server_default": DEFAULT_QUEUE}),
    "status": (Text, {"server_default": JobStatus.PENDING.value}),
    "priority": (Integer, {"server_default": "0"}),
    "attempts": (Integer, {"server_default": "0"}),
    "max_attempts": (Integer, {"server_default": str(DEFAULT_MAX_ATTEMPTS)}),
    "run_at": (lambda: TIMESTAMPTZ, {"server_default": func.now()}),
    "locked_until": (lambda: TIMESTAMPTZ, {"nullable": True}),
    "locked_by": (Text, {"nullable": True}),
    "last_error": (Text, {"nullable": True}),
    "unique_key": (Text, {"nullable": True}),
    "created_at": (lambda: TIMESTAMPTZ, {"server_default": func.now()}),
    "started_at": (lambda: TIMESTAMPTZ, {"nullable": True}),
    "finished_at": (lambda: TIMESTAMPTZ, {"nullable": True}),
    "errors": (JSONB, {"server_default": literal_column("'[]'::jsonb")}),
    "result": (lambda: JSONB(none_as_null=True), {"nullable": True}),
    "progress": (DOUBLE_PRECISION, {"nullable": True}),
}


def brought(name: str, **dataclass_options: Any) -> MappedColumn[Any]:
    """A column that a mixin brings, new at each call."""
    make_type, options = COLUMNS[name]
    arguments: list[Any] = [name, make_type()]
    options = {"nullable": False, "sort_order": 100, "info": {INFO_BROUGHT: True}, **options}
    if name == "id":
        del options["server_default"]
        arguments.append(Identity(always=True))
    return mapped_column(*arguments, **options, **dataclass_options)
