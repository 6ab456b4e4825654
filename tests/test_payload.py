"""Signatures as payloads: what round-trips, what is refused, and what an entity argument needs."""

# ruff: noqa: DTZ001, DTZ901  # naive instants are among the values that must come back
import asyncio
import contextlib
import dataclasses
import functools
import json
import math
import sys
import textwrap
import traceback
import types
import uuid
import zoneinfo
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import pydantic
import pytest
import typing_extensions
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    RootModel,
    SecretStr,
    computed_field,
    field_validator,
    model_serializer,
)
from pydantic_core import core_schema
from sqlalchemy import (
    CHAR,
    DateTime,
    Engine,
    ForeignKey,
    SmallInteger,
    TypeDecorator,
    bindparam,
    event,
    inspect,
    select,
    type_coerce,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Session, mapped_column
from sqlmodel import Field as SQLField
from sqlmodel import SQLModel
from typing_extensions import TypedDict

from sqla_jobqueue.errors import ConfigurationError, EnqueueError, EntityGone, PayloadError, PayloadNotReadable
from sqla_jobqueue.payload import Bound, Codec, Ref, check_json, key_of, ref
from tests.helpers import open_async_engine

T = TypeVar("T")


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(default="order")
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "order"}  # noqa: RUF012  # SQLAlchemy reads it


class RushOrder(Order):
    __mapper_args__ = {"polymorphic_identity": "rush"}  # noqa: RUF012  # as above


class Archived(Order):
    __tablename__ = "archived_orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(default="archived")
    __mapper_args__ = {"concrete": True, "polymorphic_identity": "archived"}  # noqa: RUF012  # as above


class Line(Base):
    __tablename__ = "lines"
    order_id: Mapped[int] = mapped_column(ForeignKey("orders.id"), primary_key=True)
    sku: Mapped[str] = mapped_column(primary_key=True)


class Token(Base):
    __tablename__ = "tokens"
    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, default=uuid.uuid4)


class Slot(Base):
    __tablename__ = "slots"
    at: Mapped[datetime] = mapped_column(DateTime(timezone=True), primary_key=True)


class Tiny(Base):
    __tablename__ = "tinies"
    id: Mapped[int] = mapped_column(SmallInteger, primary_key=True)


class Guid(TypeDecorator):
    """The recipe of SQLAlchemy's manual, which does not tell its Python type."""

    impl = CHAR(32)
    cache_ok = True

    def process_bind_param(self, value, _dialect):
        return None if value is None else value.hex

    def process_result_value(self, value, _dialect):
        return None if value is None else uuid.UUID(value)


class TypedGuid(Guid):
    cache_ok = True
    python_type = uuid.UUID


class Untyped(Base):
    __tablename__ = "untyped"
    id = mapped_column(Guid, primary_key=True)


class Typed(Base):
    __tablename__ = "typed"
    id = mapped_column(TypedGuid, primary_key=True)


class Hero(SQLModel, table=True):
    """A BaseModel and a mapped class at once."""

    id: int | None = SQLField(default=None, primary_key=True)
    name: str = ""


class DataBase(MappedAsDataclass, DeclarativeBase):
    pass


class Point(DataBase):
    __tablename__ = "points"
    id: Mapped[int] = mapped_column(primary_key=True, init=False)
    x: Mapped[int]


def codec(hint: Any = Any, /, **hints: Any) -> Codec:
    """The codec of a handler with these annotations, or of ``handler(session, value: hint)``."""
    hints = hints or {"value": hint}
    space: dict[str, Any] = {}
    exec(f"def handler(session, {', '.join(hints)}): ...", space)  # noqa: S102  # the names are the test's own
    space["handler"].__annotations__ = hints
    return Codec(space["handler"], "handler")


def short(value: Any) -> str:
    """An id for a test's parameter."""
    return value if isinstance(value, str) and value.isprintable() else type(value).__name__


def nowhere() -> Session:
    """A session that cannot send anything."""
    return Session()


def through(made: Codec, **values: Any) -> dict[str, Any]:
    return made.decode(json.loads(json.dumps(made.bind((), values).values)), nowhere())


@contextlib.contextmanager
def statements(engine: Engine) -> Iterator[list[str]]:
    sent: list[str] = []

    def note(_connection, _cursor, statement, *_rest):
        sent.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    yield sent
    event.remove(engine, "before_cursor_execute", note)


# What round-trips, R07


class Colour(Enum):
    RED = "red"
    BLUE = 2


class Level(IntEnum):
    LOW = 1


class Size(StrEnum):
    S = "s"


@dataclasses.dataclass
class Box:
    width: Decimal
    labels: list[bytes]


@dataclasses.dataclass(eq=False)
class Bare:
    width: int


class Pair(NamedTuple):
    left: int
    right: datetime


class Shape(TypedDict):
    name: str
    corners: set[int]


class Address(BaseModel):
    zip_code: str = Field(alias="zipCode")
    since: date
    _cached: int = PrivateAttr(default=0)


class Blob(BaseModel):
    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
    data: bytes


class Plain(BaseModel):
    data: bytes


@dataclasses.dataclass
class Computed:
    width: int
    area: int = dataclasses.field(init=False)
    note: Any = dataclasses.field(default=None, compare=False)
    lock: Any = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self):
        self.area = self.width**2
        self.lock = uuid.uuid4()


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")

    @functools.cached_property
    def double(self):
        return object()


class Dropping(Open):
    @model_serializer
    def drop(self):
        return {}


class Growing(Open):
    @computed_field
    @property
    def half(self) -> int:
        return 1


class Opaque:
    """A type of somebody's own, without an `__eq__`."""

    def __init__(self, n):
        self.n = n

    @classmethod
    def __get_pydantic_core_schema__(cls, _source, _handler):
        return core_schema.json_or_python_schema(
            json_schema=core_schema.no_info_plain_validator_function(cls),
            python_schema=core_schema.is_instance_schema(cls),
            serialization=core_schema.plain_serializer_function_ser_schema(lambda it: it.n),
        )


BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")

READS_WIDE_FLOATS = tuple(map(int, pydantic.VERSION.split(".")[:2])) >= (2, 12)
WIDEST = sys.float_info.max if READS_WIDE_FLOATS else 1e17

KEPT: list[tuple[Any, Any]] = [
    (int, 2**70),
    (int, -(10**4000)),
    *([(float, 1e308), (float, 1e22)] if READS_WIDE_FLOATS else []),
    (float, 1e16),
    (float, 5e-324),
    (float, 0.1),
    (float, 10.0),
    (bool, True),
    (str, "a\nb \u2028 \U0001f600 </script> \x1b[31m"),
    (bytes, bytes(range(256))),
    (list[bytes], [b"", b"\xff\x00"]),
    (datetime, datetime(2026, 10, 25, 2, 30, 0, 123456)),
    (datetime, datetime(2026, 10, 25, 2, 30, tzinfo=UTC)),
    (datetime, datetime(2026, 7, 1, 2, 30, tzinfo=timezone(timedelta(hours=-3, minutes=-30)))),
    (datetime, datetime.max.replace(tzinfo=UTC)),
    (datetime, datetime.min),
    (date, date(2026, 2, 28)),
    (time, time(23, 59, 59, 999999)),
    (timedelta, timedelta(days=-400, microseconds=1)),
    (timedelta, timedelta.max),
    (Decimal, Decimal("0.10")),
    (Decimal, Decimal("1E+400")),
    (uuid.UUID, uuid.UUID(int=2**127)),
    (Colour, Colour.BLUE),
    (Level, Level.LOW),
    (Size, Size.S),
    (Literal["a", 1], 1),
    (set[int], {3, 1}),
    (frozenset[str], frozenset({"a"})),
    (tuple[int, str], (1, "a")),
    (tuple[date, ...], (date(2026, 1, 1),)),
    (dict[int, Decimal], {1: Decimal("1.50"), -2: Decimal(0)}),
    (dict[str, list[datetime]], {"a": [datetime(2026, 1, 1)]}),
    (Box, Box(Decimal("0.10"), [b"\xff"])),
    (list[Box], [Box(Decimal("0.10"), [])]),
    (Bare, Bare(3)),
    (Pair, Pair(1, datetime(2026, 1, 1))),
    (Shape, {"name": "x", "corners": {1, 2}}),
    (Address, Address(zipCode="01234", since=date(2026, 1, 1))),
    (Blob, Blob(data=b"\xff")),
    (Plain, Plain(data=b"text")),
    (Computed, Computed(3)),
    (Open, Open(more=[1])),
    (RootModel[list[int]], RootModel[list[int]]([1])),
    (int | None, None),
    (str | int, "1"),
    (str | int, 1),
    (date | datetime, date(2026, 1, 1)),
    (Annotated[int, Field(gt=0)], 1),
    (Annotated[int, Field(alias="other")], 1),
    (typing_extensions.TypeAliasType("Ids", list[int]), [1]),
    (Any, {"a": [1, 1.5, None, True, {"b": "c"}]}),
    (list, [1, "a"]),
    (None, None),
]


@pytest.mark.parametrize(("hint", "value"), KEPT, ids=short)
def test_comes_back_equal_and_of_the_same_type(hint, value):
    found = through(codec(hint), value=value)["value"]
    assert type(found) is type(value)
    assert dataclasses.astuple(found) == dataclasses.astuple(value) if hint is Bare else found == value
    assert repr(found) == repr(value) or isinstance(value, datetime | set)


def test_comes_back_from_jsonb(engine):
    codecs = [codec(hint) for hint, _ in KEPT]
    stored = [made.bind((value,), {}).values for made, (_, value) in zip(codecs, KEPT, strict=True)]
    with engine.connect() as connection:
        found = connection.scalar(select(type_coerce(bindparam("it", stored, JSONB), JSONB)))
    for made, payload, (hint, value) in zip(codecs, found, KEPT, strict=True):
        back = made.decode(payload, nowhere())["value"]
        assert type(back) is type(value)
        assert back == value or hint is Bare


def test_aware_datetimes_keep_the_instant_also_in_the_hour_that_a_clock_repeats():
    for fold in (0, 1):
        when = datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN, fold=fold)
        found = through(codec(datetime), value=when)["value"]
        assert found.timestamp() == when.timestamp()


def test_a_subclass_of_a_library_type_is_taken_as_the_type():
    class Frozen(datetime):
        """As the fake clocks of tests have."""

    made = codec(when=datetime, name=str, number=float)
    found = through(made, when=Frozen(2026, 1, 1), name=Size.S, number=type("F", (float,), {})(1.5))
    assert found == {"when": datetime(2026, 1, 1), "name": "s", "number": 1.5}
    assert [type(value) for value in found.values()] == [datetime, str, float]


def test_an_int_is_a_float_where_the_annotation_says_float():
    assert type(through(codec(float), value=1)["value"]) is float


def test_only_passed_arguments_are_stored():
    def handler(session, a: int, b: int = 2, *, c: int = 3): ...

    made = Codec(handler, "handler")
    assert made.bind((1,), {}).values == {"a": 1}
    assert made.bind((1,), {"c": 4}).values == {"a": 1, "c": 4}
    assert made.decode({"a": 1, "c": 4}, nowhere()) == {"a": 1, "c": 4}
    assert made.decode({"a": 1}, nowhere()) == {"a": 1}


def test_a_handler_may_take_nothing_but_the_session():
    made = Codec(lambda _session: None, "handler")
    made.check()
    assert made.bind((), {}) == Bound({}, {})
    assert made.attach(Bound({}, {}), nowhere()) == ({}, {})
    assert made.decode({}, nowhere()) == {}
    with pytest.raises(PayloadNotReadable, match="a: Extra inputs"):
        made.decode({"a": 1}, nowhere())


