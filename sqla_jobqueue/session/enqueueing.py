"""From a call to a row: build the job instance, add it, and fill in the keys that only the flush gives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, ParamSpec, cast, overload

from sqlalchemy import bindparam, event, func, inspect
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import Session, UOWTransaction
from sqlalchemy.orm.attributes import set_committed_value

from sqla_jobqueue.errors import EnqueueError
from sqla_jobqueue.model import TIMESTAMPTZ, J, JobTable, job_mapper, job_table
from sqla_jobqueue.session.current import AnySession, sync_session_of
from sqla_jobqueue.statements import fill_payload
from sqla_jobqueue.status import LIVE
from sqla_jobqueue.tasks import Call, Kind, Options, Producer, Task, declared_queues

P = ParamSpec("P")

INFO_PENDING: Final = "sqla_jobqueue.pending_entities"
"""Key of an instance's ``InstanceState.info``: payload key -> entity without a key yet."""
INFO_FILLED: Final = "sqla_jobqueue.filled"
"""Key of ``Session.info`` between the two events of a flush: jobs and their completed payloads."""


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
    if isinstance(what, Producer):
        what = Call(what, what.bind(args, payload))
    elif args or payload:
        raise EnqueueError(f"{type(what).__name__} brings its own payload: enqueue it without further arguments")
    job = _job_for(target, what) if isinstance(what, Call) else _checked_row(what)
    _check_session(target, type(job))
    target.add(job)
    return job


def enqueue_all(session: AnySession, calls: Iterable[Call[J]], /) -> list[J]:
    """Add several jobs: all of them, or none if one does not fit. One event, many consumers.

    Args:
        session: any Session, AsyncSession or scoped session.
        calls: ``task.call(...)`` each.
    """
    target = sync_session_of(session)
    listed = list(calls)
    for call in listed:
        if not isinstance(call, Call):
            raise EnqueueError(f"enqueue_all takes task.call(...), not {call!r}")
    jobs = [_job_for(target, call) for call in listed]
    for model in {type(job) for job in jobs}:
        _check_session(target, model)
    target.add_all(jobs)
    return jobs


def _check_session(session: Session, model: type[JobTable]) -> None:
    try:
        bind = session.get_bind(job_mapper(model))
    except UnboundExecutionError as error:
        raise EnqueueError(f"the session has no engine for {model.__qualname__}: {error}") from error
    options = bind.get_execution_options()
    if options.get("postgresql_readonly"):
        raise EnqueueError("the session's engine is read-only (postgresql_readonly): enqueue on one that can write")
    if options.get("isolation_level") == "AUTOCOMMIT":
        raise EnqueueError(
            "the session's engine commits every statement by itself (isolation_level AUTOCOMMIT), so a job and its "
            "data could not commit together: enqueue on a transactional one"
        )


def _checked_row(job: object) -> JobTable:
    if not isinstance(job, JobTable):
        raise EnqueueError(
            f"cannot enqueue {job!r}: give a task, task.options(...), task.call(...), queue.kind(...) or a job instance"
        )
    state = inspect(job)
    if state.persistent or state.detached:
        status = vars(job).get("status")
        advice = "it is in the queue already" if status in LIVE else "use requeue to run a finished job again"
        raise EnqueueError(f"{type(job).__name__} {state.identity} is a row already: {advice}")
    queues = declared_queues(job_table(type(job)))
    if vars(job).get("queue") is None and len(queues) == 1:
        name, settings = queues[0]
        job.queue = name
        if vars(job).get("max_attempts") is None:
            job.max_attempts = settings.max_attempts
    return job


def _job_for(session: Session, call: Call[J]) -> J:
    producer = call.of
    queue = producer.queue
    if not queue.has_kinds:
        raise EnqueueError(f"{queue.model.__qualname__} rows are the jobs themselves: enqueue an instance of it")
    payload, pending = attach(session, call)
    model = _class_for(queue.model, producer.kind)
    job: J = cast("Any", model)(kind=producer.kind, payload=payload)
    job.queue = queue.name
    _apply(job, producer.options_set, queue.settings.max_attempts)
    if pending:
        inspect(job).info[INFO_PENDING] = pending
        if not event.contains(session, "after_flush", _fill_keys):
            event.listen(session, "after_flush", _fill_keys)
            event.listen(session, "after_flush_postexec", _show_keys)
    return job


def attach(session: Session, call: Call[Any]) -> tuple[dict[str, Any], dict[str, object]]:
    """The payload of a call for this session, and the entities whose keys only the flush will give."""
    if isinstance(call.of, Task):
        return call.of.codec.attach(call.bound, session)
    return dict(call.bound.values), {}


def _class_for(model: type[J], kind: str) -> type[J]:
    """The subclass that is mapped to the kind, where the model is polymorphic on it."""
    mapper = inspect(model)
    if mapper.polymorphic_on is None or mapper.polymorphic_on.key != "kind":
        return model
    found = mapper.polymorphic_map.get(kind)
    if found is None:
        raise EnqueueError(f"{model.__qualname__} is polymorphic on kind, and no subclass is mapped to {kind!r}")
    subclass: type[J] = found.class_
    return subclass


def _apply(job: JobTable, options: Options, max_attempts: int) -> None:
    job.max_attempts = options.max_attempts if options.max_attempts is not None else max_attempts
    if options.priority is not None:
        job.priority = options.priority
    if options.meta is not None:
        cast("Any", job).meta = dict(options.meta)
    if options.run_at is not None:
        job.run_at = options.run_at
    elif options.delay:
        clock = func.clock_timestamp(type_=TIMESTAMPTZ)
        cast("Any", job).run_at = clock + bindparam(None, options.delay, unique=True)


def _fill_keys(session: Session, _context: UOWTransaction) -> None:
    """Put the keys that this flush gave into the payloads of the jobs that it wrote."""
    from sqla_jobqueue.payload import key_of  # noqa: PLC0415  brings pydantic

    rows: dict[type[JobTable], list[dict[str, Any]]] = {}
    filled: list[tuple[object, dict[str, Any]]] = []
    for job in session.new:
        state = inspect(job)
        if INFO_PENDING not in state.info:
            continue
        identity = state.mapper.primary_key_from_instance(job)
        if None in identity:
            continue  # not among the objects of this flush
        pending: dict[str, object] = state.info.pop(INFO_PENDING)
        keys = {name: key_of(entity) for name, entity in pending.items()}
        row = {f"id_{n}": part for n, part in enumerate(identity)}
        rows.setdefault(type(job), []).append({**row, "keys": keys})
        filled.append((job, {**job.payload, **keys}))
    for model, parameters in rows.items():
        connection = session.connection(bind_arguments={"mapper": job_mapper(model)})
        connection.execute(fill_payload(model), parameters)
    session.info[INFO_FILLED] = filled


def _show_keys(session: Session, _context: UOWTransaction) -> None:
    """What was written is what the instance shows, without a SELECT."""
    for job, payload in session.info.pop(INFO_FILLED, ()):
        set_committed_value(job, "payload", payload)
