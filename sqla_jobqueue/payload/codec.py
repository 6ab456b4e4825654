"""A handler's signature as a codec: arguments to a payload, and a payload to arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pydantic import ValidationError
from sqlalchemy.orm import Session

from sqla_jobqueue.errors import EnqueueError, PayloadError, PayloadNotReadable
from sqla_jobqueue.model import JsonValue
from sqla_jobqueue.payload.entities import EntityParameter, load, reference
from sqla_jobqueue.payload.plain import check_json
from sqla_jobqueue.payload.signature import Plan, check_session, function_of, make_plan, parameters_of
from sqla_jobqueue.payload.typed import decode, encode, problems


@dataclass(frozen=True, slots=True)
class Bound:
    """The arguments of one call, checked. No session is involved yet.

    Attributes:
        values: the encoded plain parameters, by payload key.
        entities: mapped instances, `Ref`s and None, by payload key (``order_id``).
    """

    values: dict[str, JsonValue]
    entities: dict[str, object]


class Codec:
    """Maps a handler's signature to a payload and back.

    Annotations are resolved at first use, so that they may name what is defined later.

    Args:
        handler: ``handler(session, ...)``, sync or async.
        kind: its name in messages.

    Raises:
        ConfigurationError: the signature cannot be a job's.
    """

    def __init__(self, handler: Callable[..., Any], kind: str) -> None:
        self.handler = handler
        self.kind = kind
        self._session, *parameters = parameters_of(handler, kind)
        self.is_async = inspect.iscoroutinefunction(function_of(handler))
        self._parameters = {each.name: each for each in parameters}
        self._positional = tuple(each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD)
        self._required = tuple(each.name for each in parameters if each.default is each.empty)

    def __repr__(self) -> str:
        """The call that the codec understands."""
        shown = inspect.Signature([*self._parameters.values()])
        return f"{self.kind}{shown}"

    def check(self) -> None:
        """Resolve the annotations now.

        Raises:
            ConfigurationError: names the parameter and what to do about it.
        """
        _ = self._plan
        check_session(self.kind, self.handler, self._session)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, partial: bool = False) -> Bound:
        """Check and encode the arguments of a call. Only those really passed are stored: Python applies defaults.

        Args:
            args: by position.
            kwargs: by name.
            partial: required ones may be missing; such a payload can be compared with, not enqueued.

        Raises:
            PayloadError: a missing, unexpected or unfit argument; nothing was sent.
        """
        given = self._given(args, kwargs, partial=partial)
        plan = self._loose_plan if partial else self._plan
        try:
            entities = {each.key: each.checked(given.pop(each.name)) for each in plan.entities if each.name in given}
            for name in plan.as_is:
                if name in given:
                    check_json(given[name], (name,))
            values = cast("dict[str, JsonValue]", encode(plan.adapter, given)) if given else {}
            return Bound(values, entities)
        except PayloadError as error:
            raise PayloadError(f"{self.kind}: {error}", error.path) from error.__cause__

    def attach(self, bound: Bound, session: Session) -> tuple[dict[str, JsonValue], dict[str, object]]:
        """The payload of a call in one session.

        Returns:
            The payload, and by payload key the entities that are pending in this session: None stands in their place
            until the flush that gives them a key.

        Raises:
            EnqueueError: an entity has no row that the job could find; nothing was sent.
        """
        payload = dict(bound.values)
        pending: dict[str, object] = {}
        for key, entity in bound.entities.items():
            try:
                payload[key], is_pending = reference(entity, session)
            except PayloadError as error:
                raise PayloadError(f"{self.kind}: {key}: {error}", (key, *error.path)) from error.__cause__
            except EnqueueError as error:
                raise EnqueueError(f"{self.kind}: {key}: {error}") from None
            if is_pending:
                pending[key] = entity
        return payload, pending

    def decode(self, payload: object, session: Session) -> dict[str, Any]:
        """The keyword arguments for the handler. Entities are loaded with `Session.get`; nothing else sends SQL.

        Raises:
            PayloadNotReadable: the payload does not fit the signature. Its values are not in the message.
            EntityGone: an entity does not exist any more, and its annotation does not allow None.
        """
        plan = self._plan
        if not isinstance(payload, dict):
            shown = "null" if payload is None else type(payload).__name__
            raise PayloadNotReadable(f"{self.kind}: the payload is {shown}, not an object")
        arguments: dict[str, Any] = {}
        problem = ""
        try:
            arguments = decode(plan.adapter, payload)
        except ValidationError as error:
            problem = problems(error)[0]
        except ValueError as error:
            problem = f"the payload is no JSON ({type(error).__name__})"
        if problem:  # raised out here, so that not even its context holds the values
            raise PayloadNotReadable(f"{self.kind}: {problem}")
        for each in plan.entities:
            if each.key in arguments:
                key = arguments.pop(each.key)
                arguments[each.name] = None if key is None else load(each, key, session, self.kind)
            elif each.name in self._required:
                raise PayloadNotReadable(f"{self.kind}: {each.key}: Field required")
        return arguments

    def _given(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, partial: bool) -> dict[str, Any]:
        if len(args) > len(self._positional):
            raise PayloadError(f"{self!r} takes {len(self._positional)} positional argument(s), not {len(args)}")
        given = dict(zip(self._positional, args, strict=False))
        for name, value in kwargs.items():
            if name not in self._parameters:
                raise PayloadError(f"{self!r} has no parameter {name!r}", (name,))
            if name in given:
                raise PayloadError(f"{self!r} got parameter {name!r} twice", (name,))
            given[name] = value
        missing = [name for name in self._required if name not in given]
        if missing and not partial:
            raise PayloadError(f"{self!r} misses {', '.join(map(repr, missing))}", (missing[0],))
        return given

    @property
    def entities(self) -> tuple[EntityParameter, ...]:
        """The parameters that are annotated with a mapped class."""
        return self._plan.entities

    @functools.cached_property
    def _plan(self) -> Plan:
        return make_plan(self.kind, self.handler, self._parameters.values())

    @functools.cached_property
    def _loose_plan(self) -> Plan:
        """The plan with every parameter optional."""
        return make_plan(self.kind, self.handler, [each.replace(default=None) for each in self._parameters.values()])
