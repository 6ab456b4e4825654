"""Fixtures for pytest, found by it wherever the library is installed.

=====================  =============================================================================================
`jobqueue_metadata`    to be overridden: ``return Base.metadata``, whose tables the tests need
`jobqueue_url`         of the database: option ``--jobqueue-url``, else an embedded server for the session
`jobqueue_engine`      an Engine on it, with the tables made
`jobqueue_session`     a `JobSession` in a transaction of the test's own, which is rolled back
=====================  =============================================================================================

Each may be overridden in a ``conftest.py``. Async sessions are made by ``sqla_jobqueue.testing.rolled_back``, with
whichever plugin runs the async tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from sqlalchemy import Engine, MetaData

    from sqla_jobqueue import JobSession


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--jobqueue-url``."""
    parser.getgroup("sqla_jobqueue").addoption(
        "--jobqueue-url",
        default=None,
        help="PostgreSQL database for the jobqueue_* fixtures, whose tables are made if they are not there; "
        "an embedded server if left out",
    )


@pytest.fixture(scope="session")
def jobqueue_metadata() -> MetaData:
    """The tables that the tests need: override it."""
    raise pytest.UsageError(
        "the jobqueue_* fixtures need to know your tables: override the session-scoped fixture jobqueue_metadata in "
        "conftest.py with one that returns Base.metadata"
    )


@pytest.fixture(scope="session")
def jobqueue_url(pytestconfig: pytest.Config) -> Iterator[str]:
    """URL of the database."""
    if url := pytestconfig.getoption("--jobqueue-url"):
        yield url
        return
    from sqla_jobqueue.embedded import EmbeddedPostgres  # noqa: PLC0415  needed by those who use the fixture

    with EmbeddedPostgres(settings={"fsync": "off"}) as server:
        yield server.url()


@pytest.fixture(scope="session")
def jobqueue_engine(jobqueue_url: str, jobqueue_metadata: MetaData) -> Iterator[Engine]:
    """An engine on a database that has the tables."""
    from sqlalchemy import create_engine  # noqa: PLC0415  needed by those who use the fixture

    engine = create_engine(jobqueue_url)
    try:
        jobqueue_metadata.create_all(engine)
        yield engine
    finally:
        engine.dispose()


@pytest.fixture
def jobqueue_session(jobqueue_engine: Engine) -> Iterator[JobSession[Any]]:
    """A session whose commits are gone after the test."""
    from sqla_jobqueue.testing import rolled_back  # noqa: PLC0415  needed by those who use the fixture

    with rolled_back(jobqueue_engine) as session:
        yield session
