"""The process between an application and its embedded PostgreSQL.

It is run as a script, by path and in isolated mode, so it imports nothing but the standard library. It reads one JSON
object per line from its standard input, does what that says, and answers with one line: ``{"port": ...}`` or
``{"error": ...}``. The first order describes the server and starts it; later ones stop and start it. The end of the
input, or of the parent, is the order to stop the server and to remove the base directory.

The base directory holds the socket, the log and, unless it is kept elsewhere, the data::

    /tmp/sqla-jobqueue-x/log  .s.PGSQL.20543
    HOME/data                 PostgreSQL's data directory; made as data.partial and renamed when whole
    HOME/password             of the superuser, 0600; only beside data that is kept
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pwd
import random
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

SUPERUSER = "postgres"
READY_SECONDS = 60  # a kept directory may have to recover first
STOP_SECONDS = 10  # for each of fast and immediate shutdown, and how long to insist on a port that is taken
PORTS = range(20_000, 32_000)  # below the ephemeral ports, so that no outgoing connection takes ours during a restart
LOG_TAIL = 4_000  # characters


class ServerError(Exception):
    """The server cannot be had: the text is the answer to the parent."""


def tail(base: Path) -> str:
    """Return the end of the server's log."""
    return (base / "log").read_text(errors="replace")[-LOG_TAIL:]


def remove(base: Path) -> None:
    """Remove a base directory with everything in it."""
    for _ in range(100):  # the last children of a killed server may still be writing
        shutil.rmtree(base, ignore_errors=True)
        if not base.exists():
            return
        time.sleep(0.05)


