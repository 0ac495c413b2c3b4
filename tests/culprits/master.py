"""A master that says whom it names: `python -m tests.culprits.master ADDRESS`.

It writes its address, and from then on a line of JSON whenever a finding begins or ends, or the ring changes.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from typing import Any

from pccl import MasterNode

LOOK_S = 0.05


def main() -> None:
    logging.basicConfig(level=logging.CRITICAL)  # whom it names is told as JSON
    with MasterNode(sys.argv[1]) as node:
        assert node._service is not None
        machine = node._service._server._machine
        _say({"address": node.address})
        signal.signal(signal.SIGUSR1, lambda *_: _explain(machine.master.state.diagnosis))
        before: Any = None
        while True:
            time.sleep(LOOK_S)
            state = machine.master.state
            try:
                names = {peer: member.hello.name for peer, member in list(state.members.items())}
                found = [
                    [each.kind, names.get(each.peer, ""), "" if each.to is None else names.get(each.to, ""), each.text]
                    for each in state.diagnosis.findings(0.0)
                ]
                group = state.groups.get(0)
                ring = [names.get(peer, "") for peer in group.ring] if group is not None and group.running else []
            except RuntimeError:
                continue  # it was being changed
            now = [sorted(each[:3] for each in found), ring]
            if now != before:
                _say({"at_s": time.monotonic(), "findings": found, "ring": ring})
            before = now


def _explain(diagnosis: Any) -> None:
    """Write the evidence to stderr."""
    for evidence in diagnosis._groups.values():
        for each in list(evidence.lateness.rounds)[-4:]:
            print("   ", each, file=sys.stderr)
        for late in list(evidence.late_rounds)[-4:]:
            print("    late", late, file=sys.stderr)
        for ways in list(evidence.link_rounds)[-4:]:
            for way, each in sorted(ways.items(), key=lambda one: -one[1].busy)[:5]:
                print("   ", way, each, file=sys.stderr)


def _say(what: dict[str, Any]) -> None:
    os.write(1, (json.dumps(what) + "\n").encode())


if __name__ == "__main__":
    main()
