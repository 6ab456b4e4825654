"""Orders are invoiced exactly once while a worker is killed: ``make demo``, or ``python -m examples.demo``.

A shop places orders on an embedded PostgreSQL. Each enqueues two jobs in its own transaction; every ninth is rolled
back. Two worker processes do the jobs, until one of them is killed (SIGKILL) while it runs leased jobs and has written
an invoice that is not committed. Another takes its place. In the end SQL must find nothing lost and nothing done twice,
else the exit code is 1.
"""

import argparse
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, create_engine, inspect

from examples.common import empty_database
from examples.demo.processes import Workers
from examples.demo.screen import Screen
from examples.demo.story import Story, StoryError

ROOT = Path(__file__).parents[2]
EXIT_BROKEN, EXIT_INTERRUPTED = 1, 130


def migrate(engine: Engine) -> None:
    """``alembic upgrade head``."""
    config = Config(toml_file=ROOT / "pyproject.toml")
    with engine.begin() as connection:
        if inspect(connection).get_table_names():
            raise SystemExit(f"the database {engine.url.database!r} is not empty")
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def run(orders: int) -> bool:
    """Whether all that was promised holds."""
    with ExitStack() as stack:
        screen = stack.enter_context(Screen())
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sqla_jobqueue-demo-")))
        engine = create_engine(stack.enter_context(empty_database()))
        stack.callback(engine.dispose)
        with engine.connect() as connection:
            version = ".".join(map(str, connection.dialect.server_version_info or ()))
        screen.say(f"PostgreSQL {version} is up")
        migrate(engine)
        screen.say("the shop's tables are migrated")
        workers = stack.enter_context(Workers(engine.url, logs))
        try:
            holds = Story(engine, workers, screen, orders).run()
        except StoryError as error:
            screen.say(str(error), style="bold red")
            holds = False
        if not holds:
            screen.quote(*(worker.log for worker in workers.processes))
    return holds


def main() -> int:
    parser = argparse.ArgumentParser("python -m examples.demo", description=__doc__)
    parser.add_argument("--orders", type=int, default=300, help="how many to place")
    orders: int = parser.parse_args().orders
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        return 0 if run(orders) else EXIT_BROKEN
    except KeyboardInterrupt:
        print("interrupted; workers and server are stopped")
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
