"""Plans played with the engine that ships, alone, or beside the one that pretends.

Played with both (`play_both`), a plan is a calm one: the run comes to rest after each of its steps, the oldest thing
happens first, no op takes the fast path, connections fail only where a step says so, and steps that depend on how long
something takes are left out. So what each step comes to depends on the plan alone, and both engines must have led to
the same after every one: the same peers in the same rings, and the same result code of every op and joint call whose
caller has one. Reasons, views' numbers and bytes sent are not compared, nor are plans that are not calm: there both
engines are held to the same checkers, each in its own course of the plan.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.simulation.node import Node
from tests.simulation.plan import Plan
from tests.simulation.schedule import Schedule, play
from tests.simulation.world import World

CALM = frozenset(
    (
        *("add", "leave", "launch_one", "launch_all", "launch_pair", "catch_up", "cancel", "give_up", "joint_one"),
        *("joint_all", "update", "sync", "optimize", "cancel_joint", "rest", "kill", "break_link", "sever"),
    )
)
"""Steps whose outcome, once all is at rest, depends on nothing but the plan."""

Outcome = list[object]


class Calm(Schedule):
    """A schedule in which all peers call their ops alike: who finds first that they do not, and so before others have
    called at all, depends on who sends to whom."""

    def _launch(self, node: Node, tag: int, is_sound: bool = False, pair: tuple[Node, bool] | None = None) -> None:
        super()._launch(node, tag, True, pair)


def play_real(plan: Plan) -> World:
    return play(plan, is_real=True)


def play_both(plan: Plan) -> None:
    calm = plan._replace(steps=tuple(step for step in plan.steps if step.action in CALM), traits=())
    pretended, real = (_outcomes(calm, is_real) for is_real in (False, True))
    for at, (one, other) in enumerate(zip(pretended, real, strict=True)):
        assert one == other, f"after step {at}, {calm.steps[at].action}: {one} if pretended, {other} in reality"


def _outcomes(plan: Plan, is_real: bool) -> list[Outcome]:
    """Play a calm plan. Return what it has come to after each step."""
    schedule = Calm(plan, is_real, is_calm=True)
    world = schedule.world
    found: list[Outcome] = []
    schedule.run(lambda: found.append(_outcome(world)))
    world.close()
    return found


def _outcome(world: World) -> Outcome:
    found: Outcome = []
    for node in world.nodes:
        ring = [world.node_of(peer).name for peer in node.view.ring] if node.is_reachable and node.views else None
        results = {op: result.code.name for op, result in node.results.items()}
        calls = {call: result.code.name for call, result in node.calls.items()}
        found.append((node.name, ring, results, calls))
    return found


def sanitized(names: str) -> None:
    """Begin the process anew, unless it has, with the real engine built so and the sanitizer's library loaded before
    all others. Its reports end the process."""
    if os.environ.get("PCCL_SIMULATION_SANITIZE") == names:
        return
    libraries = ["libasan.so"] if "address" in names else []
    found = [subprocess.check_output(["gcc", f"-print-file-name={each}"], text=True).strip() for each in libraries]
    environment = {
        "PCCL_SIMULATION_SANITIZE": names,
        "LD_PRELOAD": " ".join(found),
        "ASAN_OPTIONS": "detect_leaks=0:" + os.environ.get("ASAN_OPTIONS", ""),
    }
    os.execve(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]], {**os.environ, **environment})