def test_any_parameter_name_will_do():
    names = ("json", "schema", "copy", "model_config", "model_fields", "_private", "self", "validate", "kind", "root")
    made = codec(**dict.fromkeys(names, int))
    assert through(made, **dict.fromkeys(names, 1)) == dict.fromkeys(names, 1)


def test_a_bound_payload_does_not_change_with_its_arguments():
    numbers, anything = [1], {"a": [1]}
    bound = codec(numbers=list[int], anything=Any).bind((numbers, anything), {})
    numbers.append(2)
    anything["a"].append(2)
    assert bound.values == {"numbers": [1], "anything": {"a": [1]}}


# What is refused at the call


def loop() -> list[Any]:
    it: list[Any] = []
    it += [it, it]
    return it


def deep(levels: int) -> list[Any]:
    it: list[Any] = []
    for _ in range(levels - 1):
        it = [it]
    return it


NOT_JSON: list[tuple[Any, tuple[Any, ...], str]] = [
    (math.nan, (), "nan is no JSON number"),
    ({"a": [0, {"b": math.inf}]}, ("a", 1, "b"), r"a\[1\]\.b: inf is no JSON number"),
    ([-math.inf], (0,), "-inf"),
    ({"a": "x\0y"}, ("a",), "a: text holds a NUL character"),
    ({"a": {"x\0y": 1}}, ("a",), r"a: a key, 'x\\x00y', holds a NUL character"),
    (["\ud800"], (0,), "lone surrogate"),
    ({"\ud800": 1}, (), r"a key, '\\ud800', holds a lone surrogate"),
    ({1: 2}, (), "a key is int, the keys of JSON objects are str"),
    ({"a": {None: 2}}, ("a",), "a: a key is NoneType"),
    ({True: 2}, (), "a key is bool"),
    (1e22, (), r"1e\+22 would come back as an int"),
    ([1e308], (0,), "come back as an int"),
    (-1e16, (), "come back as an int"),
    (10**4300, (), "4,200 digits"),
    ((1, 2), (), "tuple is no JSON, pass a list"),
    ({"a": {1}}, ("a",), "set is no JSON, pass a list"),
    (datetime(2026, 1, 1), (), "datetime.datetime is no JSON: accepted as they are: dict"),
    ([Decimal(1)], (0,), "decimal.Decimal is no JSON"),
    (uuid.UUID(int=1), (), "uuid.UUID is no JSON"),
    (b"a", (), "bytes is no JSON"),
    (Size.S, (), "Size is no JSON"),
    (Level.LOW, (), "Level is no JSON"),
    (OrderedDict(a=1), (), "OrderedDict is no JSON"),
    (object(), (), "object is no JSON"),
    (Order(), (), "mapped class Order is no JSON: annotate"),
    (loop(), (0,) * 101, "nested deeper than 100 levels"),
    (deep(102), (0,) * 101, "nested deeper than 100 levels"),
]


@pytest.mark.parametrize(("value", "path", "text"), NOT_JSON, ids=short)
def test_what_json_cannot_hold_is_refused_with_its_path(value, path, text):
    with pytest.raises(PayloadError, match=text) as caught:
        check_json(value)
    assert caught.value.path == path
    with pytest.raises(PayloadError, match=text.removeprefix("a: ")) as caught:
        codec().bind((value,), {})
    assert caught.value.path[: len(path) + 1] == ("value", *path)[: len(caught.value.path)]


def test_a_typed_container_refuses_the_same():
    for hint in (list[Any], dict[str, Any], list, dict):
        for value, _, _ in NOT_JSON:
            for container in ([value], {"a": value}):
                with pytest.raises(PayloadError):
                    codec(hint).bind((container,), {})


def test_json_that_is_accepted_is_copied():
    value = {"a": [1, 2**70, 1.5, 1e15, "x", None, True, {"b": []}], "": deep(90)}
    found = check_json(value)
    assert found == value
    assert found is not value
    assert found["a"] is not value["a"]


PASSED_TO: list[tuple[Any, Any, tuple[Any, ...], str]] = [
    (int, "1", ("value",), "value: Input should be a valid integer"),
    (int, True, ("value",), "valid integer"),
    (int, 1.0, ("value",), "valid integer"),
    (int, None, ("value",), "valid integer"),
    (float, math.nan, ("value",), "value: nan is no JSON number"),
    (float | None, math.inf, ("value",), "value: inf is no JSON number"),
    (list[float], [0.0, math.nan], ("value", 1), r"value\[1\]: nan"),
    (str, "a\0b", ("value",), "value: text holds a NUL"),
    (str, "\udfff", ("value",), "lone surrogate"),
    (dict[str, int], {"a\0b": 1}, ("value",), "NUL"),
    (list[int], (1,), ("value",), "valid list"),
    (list[int], [1, 2, "3"], ("value", 2), r"value\[2\]: Input should be a valid integer"),
    (Sequence[int], (1,), ("value",), "value: this tuple would come back as list"),
    (OrderedDict[str, int], OrderedDict(b=1, a=2), ("value",), "OrderedDict would come back changed"),
    (Annotated[int, Field(gt=0)], 0, ("value",), "greater than 0"),
    (Colour, "red", ("value",), "instance of Colour"),
    (Level | int, Level.LOW, ("value",), "Level would come back as int"),
    (list[Size | str], [Size.S], ("value", 0), "Size would come back as str"),
    (set[Level | int], {Level.LOW}, ("value",), "set would come back changed"),
    (str | Decimal, Decimal("0.10"), ("value",), "would come back as str"),
    (str | bytes, b"abc", ("value",), "would come back"),
    (int | float, 1e22, ("value",), "this float would come back as int"),
    (list[Any], [{"a": uuid.UUID(int=1)}], ("value", 0, "a"), r"value\[0\]\.a: this uuid.UUID would come back as str"),
    (dict[Any, int], {1: 2}, ("value",), "dict would come back changed"),
    (dict[str, Any], {"a": [object()]}, ("value", "a", 0), r"value\.a\[0\]: cannot be written as JSON"),
    (list[Any], [[math.inf]], ("value", 0, 0), r"value\[0\]\[0\]: inf is no JSON number"),
    (dict[Size | str, int], {Size.S: 1}, ("value",), "dict would come back changed"),
    (Bare, Bare(uuid.UUID(int=1)), ("value", "width"), "valid integer"),
    (Computed, Computed(1, note=uuid.UUID(int=1)), ("value", "note"), "UUID would come back as str"),
    (Open, Open(more=uuid.UUID(int=1)), ("value", "more"), "UUID would come back as str"),
    (Dropping, Dropping(more=1), ("value",), "Dropping would come back changed"),
    (Growing, Growing(more=1), ("value",), "Growing would come back changed"),
    (SecretStr, SecretStr("hunter2"), ("value",), "would come back changed"),
    (Box, {"width": Decimal(1), "labels": []}, ("value",), "instance of Box"),
    (
        Plain,
        Plain(data=b"\xff"),
        ("value",),
        'value: cannot be written as JSON: .*model_config says ser_json_bytes="base64"',
    ),
    (Plain, Plain.model_construct(data=4), ("value", "data"), "can be written as JSON, but not be read again"),
    (datetime, datetime(1900, 1, 1, tzinfo=timezone(timedelta(seconds=1172))), ("value",), "would come back changed"),
    (int, Order(), ("value",), "mapped class Order is no JSON: annotate the handler's parameter with Order"),
    (dict[str, Any], {"a": [Point(x=1)]}, ("value", "a", 0), "mapped class Point is no JSON"),
    (list[Any], [Hero()], ("value", 0), "mapped class Hero is no JSON"),
    (Any, [ref(Order, 4)], ("value", 0), "Ref is no JSON"),
]


