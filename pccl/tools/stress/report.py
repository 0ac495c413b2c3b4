"""Shows a stress run on the terminal, and its result as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pccl.tools.stress.checker import Counts
from pccl.tools.stress.plan import At, Plan

LINE_EVERY_S = 10.0


class Disturbances(msgspec.Struct):
    started: int = 0
    killed: int = 0
    frozen: int = 0
    dismissed: int = 0
    masters_killed: int = 0
    interrupted: int = 0
    peers_most: int = 0


class Report(msgspec.Struct, frozen=True):
    plan: Plan
    seconds: float
    counts: Counts
    disturbances: Disturbances
    problems: list[str]
    logs: str | None
    """The folder with the logs, which is kept only after a failure."""
    passed: bool


class Display:
    """Prints the faults and, live below them, what each peer is doing."""

    def __init__(self, console: Console, plan: Plan) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._next_line_s = LINE_EVERY_S
        names = ("kill", "join", "leave", "freeze", "cut", "timeouts", "threads", "interrupts", "token")
        kinds = [name for name in (*names, "encrypt") if getattr(plan, name)]
        if plan.kill_master is not None:
            kinds.append(f"kill masters ({plan.standbys} standbys)")
        self._print(
            f"pccl stress: seed {plan.seed}, {plan.peers} to {plan.peers_max} peers, {plan.minutes:g} min, "
            f"{', '.join(kinds) or 'undisturbed'}"
        )
        if self._live is not None:
            self._live.start()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def moved(self, seconds: float, peers: Mapping[int, At], counts: Counts, done: Disturbances) -> None:
        line = (
            f"{seconds:6.0f} s  {len(peers)} peers  {counts.steps} steps  {counts.ops_committed} ops  "
            f"{done.killed} killed  {done.dismissed} left  {done.frozen} frozen  {done.started} started  "
            f"longest step {counts.longest_step_s:.2f} s"
        )
        if self._live is not None:
            positions = "  ".join(f"{peer} {at.doing} {at.revision}" for peer, at in sorted(peers.items()))
            self._live.update(Text(f"{line}\n{positions}"), refresh=True)
        elif seconds >= self._next_line_s:
            self._next_line_s = seconds + LINE_EVERY_S
            self._print(line)

    def verdict(self, report: Report) -> None:
        for problem in report.problems:
            self._print(problem, "red")
        self._console.print(_table(report))
        if report.passed:
            self._print("passed", "bold green")
        else:
            self._print(f"FAILED with --seed {report.plan.seed}; the logs are in {report.logs}", "bold red")

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True, highlight=False)


def _table(report: Report) -> Table:
    result = Table(title=f"seed {report.plan.seed}, {report.seconds:.0f} s", show_header=False, title_justify="left")
    result.add_column()
    result.add_column(justify="right")
    for facts in (report.disturbances, report.counts):
        for name, count in msgspec.to_builtins(facts).items():
            text = f"{count:.2f} s" if name.endswith("_s") else str(count)
            result.add_row(name.removesuffix("_s").replace("_", " "), text)
    result.add_row("problems", str(len(report.problems)))
    return result
