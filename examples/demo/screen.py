"""Progress and report: live on a terminal, plain lines elsewhere."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from examples.demo.checks import Verdict

SECONDS_BETWEEN_LINES = 1.0
"""Where there is no terminal."""
LINES_OF_LOG = 40


@dataclass(frozen=True)
class State:
    """How far the story is."""

    placed: int
    planned: int
    refused: int
    orders: int
    invoices: int
    receipts: int
    retrying: int
    dead: int
    workers: Mapping[str, bool]
    """Whether each is alive."""


class Screen:
    """Where the demo tells what happens."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self._began_at = time.monotonic()
        self._next_line = 0.0
        self._bars = Progress(
            TextColumn("  {task.description:<9}"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            console=self.console,
        )
        self._tasks: dict[str, TaskID] = {
            name: self._bars.add_task(name, total=None, note="") for name in ("orders", "invoices", "receipts")
        }
        self._workers = Text()
        self._live = Live(Group(self._bars, self._workers), console=self.console, transient=True, refresh_per_second=10)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._live.stop()

    def say(self, text: str, style: str = "") -> None:
        """Tell that something happened."""
        self.console.print(f"[dim]{time.monotonic() - self._began_at:5.1f} s[/]  [{style or 'default'}]{text}[/]")

    def show(self, state: State) -> None:
        """Tell how far it is."""
        waiting = f"{state.retrying} to retry, {state.dead} dead"
        if self.console.is_terminal:
            self._bar("orders", state.placed, state.planned, f"{state.refused} rolled back")
            self._bar("invoices", state.invoices, state.orders, "")
            self._bar("receipts", state.receipts, state.orders, waiting)
            self._workers.plain = ""
            for name, is_alive in state.workers.items():
                self._workers.append(f"  {name} {'works' if is_alive else 'is dead'} ", "green" if is_alive else "red")
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
            self.say(
                f"orders {state.placed}/{state.planned}, invoices {state.invoices}/{state.orders}, "
                f"receipts {state.receipts}/{state.orders}, {waiting}"
            )

    def quote(self, *logs: Path) -> None:
        """Show the ends of the workers' logs, where something went wrong."""
        for log in logs:
            self.console.rule(log.name)
            self.console.print("\n".join(log.read_text().splitlines()[-LINES_OF_LOG:]), markup=False)

    def _bar(self, name: str, done: int, of: int, note: str) -> None:
        self._bars.update(self._tasks[name], completed=done, total=of, note=note)

    def report(
        self, verdicts: Sequence[Verdict], attempts: Sequence[tuple[int, int]], dead: Sequence[tuple[Any, ...]]
    ) -> None:
        """The tables at the end."""
        self._live.stop()
        promises = Table(title="What the database says", title_justify="left", expand=True)
        promises.add_column("promise", ratio=2)
        promises.add_column("found by SQL", ratio=1)
        promises.add_column("holds")
        for verdict in verdicts:
            holds = Text("yes", "green") if verdict.holds else Text("NO", "bold red")
            promises.add_row(verdict.promise, verdict.found, holds)

        tries = Table(title="Receipts by attempts", title_justify="left")
        tries.add_column("attempts", justify="right")
        tries.add_column("receipts", justify="right")
        for number, receipts in attempts:
            tries.add_row(str(number), str(receipts))

        letters = Table(title="The dead letter", title_justify="left")
        for column in ("job", "receipt for", "attempts", "last error"):
            letters.add_column(column)
        for row in dead:
            letters.add_row(*map(str, row))
        side_by_side = Table.grid(padding=(0, 4))
        side_by_side.add_row(tries, letters)
        self.console.print(promises, side_by_side)
