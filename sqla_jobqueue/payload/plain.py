"""JSON as it stands: which Python values a jsonb column gives back as they were."""

from __future__ import annotations

import math
from typing import Final, TypeAlias, cast

from sqlalchemy import inspect
from sqlalchemy.orm import InstanceState

from sqla_jobqueue.errors import PayloadError
from sqla_jobqueue.model import JsonValue

MAX_DEPTH: Final = 100
"""Levels of nesting. pydantic reads 200; one that is too deep could be written and never be read."""
MAX_INT_BITS: Final = 14_000
"""4,214 digits. Python reads and writes 4,300."""
MIN_ROUNDED_FLOAT: Final = 1e16
"""From here on Python writes a whole float with an exponent, and jsonb, which stores a numeric, returns digits only:
``1e22`` comes back as an int. Below, ``10.0`` stays ``10.0``. pydantic before 2.12 reads no float from more
than 18 digits, so there the call refuses it."""

Path: TypeAlias = tuple[str | int, ...]


def at(path: Path) -> str:
    """A path as a person writes it: ``address.lines[2]``."""
    shown = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return shown.removeprefix(".") or "the payload"


def name_of(kind: type) -> str:
    """A class as a message names it."""
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def is_entity(value: object) -> bool:
    """Whether a value is an instance of a mapped class."""
    return isinstance(inspect(value, raiseerr=False), InstanceState)


def check_json(value: object, path: Path = ()) -> JsonValue:
    """A copy of a value that is JSON as it stands: dict, list, str, int, float, bool or None.

    A tuple, a str subclass or a float such as ``1e22`` would come back as something else, so they are refused.

    Raises:
        PayloadError: names the place, and what is accepted.
    """
    return _json(value, path, as_is=True)


def as_stored(value: object) -> JsonValue:
    """What jsonb gives back for something that pydantic wrote.

    Raises:
        PayloadError: PostgreSQL would refuse it.
    """
    return _json(value, (), as_is=False)


def _json(value: object, path: Path, *, as_is: bool) -> JsonValue:
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return _text(cast("str", value), path)
    if kind is int:
        if cast("int", value).bit_length() > MAX_INT_BITS:
            raise PayloadError(f"{at(path)}: this int has more than 4,200 digits, JSON readers refuse it", path)
        return value
    if kind is float:
        return _number(cast("float", value), path, as_is=as_is)
    if len(path) > MAX_DEPTH:
        raise too_deep(path)
    if kind is list:
        return [_json(item, (*path, n), as_is=as_is) for n, item in enumerate(cast("list[object]", value))]
    if kind is dict:
        entries = cast("dict[object, object]", value).items()
        return {_key(key, path): _json(item, (*path, cast("str", key)), as_is=as_is) for key, item in entries}
    raise PayloadError(f"{at(path)}: {refusal(value)}", path)


def too_deep(path: Path) -> PayloadError:
    """The error of a value that holds itself, or nearly so."""
    return PayloadError(f"{at(path[:3])}...: nested deeper than {MAX_DEPTH} levels, or inside of itself", path)


def refusal(value: object) -> str:
    """Why a value is no JSON, and what is."""
    kind = type(value)
    if is_entity(value):
        return (
            f"an instance of the mapped class {kind.__qualname__} is no JSON: annotate the handler's parameter with "
            f"{kind.__qualname__} to pass its key, or pass the values that the handler needs"
        )
    hint = ", pass a list" if isinstance(value, (tuple, set, frozenset)) else ""
    return (
        f"{name_of(kind)} is no JSON{hint}: accepted as they are: dict with str keys, list, str, "
        "int, float, bool, None; other types where a handler's parameter is annotated with them"
    )


def _text(value: str, path: Path) -> str:
    if "\0" in value:
        raise PayloadError(f"{at(path)}: text holds a NUL character, which PostgreSQL cannot store", path)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise PayloadError(f"{at(path)}: text holds a lone surrogate, which is no Unicode text", path) from None
    return value


def _key(key: object, path: Path) -> str:
    if type(key) is not str:
        raise PayloadError(f"{at(path)}: a key is {name_of(type(key))}, the keys of JSON objects are str", path)
    try:
        return _text(key, path)
    except PayloadError as error:
        raise PayloadError(f"{at(path)}: a key, {key!a}, {str(error).partition('text ')[2]}", path) from None


def _number(value: float, path: Path, *, as_is: bool) -> float:
    if not math.isfinite(value):
        raise PayloadError(f"{at(path)}: {value} is no JSON number", path)
    if abs(value) >= MIN_ROUNDED_FLOAT:
        if as_is:
            raise PayloadError(f"{at(path)}: {value!r} would come back as an int: pass int({value!r})", path)
        return int(value)
    return value
