"""The process between an application and its embedded PostgreSQL.

It is run as a script, by path and in isolated mode, so it imports nothing but the standard library. It reads one JSON
object per line from its standard input, does what that says, and answers with one line: ``{"port": ...}`` or
``{"error": ...}``. The first order describes the server and starts it; later ones stop and start it. The end of the
input, or of the parent, is the order to stop the server and to remove the base directory.

The base directory holds the socket, the log and, unless it is kept elsewhere, the data::

    BASE/log  BASE/.s.PGSQL.20543    BASE is /tmp/sqla-jobqueue-x; throwaway data goes to /dev/shm where that is roomy
    HOME/data                        HOME is BASE or data_dir; made as data.partial and renamed when whole
    HOME/password                    of the superuser, 0600; only beside data that is kept
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
STOP_SECONDS = 10  # for each of fast and immediate shutdown
FREE_PORTS_TRIED = 3  # another process may take one before the server does
OWN_PORT_TRIES = 100  # 0.1 seconds apart: after a kill -9 the old server's children may hold the data for a moment
PORTS = range(20_000, 32_000)  # below the ephemeral ports, so that no outgoing connection takes ours during a restart
MEMORY_WANTED = 2 * 1024**3  # bytes free in /dev/shm; a container's usual 64 MiB are too few
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
        self.base = Path(tempfile.mkdtemp(prefix="sqla-jobqueue-", dir=_temporary_root(in_memory=order["throwaway"])))
        self.home = Path(order["data_dir"] or self.base)
        self.kept = order["data_dir"] is not None
        self.bindir = Path(order["bindir"])
        self.settings: dict[str, str] = {**order["settings"], "unix_socket_directories": str(self.base)}
        self.port = int(self.settings.pop("port", 0))
        self.throwaway: bool = order["throwaway"]
        self.parent: int = order["parent"]
        self.password = secrets.token_urlsafe(24)
        self.user: pwd.struct_passwd | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.is_prepared = False

    def prepare(self) -> None:
        """Settle who runs the server, from which binaries, on which data."""
        data, password_file, partial = (self.home / name for name in ("data", "password", "data.partial"))
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_new = not data.exists()
        foreign = set(self.home.iterdir()) - {password_file, partial} if is_new else not password_file.exists()
        if self.kept and foreign:
            raise ServerError(f"{self.home} holds something that was not made here: name an empty or a new data_dir.")
        if os.geteuid() == 0:
            self.user = _unprivileged((self.home if is_new else data).stat().st_uid)
            for place in {self.base, self.home}:
                os.chown(place, self.user.pw_uid, self.user.pw_gid)
            self._reach_binaries(self.user)
        if is_new:
            self._make_data(data, password_file, partial)
        else:
            self.password = password_file.read_text()
        self.is_prepared = True

    def _make_data(self, data: Path, password_file: Path, partial: Path) -> None:
        """Make the data directory under another name, so that one cut short is never taken for a whole one."""
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
        reach = f", who must be able to reach {self.home}" if self.kept else ""
        return f" as the user {self.user.pw_name}{reach}" if self.user else ""

    def spawn(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a PostgreSQL program as the unprivileged user, its output into the log."""
        passed_on = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        with (self.base / "log").open("ab") as log:
            return subprocess.Popen(  # noqa: S603 - a program of the directory we were given
                [str(self.bindir / program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**passed_on, "LC_ALL": "C", "TZ": "UTC", "HOME": str(self.base)},
                cwd=self.base,
                user=self.user and self.user.pw_uid,
                group=self.user and self.user.pw_gid,
                extra_groups=[] if self.user else None,
                start_new_session=True,
                preexec_fn=_dying_with_this_process(),  # noqa: PLW1509 - the watchdog has one thread only
            )

    def start(self) -> None:
        """Start the server on its port, or on a free one the first time, and wait until it is ready."""
        for _ in range(OWN_PORT_TRIES if self.port else FREE_PORTS_TRIED):
            port = self.port or _free_port()
            options = [f"--{name}={value}" for name, value in {**self.settings, "port": str(port)}.items()]
            self.process = self.spawn("postgres", "-D", str(self.home / "data"), *options)
            if self._becomes_ready(self.process):
                self.port = port
                return
            time.sleep(0.1)
        raise ServerError(f"PostgreSQL did not start{self._as_whom()}.\n{tail(self.base)}")

    def _becomes_ready(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait until the server takes connections; False when it ended instead."""
        deadline = time.monotonic() + READY_SECONDS
        while process.poll() is None:
            with contextlib.suppress(OSError):  # not written yet
                lines = (self.home / "data" / "postmaster.pid").read_text().splitlines()
                if lines[:1] == [str(process.pid)] and [line.strip() for line in lines[7:8]] == ["ready"]:
                    return True
            if time.monotonic() > deadline or os.getppid() != self.parent:
                self.stop(immediate=True)
                raise ServerError(f"PostgreSQL was not ready within {READY_SECONDS} s.\n{tail(self.base)}")
            time.sleep(0.01)
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
        except ServerError as error:
            return {"error": str(error)}
        except OSError as error:
            return {"error": f"PostgreSQL cannot be run{self._as_whom()}: {error}"}
        pid = self.process.pid if self.process else 0
        return {"port": self.port, "pid": pid, "password": self.password, "base": str(self.base)}


def _temporary_root(*, in_memory: bool) -> str | None:
    """Return where the base directory goes: a socket's path must stay under about 100 bytes.

    Why in memory: of the start and of CREATE DATABASE, making files takes most of the time. Measured on ext4 and on
    tmpfs (PostgreSQL 18.6, two cores): 0.6 to 1.6 and 0.4 to 0.6 seconds, 110 to 400 and 12 milliseconds.
    """
    for root, wanted_bytes in (("/dev/shm", MEMORY_WANTED), ("/tmp", 0)):  # noqa: S108 - mkdtemp makes a private one
        if (in_memory or not wanted_bytes) and os.access(root, os.W_OK | os.X_OK):
            file_system = os.statvfs(root)
            can_execute = not file_system.f_flag & getattr(os, "ST_NOEXEC", 0)  # binaries may have to be copied there
            if file_system.f_bavail * file_system.f_frsize >= wanted_bytes and can_execute:
                return root
    return None


def _unprivileged(owner: int) -> pwd.struct_passwd:
    """Return whom to run as instead of root: the owner of the data, else nobody."""
    with contextlib.suppress(KeyError):
        if owner:
            return pwd.getpwuid(owner)
    with contextlib.suppress(KeyError):
        return pwd.getpwnam("nobody")
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
