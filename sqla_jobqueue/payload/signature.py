"""What a handler's signature says about its payload.

Its shape is read at once. Its annotations are resolved later, since they may name what is not defined yet.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NewType, NotRequired, cast

import typing_extensions
from pydantic import TypeAdapter
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from sqla_jobqueue.errors import ConfigurationError
from sqla_jobqueue.payload.entities import EntityParameter, key_type, mapper_of
from sqla_jobqueue.payload.typed import CONFIG

_UNIONS = (typing.Union, types.UnionType)


@dataclass(frozen=True, slots=True)
class Plan:
    """A signature, resolved.

    Attributes:
        adapter: of the whole payload; the keys of entities are optional in it, a call has none yet.
        entities: the parameters annotated with a mapped class.
        as_is: names of the parameters that take any JSON.
    """

    adapter: TypeAdapter[dict[str, Any]]
    entities: tuple[EntityParameter, ...]
    as_is: tuple[str, ...]


def function_of(handler: Callable[..., Any]) -> Callable[..., Any]:
    """The function behind a partial, or behind an object with a ``__call__``."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    return handler if inspect.isroutine(handler) else type(handler).__call__


def parameters_of(handler: Callable[..., Any], kind: str) -> list[inspect.Parameter]:
    """The parameters of a handler, its session first.

    Raises:
        ConfigurationError: they cannot be a job's.
    """
    if not callable(handler) or isinstance(handler, type):
        raise ConfigurationError(f"{kind}: a handler is a function, not {handler!r}")
    function = function_of(handler)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(f"{kind}: the handler is a generator, so its body would never run: take out the yield")
    parameters = [*inspect.signature(handler).parameters.values()]
    if not parameters or parameters[0].kind not in {
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    }:
        raise ConfigurationError(
            f"{kind}: a handler takes the session as its first parameter: def {kind}(session, ...)"
        )
    for each in parameters[1:]:
        if each.kind in {each.VAR_POSITIONAL, each.VAR_KEYWORD}:
            raise ConfigurationError(
                f"{kind}: {each} gives a payload no names: name every parameter; one of them may be a dict or a list"
            )
        if each.kind is each.POSITIONAL_ONLY:
            raise ConfigurationError(
                f"{kind}: {each.name!r} is positional-only, and payloads go by name: put the / behind the session"
            )
    return parameters


def make_plan(kind: str, handler: Callable[..., Any], parameters: Collection[inspect.Parameter]) -> Plan:
    """Resolve the annotations of the parameters behind the session.

    Raises:
        ConfigurationError: names the parameter, and what to do about it.
    """
    hints = {each.name: _resolve(kind, handler, each) for each in parameters}
    found = {name: _entity(kind, name, hint) for name, hint in hints.items()}
    entities = tuple(each for each in found.values() if each)
    fields: dict[str, Any] = {}
    for each in parameters:
        if not found[each.name]:
            hint = hints[each.name]
            fields[each.name] = hint if each.default is each.empty else NotRequired[hint]
    for entity in entities:
        if entity.key in hints:
            raise ConfigurationError(
                f"{kind}: parameter {entity.key!r} stands in the payload where {entity.name!r} has its key: rename one"
            )
        hint = key_type(cast("Any", mapper_of(entity.entity)))
        fields[entity.key] = NotRequired[hint | None if entity.optional else hint]
    as_is = tuple(name for name, hint in hints.items() if _strip(hint)[0] is Any)
    return Plan(_adapter(kind, fields), entities, as_is)


def check_session(kind: str, handler: Callable[..., Any], parameter: inspect.Parameter) -> None:
    """Compare the flavour of the session's annotation with the handler's.

    Raises:
        ConfigurationError: an async handler asks for a sync session, or the other way round.
    """
    try:
        hint, _ = _strip(_resolve(kind, handler, parameter))
    except ConfigurationError:
        return  # imported for type checkers only, and nothing else depends on it
    annotated = typing.get_origin(hint) or hint
    if not isinstance(annotated, type):
        return
    shown = f"{kind}: {parameter.name!r} is annotated with {annotated.__qualname__}"
    is_async = inspect.iscoroutinefunction(function_of(handler))
    if is_async and issubclass(annotated, Session):
        raise ConfigurationError(
            f"{shown}, but an async handler gets an AsyncSession: AsyncJobSession[...], or a plain def"
        )
    if not is_async and issubclass(annotated, AsyncSession):
        raise ConfigurationError(f"{shown}, but a sync handler gets a Session: JobSession[...], or async def")
    if mapper_of(annotated) or (annotated.__module__ == "builtins" and annotated is not object):
        raise ConfigurationError(f"{shown}, but it gets the session: def {kind}(session, {parameter.name}, ...)")


