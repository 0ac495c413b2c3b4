"""The terminal's view of a run: a row per outer step, a live bar below, the verdict at the end.

Without a terminal the same rows come as plain lines and there is no bar.
"""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from pccl.demo.messages import At
from pccl.demo.plan import Plan
from pccl.demo.report import Kind, Report, Row

_STYLES: dict[Kind, str] = {"lost": "bold red", "joined": "bold green", "retried": "yellow"}
_HEADER = f"{'step':>5} {'bits/byte':>10} {'peers':>6} {'sent':>10} {'received':>10} {'time':>8}  events"


class RichDisplay:
    """Writes to one console; a context manager, because a live bar has to be taken down."""

    def __init__(self, console: Console, plan: Plan) -> None:
        self._console = console
        self._plan = plan
        self._steps_shown = 0
        self._progress = Progress(
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[peers]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=plan.steps, peers="starting the master")

    def __enter__(self) -> RichDisplay:
        plan = self._plan
        what = [
            f"{plan.peers} peer{'s' * (plan.peers > 1)}",
            f"{plan.steps} outer steps of {plan.inner_steps} inner steps",
        ]
        if plan.kill:
            what.append(f"peer {plan.victim} is killed in step {plan.kill_step}")
        if plan.join:
            what.append(f"peer {plan.newcomer} joins in step {plan.join_step}")
        self._print(Text("pccl demo: " + ", ".join(what)))
        self._print(Text(_HEADER, style="bold"))
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def moved(self, peers: dict[int, At]) -> None:
        """Update the bar: whole steps by the rows, the fraction by the slowest peer of the current step."""
        done = min((at.done for at in peers.values() if at.step == self._steps_shown + 1), default=0.0)
        stands = "  ".join(f"[dim]{peer}[/] {at.doing}" for peer, at in sorted(peers.items()))
        self._progress.update(self._task, completed=self._steps_shown + min(done, 0.99), peers=stands)

    def row(self, row: Row) -> None:
        """Print one row above the bar."""
        self._steps_shown = row.step
        bits = "" if row.bits_per_byte is None else f"{row.bits_per_byte:.3f}"
        line = Text(
            f"{row.step:>5} {bits:>10} {row.world_size:>6} {_size(row.sent_bytes):>10} "
            f"{_size(row.received_bytes):>10} {row.seconds:>6.2f} s  "
        )
        for index, event in enumerate(row.events):
            line.append("; " if index else "").append(event.text, style=_STYLES[event.kind])
        if row.step == 0:
            line.append("the untrained model")
        self._print(line)

    def verdict(self, report: Report) -> None:
        """Print the checks and every survivor's digest."""
        self._print(Text())
        for survivor in report.survivors:
            self._print(Text(f"peer {survivor.peer}  shared state after step {survivor.step}  {survivor.digest}"))
        self._print(Text())
        for check in report.checks:
            mark = Text("ok   ", style="green") if check.passed else Text("FAIL ", style="bold red")
            self._print(mark.append(f"{check.name:<13} ", style="default").append(check.found, style="default"))
        for problem in report.problems:
            if "\n" in problem:
                self._print(Text(f"\n{problem}\n", style="dim"))
        word, style = ("passed", "bold green") if report.passed else ("FAILED", "bold red")
        self._print(Text(f"{word} in {report.seconds:.1f} s", style=style))

    def _print(self, text: Text) -> None:
        # As long as it is: a digest or a sentence cut by rich could not be copied.
        self._console.print(text, soft_wrap=True, highlight=False)


def _size(count_bytes: int) -> str:
    return f"{count_bytes / 1e6:.2f} MB"
