"""The module that the entry point ``alembic.plugins`` names.

It is loaded while Alembic's own import is under way. What it needs of ``alembic.operations`` and
``alembic.autogenerate.render`` can be imported by then; ``alembic.autogenerate.api`` and ``comparators`` cannot.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Final

from alembic.runtime.plugins import Plugin
from alembic.util import DispatchPriority

from sqla_jobqueue.migrations.storage import compare_storage_parameters, hide_our_info

PLUGIN: Final = "alembic.autogenerate.sqla_jobqueue"
"""Name of the plugin, as in pyproject.toml. In this namespace, since Alembic's default runs that alone."""

loaded: Final[set[str]] = set()
"""Under which names it was set up."""


def setup(plugin: Plugin) -> None:
    """Add the comparators. Alembic calls this once; the operations were registered by their import."""
    loaded.add(plugin.name)
    plugin.add_autogenerate_comparator(compare_storage_parameters, "table", qualifier="postgresql")
    plugin.add_autogenerate_comparator(hide_our_info, "autogenerate", priority=DispatchPriority.LAST)


class _PluginModule(ModuleType):
    """Alembic 1.20 takes a module; 1.18 and 1.19 iterate over it, and fail to import where they cannot."""

    def __iter__(self) -> Iterator[ModuleType]:
        yield self


sys.modules[__name__].__class__ = _PluginModule