def _resolve(kind: str, handler: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    if parameter.annotation is parameter.empty:
        return Any
    function = inspect.unwrap(function_of(handler))

    def carrier() -> None: ...

    carrier.__annotations__ = {"it": parameter.annotation}
    names = getattr(function, "__globals__", {})
    try:
        return typing.get_type_hints(carrier, globalns=names, include_extras=True)["it"]
    except Exception as error:  # an annotation is any expression
        raise ConfigurationError(
            f"{kind}: the annotation {parameter.annotation!r} of {parameter.name!r} cannot be resolved ({error}): "
            f"import or define it at the top of {function.__module__}, not under TYPE_CHECKING nor inside of a function"
        ) from error


def _strip(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A hint without aliases and `Annotated`, and the metadata of the latter."""
    metadata: tuple[Any, ...] = ()
    while True:
        if typing.get_origin(hint) is Annotated:
            metadata += hint.__metadata__
            hint = hint.__origin__
        elif isinstance(hint, typing_extensions.TypeAliasType):
            hint = hint.__value__
        else:
            return hint, metadata


def _entity(kind: str, name: str, hint: Any) -> EntityParameter | None:
    plain, metadata = _strip(hint)
    choices = typing.get_args(plain) if typing.get_origin(plain) in _UNIONS else (plain,)
    stripped = [_strip(choice) for choice in choices if choice is not type(None)]
    if len(stripped) == 1 and mapper_of(stripped[0][0]):
        entity, inner = stripped[0]
        return EntityParameter(name, f"{name}_id", entity, len(choices) > 1, metadata + inner)
    nested = next(_nested(hint), None)
    if nested is None:
        return None
    raise ConfigurationError(
        f"{kind}: {name!r} is annotated with {hint!r}: a mapped class stands alone, as {nested.__qualname__} or "
        f"{nested.__qualname__} | None; for several, enqueue a job for each, or pass keys and load them in the handler"
    )


def _nested(hint: Any) -> Iterator[type[Any]]:
    plain, _ = _strip(hint)
    if mapper_of(plain):
        yield plain
    for argument in typing.get_args(plain):
        yield from _nested(argument)


def _refuse_parts(schema: Any) -> None:
    """Look through a core schema, such as the fields of a model, for what no payload can serve."""
    parts: Iterable[Any] = ()
    if isinstance(schema, Mapping):  # where it is not complete, reading it raises pydantic's advice
        found = cast("Mapping[str, Any]", schema)
        mapper = mapper_of(found.get("cls"))
        if mapper:
            raise TypeError(f"{mapper.class_.__qualname__} is a mapped class, which stands alone as a parameter")
        if found.get("type") == "generator":
            raise TypeError("an Iterable or Generator is checked only while it is read: annotate a list")
        parts = found.values()
    elif isinstance(schema, (list, tuple)):
        parts = cast("Sequence[Any]", schema)
    for part in parts:
        _refuse_parts(part)


def _adapter(kind: str, fields: dict[str, Any]) -> TypeAdapter[dict[str, Any]]:
    try:
        return _typed_dict(fields)
    except Exception as error:
        for name, hint in fields.items():
            try:
                _typed_dict({name: hint})
            except Exception as cause:
                raise ConfigurationError(
                    f"{kind}: {name!r}: pydantic cannot handle {hint!r}: {_first_line(cause)}"
                ) from cause
        raise ConfigurationError(f"{kind}: pydantic cannot handle the signature: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _typed_dict(fields: dict[str, Any]) -> TypeAdapter[dict[str, Any]]:
    # Not create_model(): a parameter may be called `json` or `schema`. The NewType carries the configuration to the
    # serializer, which does not ask a TypedDict for its own.
    shape = cast("Any", typing_extensions.TypedDict)("Payload", fields)
    shape.__pydantic_config__ = CONFIG
    payload: Any = cast("Any", NewType)("Payload", shape)
    adapter = TypeAdapter[dict[str, Any]](payload, config=CONFIG)
    _refuse_parts(adapter.core_schema)
    return adapter
