"""Openings that are refused, though whoever sends them has proved that it knows the token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from pccl.protocol import messages as m
from pccl.runtime.session.driver import SessionOptions, Shared
from pccl.runtime.session.links import Inbound

NOBODY = cast(Any, None)
RUN, PEER, OTHER = "run", 1, 2
LINK = m.LinkHello(m.PROTOCOL_VERSION, RUN, OTHER, PEER, 7, 0, 1)
STATE = m.StateHello(m.PROTOCOL_VERSION, RUN, OTHER, PEER, 9)
PULL = m.ProbeHello(m.PROTOCOL_VERSION, RUN, OTHER, PEER, pulls=True)
KEYS = b"ours", b"theirs"


def refusal(opening: m.PeerOpening, encrypt: bool = False, is_optimizing: bool = False, has_keys: bool = True) -> str:
    facts = SimpleNamespace(run=RUN, peer=PEER, is_optimizing=is_optimizing)
    options = SessionOptions(0, 1, token="secret", encrypt=encrypt)
    driver: Any = SimpleNamespace(facts=facts)
    shared = Shared(options, NOBODY, NOBODY, NOBODY, NOBODY, NOBODY, driver, NOBODY)
    inbound = Inbound(shared, NOBODY, NOBODY, NOBODY, NOBODY)
    return inbound._refusal(opening, KEYS if has_keys else None) or ""


@pytest.mark.parametrize("opening", [LINK, STATE, PULL])
def test_who_means_another_run_or_peer_is_told_so(opening: m.PeerOpening) -> None:
    assert refusal(opening, is_optimizing=True) == ""
    others = {"run": "elsewhere", "receiver": 3, "protocol": m.PROTOCOL_VERSION + 1}
    told = [
        refusal(msgspec.structs.replace(opening, **{name: value}), is_optimizing=True) for name, value in others.items()
    ]
    assert told == [
        "this peer belongs to run 'run', not 'elsewhere'",
        "this is peer 1, not 3",
        f"this peer speaks protocol {m.PROTOCOL_VERSION}, not {m.PROTOCOL_VERSION + 1}",
    ]


@pytest.mark.parametrize("opening", [LINK, STATE])
def test_both_ends_encrypt_or_neither_does(opening: m.LinkHello | m.StateHello) -> None:
    sealed = msgspec.structs.replace(opening, encrypt=True)
    assert refusal(sealed).startswith("peer 2 encrypts the data between peers but peer 1 does not")
    assert refusal(opening, encrypt=True).startswith("peer 1 encrypts the data between peers but peer 2 does not")
    assert refusal(sealed, encrypt=True) == ""
    assert "cannot exchange keys" in refusal(sealed, encrypt=True, has_keys=False)


def test_payload_for_measurements_is_sent_while_all_measure_alone() -> None:
    assert "no optimize_topology is in progress" in refusal(PULL)
    assert refusal(PULL, encrypt=True, is_optimizing=True, has_keys=False) == ""
    assert refusal(msgspec.structs.replace(PULL, pulls=False)) == ""
