"""A demo run's results, verdict, JSON and plot. The verdict is a list of checks that use only the results."""

from __future__ import annotations

import textwrap
from itertools import accumulate
from typing import Literal, TypeAlias

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from pccl.tools.demo.plan import At, Plan

CLEARLY_BELOW_BITS = 0.5
"""The final loss must be this far below the unigram entropy, if the run has at least STEPS_TO_LEARN inner steps. In a
shorter run, it must be below the initial loss."""
STEPS_TO_LEARN = 100

Kind: TypeAlias = Literal["lost", "retried", "joined"]


class Event(msgspec.Struct, frozen=True):
    """A membership change, or retried reduces, in one outer step."""

    kind: Kind
    text: str
    peer: int | None = None


class Row(msgspec.Struct, frozen=True):
    """One outer step of the run; row 0 is the untrained model."""

    step: int
    bits_per_byte: float | None
    world_size: int
    sent_bytes: int
    """Summed over all peers, like `received_bytes`."""
    received_bytes: int
    seconds: float
    events: list[Event] = []
    agreed: bool = True
    """Whether all peers saw the same world size."""


class Killed(msgspec.Struct, frozen=True):
    """The state of the planned victim when it was killed."""

    peer: int
    step: int
    launched: int
    """The number of all-reduces in flight, out of `of`."""
    of: int
    aborted: dict[int, int] = {}
    """For each survivor, the number of all-reduces in that step that were aborted and retried."""


class Joined(msgspec.Struct, frozen=True):
    """The newcomer after its first sync."""

    peer: int
    step: int
    """The first step that it takes part in."""
    received_bytes: int
    sync_seconds: float


class Survivor(msgspec.Struct, frozen=True):
    """A peer that completed all its steps, and the BLAKE3 digest of its shared state."""

    peer: int
    step: int
    revision: int
    digest: str


class Check(msgspec.Struct, frozen=True):
    name: str
    passed: bool
    found: str


class Report(msgspec.Struct, kw_only=True):
    plan: Plan
    unigram_bits: float
    rows: list[Row]
    killed: Killed | None
    joined: Joined | None
    survivors: list[Survivor]
    problems: list[str]
    seconds: float
    start_bits: float | None = None
    end_bits: float | None = None
    checks: list[Check] = []
    passed: bool = False

    def __post_init__(self) -> None:
        losses = {row.step: row.bits_per_byte for row in self.rows}
        self.start_bits = losses.get(0)
        self.end_bits = losses.get(self.plan.steps)
        self.checks = judge(self)
        self.passed = all(check.passed for check in self.checks)


def judge(report: Report) -> list[Check]:
    checks = [_loss(report), _digests(report)]
    if report.plan.kill:
        checks.append(_kill(report))
    if report.plan.join:
        checks.append(_join(report))
    checks.append(_agreement(report))
    found = "; ".join(first_and_last_line(problem) for problem in report.problems)
    checks.append(Check("other failures", not report.problems, found or "none"))
    return checks


def _loss(report: Report) -> Check:
    if report.end_bits is None or report.start_bits is None:
        return Check("loss", False, "not measured to the end")
    found = f"{report.start_bits:.3f} at the start, {report.end_bits:.3f} bits per byte at the end; "
    inner_steps = report.plan.steps * report.plan.inner_steps
    if inner_steps < STEPS_TO_LEARN:
        needed = report.start_bits
        found += f"in a run this short, it must be below {needed:.3f}"
    else:
        needed = report.unigram_bits - CLEARLY_BELOW_BITS
        found += f"unigram entropy {report.unigram_bits:.3f}, so it must be below {needed:.3f}"
    return Check("loss", report.end_bits < needed, found)


def _digests(report: Report) -> Check:
    plan = report.plan
    expected = set(range(plan.peers)) - {plan.victim} | ({plan.newcomer} if plan.newcomer is not None else set())
    missing = expected - {survivor.peer for survivor in report.survivors}
    if missing:
        return Check("parity", False, f"no digest from {name_peers(sorted(missing))}")
    states = {(survivor.digest, survivor.revision, survivor.step) for survivor in report.survivors}
    if len(states) > 1:
        return Check("parity", False, f"{len(states)} different shared states on {len(report.survivors)} survivors")
    return Check("parity", True, f"{len(report.survivors)} survivors hold the same shared state, byte for byte")


def _kill(report: Report) -> Check:
    killed = report.killed
    if killed is None:
        return Check("kill", False, f"peer {report.plan.victim} was never killed in an all-reduce")
    found = (
        f"peer {killed.peer} died by SIGKILL in step {killed.step} with {killed.launched} of {killed.of} "
        "all-reduces in flight"
    )
    rows = {row.step: row for row in report.rows}
    if killed.step not in rows or rows[killed.step].world_size != report.plan.peers - 1:
        return Check("kill", False, f"{found}; the others did not finish that step without it")
    # Not necessarily on all peers: a launch returns before it takes effect, so the kill may not abort a peer's ops.
    interrupted = {peer: aborted for peer, aborted in killed.aborted.items() if aborted}
    if not interrupted:
        return Check("kill", False, f"{found}, but no survivor's all-reduce was aborted")
    most = max(interrupted.values())
    return Check("kill", True, f"{found}; {name_peers(list(interrupted))} retried {most} aborted ones")


