"""The facts of a demo run, the verdict, JSON and the plot. The verdict is a list of checks and uses the facts only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from pccl.tools.demo.plan import Plan
from pccl.tools.report import check_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CLEARLY_BELOW_BITS = 0.5
"""The final loss must be this far below the unigram entropy, after STEPS_TO_LEARN inner steps or more. In a shorter run
it must be below the initial loss."""
STEPS_TO_LEARN = 100

Kind: TypeAlias = Literal["lost", "retried", "joined"]


class Event(msgspec.Struct, frozen=True):
    """A change of the membership, or retried reduces, in one outer step."""

    kind: Kind
    text: str
    peer: int | None = None


class Row(msgspec.Struct, frozen=True):
    """One outer step of the run; row 0 is the untrained model."""

    step: int
    bits_per_byte: float | None
    world_size: int
    sent_bytes: int
    """The sum over all peers, as in `received_bytes`."""
    received_bytes: int
    seconds: float
    """The slowest peer's time."""
    events: list[Event] = []
    agreed: bool = True
    """All peers saw the same world size."""


class Killed(msgspec.Struct, frozen=True):
    """The planned victim at its kill."""

    peer: int
    step: int
    launched: int
    """All-reduces in flight, of `of`."""
    of: int
    aborted: dict[int, int] = {}
    """For each survivor the number of aborted and retried all-reduces of that step."""


class Joined(msgspec.Struct, frozen=True):
    """The newcomer after its first sync."""

    peer: int
    step: int
    """The first step it takes part in."""
    received_bytes: int
    sync_seconds: float


class Survivor(msgspec.Struct, frozen=True):
    """A peer that did all its steps, and the BLAKE3 digest of its shared state."""

    peer: int
    step: int
    revision: int
    digest: str


class Check(msgspec.Struct, frozen=True):
    """One part of the verdict."""

    name: str
    passed: bool
    found: str


class Report(msgspec.Struct, kw_only=True):
    """All facts of a run."""

    plan: Plan
    unigram_bits: float
    rows: list[Row]
    killed: Killed | None
    joined: Joined | None
    survivors: list[Survivor]
    problems: list[str]
    """Unplanned failures."""
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
    """Return the verdict, check by check."""
    checks = [_loss(report), _digests(report)]
    if report.plan.kill:
        checks.append(_kill(report))
    if report.plan.join:
        checks.append(_join(report))
    checks.append(_agreement(report))
    found = "; ".join(first_and_last_line(problem) for problem in report.problems)
    checks.append(Check("nothing else", not report.problems, found or "no other failure"))
    return checks


def _loss(report: Report) -> Check:
    if report.end_bits is None or report.start_bits is None:
        return Check("loss", False, "not measured to the end")
    found = f"{report.start_bits:.3f} at the start, {report.end_bits:.3f} bits per byte at the end; "
    inner_steps = report.plan.steps * report.plan.inner_steps
    if inner_steps < STEPS_TO_LEARN:
        needed = report.start_bits
        found += f"in a run this short needed below {needed:.3f}"
    else:
        needed = report.unigram_bits - CLEARLY_BELOW_BITS
        found += f"unigram entropy {report.unigram_bits:.3f}, needed below {needed:.3f}"
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
        return Check("kill", False, f"{found}; the others did not end that step without it")
    # Not on all peers: a launch returns before it takes effect, so a peer may be too late to be interrupted.
    interrupted = {peer: aborted for peer, aborted in killed.aborted.items() if aborted}
    if not interrupted:
        return Check("kill", False, f"{found}, but the others aborted no all-reduce")
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
        return Check("join", False, f"{found}; the others did not see it join")
    return Check("join", True, found)


def _agreement(report: Report) -> Check:
    wrong = [row.step for row in report.rows if not row.agreed]
    if wrong:
        return Check("agreement", False, f"peers saw different world sizes in step {', '.join(map(str, wrong))}")
    if not report.rows or report.rows[-1].step < report.plan.steps:
        done = report.rows[-1].step if report.rows else 0
        return Check("agreement", False, f"{done} of {report.plan.steps} steps were done")
    return Check("agreement", True, "all peers saw the same membership in every step")


def name_peers(peers: list[int]) -> str:
    """Return `peer 3`, `peers 1 and 3` or `peers 0, 1 and 3`."""
    if len(peers) == 1:
        return f"peer {peers[0]}"
    return f"peers {', '.join(map(str, peers[:-1]))} and {peers[-1]}" if peers else "no peer"


def first_and_last_line(problem: str) -> str:
    """Return a problem without the middle of its traceback."""
    lines = problem.splitlines()
    return problem if len(lines) < 3 else f"{lines[0]} ... {lines[-1].strip()}"


def megabytes(count_bytes: int) -> str:
    return f"{count_bytes / 1e6:.1f} MB"


def to_json(report: Report) -> str:
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode()


_EVENT_COLOURS: dict[Kind, str] = {"lost": "tab:red", "joined": "tab:green"}


def draw_plot(report: Report, path: Path) -> None:
    """Draw the loss against steps and against bytes sent, with losses and joins marked."""
    check_plot(path)
    from matplotlib.figure import Figure

    rows = [row for row in report.rows if row.bits_per_byte is not None]
    losses = [row.bits_per_byte for row in rows]
    sent_megabytes, total_bytes = {}, 0
    for row in report.rows:
        total_bytes += row.sent_bytes
        sent_megabytes[row.step] = total_bytes / 1e6

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    by_step, by_bytes = figure.subplots(1, 2, sharey=True)
    _draw(by_step, report, {row.step: float(row.step) for row in report.rows}, [row.step for row in rows], losses)
    _draw(by_bytes, report, sent_megabytes, [sent_megabytes[row.step] for row in rows], losses)
    by_step.set(xlabel="outer step", ylabel="validation loss, bits per byte")
    by_bytes.set(xlabel="sent by all peers since the start, MB")
    by_step.xaxis.get_major_locator().set_params(integer=True)
    by_step.legend(loc="center right", bbox_to_anchor=(1.0, 0.32))
    plan = report.plan
    figure.suptitle(f"DiLoCo over pccl: {plan.peers} peers, {plan.inner_steps} inner steps, quantize {plan.quantize}")
    figure.savefig(path, dpi=150)


def _draw(axes: Axes, report: Report, position: dict[int, float], x: list[Any], losses: list[Any]) -> None:
    axes.axhline(report.unigram_bits, color="grey", linestyle="--", label="unigram entropy of the text")
    axes.plot(x, losses, marker=".", label="validation loss")
    axes.grid(alpha=0.3)
    for row in report.rows:
        for event in row.events:
            if colour := _EVENT_COLOURS.get(event.kind):
                axes.axvline(position[row.step], color=colour, linewidth=1)
                axes.annotate(
                    f"{event.kind} {event.peer if event.peer is not None else ''}",
                    (position[row.step], 0.98),
                    xycoords=("data", "axes fraction"),
                    rotation=90,
                    ha="right",
                    va="top",
                    color=colour,
                )
