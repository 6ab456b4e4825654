"""Alembic's environment for the example application, whose models are in ``examples/shop/models.py``.

The database is, in this order: ``config.attributes["connection"]`` (for a program that migrates over a connection of
its own), ``alembic -x url=...``, the environment variable ``SHOP_DATABASE_URL``.
"""

import logging
import os

from alembic import context
from alembic.util import CommandError
from sqlalchemy import Connection, NullPool, create_engine

from examples.shop.models import Base

config = context.config
if config.cmd_opts is not None:  # on the command line, say what is done; a program has log handlers of its own
    logging.basicConfig(format="%(levelname)-5.5s [%(name)s] %(message)s")
    for name in ("alembic.runtime.migration", "alembic.autogenerate"):
        logging.getLogger(name).setLevel(logging.INFO)


def database_url() -> str | None:
    return context.get_x_argument(as_dictionary=True).get("url") or os.environ.get("SHOP_DATABASE_URL")


def migrate(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=Base.metadata, compare_server_default=True)
    with context.begin_transaction():
        context.run_migrations()


def print_migrations() -> None:
    """Print SQL for ``alembic upgrade head --sql``, which needs no database."""
    context.configure(dialect_name="postgresql", target_metadata=Base.metadata, literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()


def migrate_database() -> None:
    connection: Connection | None = config.attributes.get("connection")
    if connection is not None:
        migrate(connection)
        return
    url = database_url()
    if not url:
        raise CommandError(
            "which database? set SHOP_DATABASE_URL=postgresql+psycopg://user:password@host/name, "
            "or call alembic with -x url=..."
        )
    with create_engine(url, poolclass=NullPool).connect() as connection:
        migrate(connection)


if context.is_offline_mode():
    print_migrations()
else:
    migrate_database()
