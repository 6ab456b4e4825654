"""The demo's worker processes: start, freeze, kill, stop."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from sqlalchemy import URL

SECONDS_TO_STOP = 8
"""More than a worker's own grace period."""


class WorkerProcess:
    """A worker in a process of its own."""

    def __init__(self, name: str, url: URL, log: Path) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(  # noqa: S603  this interpreter and a module of ours
                [sys.executable, "-m", "examples.demo.worker", name],
                env={**os.environ, "SHOP_DATABASE_URL": url.render_as_string(hide_password=False)},
                stdin=subprocess.PIPE,  # its end tells the worker that the demo is gone
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,  # Ctrl-C is the demo's; it stops the workers itself
            )
        self.pid = self._process.pid
        self.was_killed = False

    def wait_until_ready(self) -> None:
        """Until it has imported everything and begins to work."""
        if self._process.stdout is None or self._process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"{self.name} did not start")

    def freeze(self) -> None:
        """Stop it where it is: all its threads, in the middle of whatever they do. Returns when they stand still."""
        if self.is_alive:
            os.kill(self.pid, signal.SIGSTOP)
            os.waitpid(self.pid, os.WUNTRACED)

    def thaw(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL: no goodbye, nothing cleaned up."""
        self.was_killed = True
        self._process.kill()
        self._process.wait()

    @property
    def is_alive(self) -> bool:
        """It has not ended."""
        return self._process.poll() is None

    def ask_to_stop(self) -> None:
        """Have it finish what it has begun, and end."""
        if self.is_alive:
            self._process.terminate()
            self.thaw()  # a frozen one would not hear it

    def wait(self) -> int:
        """Wait until it has ended; return its exit code."""
        try:
            self._process.wait(SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        return self._process.returncode


class Workers:
    """All of them; on the way out, those that are left are stopped."""

    def __init__(self, url: URL, logs: Path) -> None:
        self._url = url
        self._logs = logs
        self.processes: list[WorkerProcess] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def start(self) -> WorkerProcess:
        """Start one more."""
        n = len(self.processes) + 1
        self.processes.append(WorkerProcess(f"worker {n}", self._url, self._logs / f"worker-{n}.log"))
        return self.processes[-1]

    def stop(self) -> dict[str, int]:
        """Stop those that are left; return the exit codes of all."""
        for worker in self.processes:
            worker.ask_to_stop()
        return {worker.name: worker.wait() for worker in self.processes}
