"""``python -m sqla_jobqueue.embedded``: an embedded PostgreSQL on the command line."""

import argparse
import contextlib
import signal
import sys
from pathlib import Path

from sqla_jobqueue.embedded import EmbeddedPostgres


def main() -> int:
    """Serve until Ctrl-C: ``python -m sqla_jobqueue.embedded [--data-dir DIR]``."""
    parser = argparse.ArgumentParser(prog="python -m sqla_jobqueue.embedded", description=main.__doc__)
    parser.add_argument("--data-dir", type=Path, help="keep the data here; without it, it is lost at the end")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT too: a shell's background job starts with it ignored
        signal.signal(number, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), EmbeddedPostgres(data_dir=options.data_dir) as postgres:
        sys.stdout.write(f"{postgres.url()}\n")
        sys.stdout.flush()
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
