"""What the examples take for granted: an empty database, with the tables of `examples/shop/models.py`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Engine, create_engine

from examples.shop.models import Base
from sqla_jobqueue.embedded import EmbeddedPostgres

URL_VARIABLE = "SQLA_JOBQUEUE_EXAMPLE_URL"


@contextmanager
def empty_database() -> Iterator[str]:
    """The one of ``SQLA_JOBQUEUE_EXAMPLE_URL``, else one on an embedded server that ends with the block."""
    if url := os.environ.get(URL_VARIABLE):
        yield url
        return
    with EmbeddedPostgres() as postgres:
        yield postgres.url()


@contextmanager
def empty_engine() -> Iterator[Engine]:
    """An engine on an empty database."""
    with empty_database() as url:
        engine = create_engine(url)
        try:
            yield engine
        finally:
            engine.dispose()


@contextmanager
def shop_engine() -> Iterator[Engine]:
    """An engine on a database in which the shop's tables are, and nothing else."""
    with empty_engine() as engine:
        Base.metadata.create_all(engine)
        yield engine
