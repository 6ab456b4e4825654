"""Entity arguments: a mapped instance in Python, its primary key in JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Final, TypeVar, cast

from pydantic import Field, PydanticUserError, TypeAdapter
from sqlalchemy import BigInteger, ColumnElement, Integer, Row, SmallInteger, inspect
from sqlalchemy.orm import InstanceState, Mapper, Session

from sqla_jobqueue.errors import ConfigurationError, EnqueueError, EntityGone, PayloadError
from sqla_jobqueue.model import JsonValue
from sqla_jobqueue.payload.plain import name_of
from sqla_jobqueue.payload.typed import CONFIG, encode

E = TypeVar("E")

_INT_BITS: Final = ((SmallInteger, 15), (BigInteger, 63), (Integer, 31))


def mapper_of(entity: object) -> Mapper[Any] | None:
    """The mapper of a mapped class; None for anything else."""
    found: Mapper[Any] | None = inspect(entity, raiseerr=False) if isinstance(entity, type) else None
    return found


def _column_type(column: ColumnElement[Any]) -> Any:
    for kind, bits in _INT_BITS:
        if isinstance(column.type, kind):
            # "integer out of range" would break the handler's transaction before the handler has begun.
            return Annotated[int, Field(ge=-(2**bits), lt=2**bits)]
    try:
        found = column.type.python_type
    except NotImplementedError:  # SQLAlchemy 2.0
        return Any
    return Any if found is object else found


def key_type(mapper: Mapper[Any]) -> Any:
    """Annotation of a primary key in a payload: of the one column, or a tuple."""
    types = tuple(_column_type(column) for column in mapper.primary_key)
    return types[0] if len(types) == 1 else tuple.__class_getitem__(types)


@cache
def _key_adapter(mapper: Mapper[Any]) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(key_type(mapper), config=CONFIG)
    except PydanticUserError as error:
        raise ConfigurationError(
            f"{mapper.class_.__qualname__} is no entity argument: pydantic cannot handle its primary key: {error}"
        ) from error


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for an entity that is known by its key only."""

    entity: type[Any]
    key: tuple[Any, ...]
    stored: JsonValue = field(repr=False, compare=False)


def ref(entity: type[E], key: Any) -> E:
    """An entity argument for a producer that holds only the key.

    The declared type is a white lie: with it, a call is checked against the handler's signature. What is returned can
    only be passed to `enqueue`. No SQL is sent, so whether the row exists is seen when the job runs.

    Args:
        entity: the mapped class, or a subclass of the one in the annotation.
        key: as for `Session.get`: one value, or a tuple for a composite key.

    Raises:
        PayloadError: not a mapped class, a key of the wrong length or type, or a None in it.
    """
    mapper = mapper_of(entity)
    if mapper is None:
        given: object = entity
        shown = name_of(given) if isinstance(given, type) else f"an instance of {name_of(type(given))}"
        raise PayloadError(f"ref() takes a mapped class and a key, not {shown}")
    name = mapper.class_.__qualname__
    columns = [column.name for column in mapper.primary_key]
    values: tuple[Any, ...] = tuple(key) if issubclass(type(key), (tuple, Row)) else (key,)
    if len(values) != len(columns):
        raise PayloadError(
            f"ref({name}, ...): the key is ({', '.join(columns)}), and {len(values)} value(s) were given"
        )
    if any(value is None for value in values):
        raise PayloadError(
            f"ref({name}, ...): the key holds a None: pass the object itself, its key is stored once it is flushed"
        )
    return cast("E", Ref(entity, values, _written(mapper, values, strict=True)))


def _written(mapper: Mapper[Any], key: tuple[Any, ...], *, strict: bool) -> JsonValue:
    try:
        return encode(_key_adapter(mapper), key[0] if len(key) == 1 else key, strict=strict)
    except PayloadError as error:
        unknown = [repr(column.type) for column in mapper.primary_key if _column_type(column) is Any]
        advice = f"; give the column type {', '.join(unknown)} a `python_type` property" if unknown else ""
        problem = str(error).removeprefix("the payload: ")
        raise PayloadError(f"key of {mapper.class_.__qualname__}: {problem}{advice}", error.path) from error.__cause__


