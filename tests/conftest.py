"""A real PostgreSQL for every test.

The server is, in this order: the one of ``SQLA_JOBQUEUE_TEST_URL`` (its role must be a superuser); a container, where a
Docker engine answers and can get the image of ``SQLA_JOBQUEUE_TEST_IMAGE``; else the embedded one. It starts with the
first test that asks for it. A test that takes a server away starts an ``EmbeddedPostgres`` of its own.

===============  ==============================================================================================
fixture          gives
===============  ==============================================================================================
server_url       the server's maintenance database (whole session)
database_url     an empty database, ``postgresql+psycopg://...``
new_database     a function that gives further empty databases
engine           a sync Engine on ``database_url``
async_driver     runs the test twice: "psycopg", "asyncpg"
async_url        ``database_url`` for ``async_driver``
===============  ==============================================================================================

An async test is a plain function that runs its own loop, so an engine lives and ends inside of it::

    def test_it(async_url):
        async def main():
            async with open_async_engine(async_url) as engine: ...
        asyncio.run(main())

``open_async_engine``, ``driver_url`` and ``wait_until`` are in ``tests/helpers.py``.
"""

import contextlib
import functools
import gc
import os
import warnings
from collections.abc import Callable, Iterator

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import Engine, create_engine, make_url

from sqla_jobqueue.embedded import EmbeddedPostgres, find_bindir
from tests.helpers import driver_url

IMAGE = os.environ.get("SQLA_JOBQUEUE_TEST_IMAGE", "postgres:17-alpine")
SETTINGS = {"fsync": "off", "max_connections": "200"}


@functools.cache
def docker_refusal() -> str:
    """Why there can be no container; empty when there can. The image is got here, before any test's time-out runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ask_docker()
        finally:
            gc.collect()  # a client that reaches no engine leaves its socket open


def ask_docker() -> str:
    try:
        import docker

        with contextlib.closing(docker.from_env(timeout=3)) as client:
            client.ping()
    except Exception:
        return "no Docker engine answers"
    try:
        with contextlib.closing(docker.from_env(timeout=60)) as client:
            try:
                client.images.get(IMAGE)
            except docker.errors.ImageNotFound:
                client.images.pull(IMAGE)
    except Exception as error:
        return f"the Docker engine cannot get {IMAGE}: {error}"
    return ""


def pytest_report_header() -> str:
    if url := os.environ.get("SQLA_JOBQUEUE_TEST_URL"):
        return f"postgresql: {make_url(url)!r} (SQLA_JOBQUEUE_TEST_URL)"
    if refusal := docker_refusal():
        return f"postgresql: embedded, {find_bindir()} ({refusal})"
    return f"postgresql: a container of {IMAGE}"


@contextlib.contextmanager
def container() -> Iterator[str]:
    os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")  # it would need a second image
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from testcontainers.postgres import PostgresContainer

        running = PostgresContainer(IMAGE, driver="psycopg")
        running.with_command(" ".join(f"-c {name}={value}" for name, value in SETTINGS.items()))
        try:
            running.start()
        except BaseException:
            running.stop()
            raise
    try:
        yield running.get_connection_url()
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            running.stop()


@pytest.fixture(scope="session")
def server_url(request) -> Iterator[str]:
    if url := os.environ.get("SQLA_JOBQUEUE_TEST_URL"):
        yield driver_url(url, "psycopg")
        return
    with contextlib.ExitStack() as stack:
        url = ""
        if not docker_refusal():
            try:
                url = stack.enter_context(container())
            except Exception as error:
                with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
                    print(f"\npostgresql: embedded, since no container of {IMAGE} starts: {error}")
        yield url or stack.enter_context(EmbeddedPostgres(settings=SETTINGS)).url()


class Databases:
    """Empty databases, emptied again after use: 5 ms, where CREATE DATABASE takes 20 to 300 ms by file system."""

    def __init__(self, admin: psycopg.Connection, server_url: str) -> None:
        self.admin = admin
        self.server_url = make_url(server_url)
        self.count = 0
        self.spare: list[str] = []

    def take(self) -> str:
        if self.spare:
            return self.spare.pop()
        self.count += 1
        name = f"sqla_jobqueue_test_{os.getpid()}_{self.count}"
        self.admin.execute(sql.SQL("CREATE DATABASE {} TEMPLATE template0").format(sql.Identifier(name)))
        return name

    def url(self, name: str) -> str:
        return self.server_url.set(database=name).render_as_string(hide_password=False)

    def give_back(self, name: str) -> None:
        try:
            self.empty(name)
        except psycopg.Error:  # something stands that no DROP SCHEMA reaches
            self.drop(name)
        else:
            self.spare.append(name)

    def empty(self, name: str) -> None:
        self.admin.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = %s AND backend_type = 'client backend'",
            [name],
        )
        self.admin.execute(sql.SQL("ALTER DATABASE {} RESET ALL").format(sql.Identifier(name)))
        options = "-c lock_timeout=10s"
        with psycopg.connect(driver_url(self.url(name), ""), autocommit=True, options=options) as connection:
            schemas = connection.execute(
                "SELECT nspname FROM pg_namespace WHERE nspname !~ '^pg_' AND nspname <> 'information_schema'"
            ).fetchall()
            for (schema,) in schemas:
                connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(schema)))
            connection.execute("CREATE SCHEMA public")
            connection.execute("GRANT USAGE ON SCHEMA public TO PUBLIC")

    def drop(self, name: str) -> None:
        self.admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture(scope="session")
def _databases(server_url) -> Iterator[Databases]:
    with psycopg.connect(driver_url(server_url, ""), autocommit=True) as admin:
        databases = Databases(admin, server_url)
        yield databases
        for name in databases.spare:
            databases.drop(name)


@pytest.fixture
def new_database(_databases) -> Iterator[Callable[[], str]]:
    taken: list[str] = []

    def new() -> str:
        taken.append(_databases.take())
        return _databases.url(taken[-1])

    yield new
    for name in taken:
        _databases.give_back(name)


@pytest.fixture
def database_url(new_database) -> str:
    return new_database()


@pytest.fixture
def engine(database_url) -> Iterator[Engine]:
    engine = create_engine(database_url)
    yield engine
    engine.dispose()


@pytest.fixture(params=["psycopg", "asyncpg"])
def async_driver(request) -> str:
    return request.param


@pytest.fixture
def async_url(database_url, async_driver) -> str:
    return driver_url(database_url, async_driver)