@pytest.mark.parametrize(("hint", "value", "path", "text"), PASSED_TO, ids=short)
def test_what_would_not_come_back_the_same_is_refused_with_its_path(hint, value, path, text):
    with pytest.raises(PayloadError, match=text) as caught:
        codec(hint).bind((value,), {})
    assert caught.value.path == path
    assert str(caught.value).startswith("handler: ")


def test_a_validator_that_changes_its_own_output_is_refused():
    class Doubled(BaseModel):
        n: int

        @field_validator("n")
        @classmethod
        def double(cls, n: int) -> int:
            return 2 * n

    with pytest.raises(PayloadError, match=r"value\.n: this int would come back changed"):
        codec(Doubled).bind((Doubled(n=1),), {})


def test_what_cannot_be_compared_is_taken_at_its_type():
    assert through(codec(Opaque), value=Opaque(3))["value"].n == 3


def test_a_property_that_was_cached_is_no_difference():
    value = Open(more=1)
    assert value.double
    assert through(codec(Open), value=value) == {"value": Open(more=1)}


def test_a_subclass_that_would_lose_its_fields_is_refused():
    class Wide(Plain):
        more: int

    with pytest.raises(PayloadError, match=r"Wide would come back as .*Plain"):
        codec(Plain).bind((Wide(data=b"", more=1),), {})


def test_arguments_that_do_not_fit_the_signature_name_it():
    def send(session, a: int, b: str = "x", *, c: int = 3): ...

    made = Codec(send, "send")
    shown = r"send\(a: int, b: str = 'x', \*, c: int = 3\)"
    for args, kwargs, text, path in [
        ((), {}, f"{shown} misses 'a'", ("a",)),
        ((1, "x", 3), {}, rf"{shown} takes 2 positional argument\(s\), not 3", ()),
        ((1,), {"d": 4}, f"{shown} has no parameter 'd'", ("d",)),
        ((1,), {"session": 4}, f"{shown} has no parameter 'session'", ("session",)),
        ((1,), {"a": 1}, f"{shown} got parameter 'a' twice", ("a",)),
    ]:
        with pytest.raises(PayloadError, match=text) as caught:
            made.bind(args, kwargs)
        assert caught.value.path == path


def test_payload_errors_are_type_errors_and_enqueue_errors():
    with pytest.raises(TypeError) as caught:
        codec(int).bind(("1",), {})
    assert isinstance(caught.value, EnqueueError)


def test_the_error_of_a_call_does_not_show_the_value():
    secret = "hunter2"
    with pytest.raises(PayloadError) as caught:
        codec(int).bind((secret,), {})
    assert secret not in "".join(traceback.format_exception(caught.value))
    assert secret not in str(caught.value.__context__.__context__)


TEXT = st.text(st.characters(exclude_categories=()))
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


def exactly(value: Any) -> Any:
    """A form that is equal only for values of the same types."""
    if isinstance(value, list):
        return [exactly(item) for item in value]
    if isinstance(value, dict):
        return {key: exactly(item) for key, item in value.items()}
    return type(value), value


def test_json_is_accepted_if_and_only_if_jsonb_gives_it_back(engine):
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:

        def jsonb(value: Any) -> Any:
            return connection.scalar(select(type_coerce(bindparam("it", value, JSONB), JSONB)))

        @settings(max_examples=300, deadline=None)
        @given(ANYTHING)
        def check(value):
            try:
                accepted = check_json(value)
            except PayloadError:
                with contextlib.suppress(DBAPIError):
                    assert exactly(jsonb(value)) != exactly(value)
                return
            stored = jsonb(accepted)
            assert exactly(stored) == exactly(value)
            payload = codec().bind((value,), {}).values
            assert exactly(codec().decode(payload | {"value": stored}, nowhere())["value"]) == exactly(value)

        check()