class Server:
    """The watchdog's side: one base directory, one data directory, one server process at a time."""

    def __init__(self, order: dict[str, Any]) -> None:
        shared = "/tmp"  # noqa: S108 - mkdtemp is private; a socket's path must stay under about 100 bytes
        self.base = Path(tempfile.mkdtemp(prefix="sqla-jobqueue-", dir=shared if os.access(shared, os.W_OK) else None))
        self.home = Path(order["data_dir"] or self.base)
        self.kept = order["data_dir"] is not None
        self.bindir = Path(order["bindir"])
        self.settings: dict[str, str] = {**order["settings"], "unix_socket_directories": str(self.base)}
        self.throwaway: bool = order["throwaway"]
        self.parent: int = order["parent"]
        self.password = secrets.token_urlsafe(24)
        self.port = 0
        self.user: pwd.struct_passwd | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.is_prepared = False

    def prepare(self) -> None:
        """Take the place: the user, the binaries, the data directory."""
        data, password_file = self.home / "data", self.home / "password"
        self.home.mkdir(parents=True, exist_ok=True)
        is_new = not data.exists()
        if is_new and self.kept and any(path.name != "password" for path in self.home.iterdir()):
            raise ServerError(f"{self.home} is neither empty nor was it made here: name another data_dir.")
        if os.geteuid() == 0:
            self.user = _unprivileged(self.home.stat().st_uid)
            os.chown(self.base, self.user.pw_uid, self.user.pw_gid)
            os.chown(self.home, self.user.pw_uid, self.user.pw_gid)
            self._reach_binaries(self.user)
        if is_new:
            self._make_data(data, password_file)
        else:
            self.password = password_file.read_text()
        self.is_prepared = True

    def _make_data(self, data: Path, password_file: Path) -> None:
        partial = self.home / "data.partial"  # only a whole one gets the name
        shutil.rmtree(partial, ignore_errors=True)
        password_file.unlink(missing_ok=True)
        password_file.touch(mode=0o600)
        password_file.write_text(self.password)
        if self.user:
            os.chown(password_file, self.user.pw_uid, self.user.pw_gid)
        options = ["--username", SUPERUSER, "--auth", "scram-sha-256", "--pwfile", str(password_file)]
        options += ["--encoding", "UTF8", "--locale", "C", *(["--no-sync"] if self.throwaway else [])]
        if self.spawn("initdb", "--pgdata", str(partial), *options).wait():
            raise ServerError(f"initdb could not make {data}{self._as_whom()}.\n{tail(self.base)}")
        partial.rename(data)
        if not self.kept:
            password_file.unlink()

    def _reach_binaries(self, user: pwd.struct_passwd) -> None:
        """Copy the binaries into the base directory when the unprivileged user cannot run them where they are."""
        with contextlib.suppress(PermissionError):
            if self.spawn("postgres", "--version").wait() == 0:
                return
        install = self.bindir.parent
        copy = self.base / "copy" / install.parent.name / install.name
        for part in ("lib", "share"):
            shutil.copytree(install / part, copy / part, symlinks=True)
        (copy / "bin").mkdir()
        for program in ("postgres", "initdb"):
            shutil.copy(self.bindir / program, copy / "bin")
        vendored = install.parent.parent / f"{install.parent.name}.libs"  # the wheel's, found by $ORIGIN/../../../
        if vendored.is_dir():
            shutil.copytree(vendored, self.base / "copy" / vendored.name)
        for folder, _, files in os.walk(self.base / "copy"):
            for name in (".", *files):
                os.chown(Path(folder, name), user.pw_uid, user.pw_gid, follow_symlinks=False)
        self.bindir = copy / "bin"

    def _as_whom(self) -> str:
        return f" as the user {self.user.pw_name}, who must be able to reach it" if self.user else ""

    def spawn(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a PostgreSQL program as the unprivileged user, its output into the log."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        with (self.base / "log").open("ab") as log:
            return subprocess.Popen(  # noqa: S603 - a program of the directory we were given
                [str(self.bindir / program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**env, "LC_ALL": "C", "TZ": "UTC", "HOME": str(self.base)},
                cwd=self.base,
                user=self.user and self.user.pw_uid,
                group=self.user and self.user.pw_gid,
                extra_groups=[] if self.user else None,
                start_new_session=True,
                preexec_fn=_dying_with_this_process(),  # noqa: PLW1509 - the watchdog has one thread only
            )

    def start(self) -> None:
        """Start the server on its port, or on a free one the first time, and wait until it is ready."""
        patience = time.monotonic() + STOP_SECONDS
        attempts = 0
        while attempts < 3 or (self.port and time.monotonic() < patience):  # noqa: PLR2004 - a free port may be lost twice
            attempts += 1
            port = self.port or _free_port()
            options = [f"--{name}={value}" for name, value in {**self.settings, "port": str(port)}.items()]
            self.process = self.spawn("postgres", "-D", str(self.home / "data"), *options)
            if self._becomes_ready(self.process):
                self.port = port
                return
            time.sleep(0.1)
        raise ServerError(f"PostgreSQL did not start{self._as_whom()}.\n{tail(self.base)}")

    def _becomes_ready(self, process: subprocess.Popen[bytes]) -> bool:
        deadline = time.monotonic() + READY_SECONDS
        while process.poll() is None and time.monotonic() < deadline and os.getppid() == self.parent:
            with contextlib.suppress(OSError):
                lines = (self.home / "data" / "postmaster.pid").read_text().split("\n")
                if lines[0] == str(process.pid) and lines[7:8] and lines[7].strip() == "ready":
                    return True
            time.sleep(0.01)
        self.stop(immediate=True)
        return False

    def stop(self, *, immediate: bool = False) -> None:
        """Stop the server: fast, then immediate, then by force."""
        process, self.process = self.process, None
        if process is None:
            return
        for number in [signal.SIGQUIT] if immediate else [signal.SIGINT, signal.SIGQUIT]:
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
                return
        process.kill()
        process.wait()

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carry out an order of the parent and return what it may want to know."""
        try:
            if order["do"] == "stop":
                self.stop(immediate=order["immediate"])
            else:
                if not self.is_prepared:
                    self.prepare()
                if self.process is None or self.process.poll() is not None:
                    self.start()
        except (ServerError, OSError) as error:
            return {"error": str(error), "base": str(self.base)}
        pid = self.process.pid if self.process else 0
        return {"port": self.port, "pid": pid, "password": self.password, "base": str(self.base)}


def _unprivileged(owner: int) -> pwd.struct_passwd:
    """Return whom to run as instead of root: the owner of the data, else nobody."""
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(owner) if owner else pwd.getpwnam("nobody")
    raise ServerError("PostgreSQL does not run as root, and there is no user 'nobody': start it as another user.")


def _dying_with_this_process() -> Callable[[], None] | None:
    """Return what makes a child stop when this process is killed: run in the child after it has dropped root."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def arm() -> None:
        prctl(1, signal.SIGINT)  # PR_SET_PDEATHSIG; a change of user would have cleared it
        if os.getppid() != parent:
            os._exit(1)

    return arm


def _free_port() -> int:
    for port in random.sample(PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerError(f"No free port on 127.0.0.1 between {PORTS.start} and {PORTS.stop}.")


def _orders() -> Iterator[dict[str, Any]]:
    """Yield the parent's orders until it closes the pipe or is gone (a fork of it may hold the pipe open)."""
    parent = 0
    pipe = os.fdopen(0, "rb", buffering=0)
    while True:
        while not select.select([pipe], [], [], 0.5)[0]:
            if parent and os.getppid() != parent:
                return
        if not (line := pipe.readline()):
            return
        order: dict[str, Any] = json.loads(line)
        parent = order.get("parent", parent)
        yield order


def main() -> int:
    """Obey the parent until it is gone, and leave nothing behind."""

    def ignore(_number: int, _frame: FrameType | None) -> None:
        """Do nothing; unlike SIG_IGN it is not inherited by the server."""

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, ignore)
    server: Server | None = None
    try:
        for order in _orders():
            server = server or Server(order)
            sys.stdout.write(json.dumps(server.obey(order)) + "\n")
            sys.stdout.flush()
    except BrokenPipeError:
        return 1  # the parent died while it waited
    finally:
        if server:
            server.stop()
            remove(server.base)
    return 0


if __name__ == "__main__":
    sys.exit(main())
