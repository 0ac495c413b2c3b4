"""Machines of peers in views of three."""

from __future__ import annotations

import pytest

from pccl.protocol import topology
from tests.protocol.peer.rig import Rig, meshed


@pytest.fixture
def rig() -> Rig:
    """Peer 2 in a ring of three."""
    rig = Rig()
    rig.join([1, 2, 3])
    return rig


@pytest.fixture
def no_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of more than three keep to the ring's links."""
    monkeypatch.setattr(topology, "MESH_PEERS_MAX", 3)


@pytest.fixture
def mesh() -> Rig:
    return meshed()
