"""Kills ranks in DDP and FSDP2 training, and says how the others went on:

    python -m tests.torch.elastic                       # with whatever torch is there; minutes
    python -m tests.torch.elastic --loop fsdp --rounds 5

torch 2.15 has `dist._reconfigure`; with an older torch the same methods are called on the process group.
"""

from __future__ import annotations

import argparse
import sys

from tests.torch.elastic.trial import judge, run

HOST = 0
"""The rank that hosts the master: its loss is decided by a standby, after a peer timeout."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loop", choices=["ddp", "fsdp"], action="append", help="default: both")
    parser.add_argument(
        "--victim", type=int, action="append", help="default: one that hosts the master, one that does not"
    )
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    is_well = True
    print("loop  killed           heard after      reconfigured in   with a newcomer in")
    for loop in arguments.loop or ["ddp", "fsdp"]:
        for victim in arguments.victim or [2, HOST]:
            for _ in range(arguments.rounds):
                events = run(loop, victim)
                found = judge(events, loop, victim)
                who = f"rank {victim}{', the host' if victim == HOST else ''}"
                spans = [_span(found.heard_s), _span(found.reconfigured_s), _span(found.joined_s)]
                print(f"{loop:5} {who:16} {spans[0]:16} {spans[1]:17} {spans[2]}", flush=True)
                for fault in found.faults:
                    print(f"      wrong: {fault}", flush=True)
                for event in events if found.faults else ():
                    print(f"      {event}", flush=True)
                is_well = is_well and not found.faults
    return 0 if is_well else 1


def _span(seconds: list[float]) -> str:
    return f"{min(seconds):.2f} to {max(seconds):.2f} s" if seconds else "-"


if __name__ == "__main__":
    sys.exit(main())
