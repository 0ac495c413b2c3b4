"""The demo on a terminal of 80 columns: a row per outer step, a live bar below, the verdict at the end.

Without a terminal the rows are plain lines without a bar.
"""

from __future__ import annotations

import textwrap

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from pccl.tools.demo.plan import At, Plan
from pccl.tools.demo.report import Kind, Report, Row, name_peers
from pccl.tools.harness import Closing

_STYLES: dict[Kind, str] = {"lost": "bold red", "joined": "bold green", "retried": "yellow"}
_HEADER = f"{'step':>4} {'bits/byte':>9} {'peers':>5} {'sent MB':>7} {'recv MB':>7} {'time':>7}  events"
_EVENTS_AT = 46
_FINDINGS_AT = 19
_COLUMNS = 80


class Display(Closing):
    """Writes to one console, with a live bar until `close`."""

    def __init__(self, console: Console, plan: Plan) -> None:
        self._console = console
        self._steps_shown = 0
        self._progress = Progress(
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[peers]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=plan.steps, peers="starting the master")
        what = [
            f"{plan.peers} peer{'s' * (plan.peers > 1)}",
            f"{plan.steps} outer steps of {plan.inner_steps} inner steps",
        ]
        if plan.kill:
            what.append(f"peer {plan.victim} is killed in step {plan.kill_step}")
        if plan.join:
            what.append(f"peer {plan.newcomer} joins in step {plan.join_step}")
        self._print(Text(_wrapped("pccl demo: " + ", ".join(what), 2)))
        self._print(Text(_HEADER, style="bold"))
        self._progress.start()

    def close(self) -> None:
        self._progress.stop()

    def moved(self, peers: dict[int, At]) -> None:
        """Update the bar: whole steps from the rows, the fraction from the slowest peer of the current step."""
        done = min((at.done for at in peers.values() if at.step == self._steps_shown + 1), default=0.0)
        doing: dict[str, list[str]] = {}
        for peer, at in sorted(peers.items()):
            doing.setdefault(at.doing, []).append(str(peer))
        positions = "  ".join(f"[dim]{' '.join(these)}[/] {what}" for what, these in doing.items())
        self._progress.update(self._task, completed=self._steps_shown + min(done, 0.99), peers=positions)

    def row(self, row: Row) -> None:
        """Print one row above the bar."""
        self._steps_shown = row.step
        bits = "" if row.bits_per_byte is None else f"{row.bits_per_byte:.3f}"
        line = Text(
            f"{row.step:>4} {bits:>9} {row.world_size:>5} {row.sent_bytes / 1e6:>7.2f} "
            f"{row.received_bytes / 1e6:>7.2f} {row.seconds:>5.2f} s  "
        )
        for index, event in enumerate(row.events):
            line.append("\n" + " " * _EVENTS_AT if index else "")
            line.append(_wrapped(event.text, _EVENTS_AT, _EVENTS_AT), style=_STYLES[event.kind])
        if row.step == 0:
            line.append("the untrained model")
        self._print(line)

    def page(self, url: str) -> None:
        """Print the address of the run's page."""
        self._print(Text(f"the run is shown at {url}"))

    def verdict(self, report: Report) -> None:
        """Print the checks and every survivor's digest."""
        self._print(Text())
        states: dict[tuple[int, str], list[int]] = {}
        for survivor in report.survivors:
            states.setdefault((survivor.step, survivor.digest), []).append(survivor.peer)
        for (step, digest), peers in states.items():
            self._print(Text(f"{name_peers(peers)}: shared state after step {step}\n  {digest}"))
        self._print(Text())
        for check in report.checks:
            mark = Text("ok   ", style="green") if check.passed else Text("FAIL ", style="bold red")
            found = _wrapped(check.found, _FINDINGS_AT, _FINDINGS_AT)
            self._print(mark.append(f"{check.name:<13} ", style="default").append(found, style="default"))
        for problem in report.problems:
            if "\n" in problem:
                self._print(Text(f"\n{problem}\n", style="dim"))
        word, style = ("passed", "bold green") if report.passed else ("FAILED", "bold red")
        self._print(Text(f"{word} in {report.seconds:.1f} s", style=style))

    def _print(self, text: Text) -> None:
        # soft_wrap: rich must not break digests, which users copy.
        self._console.print(text, soft_wrap=True, highlight=False)


def _wrapped(text: str, indent: int, column: int = 0) -> str:
    """Return a text that begins at a column, wrapped, with an indent on its further lines."""
    lines = textwrap.wrap(
        " " * column + text,
        _COLUMNS,
        drop_whitespace=True,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines)[column:]
