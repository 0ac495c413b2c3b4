"""Objects that are told what becomes of each step: who is there, and whose contributions its average had.

Such as `ElasticSampler`. A training class finds them among the objects that it is handed over (`shared=`), tells all of
them, in the order of their names, and in each step does so:

    check     before anything is averaged, or afterwards nothing can be told of what does not fit; not a joint call
    claim     before an average is launched, or where steps are fixed before the next one is: a joint call
    commit    once it has committed, with the numbers of the peers that are in it; in the order of the claims
    discard   where what was trained on since the last claim is left out; not a joint call
    regroup   after an admission, when all have the same state: a joint call
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol, runtime_checkable

from pccl import Communicator


@runtime_checkable
class Follower(Protocol):
    """One such object; `ElasticSampler` tells what its methods do."""

    def fix_steps(self) -> None: ...
    def check_step(self) -> None: ...
    def claim(self, communicator: Communicator | None, tag: int = 0, on_their_way: int = 0) -> None: ...
    def commit(self, peers: Collection[int] | None = None) -> None: ...
    def discard(self) -> None: ...
    def regroup(self, communicator: Communicator | None, tag: int = 0) -> None: ...


class Followers:
    """All of a training object. Uses one tag."""

    def __init__(self, objects: Iterable[object], tag: int) -> None:
        self._all = [each for each in objects if isinstance(each, Follower)]
        self._tag = tag

    def fix_steps(self) -> None:
        """Gradients travel before a step is complete, so what is in it must be known before. ValueError."""
        for each in self._all:
            each.fix_steps()

    def check_step(self) -> None:
        """RuntimeError: this peer has not done what it has said of the step."""
        for each in self._all:
            each.check_step()

    def claim(self, communicator: Communicator, on_their_way: int = 0) -> None:
        """`on_their_way`: averages, at this moment. RuntimeError as `check_step`, PCCLError for anything but losses."""
        for each in self._all:
            each.claim(communicator, self._tag, on_their_way)

    def commit(self, peers: Collection[int]) -> None:
        for each in self._all:
            each.commit(peers)

    def discard(self) -> None:
        for each in self._all:
            each.discard()

    def regroup(self, communicator: Communicator) -> None:
        """PCCLError for anything but losses."""
        for each in self._all:
            each.regroup(communicator, self._tag)
