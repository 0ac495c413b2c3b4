"""Renders a run's status for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pccl.status import label, peers_named, tag_named

if TYPE_CHECKING:
    from pccl.status import MemberStatus, RunStatus

EVENTS_SHOWN = 10
LOSSES_SHOWN = 5
LINKS_SHOWN = 8
STYLES = {"accepted": "green", "joining": "cyan", "pending": "yellow", "connecting": "dim"}
LEVELS = {"warning": "yellow", "debug": "dim"}
RATE_OVER_S = 10.0


def render(status: RunStatus) -> RenderableType:
    # As Text, names and reasons from other processes are never interpreted as markup.
    rings: list[RenderableType] = [_groups(status), *_decisions(status), *_links(status), *_traffic(status)]
    return Group(
        *_head(status), *_hold(status), *_findings(status), *rings, _peers(status), *_losses(status), *_events(status)
    )


def _head(status: RunStatus) -> list[Text]:
    totals = status.totals
    accepted = sum(member.state == "accepted" for member in status.members)
    changing = ", changing" if status.is_changing else ""
    return [
        Text.assemble(
            ("run ", "dim"),
            (status.run_name or status.run, "bold"),
            ("" if status.role == "leading" else f"  {status.role}", "bold yellow"),
            f"  view {status.view}{changing}, term {status.term}, up {span(status.uptime_s)}, pccl {status.version}",
        ),
        Text(status.recovery, style="yellow")
        if status.recovery
        else Text(
            f"{accepted} peers, {len(status.members) - accepted + status.held} waiting; {totals.joins} joins, "
            f"{totals.losses} losses, {totals.leaves} left, {totals.reconnects} reconnects"
        ),
        Text(
            f"{per_second(status, 'ops_committed'):.1f} ops/s, {totals.ops_committed} committed, {totals.ops_aborted} "
            f"aborted; {size(per_second(status, 'tx_bytes'))}/s sent, {size(totals.tx_bytes)} in all, "
            f"{size(totals.state_bytes)} of state"
        ),
    ]


def _hold(status: RunStatus) -> Iterable[Text]:
    if status.held_for and (status.held or not status.recovery):
        yield Text(f"newcomers are held: this master waits for {status.held_for}", style="yellow")


def _table(*columns: str, title: str = "") -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _findings(status: RunStatus) -> Iterable[Table]:
    if status.findings:
        table = _table("for", "peer", "finding", "evidence", title="Stragglers")
        for found in status.findings:
            peer = Text(_label(status, found.peer))
            table.add_row(span(found.for_s), peer, found.kind, Text(found.text, style="yellow"))
        yield table


def _groups(status: RunStatus) -> Table:
    table = _table("group", "state", "progress", "epoch", "ring")
    for group in status.groups:
        state = "syncing" if group.is_syncing else group.state
        ring = " → ".join(map(str, group.ring)) + (" → " if len(group.ring) > 1 else "")
        steps = [each.figures.get("step", -1.0) for each in status.members if each.group == group.group]
        revision = "-" if group.revision is None else f"revision {group.revision}"
        step = max(steps, default=-1.0)  # training classes only sync when peers join, so their revision stays behind
        progress = f"step {step:.10g}" if step >= 0 else revision
        table.add_row(str(group.group), state, progress, str(group.epoch), ring + ("(mesh)" if group.is_meshed else ""))
    return table


def _decisions(status: RunStatus) -> Iterable[Text]:
    for group in status.groups:
        if group.decision:
            yield Text(f"group {group.group}, last optimize_topology: {group.decision}", style="dim")


def _links(status: RunStatus) -> Iterable[Table]:
    known = sorted((link for group in status.groups for link in group.links), key=lambda link: link.bytes_per_s)
    if known:
        table = _table("from", "to", "measured", "round trip", "ago", title=_titled("Links of the rings", len(known)))
        for link in known[:LINKS_SHOWN]:
            table.add_row(
                _in_brief(status, link.sender),
                _in_brief(status, link.receiver),
                f"{link.bytes_per_s * 8e-6:,.1f} Mbit/s",
                f"{link.round_trip_s * 1e3:.2f} ms",
                span(link.age_s),
            )
        yield table


def _traffic(status: RunStatus) -> Iterable[Table]:
    """Yield the traffic of the link directions that are sending now, slowest first."""
    known = [
        (member.peer, link) for member in status.members for link in member.traffic.links if link.tx_bytes_per_s > 0
    ]
    if known:
        known.sort(key=lambda each: each[1].tx_bytes_per_s)
        table = _table("from", "to", title=_titled("Traffic of links", len(known)))
        has_udp = any(link.is_udp for _, link in known)
        udp = ["over"] * has_udp
        table.collapse_padding = True  # only the names are cut at 80 columns
        for column in ("sends", *udp, "rtt\nms", "min\nms", "resent", "unacked", "snd\nlim", "rcv\nlim"):
            table.add_column(column, justify="right", no_wrap=True)
        for peer, link in known[:LINKS_SHOWN]:
            table.add_row(
                _in_brief(status, peer),
                _in_brief(status, link.peer),
                f"{size(link.tx_bytes_per_s)}/s",
                *["UDP" if link.is_udp else ""] * has_udp,
                f"{link.round_trip_s * 1e3:.2f}",
                f"{link.round_trip_s_min * 1e3:.2f}",
                f"{link.resent_share:.1%}",
                size(link.unacked_bytes),
                f"{link.sender_limited:.0%}",
                f"{link.receiver_limited:.0%}",
            )
        yield table


def _titled(title: str, count: int) -> str:
    return f"{title}, slowest {LINKS_SHOWN} of {count}" if count > LINKS_SHOWN else title


def _label(status: RunStatus, peer: int) -> str:
    return label(peer, _names(status).get(peer, ""))


def _in_brief(status: RunStatus, peer: int) -> Text:
    return Text(_label(status, peer), no_wrap=True, overflow="ellipsis")


def _names(status: RunStatus) -> dict[int, str]:
    return {loss.peer: loss.name for loss in status.losses} | {each.peer: each.name for each in status.members}


def _peers(status: RunStatus) -> Table:
    names = _names(status)
    has_groups = len({member.group for member in status.members}) > 1
    table = _table("peer", *(["group"] if has_groups else []), "address", "state")
    for column in ("sent/s", "recv/s"):
        table.add_column(column, no_wrap=True, justify="right")
    has_figures = any(member.figures for member in status.members)
    if has_figures:
        table.add_column("waited", justify="right")
        table.add_column("reports")
    for member in status.members:
        table.add_row(
            Text(label(member.peer, member.name)),
            *([str(member.group)] if has_groups else []),
            Text(member.address),
            Text("; ".join([member.state, *waits(member, names)]), style=STYLES.get(member.state, "")),
            size(member.traffic.tx_bytes_per_s),
            size(member.traffic.rx_bytes_per_s),
            *([Text(f"{member.traffic.waited:.0%}"), Text(_figures(member))] if has_figures else []),
        )
    return table


def _figures(member: MemberStatus) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in member.figures.items())


def waits(member: MemberStatus, names: Mapping[int, str]) -> Iterable[str]:

    def named(peers: Iterable[int]) -> str:
        return peers_named(peers, lambda peer: names.get(peer, ""))

    if member.waiting is not None:
        missing = f" for {named(member.waiting.missing)}" if member.waiting.missing else ""
        yield f"{member.waiting.call}{missing}, {span(member.waiting.for_s)}"
    for op in member.stalled_ops:
        yield f"{op.call} with {tag_named(op.tag)}{f' for {named(op.missing)}' if op.missing else ''}"
    if member.answer_due_s is not None:
        yield f"the master waits for its answer, {span(member.answer_due_s)}"
    if not member.is_heard:
        yield "sends no heartbeat"


def _losses(status: RunStatus) -> Iterable[Table]:
    if status.losses:
        table = _table("ago", "peer", "reason", title="Losses")
        for loss in status.losses[-LOSSES_SHOWN:]:
            table.add_row(span(loss.age_s), Text(label(loss.peer, loss.name)), Text(loss.reason))
        yield table


def _events(status: RunStatus) -> Iterable[Table]:
    if status.events:
        table = _table("ago", "event", title="Log")
        for event in status.events[-EVENTS_SHOWN:]:
            table.add_row(span(event.age_s), Text(event.text, style=LEVELS.get(event.level, "")))
        yield table


def per_second(status: RunStatus, what: str) -> float:
    """Return the recent rate of a count in `Totals`, without the last two steps, which are incomplete."""
    steps = status.course.steps[-2 - round(RATE_OVER_S / status.course.step_s) : -2]
    total: int = sum(getattr(step, what) for step in steps)
    return total / (len(steps) * status.course.step_s) if steps else 0.0


def size(count: float) -> str:
    """Return a formatted number of bytes, with decimal prefixes as is usual for networks."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if count >= 100 or unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def span(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