@settings(max_examples=100, deadline=None)
@given(
    when=st.datetimes(timezones=st.none() | st.timezones()),
    wait=st.timedeltas(),
    amount=st.decimals(allow_nan=False, allow_infinity=False),
    data=st.binary(max_size=20),
    number=st.floats(-WIDEST, WIDEST),
)
def test_any_value_of_a_type_comes_back_or_is_refused(when, wait, amount, data, number):
    made = codec(when=datetime, wait=timedelta, amount=Decimal, data=bytes, number=float)
    values = {"when": when, "wait": wait, "amount": amount, "data": data, "number": number}
    try:
        found = through(made, **values)
    except PayloadError as error:
        assert error.path == ("when",)  # noqa: PT017  # only an offset with seconds is refused
        assert when.utcoffset().total_seconds() % 60
        return
    if when.tzinfo is not None:
        assert not found.pop("when") - values.pop("when")
    assert found == values
    assert str(found["amount"]) == str(amount)


# What a stored payload must be, R04


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (None, "the payload is null, not an object"),
        ("text", "the payload is str, not an object"),
        ([], "the payload is list, not an object"),
        (3, "the payload is int, not an object"),
        ({}, "order_id: Field required|number: Field required"),
        ({"number": 1}, "order_id: Field required"),
        ({"order_id": 1}, "number: Field required"),
        ({"number": 1, "order_id": 1, "other": 1}, "other: Extra inputs are not permitted"),
        ({"number": "hunter2", "order_id": 1}, "number: Input should be a valid integer"),
        ({"number": 1.5, "order_id": 1}, "number: Input should be a valid integer"),
        ({"number": 1, "order_id": None}, "order_id: Input should be a valid integer"),
        ({"number": 1, "order_id": [1]}, "order_id: Input should be a valid integer"),
        ({"number": 1, "order_id": 2**31}, "order_id: Input should be less than 2147483648"),
        ({"number": 1, "order_id": 1, "box": {"width": "hunter2", "labels": [1]}}, r"box.width: .*; box.labels\[0\]: "),
        ({"number": 1, "order_id": 1, "shape": {"kind": "hunter2"}}, "shape: unknown tag"),
        ({"number": math.nan, "order_id": 1}, "number: Input should be a finite number"),
        ({"number": "\ud800", "order_id": 1}, "no JSON"),
    ],
)
def test_a_payload_that_does_not_fit_is_not_readable(payload, text):
    class Circle(BaseModel):
        kind: Literal["circle"]

    class Square(BaseModel):
        kind: Literal["square"]

    figure = Annotated[Circle | Square, Field(discriminator="kind")]

    def handler(session, order: Order, number: int, box: Box = None, shape: figure = None): ...

    with pytest.raises(PayloadNotReadable, match=f"^handler: .*({text})") as caught:
        Codec(handler, "handler").decode(payload, nowhere())
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert "hunter2" not in str(caught.value.__context__)


def test_reading_is_lax_since_sql_and_people_write_payloads():
    made = codec(n=int, wait=timedelta, when=datetime)
    assert made.decode({"n": 12.0, "wait": 5, "when": "2026-01-01"}, nowhere()) == {
        "n": 12,
        "wait": timedelta(seconds=5),
        "when": datetime(2026, 1, 1),
    }


def test_a_stored_payload_is_data_and_nothing_is_imported(monkeypatch):
    before = set(sys.modules)
    evil = {
        "$type": "os.system",
        "__reduce__": ["os.system", ["true"]],
        "py/object": "antigravity.fly",
        "__class__": "x",
    }
    assert codec().decode({"value": evil}, nowhere()) == {"value": evil}
    with pytest.raises(PayloadNotReadable):
        codec(Box).decode({"value": evil}, nowhere())
    assert set(sys.modules) == before


# What a handler must be


def test_the_shape_of_a_signature_is_checked_at_once():
    def generator(session):
        yield

    async def async_generator(session):
        yield

    def no_parameter(): ...
    def keyword(*, session): ...
    def args(session, *args): ...
    def kwargs(session, **kwargs): ...
    def positional(session, order, /): ...

    for handler, text in [
        (generator, "generator"),
        (async_generator, "generator"),
        (no_parameter, r"session as its first parameter: def it\(session, \.\.\.\)"),
        (keyword, "session as its first parameter"),
        (args, r"\*args gives a payload no names"),
        (kwargs, r"\*\*kwargs gives a payload no names"),
        (positional, "'order' is positional-only"),
        (Order, "a handler is a function, not <class"),
        ("send", "a handler is a function, not 'send'"),
    ]:
        with pytest.raises(ConfigurationError, match=f"^it: .*{text}"):
            Codec(handler, "it")


def test_functions_of_all_kinds_are_handlers():
    class Service:
        def method(self, session, n: int): ...

        async def __call__(self, session, n: int): ...

    def plain(session, /, n: "int"): ...
    async def coroutine(session, n: int): ...

    @functools.wraps(plain)
    def wrapped(*args, **kwargs): ...

    for handler, is_async in [
        (plain, False),
        (coroutine, True),
        (wrapped, False),
        (Service().method, False),
        (Service(), True),
        (functools.partial(coroutine), True),
        (lambda session, n: (session, n), False),
    ]:
        made = Codec(handler, "it")
        made.check()
        assert made.is_async is is_async
        assert made.handler is handler
        assert made.kind == "it"
        assert through(made, n=1) == {"n": 1}


def test_a_wrapped_function_resolves_its_annotations_where_it_was_written():
    module = types.ModuleType("elsewhere")
    exec(  # noqa: S102  # a module of its own
        textwrap.dedent("""
            from __future__ import annotations
            from decimal import Decimal as Money
            def pay(session, amount: Money): ...
        """),
        vars(module),
    )

    @functools.wraps(module.pay)
    def wrapped(*args, **kwargs): ...

    assert through(Codec(wrapped, "pay"), amount=Decimal("0.10")) == {"amount": Decimal("0.10")}