def key_of(entity: object) -> JsonValue:
    """The JSON key of a row: one value, or a list for a composite key. Sends no SQL, even where attributes are expired.

    Within `after_flush` an object that was just inserted counts, too.

    Raises:
        EnqueueError: the object stands for no row of its session, or its key is about to change.
    """
    state: InstanceState[Any] | None = inspect(entity, raiseerr=False)
    if not isinstance(state, InstanceState):
        raise PayloadError(f"{type(entity).__qualname__} is no mapped class")
    mapper: Mapper[Any] = state.mapper
    name = mapper.class_.__qualname__
    identity = state.identity if state.persistent else None
    if state.pending:
        identity = tuple(mapper.primary_key_from_instance(entity))
    if identity is None or None in identity:
        raise EnqueueError(f"{name} has no key to rely on: it is not a row of its session")
    if state.persistent and state.modified:
        keys = [mapper.get_property_by_column(column).key for column in mapper.primary_key]
        if any(state.attrs[key].history.has_changes() for key in keys):
            raise EnqueueError(f"the primary key of {name} was changed: session.flush() before the job is enqueued")
    return _written(mapper, tuple(identity), strict=False)


@dataclass(frozen=True, slots=True)
class EntityParameter:
    """A handler's parameter that is annotated with a mapped class.

    Attributes:
        name: of the parameter, ``order``.
        key: its place in the payload, ``order_id``.
        optional: whether None is allowed, and then also a deleted row.
        metadata: of `Annotated`.
    """

    name: str
    key: str
    entity: type[Any]
    optional: bool
    metadata: tuple[Any, ...]

    def checked(self, value: object) -> object:
        """The argument, once it is of the right class."""
        name = self.entity.__qualname__
        if value is None and self.optional:
            return None
        if isinstance(value, Ref):
            if self._takes(value.entity):
                return value
            raise PayloadError(f"{self.name}: takes {name}, not ref({value.entity.__qualname__}, ...)", (self.name,))
        if self._takes(type(value)):
            return value
        if value is None:
            problem = f"is None; annotate it `{name} | None` where that is meant"
        else:
            problem = f"takes an instance of {name}, or ref({name}, key), not {type(value).__qualname__}"
        raise PayloadError(f"{self.name}: {problem}", (self.name,))

    def _takes(self, entity: type[Any]) -> bool:
        # A concrete subclass has a table of its own: the key would find another row in this one.
        mapper, target = mapper_of(entity), mapper_of(self.entity)
        while mapper is not None and mapper is not target and not mapper.concrete:
            mapper = mapper.inherits
        return mapper is target


def reference(entity: object, session: Session) -> tuple[JsonValue, bool]:
    """What stands in the payload for an entity argument, and whether the key is still to come.

    Only a persistent object has a key to rely on: after a rollback, a transient one keeps the dead value. Only a
    pending one of the same session will have a key in the same transaction.

    Raises:
        EnqueueError: says where the object is, and what to do.
    """
    if entity is None:
        return None, False
    if isinstance(entity, Ref):
        return entity.stored, False
    state: InstanceState[Any] = inspect(entity)
    name = state.mapper.class_.__qualname__
    owner = state.session
    if owner is session and state.pending:
        return None, True
    if owner is session and state.persistent and entity not in session.deleted:
        return key_of(entity), False
    if state.transient:
        advice = "session.add() it first; after a rollback, add it anew"
        raise EnqueueError(f"{name} is transient, no session holds it: {advice}")
    if state.was_deleted or (owner is session and entity in session.deleted):
        raise EnqueueError(
            f"{name} is deleted in this session: the job would not find it; pass the values that it needs"
        )
    where = "detached" if owner is None else "in another session"
    raise EnqueueError(f"{name} is {where}: pass ref({name}, key), or session.merge() it")


def load(parameter: EntityParameter, key: Any, session: Session, kind: str) -> object:
    """The row that a key names, through the session.

    Raises:
        EntityGone: there is none, and the parameter is not optional.
    """
    found = session.get(parameter.entity, key)
    if found is None and not parameter.optional:
        raise EntityGone(
            f"{kind}: there is no {parameter.entity.__qualname__} {key} (any more), {parameter.name!r} needs one"
        )
    return found
