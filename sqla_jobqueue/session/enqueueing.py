"""From a call to a job instance, added to a session: everything that happens before the flush."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, ParamSpec, cast, overload

from sqlalchemy import ClauseElement, Table, bindparam, func, inspect
from sqlalchemy.exc import InvalidRequestError, UnboundExecutionError
from sqlalchemy.orm import InstanceState, Session

from sqla_jobqueue.errors import EnqueueError
from sqla_jobqueue.model import DEFAULT_QUEUE, TIMESTAMPTZ, J, JobTable, job_mapper, job_table, key_columns
from sqla_jobqueue.session.current import AnySession, sync_session_of
from sqla_jobqueue.session.flushing import mark_enqueued, refuse_unsuitable
from sqla_jobqueue.status import LIVE, JobStatus
from sqla_jobqueue.tasks import (
    MAX_KIND,
    MAX_QUEUE_NAME,
    Call,
    Kind,
    Options,
    Producer,
    Task,
    checked_name,
    declared_queues,
    has_kinds,
    queue_settings,
)

P = ParamSpec("P")


@overload
def enqueue(session: AnySession, what: Task[P, Any, J], /, *args: P.args, **payload: P.kwargs) -> J: ...
@overload
def enqueue(session: AnySession, what: Kind[J], /, **payload: Any) -> J: ...
@overload
def enqueue(session: AnySession, what: Call[J], /) -> J: ...
@overload
def enqueue(session: AnySession, what: J, /) -> J: ...
def enqueue(session: AnySession, what: Any, /, *args: Any, **payload: Any) -> Any:
    """Add a job to the session's unit of work. Sends nothing; the next flush writes it.

    Args:
        session: any Session, AsyncSession or scoped session.
        what: a task, a task with options, a kind, a call, or an instance of a job model.
        args: payload by position, as the handler takes it after its session.
        payload: payload by keyword.

    Returns:
        The job instance, pending in the session. Its ``id`` is there after the flush.

    Raises:
        EnqueueError: the payload does not fit, an entity is not usable, or the session cannot commit job and data
            together. Nothing was added; the session is as it was.
    """
    target = sync_session_of(session)
    given: object = what
    call: Call[Any] | None = None
    if isinstance(given, Producer):
        call = Call(what, what.bind(args, payload))
    elif args or payload:
        raise EnqueueError(f"{type(what).__name__} brings its own payload: enqueue it without further arguments")
    elif isinstance(given, Call):
        call = what
    job, pending = (_checked(what), dict[str, object]()) if call is None else _made(target, call)
    _add(target, [(job, pending)])
    return job


def enqueue_all(session: AnySession, calls: Iterable[Call[J]], /) -> list[J]:
    """Add several jobs: all of them, or none if one does not fit. One event, many consumers.

    Args:
        session: any Session, AsyncSession or scoped session.
        calls: ``task.call(...)`` each.

    Returns:
        The job instances, in the order of the calls.

    Raises:
        EnqueueError: as `enqueue`; nothing was added.
    """
    target = sync_session_of(session)
    listed = list(calls)
    for call in listed:
        if not isinstance(call, Call):
            raise EnqueueError(f"enqueue_all takes task.call(...), not {call!r}")
    made = [_made(target, call) for call in listed]
    _add(target, made)
    return [job for job, _ in made]


def _add(session: Session, made: Sequence[tuple[JobTable, dict[str, object]]]) -> None:
    """Add jobs, all or none; each with the entities whose keys its payload waits for."""
    jobs = [job for job, _ in made]
    if not session.is_active:
        raise EnqueueError("a flush of the session failed, and its transaction with it: session.rollback() first")
    for model in {type(job) for job in jobs}:
        _check_session(session, model)
    new = [job for job in jobs if job not in session]
    try:
        session.add_all(jobs)
    except InvalidRequestError as error:
        for job in new:
            if job in session:
                session.expunge(job)
        raise EnqueueError(f"the session takes no job: {error}") from error
    for job, pending in made:
        mark_enqueued(session, job, pending)


def _check_session(session: Session, model: type[JobTable]) -> None:
    if type(session).get_bind is not Session.get_bind:
        return  # it may route by what is being flushed: looked at then
    try:
        bind = session.get_bind(job_mapper(model))
    except UnboundExecutionError as error:
        raise EnqueueError(f"the session has no engine for {model.__qualname__}: {error}") from error
    refuse_unsuitable(bind)


def _made(session: Session, call: Call[J]) -> tuple[J, dict[str, object]]:
    """The job of a call, and by payload key the entities whose keys only the flush will give."""
    producer = call.of
    queue = producer.queue
    if not queue.has_kinds:
        raise EnqueueError(f"{queue.model.__qualname__} rows are the jobs themselves: enqueue an instance of it")
    payload, pending = attach(session, call)
    model = _class_for(queue.model, producer.kind)
    try:
        job: J = cast("Any", model)(kind=producer.kind, payload=payload)
    except TypeError as error:
        raise EnqueueError(
            f"{model.__qualname__} cannot be made of kind and payload alone ({error}): give its other columns "
            "defaults, or enqueue an instance of it"
        ) from error
    job.queue = queue.name
    _apply(job, producer.options_set, queue.settings.max_attempts)
    return job, pending


def attach(session: Session, call: Call[Any]) -> tuple[dict[str, Any], dict[str, object]]:
    """The payload of a call for this session, and the entities whose keys only the flush will give."""
    producer: Producer[Any] = call.of
    if isinstance(producer, Task):
        payload, pending = cast("Task[..., Any, Any]", producer).codec.attach(call.bound, session)
    else:
        payload, pending = dict(call.bound.values), {}
    return deepcopy(payload), pending  # a call can be enqueued again: its jobs share nothing


def _class_for(model: type[J], kind: str) -> type[J]:
    """The subclass that is mapped to the kind, where the model is polymorphic on it."""
    mapper = inspect(model)
    if mapper.polymorphic_on is None or mapper.polymorphic_on.key != "kind":
        return model
    found = mapper.polymorphic_map.get(kind)
    if found is None or not found.isa(mapper):
        raise EnqueueError(f"{model.__qualname__} is polymorphic on kind, and no subclass is mapped to {kind!r}")
    subclass: type[J] = found.class_
    return subclass


def _apply(job: JobTable, options: Options, max_attempts: int) -> None:
    job.max_attempts = options.max_attempts if options.max_attempts is not None else max_attempts
    if options.priority is not None:
        job.priority = options.priority
    if options.meta is not None:
        cast("Any", job).meta = deepcopy(options.meta)
    if options.run_at is not None:
        job.run_at = options.run_at
    elif options.delay:
        clock = func.clock_timestamp(type_=TIMESTAMPTZ)
        cast("Any", job).run_at = clock + bindparam(None, options.delay, unique=True)


def _checked(job: object) -> JobTable:
    """An instance of a job model, once it can be a new job; its queue and attempts filled in where not given."""
    if not isinstance(job, JobTable):
        raise EnqueueError(
            f"cannot enqueue {job!r}: give a task, task.options(...), task.call(...), queue.kind(...) or a job instance"
        )
    model, table = type(job), job_table(type(job))
    state: InstanceState[Any] = inspect(job)
    _refuse_row(state, table)
    # None of an expression: SQL computes it.
    values = {name: value for name, value in state.dict.items() if not isinstance(value, ClauseElement)}
    computed = state.dict.keys() - values
    _check_values(values)
    if has_kinds(model):
        if "kind" not in computed:
            checked_name("kind", values.get("kind"), MAX_KIND, EnqueueError)
        for name in {"payload", "meta"} & values.keys():
            _check_object(name, values[name])
    if "queue" not in computed:
        if values.get("queue") is None:
            job.queue = _only_queue(model, table)
        checked_name("queue name", job.queue, MAX_QUEUE_NAME, EnqueueError)
        settings = queue_settings(table, job.queue)
        if settings is not None and state.dict.get("max_attempts") is None:
            job.max_attempts = settings.max_attempts
    return job


def _refuse_row(state: InstanceState[Any], table: Table) -> None:
    """Refuse an instance that is a row, or has its key."""
    name = state.class_.__qualname__
    if state.has_identity:
        live = state.dict.get("status") in LIVE
        advice = "it is in the queue already" if live else "use requeue to run a finished job again"
        raise EnqueueError(f"{name} {state.identity} is a row already: {advice}")
    for column in key_columns(table):
        value = state.dict.get(state.mapper.get_property_by_column(column).key)
        if column.identity is not None and column.identity.always and value is not None:
            raise EnqueueError(
                f"{name} has the key {value} already, which the database gives, perhaps from a transaction that was "
                "rolled back: enqueue a new instance"
            )


def _check_values(values: Mapping[str, Any]) -> None:
    if values.get("status") not in {None, JobStatus.PENDING}:
        raise EnqueueError(f"a job is enqueued as pending, not {values['status']!r}")
    Options(**{name: values.get(name) for name in ("run_at", "priority", "max_attempts")})  # checks them


def _check_object(name: str, value: object) -> None:
    from sqla_jobqueue.payload import check_json  # noqa: PLC0415  brings pydantic

    if not isinstance(check_json(value, (name,)), dict):
        raise EnqueueError(f"{name} is a JSON object, a dict, not {value!r}")


def _only_queue(model: type[JobTable], table: Table) -> str:
    """Where a job goes that does not say so."""
    names = [name for name, _ in declared_queues(table)]
    if len(names) > 1 and DEFAULT_QUEUE not in names:
        raise EnqueueError(f"{model.__qualname__} has the queues {', '.join(names)}: say which, queue=...")
    return names[0] if len(names) == 1 else DEFAULT_QUEUE