def test_annotations_are_resolved_late():
    names: dict[str, Any] = {}
    exec("def pay(session: 'NeverThere', amount: 'Money', note=None) -> 'Neither': ...", names)  # noqa: S102  # as above
    made = Codec(names["pay"], "pay")
    for use in (made.check, lambda: made.bind((1,), {}), lambda: made.decode({}, nowhere())):
        with pytest.raises(
            ConfigurationError, match=r"pay: the annotation 'Money' of 'amount' cannot be resolved .*TYPE_CHECKING"
        ):
            use()
    names["Money"] = Decimal
    made.check()
    assert made.bind((Decimal(1),), {}).values == {"amount": "1"}


class Holder(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    order: Order


class Circular(BaseModel):
    part: "NotDefinedAnywhere"  # noqa: F821  # that is the point


@pytest.mark.parametrize(
    ("hints", "text"),
    [
        (
            {"orders": list[Order]},
            r"'orders' is annotated with list\[.*a mapped class stands alone, as Order or Order \| None",
        ),
        ({"orders": dict[str, Order]}, "a mapped class stands alone"),
        ({"orders": tuple[Annotated[Order, 1], ...] | None}, "a mapped class stands alone"),
        ({"order": Order | Token}, "a mapped class stands alone"),
        ({"order": Order | int | None}, "a mapped class stands alone"),
        ({"points": list[Point]}, "a mapped class stands alone"),
        ({"n": int, "holder": Holder}, "'holder': pydantic cannot handle .*Order is a mapped class"),
        ({"heroes": RootModel[list[Hero]]}, "Hero is a mapped class"),
        ({"order": Order, "order_id": int}, "'order_id' stands in the payload where 'order' has its key: rename one"),
        ({"n": int, "engine": Engine}, "'engine': pydantic cannot handle .*Engine"),
        ({"n": int, "part": Circular}, "'part': pydantic cannot handle .*Circular"),
        ({"n": int, "ids": list[Iterable[int]]}, "'ids': pydantic cannot handle .*: annotate a list"),
        ({"base": Base}, "'base': pydantic cannot handle"),
        ({"n": 4}, "'n' cannot be resolved|'n': pydantic cannot handle 4"),
    ],
)
def test_an_annotation_that_no_payload_can_serve_is_refused_with_advice(hints, text):
    with pytest.raises(ConfigurationError, match=text):
        codec(**hints).check()


class OwnSession(Session, Generic[T]):
    pass


class OwnAsyncSession(AsyncSession, Generic[T]):
    pass


@pytest.mark.parametrize("hint", [Session, OwnSession[Order], OwnSession, Annotated[OwnSession[Order], "x"]])
def test_an_async_handler_with_a_sync_session_is_refused(hint):
    async def handler(session: hint): ...
    def sync(session: hint): ...

    Codec(sync, "it").check()
    with pytest.raises(
        ConfigurationError, match=r"it: 'session' is annotated with .*Session, but an async handler gets"
    ):
        Codec(handler, "it").check()


@pytest.mark.parametrize("hint", [AsyncSession, OwnAsyncSession[Order], OwnAsyncSession])
def test_a_sync_handler_with_an_async_session_is_refused(hint):
    def handler(session: hint): ...
    async def coroutine(session: hint): ...

    Codec(coroutine, "it").check()
    with pytest.raises(ConfigurationError, match=r"it: 'session' is annotated with .*Session, but a sync handler gets"):
        Codec(handler, "it").check()


def test_a_forgotten_session_is_noticed_where_the_annotation_tells():
    def entity(order: Order): ...
    def number(n: int): ...

    for handler in (entity, number):
        with pytest.raises(ConfigurationError, match="but it gets the session"):
            Codec(handler, "it").check()

    def anything(session: Any, n: int): ...
    def unknown(session: "NeverThere[int] | object", n: int): ...  # noqa: F821  # that is the point
    def own(session: object, n: int): ...

    for handler in (anything, unknown, own):
        Codec(handler, "it").check()


# Entities


Maybe = typing_extensions.TypeAliasType("Maybe", Order | None)


@pytest.fixture
def shop(engine) -> Engine:
    Base.metadata.create_all(engine)
    DataBase.metadata.create_all(engine)
    SQLModel.metadata.create_all(engine)
    return engine


def test_an_entity_stands_as_its_key_and_comes_back_as_its_row(shop):
    made = codec(order=Order, line=Line, token=Token, slot=Slot, rush=Order, point=Point, hero=Hero, typed=Typed)
    with Session(shop) as session:
        order, rush, token, point, hero = Order(), RushOrder(), Token(), Point(x=1), Hero(name="x")
        slot, typed = Slot(at=datetime(2026, 1, 1, tzinfo=UTC)), Typed(id=uuid.UUID(int=1))
        session.add_all([order, rush, token, point, hero, slot, typed])
        session.flush()
        line = Line(order_id=order.id, sku="a")
        session.add(line)
        session.flush()
        entities = {
            "order": order, "line": line, "token": token, "slot": slot,
            "rush": rush, "point": point, "hero": hero, "typed": typed,
        }  # fmt: skip
        payload, pending = made.attach(made.bind((), entities), session)
        expected = {
            "order_id": order.id, "line_id": [order.id, "a"], "token_id": str(token.id), "slot_id": "2026-01-01T00:00:00Z",
            "rush_id": rush.id, "point_id": point.id, "hero_id": hero.id, "typed_id": "00000000-0000-0000-0000-000000000001",
        }  # fmt: skip
        assert (payload, pending) == (expected, {})
        assert made.decode(payload, session) == entities
        assert [key_of(entity) for entity in entities.values()] == list(payload.values())
        session.commit()
    with Session(shop) as session:
        found = made.decode(payload, session)
        assert {name: type(entity) for name, entity in found.items()} == {
            name: type(entity) for name, entity in entities.items()
        }
        assert all(session.get(type(entity), inspect(entity).identity) is entity for entity in found.values())


def test_binding_and_attaching_send_nothing_and_expired_entities_stay_expired(shop):
    made = codec(order=Order, line=Line, n=int)
    with Session(shop) as session:
        order = Order()
        session.add(order)
        session.flush()
        line = Line(order_id=order.id, sku="a")
        session.add(line)
        session.commit()
        with statements(shop) as sent:
            payload, _ = made.attach(made.bind((order, line, 1), {}), session)
        assert sent == []
        assert inspect(order).expired
        assert payload == {"order_id": 1, "line_id": [1, "a"], "n": 1}
        with statements(shop) as sent:
            made.decode(payload, session)
        assert len(sent) == 2


def test_a_pending_entity_leaves_its_place_open_until_the_flush(shop):
    made = codec(order=Order, n=int)
    with Session(shop) as session:
        order = Order()
        session.add(order)
        payload, pending = made.attach(made.bind((order, 1), {}), session)
        assert payload == {"order_id": None, "n": 1}
        assert pending == {"order_id": order}
        assert order in session.new
        keys = []
        event.listen(session, "after_flush", lambda *_: keys.append(key_of(order)))
        session.flush()
        assert keys == [order.id] == [key_of(order)]
        with pytest.raises(PayloadNotReadable, match="order_id: Input should be a valid integer"):
            made.decode(payload, session)


def test_an_expired_entity_in_the_wrong_place_is_refused_without_loading_it(shop):
    with Session(shop) as session:
        point, hero, order = Point(x=1), Hero(name="x"), Order()
        session.add_all([point, hero, order])
        session.commit()
        for hint, value in [
            (list[Any], [point]),
            (dict[str, object], {"a": {"b": hero}}),
            (list, [1, (order,)]),
            (set[Any], {order}),
            (int, point),
            (list[Box], [point]),
        ]:
            with statements(shop) as sent, pytest.raises(PayloadError, match=r"mapped class .* is no JSON"):
                codec(hint).bind((value,), {})
            assert sent == []


def test_a_reference_needs_only_the_key(shop):
    made = codec(order=Order, line=Line)
    bound = made.bind((ref(Order, 4), ref(Line, (4, "a"))), {})
    assert isinstance(bound, Bound)
    assert bound.entities == {"order_id": ref(Order, 4), "line_id": ref(Line, (4, "a"))}
    assert made.attach(bound, nowhere()) == ({"order_id": 4, "line_id": [4, "a"]}, {})
    assert ref(Order, 4).key == (4,)
    assert isinstance(ref(Order, 4), Ref)
    with Session(shop) as session:
        session.add(Order(id=4))
        session.commit()
        row = session.execute(select(Order.id)).one()
        assert ref(Order, row) == ref(Order, 4)


@pytest.mark.parametrize(
    ("entity", "key", "text"),
    [
        (Order, None, r"ref\(Order, ...\): the key holds a None"),
        (Line, (1, None), r"ref\(Line, ...\): the key holds a None"),
        (Line, 1, r"the key is \(order_id, sku\), and 1 value\(s\) were given"),
        (Order, (1, 2), "2 value"),
        (Order, "1", "key of Order: Input should be a valid integer"),
        (Order, True, "valid integer"),
        (Order, 2**31, "less than 2147483648"),
        (Tiny, 2**15, "less than 32768"),
        (Line, (1, "a\0"), r"key of Line: \[1\]: text holds a NUL"),
        (Line, (1, 2), r"key of Line: \[1\]: Input should be a valid string"),
        (Token, str(uuid.UUID(int=1)), "instance of UUID"),
        (Untyped, uuid.UUID(int=1), r"give the column type Guid\(.*\) a `python_type` property"),
        (Box, 1, r"takes a mapped class and a key, not .*Box"),
        (Base, 1, "takes a mapped class and a key"),
        (Order(), 1, r"takes a mapped class and a key, not an instance of .*Order"),
        (4, 1, "takes a mapped class and a key"),
    ],
)
def test_a_key_that_does_not_fit_is_refused_where_it_is_given(entity, key, text):
    with pytest.raises(PayloadError, match=text):
        ref(entity, key)


def test_a_key_of_a_type_that_does_not_tell_its_python_type_may_be_json():
    assert codec(it=Untyped).attach(codec(it=Untyped).bind((ref(Untyped, "x"),), {}), nowhere())[0] == {"it_id": "x"}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (4, r"order: takes an instance of Order, or ref\(Order, key\), not int"),
        (Token(), "not Token"),
        (Order, "not DeclarativeAttributeIntercept"),
        (Archived(), "not Archived"),
        (ref(Token, uuid.UUID(int=1)), r"takes Order, not ref\(Token, \.\.\.\)"),
        (ref(Archived, 1), r"not ref\(Archived"),
        (None, r"order: is None; annotate it `Order \| None`"),
    ],
)
def test_only_the_right_class_is_an_entity_argument(value, text):
    with pytest.raises(PayloadError, match=text) as caught:
        codec(order=Order).bind((value,), {})
    assert caught.value.path == ("order",)