def _join(report: Report) -> Check:
    joined, newcomer = report.joined, report.plan.newcomer
    if joined is None:
        return Check("join", False, f"peer {newcomer} never joined the run, or joined too late")
    found = (
        f"peer {joined.peer} joined in step {joined.step}, and received {megabytes(joined.received_bytes)} "
        f"of shared state in {joined.sync_seconds * 1000:.0f} ms"
    )
    if joined.received_bytes == 0:
        return Check("join", False, f"{found}: it received no state")
    if not any(row.step >= joined.step and "joined" in {event.kind for event in row.events} for row in report.rows):
        return Check("join", False, f"{found}; the other peers did not see it join")
    return Check("join", True, found)


def _agreement(report: Report) -> Check:
    wrong = [row.step for row in report.rows if not row.agreed]
    if wrong:
        return Check("agreement", False, f"peers saw different world sizes in step {', '.join(map(str, wrong))}")
    if not report.rows or report.rows[-1].step < report.plan.steps:
        done = report.rows[-1].step if report.rows else 0
        return Check("agreement", False, f"only {done} of {report.plan.steps} steps were completed")
    return Check("agreement", True, "all peers saw the same membership in every step")


def name_peers(peers: list[int]) -> str:
    """Return `peer 3`, `peers 1 and 3` or `peers 0, 1 and 3`."""
    if len(peers) == 1:
        return f"peer {peers[0]}"
    return f"peers {', '.join(map(str, peers[:-1]))} and {peers[-1]}" if peers else "no peer"


def first_and_last_line(problem: str) -> str:
    """Return the first and last line of a problem with a traceback."""
    lines = problem.splitlines()
    return problem if len(lines) < 3 else f"{lines[0]} ... {lines[-1].strip()}"


def megabytes(count_bytes: int) -> str:
    return f"{count_bytes / 1e6:.1f} MB"


def draw_plot(report: Report, path: str) -> None:
    """Draw the loss against steps and against bytes sent, with losses and joins marked."""
    from matplotlib.figure import Figure

    rows = [row for row in report.rows if row.bits_per_byte is not None]
    totals = accumulate(row.sent_bytes for row in report.rows)
    sent_bytes = dict(zip([row.step for row in report.rows], totals, strict=True))
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    by_step, by_bytes = figure.subplots(1, 2, sharey=True)
    for axes, position in (
        (by_step, {row.step: float(row.step) for row in report.rows}),
        (by_bytes, {step: count / 1e6 for step, count in sent_bytes.items()}),
    ):
        axes.axhline(report.unigram_bits, color="grey", linestyle="--", label="unigram entropy of the text")
        losses = [row.bits_per_byte for row in rows]
        axes.plot([position[row.step] for row in rows], losses, marker=".", label="validation loss")
        axes.grid(alpha=0.3)
        for kind, colour in (("lost", "tab:red"), ("joined", "tab:green")):
            for row in report.rows:
                if kind in {event.kind for event in row.events}:
                    axes.axvline(position[row.step], color=colour, linewidth=1, label=f"peer {kind}")
    by_step.set(xlabel="outer step", ylabel="validation loss, bits per byte")
    by_bytes.set(xlabel="sent by all peers since the start, MB")
    by_step.legend()
    plan = report.plan
    figure.suptitle(f"DiLoCo over pccl: {plan.peers} peers, {plan.inner_steps} inner steps, quantize {plan.quantize}")
    figure.savefig(path, dpi=150)


# The display for an 80-column terminal: a row per outer step, a live bar below, and finally the verdict.

_STYLES: dict[Kind, str] = {"lost": "bold red", "joined": "bold green", "retried": "yellow"}
_HEADER = f"{'step':>4} {'bits/byte':>9} {'peers':>5} {'sent MB':>7} {'recv MB':>7} {'time':>7}  events"
_EVENTS_AT = 46
_FINDINGS_AT = 19
_COLUMNS = 80


class Display:
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
        self._print(Text(f"the run's status page is at {url}"))

    def verdict(self, report: Report) -> None:
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
        # soft_wrap keeps rich from breaking digests, which users copy.
        self._console.print(text, soft_wrap=True, highlight=False)


def _wrapped(text: str, indent: int, column: int = 0) -> str:
    """Return a text, starting at a column, that is wrapped with an indent on its later lines."""
    lines = textwrap.wrap(
        " " * column + text,
        _COLUMNS,
        drop_whitespace=True,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines)[column:]
