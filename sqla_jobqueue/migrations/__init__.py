"""What Alembic has to know about a job table. Loaded by Alembic itself, never by the rest of the library.

A job table is a table of the application's own metadata, so ``alembic revision --autogenerate`` writes its columns,
checks and indexes as it writes any other's. Storage parameters it does not know. This plugin adds the operation::

    op.set_storage_parameters("jobs", {"fillfactor": "85"})      # None in place of a value resets it

and has autogenerate write it, for a job table that is new and for one whose parameters in the database are not those of
the model. Only parameters that the model names are compared; whatever else an operator set stays, and so do all tables
that are no job tables.

Nothing has to be written into ``env.py``: Alembic finds the plugin by the package's entry point. Its name,
``alembic.autogenerate.sqla_jobqueue``, is among those that the default of ``autogenerate_plugins`` matches, and
``"~alembic.autogenerate.sqla_jobqueue"`` in that list leaves it out. Where packages have no metadata (a frozen
application, a bare source tree), call `register` in ``env.py``.
"""

from __future__ import annotations

from alembic.runtime.plugins import Plugin  # first: this loads the plugin, which must not be half imported by then

from sqla_jobqueue.migrations import plugin
from sqla_jobqueue.migrations.plugin import PLUGIN
from sqla_jobqueue.migrations.storage import SetStorageParametersOp

__all__ = ["PLUGIN", "SetStorageParametersOp", "register"]


def register() -> None:
    """Do in ``env.py`` what the entry point does where the package's metadata is there; else do nothing."""
    if not plugin.loaded:
        Plugin.setup_plugin_from_module(plugin, PLUGIN)