def test_a_base_class_is_no_argument_for_its_subclass(shop):
    with pytest.raises(PayloadError, match="takes an instance of RushOrder"):
        codec(order=RushOrder).bind((Order(),), {})
    with pytest.raises(PayloadError, match=r"takes RushOrder, not ref\(Order"):
        codec(order=RushOrder).bind((ref(Order, 1),), {})
    assert codec(order=Order).bind((ref(RushOrder, 1),), {}).entities == {"order_id": ref(RushOrder, 1)}


def test_an_entity_must_stand_for_a_row_of_this_session(shop):
    made = codec(order=Order)

    def refused(session, order, text):
        bound = made.bind((order,), {})
        with statements(shop) as sent, pytest.raises(EnqueueError, match=f"^handler: order_id: Order is {text}"):
            made.attach(bound, session)
        assert sent == []

    with Session(shop) as session, Session(shop) as other:
        order = Order()
        refused(session, order, r"transient, .*session\.add\(\) it first")
        session.add(order)
        refused(other, order, r"in another session: pass ref\(Order, key\), or session\.merge")
        session.flush()
        refused(other, order, "in another session")
        session.rollback()
        assert order.id is not None
        refused(session, order, "transient, .*after a rollback, add it anew")
        with pytest.raises(EnqueueError, match="no key to rely on"):
            key_of(order)

        order = Order()
        session.add(order)
        session.commit()
        session.delete(order)
        refused(session, order, "deleted in this session")
        session.flush()
        refused(session, order, "deleted in this session")
        session.rollback()
        assert made.attach(made.bind((order,), {}), session)[0] == {"order_id": key_of(order)}
        session.delete(order)
        session.commit()
        refused(session, order, "deleted in this session")

        order = Order()
        session.add(order)
        session.commit()
        session.expunge(order)
        refused(session, order, r"detached: pass ref\(Order, key\)")
        with pytest.raises(EnqueueError, match="no key to rely on"):
            key_of(order)

        kept = Order()
        with session.begin_nested() as savepoint:
            session.add(kept)
            session.flush()
            savepoint.rollback()
        refused(session, kept, "transient")


