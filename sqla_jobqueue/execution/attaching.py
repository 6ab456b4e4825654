"""The claimed row as the job instance that a handler sees, attached to its session without a SELECT."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from sqlalchemy import Column, inspect
from sqlalchemy.orm import Mapper, Session, make_transient_to_detached
from sqlalchemy.orm.attributes import instance_dict, set_committed_value

from sqla_jobqueue.model import JobTable, cached, job_mapper, job_table, key_columns

_EAGER: Final = frozenset({"joined", "selectin", "subquery", "immediate", False})


@dataclass(frozen=True, slots=True)
class _Parts:
    """How the attributes of a mapped class are filled from a row of the job table.

    Attributes:
        columns: attribute and column name of each that the row holds.
        missing: attributes that come with a SELECT of the model, and not from the row.
    """

    columns: tuple[tuple[str, str], ...]
    missing: tuple[str, ...]


def attacher(session: Session, model: type[JobTable], row: Mapping[str, Any]) -> Callable[[], JobTable]:
    """What makes the job instance of a table row and attaches it to the session, when a handler asks for it.

    What the row does not hold (the columns of a joined subclass, SQL expressions, relationships) is loaded when it is
    asked for, as on any instance. An async session could not do that, so there, what would come with a SELECT of the
    model is loaded now.
    """
    mapper = _mapper_for(model, row)
    is_whole = mapper is not None and not _parts(mapper, model).missing
    if not is_whole and session.get_bind(job_mapper(model)).dialect.is_async:
        job = _attach(session, model, row, mapper, load=True)
        return lambda: job
    return partial(_attach, session, model, row, mapper)


def _attach(
    session: Session, model: type[JobTable], row: Mapping[str, Any], mapper: Mapper[Any] | None, *, load: bool = False
) -> JobTable:
    key = tuple(row[column.name] for column in key_columns(job_table(model)))
    if mapper is None:
        return session.get_one(model, key)
    parts = _parts(mapper, model)
    known: JobTable | None = session.identity_map.get(mapper.identity_key_from_primary_key(key))
    job: JobTable = mapper.class_manager.new_instance() if known is None else known
    if known is not None:
        for attribute, column in parts.columns:
            set_committed_value(job, attribute, row[column])
    else:
        instance_dict(job).update((attribute, row[column]) for attribute, column in parts.columns)
        make_transient_to_detached(job)
        session.add(job)
        state = inspect(job)
        state.manager.dispatch.load(state, None)  # as a load does: mutable types and composites hang on it
    if load:
        session.refresh(job, parts.missing)
    return job


@cached
def _parts(mapper: Mapper[Any], model: type[JobTable]) -> _Parts:
    table = job_table(model)
    columns: list[tuple[str, str]] = []
    missing: list[str] = []
    for attribute in mapper.column_attrs:
        column = next((found for found in attribute.columns if table.c.contains_column(found)), None)
        if column is not None:
            columns.append((attribute.key, column.name))
        elif not attribute.deferred:
            missing.append(attribute.key)
    missing += [relation.key for relation in mapper.relationships if relation.lazy in _EAGER]
    return _Parts(tuple(columns), tuple(missing))


def _mapper_for(model: type[JobTable], row: Mapping[str, Any]) -> Mapper[Any] | None:
    """The mapper of the row's class; None where only the database can tell."""
    mapper: Mapper[Any] = inspect(model)
    discriminator = mapper.polymorphic_on
    if discriminator is None or not mapper.polymorphic_map:
        return mapper
    if isinstance(discriminator, Column) and job_table(model).c.contains_column(discriminator):
        found: Mapper[Any] = mapper.polymorphic_map.get(row[discriminator.name], mapper)
        return found
    return None if len([*mapper.self_and_descendants]) > 1 else mapper
