"""What several tests need and no fixture gives: ``from tests.helpers import wait_until``."""

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine


def driver_url(url: str, driver: str) -> str:
    """The same database through another driver: ``psycopg`` or ``asyncpg``; an empty one gives libpq's form."""
    name = f"postgresql+{driver}" if driver else "postgresql"
    return make_url(url).set(drivername=name).render_as_string(hide_password=False)


@contextlib.asynccontextmanager
async def open_async_engine(url: str, **options: Any) -> AsyncIterator[AsyncEngine]:
    """An async engine that is disposed of inside the loop which used it."""
    engine = create_async_engine(url, **options)
    try:
        yield engine
    finally:
        await engine.dispose()


def wait_until(condition: Callable[[], object], what: str = "", *, seconds: float = 20) -> None:
    """Wait for a condition instead of sleeping for a while; fail when it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what or condition}")
        time.sleep(0.01)
