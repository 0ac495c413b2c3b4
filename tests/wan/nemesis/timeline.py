"""The events of a run, as text and as a picture: a lane for each host, faults as bars, steps as ticks, violations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from tests.wan.nemesis.checker import COMMITTED, Violation
from tests.wan.nemesis.history import Event
from tests.wan.nemesis.progress import World

AROUND_S = 15.0
"""The time before and after a violation that the text names."""
LINES_MAX = 400
WIDTH, LEFT, LANE, TOP = 1600, 90, 28, 30
COLOURS = {"cut": "#c0392b", "freeze": "#2980b9", "clock": "#8e44ad", "disk": "#7f8c8d", "kill": "#2c3e50"}
OTHER_COLOUR = "#d35400"
TELLING = {"joined", "left", "unsynced", "crash", "lineage", "leaving", "start", "alone", "unsaved"}


def text(world: World, histories: Mapping[str, Sequence[Event]], violations: Sequence[Violation]) -> str:
    """The faults and the peers' reports around the first violation, a line each; committed ops are counted."""
    at_s = violations[0].at_s if violations else world.end_s
    lines: list[tuple[float, str]] = []
    for span in world.spans:
        lines.append((span.begin_s, f"--- {span.label}"))
        lines.append((span.end_s, f"--- over: {span.label}"))
    for life in world.lives:
        what = "master" if life.is_master else "peer"
        lines += [(life.begin_s, f"--- {what} {life.name} starts"), (life.end_s, f"--- {what} {life.name} has ended")]
    for violation in violations:
        lines.append((violation.at_s, f"!!! {violation}"))
    for peer, events in histories.items():
        lines += _told(peer, events)
    near = sorted(each for each in lines if abs(each[0] - at_s) <= AROUND_S or each[1].startswith(("---", "!!!")))
    shown = near if len(near) <= LINES_MAX else [*near[: LINES_MAX // 2], (0, "..."), *near[-LINES_MAX // 2 :]]
    return "\n".join(f"{at - world.begin_s:9.3f} {line}" if at else line for at, line in shown)


def _told(peer: str, events: Sequence[Event]) -> Iterator[tuple[float, str]]:
    committed, since_s, last_s = 0, 0.0, 0.0
    for event in events:
        what = event.what
        if event.kind == "end" and what["verdict"] == COMMITTED:
            since_s = since_s if committed else event.at_s
            last_s, committed = event.at_s, committed + 1
            continue
        if event.kind == "end":
            line = f"op {what['op']} of step {what['step']}: {what['verdict']}: {what.get('text', '')[:160]}"
        elif event.kind in TELLING:
            said = " ".join(f"{key}={value}" for key, value in what.items())
            line = f"{event.kind} {said[:200]}"
        else:
            continue
        if committed:
            yield since_s, f"peer {peer}: {committed} ops committed, until {last_s - since_s:.2f} s later"
            committed = 0
        yield event.at_s, f"peer {peer}: {line}"
    if committed:
        yield since_s, f"peer {peer}: {committed} ops committed, until {last_s - since_s:.2f} s later"


def svg(
    title: str, world: World, histories: Mapping[str, Sequence[Event]], violations: Sequence[Violation], hosts: int
) -> str:
    """Return the whole run as a picture for browsers."""
    begin_s = min([world.begin_s, *(life.begin_s for life in world.lives)])
    end_s = max([world.end_s, *(life.end_s for life in world.lives), *(each.at_s for each in violations)])
    scale = (WIDTH - LEFT - 20) / max(1e-9, end_s - begin_s)
    bottom = TOP + LANE * hosts
    height = bottom + 20 + 14 * min(len(violations), 20)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="11">\n<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="18" font-size="14">{escape(title)}, {end_s - begin_s:.0f} s</text>',
    ]

    def x(at_s: float) -> float:
        return round(LEFT + (min(max(at_s, begin_s), end_s) - begin_s) * scale, 1)

    def bar(host: int, offset: float, from_s: float, to_s: float, colour: str, label: str) -> None:
        box = f'x="{x(from_s)}" y="{TOP + LANE * host + offset}" width="{max(2.0, x(to_s) - x(from_s)):.1f}"'
        parts.append(f'<rect {box} height="9" fill="{colour}"><title>{escape(label)}</title></rect>')

    masters = {life.host for life in world.lives if life.is_master}
    for host in range(hosts):
        parts.append(
            f'<text x="8" y="{TOP + LANE * host + 12}">{"master" if host in masters else "peer"} {host}</text>'
        )
    for life in world.lives:
        bar(life.host, 2, life.begin_s, life.end_s, "#ecf0f1", life.name)
    for span in world.spans:
        for host in span.hosts:
            colour = COLOURS.get(span.label.partition(" ")[0], OTHER_COLOUR)
            bar(host, 14, span.begin_s, span.end_s, colour, f"{span.label}, {span.end_s - span.begin_s:.1f} s")
    for peer, events in histories.items():
        for event in events:
            colour = _colour(event)
            if colour:
                y = TOP + LANE * int(peer.partition(".")[0])
                label = escape(f"{event.kind} {event.what.get('text', '')}")
                line = f'x1="{x(event.at_s)}" y1="{y + 2}" x2="{x(event.at_s)}" y2="{y + 11}" stroke="{colour}"'
                parts.append(f"<line {line}><title>{label}</title></line>")
    for number, violation in enumerate(violations[:20]):
        place = x(violation.at_s)
        parts.append(f'<line x1="{place}" y1="{TOP}" x2="{place}" y2="{bottom}" stroke="#e74c3c" stroke-width="2"/>')
        words = escape(f"{number + 1}. {violation}".splitlines()[0][:240])
        parts.append(f'<text x="8" y="{bottom + 16 + 14 * number}" fill="#e74c3c">{words}</text>')
    return "\n".join([*parts, "</svg>"])


def _colour(event: Event) -> str:
    """Steps are green, aborts orange, joins blue and ends of sessions black."""
    if event.kind == "end":
        return "" if event.what["verdict"] == COMMITTED else "#e67e22"
    return {"state": "#27ae60", "trained": "#27ae60", "joined": "#2980b9"}.get(
        event.kind, "#000" if event.kind in ("left", "crash") else ""
    )
