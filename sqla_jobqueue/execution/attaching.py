"""The claimed row as the job instance that a handler sees, attached to its session without a SELECT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import Column, inspect
from sqlalchemy.orm import Mapper, Session, make_transient_to_detached
from sqlalchemy.orm.attributes import set_committed_value

from sqla_jobqueue.model import JobTable, job_mapper, job_table, key_columns

_EAGER: Final = frozenset({"joined", "selectin", "subquery", "immediate", False})


def attach_row(session: Session, model: type[JobTable], row: Mapping[str, Any]) -> JobTable:
    """Make the job instance of a table row and attach it to the session.

    What the row does not hold (the columns of a joined subclass, SQL expressions, relationships) is loaded when it is
    asked for, as on any instance. An async session could not do that, so there, what would come with a SELECT of the
    model is loaded now.
    """
    table = job_table(model)
    key = tuple(row[column.name] for column in key_columns(table))
    mapper = _mapper_for(model, row)
    if mapper is None:
        return session.get_one(model, key)
    identity_key = mapper.identity_key_from_primary_key(key)
    known: JobTable | None = session.identity_map.get(identity_key)
    job: Any = known if known is not None else mapper.class_manager.new_instance()
    missing: list[str] = []
    for attribute in mapper.column_attrs:
        column = next((found for found in attribute.columns if table.c.contains_column(found)), None)
        if column is not None:
            set_committed_value(job, attribute.key, row[column.name])
        elif not attribute.deferred:
            missing.append(attribute.key)
    if known is None:
        make_transient_to_detached(job)
        session.add(job)
        inspect(job).manager.dispatch.load(
            inspect(job), None
        )  # as a load does: mutable types and composites hang on it
    missing += [relation.key for relation in mapper.relationships if relation.lazy in _EAGER]
    if missing and session.get_bind(job_mapper(model)).dialect.is_async:
        session.refresh(job, missing)
    attached: JobTable = job
    return attached


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
