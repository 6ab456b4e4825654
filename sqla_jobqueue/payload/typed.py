"""Annotated values as JSON, by pydantic.

Why not pydantic alone: it writes what it reads as something else, without a word. A UUID in ``dict[str, Any]`` is a str
afterwards, a secret a row of asterisks, a NaN in a model null. So `encode` reads its own result, as jsonb will give it
back, and compares values and types. That is half of its 10 to 20 us for a payload of two to five values.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final, cast
from uuid import UUID

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import to_json, to_jsonable_python

from sqla_jobqueue.errors import PayloadError
from sqla_jobqueue.model import JsonValue
from sqla_jobqueue.payload.plain import MAX_DEPTH, Path, as_stored, at, is_entity, name_of, refusal, too_deep

CONFIG: Final = ConfigDict(
    extra="forbid",
    ser_json_bytes="base64",
    val_json_bytes="base64",
    ser_json_inf_nan="constants",
    hide_input_in_errors=True,
    populate_by_name=True,
)
_ATOMS: Final = frozenset({int, str, bool, float, type(None)})
_LIBRARY_TYPES: Final = frozenset({datetime, date, time, timedelta, Decimal, UUID})
"""A subclass, such as a test's frozen clock, may come back as one of these."""
_PLAIN: Final = _ATOMS | _LIBRARY_TYPES | {bytes}


def problems(error: ValidationError) -> tuple[str, Path]:
    """What pydantic found, without the values that it found it in, and the first place."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    # The one message that quotes its input.
    texts = ["unknown tag" if each["type"] == "union_tag_invalid" else each["msg"] for each in found]
    return "; ".join(f"{at(each['loc'])}: {text}" for each, text in zip(found, texts, strict=True)), found[0]["loc"]


def encode(adapter: TypeAdapter[Any], value: object, *, strict: bool = True) -> JsonValue:
    """The JSON of a value, exact in both directions.

    Args:
        adapter: of the value's type.
        value: what to write.
        strict: whether ``"4"`` is no int.

    Raises:
        PayloadError: the value is not of the adapter's type, or would come back changed.
    """
    try:
        checked = adapter.validate_python(value, strict=strict)
    except ValidationError as error:
        _refuse_entities(value, ())
        raise PayloadError(*problems(error)) from None
    # pydantic writes an entity that is a dataclass where it may be anything, and loads what is expired.
    _refuse_entities(checked, ())
    try:
        # No warnings: what does not fit its type cannot be read again, and that is seen below.
        plain = adapter.dump_python(checked, mode="json", by_alias=True, warnings="none")
    except ValueError as error:
        raise _unwritable(adapter, checked, error) from error
    stored = as_stored(plain)
    try:
        back = decode(adapter, stored)
    except ValidationError as error:
        text, path = problems(error)
        raise PayloadError(f"can be written as JSON, but not be read again: {text}", path) from None
    changed = _difference(checked, back, ())
    if changed is not None:
        raise _changed(*changed)
    return stored


def decode(adapter: TypeAdapter[Any], payload: JsonValue) -> Any:
    """The value that some JSON stands for. Lax, as pydantic is with any JSON: people and SQL write it too.

    Raises:
        ValidationError: the JSON does not fit.
    """
    return adapter.validate_json(to_json(payload, inf_nan_mode="constants"))


def _step(step: object) -> str | int:
    return step if isinstance(step, int) else str(step)


def _parts(value: object) -> Mapping[Any, object] | None:
    """What a value holds, by step of a path; None where it is no container."""
    if isinstance(value, (list, tuple)):
        return dict(enumerate(cast("Sequence[object]", value)))
    if isinstance(value, dict):
        return cast("dict[Any, object]", value)
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        return {name: part for name, part in vars(value).items() if name in fields} | (value.model_extra or {})
    if dataclasses.is_dataclass(value):
        return {each.name: getattr(value, each.name, None) for each in dataclasses.fields(value) if each.init}
    return None


def _difference(before: object, after: object, path: Path) -> tuple[Path, object, object] | None:
    """The first place where two values differ in value or type."""
    kind = type(before)
    if kind is not type(after) and not (type(after) in _LIBRARY_TYPES and isinstance(before, type(after))):
        return path, before, after
    if kind in _ATOMS:
        return None if before == after else (path, before, after)
    parts, others = _parts(before), _parts(after)
    if parts is None or others is None:
        return None if _equal(before, after) else (path, before, after)
    if parts.keys() != others.keys() or _types(parts) != _types(others) or kind is OrderedDict:
        return path, before, after
    for step, part in parts.items():
        found = _difference(part, others[step], (*path, _step(step)))
        if found:
            return found
    return None


def _equal(before: object, after: object) -> bool:
    if isinstance(before, datetime) and isinstance(after, datetime) and before.utcoffset() is not None:
        # Not ==, which calls two zones unequal in the hour that a clock repeats.
        return after.utcoffset() is not None and not before - after
    if type(before) in (set, frozenset):
        items, others = cast("tuple[set[object], set[object]]", (before, after))
        return items == others and _types(items) == _types(others)
    return before == after or type(before).__eq__ is object.__eq__


def _types(values: Iterable[object]) -> set[type]:
    return {type(value) for value in values}


def _changed(path: Path, before: object, after: object) -> PayloadError:
    outcome = "would come back changed" if type(before) is type(after) else f"would come back as {name_of(type(after))}"
    return PayloadError(
        f"{at(path)}: this {name_of(type(before))} {outcome}: pass plain JSON, or annotate the handler's parameter "
        "with the one type that is meant",
        path,
    )


def _unwritable(adapter: TypeAdapter[Any], value: object, error: ValueError) -> PayloadError:
    path = _culprit(value, ()) or _unwritable_part(adapter, value)
    advice = ""
    if isinstance(error, UnicodeDecodeError):
        advice = (
            '; a pydantic model writes bytes as text, unless its model_config says ser_json_bytes="base64" and '
            'val_json_bytes="base64"'
        )
    return PayloadError(f"{at(path)}: cannot be written as JSON: {error}{advice}", path)


def _unwritable_part(adapter: TypeAdapter[Any], value: object) -> Path:
    for step, part in (_parts(value) or {}).items():
        try:
            adapter.dump_python({step: part}, mode="json", warnings="none")
        except ValueError:
            return (step,)
    return ()


def _culprit(value: object, path: Path) -> Path | None:
    """The first part of a value that cannot be written."""
    parts = _parts(value)
    if parts is None:
        try:
            to_jsonable_python(value, bytes_mode="base64")
        except ValueError:
            return path
        return None
    found = (_culprit(part, (*path, _step(step))) for step, part in parts.items())
    return next(filter(None, found), None)


def _refuse_entities(value: object, path: Path) -> None:
    if type(value) in _PLAIN:
        return
    if len(path) > MAX_DEPTH:
        raise too_deep(path)
    if is_entity(value):
        raise PayloadError(f"{at(path)}: {refusal(value)}", path)
    parts = dict(enumerate(cast("set[object]", value))) if isinstance(value, (set, frozenset)) else _parts(value)
    if parts and not _types(parts.values()) <= _PLAIN:
        for step, part in parts.items():
            _refuse_entities(part, (*path, _step(step)))
