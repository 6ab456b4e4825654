"""The registry of schema steps: what the library's own part of a job table is in each of its versions.

A step is a file with a number and a `Shape` that says what changes. How it is done on a live table, and back again, is
the same for all of them: see `online`. A release that changes the mixins adds a file here and raises
``model.SCHEMA_VERSION``; a test holds the newest version equal to what ``create_all`` makes.
"""

from __future__ import annotations

from functools import reduce
from typing import Final

from sqla_jobqueue.migrations.shape import Shape, Step
from sqla_jobqueue.migrations.steps import v00, v01
from sqla_jobqueue.model import schema_marker

STEPS: Final[list[Step]] = [v01.STEP]


def latest() -> int:
    """The number of the newest version."""
    return len(STEPS)


def shape_at(version: int) -> Shape:
    """All of a version."""
    return reduce(lambda shape, step: shape.changed_by(step.change), STEPS[:version], v00.BASE)


def marker_at(version: int) -> str | None:
    """The comment that tells the version; version 0 has none."""
    return schema_marker(version, STEPS[version - 1].oldest_worker) if version else None


def obsolete_storage() -> set[str]:
    """Storage parameters that a former version set and the newest does not."""
    former = {name for version in range(latest()) for name in shape_at(version).storage}
    return former - set(shape_at(latest()).storage)
