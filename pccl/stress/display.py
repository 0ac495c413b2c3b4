"""The terminal's view of a run: what is done to the peers, and below it, live, where they are.

Without a terminal there is a line every few seconds instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from pccl.stress.checker import Counts
from pccl.stress.messages import At
from pccl.stress.plan import Plan
from pccl.stress.report import Disturbances, Report, table

LINE_EVERY_S = 10.0


class Display:
    def __init__(self, console: Console, plan: Plan) -> None:
        self._console = console
        self._plan = plan
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._next_line_s = LINE_EVERY_S

    def __enter__(self) -> Display:
        plan = self._plan
        names = (
            "kill",
            "join",
            "leave",
            "freeze",
            "cut",
            "partition",
            "timeouts",
            "threads",
            "interrupts",
            "token",
            "encrypt",
        )
        kinds = [name for name in names if getattr(plan, name)]
        if plan.kill_master is not None:
            kinds.append(f"kill masters ({plan.standbys} standbys)")
        self._console.print(
            f"pccl stress: seed {plan.seed}, {plan.peers} to {plan.peers_max} peers, {plan.minutes:g} min, "
            f"{', '.join(kinds) or 'undisturbed'}",
            highlight=False,
        )
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def moved(self, seconds: float, peers: Mapping[int, At], counts: Counts, done: Disturbances) -> None:
        """Called several times a second."""
        line = (
            f"{seconds:6.0f} s  {len(peers)} peers  {counts.steps} steps  {counts.ops_committed} ops  "
            f"{done.killed} killed  {done.dismissed} left  {done.frozen} frozen  {done.started} started  "
            f"longest step {counts.longest_step_s:.2f} s"
        )
        if self._live is not None:
            where = "  ".join(f"{peer} {at.doing} {at.revision}" for peer, at in sorted(peers.items()))
            self._live.update(Text(f"{line}\n{where}"), refresh=True)
        elif seconds >= self._next_line_s:
            self._next_line_s = seconds + LINE_EVERY_S
            self._console.print(line, highlight=False, soft_wrap=True)

    def verdict(self, report: Report) -> None:
        for problem in report.problems:
            self._console.print(Text(problem, style="red"), soft_wrap=True, highlight=False)
        self._console.print(table(report))
        if report.longest_step:
            self._console.print("in and right before the longest step:", *report.longest_step, sep="\n", soft_wrap=True)
        if report.passed:
            self._console.print("passed", style="bold green")
            return
        self._console.print(
            Text(f"FAILED with --seed {report.plan.seed}; everybody's log is in {report.logs}", style="bold red"),
            soft_wrap=True,
        )