def test_a_key_that_is_about_to_change_is_refused(shop):
    made = codec(token=Token)
    with Session(shop) as session:
        token = Token()
        session.add(token)
        session.flush()
        token.id = uuid.UUID(int=5)
        with pytest.raises(EnqueueError, match=r"token_id: the primary key of Token was changed: session\.flush\(\)"):
            made.attach(made.bind((token,), {}), session)
        session.flush()
        assert made.attach(made.bind((token,), {}), session)[0] == {"token_id": str(uuid.UUID(int=5))}
        order = Order()
        session.add(order)
        session.flush()
        order.kind = "changed"
        assert key_of(order) == order.id


def test_a_key_set_in_another_type_than_the_columns_is_written_in_the_columns(shop):
    with Session(shop) as session:
        order = Order(id="41")
        session.add(order)
        session.flush()
        assert key_of(order) == 41


def test_what_is_no_entity_has_no_key():
    with pytest.raises(PayloadError, match="int is no mapped class"):
        key_of(4)
    session = nowhere()
    order = Order()
    session.add(order)
    with pytest.raises(EnqueueError, match="no key to rely on"):
        key_of(order)


@pytest.mark.parametrize(
    "hint", [Order | None, Annotated[Order | None, 1], Annotated[Order, 1] | None, Maybe, None | Order]
)
def test_a_row_that_is_gone_is_none_where_the_annotation_says_so(shop, hint):
    made = codec(order=hint)
    with Session(shop) as session:
        assert made.decode({"order_id": 4}, session) == {"order": None}
        assert made.decode({"order_id": None}, session) == {"order": None}
        assert made.attach(made.bind((None,), {}), session) == ({"order_id": None}, {})


def test_a_key_written_by_hand_finds_the_row(shop):
    with Session(shop) as session:
        session.add(Order(id=4))
        session.commit()
        for key in ("4", 4.0, 4):
            assert codec(order=Order).decode({"order_id": key}, session)["order"].id == 4


def test_a_row_that_is_gone_is_an_error_otherwise(shop):
    with Session(shop) as session:
        with pytest.raises(EntityGone, match=r"handler: there is no Order 4 \(any more\), 'order' needs one"):
            codec(order=Order).decode({"order_id": 4}, session)
        with pytest.raises(EntityGone, match=r"Line \(4, 'a'\)"):
            codec(line=Annotated[Line, "metadata"]).decode({"line_id": [4, "a"]}, session)
        session.add(Order(id=4))
        session.flush()
        with pytest.raises(EntityGone, match="RushOrder 4"):
            codec(order=RushOrder).decode({"order_id": 4}, session)


def test_nothing_is_loaded_for_a_payload_that_does_not_fit(shop):
    with Session(shop) as session, statements(shop) as sent:
        with pytest.raises(PayloadNotReadable):
            codec(order=Order, n=int).decode({"order_id": 4, "n": "x"}, session)
        assert sent == []


def test_an_entity_with_a_default_may_be_left_out():
    def handler(session, order: Order | None = None, *, line: Line = ...): ...

    made = Codec(handler, "handler")
    assert made.attach(made.bind((), {}), nowhere()) == ({}, {})
    assert made.decode({}, nowhere()) == {}


def test_metadata_of_an_entity_parameter_is_kept():
    made = codec(order=Annotated[Order | None, "outer"], other=Annotated[Order, 1, 2])
    assert [(each.name, each.key, each.entity, each.optional, each.metadata) for each in made.entities] == [
        ("order", "order_id", Order, True, ("outer",)),
        ("other", "other_id", Order, False, (1, 2)),
    ]


def test_entities_load_through_an_async_session(database_url, shop, async_url):
    made = codec(order=Order, line=Line, token=Token)

    async def main():
        async with open_async_engine(async_url) as engine, AsyncSession(engine, expire_on_commit=True) as session:
            order, token = Order(id=7), Token()
            session.add_all([order, token])
            await session.flush()
            session.add(Line(order_id=7, sku="a"))
            await session.commit()
            bound = made.bind((order, ref(Line, (7, "a")), token), {})
            payload, _ = made.attach(bound, session.sync_session)
            found = await session.run_sync(lambda sync: made.decode(payload, sync))
            assert found["order"] is order
            assert found["line"].sku == "a"
            assert found["token"] is token
            with pytest.raises(EnqueueError, match="in another session"):
                made.attach(bound, nowhere())

    asyncio.run(main())


def test_a_session_stays_usable_after_a_refusal(shop):
    made = codec(order=Order, number=float)
    with Session(shop) as session:
        order = Order()
        session.add(order)
        for bad in (math.nan, "x", order, 10**400):
            with pytest.raises(PayloadError):
                made.bind((order, bad), {})
        assert list(session.new) == [order]
        session.commit()
        assert session.scalars(select(Order)).one() is order
