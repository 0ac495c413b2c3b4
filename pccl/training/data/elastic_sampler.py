"""A data stream for a group whose members come and go: each sample of an epoch is used exactly once.

The samples of all epochs, each epoch in its own order (`pccl.training.data.stream`), form one endless stream. Every
peer holds the same ledger of used positions (`pccl.training.data.sample_ledger`). The ledger and the members determine
what each peer may draw next. In a step:

    draw      each peer takes as many of its next positions as it trains on in the step
    claim     all peers learn what each has trained on since its last claim, then launch the average
    commit    positions claimed by peers in the average become used; those claimed by others are reassigned

All peers know a claim's size before its average can commit: it is always `samples_per_step`, or peers gather the sizes
before the average. The ledger is the sampler's `state_dict`, a part of the replicated state. Ranks of a site share a
stream only within their own peer group, so each rank needs its own part of the dataset.
"""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pccl import Communicator, PCCLError, Result
from pccl._integers import as_int
from pccl.training.data.sample_ledger import Ledger, Member, SampleLog
from pccl.training.data.stream import SIZE_MAX, Range, permutation
from pccl.training.group.relaunch import gather_among_all, own_number

FORESEEN = 1024


@dataclass(frozen=True, slots=True)
class _Draw:
    generation: int
    ranges: list[Range]
    indices: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Foreseen:
    """Indices of the next positions, computed together because one index takes almost as long as many."""

    generation: int
    begin: int
    """How many of the peer's own positions precede the first index."""
    indices: NDArray[np.int64]


class ElasticSampler:
    """A sampler that gives each sample of an epoch to one peer, once, while peers come and go.

    Iteration yields this peer's part of the rest of the epoch: lists of `batch_size` indices for
    `DataLoader(batch_sampler=sampler)` or, without `batch_size`, single indices for `DataLoader(sampler=sampler)`. Each
    drawn sample is assumed to be consumed by the next step. With `num_workers` above 0, workers draw ahead, so iterate
    over `sampler.track(loader)`. Not thread-safe. A forked process must not draw from it. Example::

        sampler = ElasticSampler(len(dataset), batch_size=32)
        ddp = DDP(communicator, model, optimizer, shared={"sampler": sampler})
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2)
        ddp.join(peers_min=4)
        while sampler.epoch < 10:
            for images, labels in sampler.track(loader):
                loss(images, labels).backward()
                ddp.step()
    """

    def __init__(
        self,
        dataset_size: int,
        seed: int = 0,
        *,
        batch_size: int | None = None,
        samples_per_step: int | None = None,
        shuffle: bool = True,
        log: str | os.PathLike[str] | None = None,
    ) -> None:
        """Args:
            dataset_size: The number of samples in an epoch; the same on all peers, like `seed` and `shuffle`.
            seed: The 64-bit seed of the order.
            batch_size: The number of indices in a batch; None yields single indices.
            samples_per_step: The number of samples this peer trains on in each step, including all accumulated batches.
                No batch crosses the end of a step. Set it on all peers or on none.
            shuffle: Whether to shuffle each epoch; False keeps the dataset's order.
            log: The path of this peer's own sample log.

        Raises ValueError, and OSError from the log file.
        """
        dataset_size = as_int("dataset_size", dataset_size, 1, SIZE_MAX)
        self._seed = seed = as_int("seed", seed, 0, 2**64 - 1)
        self._shuffle = shuffle
        self._batch_size = None if batch_size is None else as_int("batch_size", batch_size, 1)
        self._samples_per_step = None if samples_per_step is None else as_int("samples_per_step", samples_per_step, 1)
        self._ledger = Ledger(dataset_size)
        self._process = os.getpid()
        self._number = 0
        self._name = ""
        self._own = 0
        self._generation = 0
        self._drawn = 0
        """How many positions this peer has drawn in the assignment of `_generation`."""
        self._trained: list[Range] = []
        self._ahead: deque[_Draw] = deque()
        self._foreseen = _Foreseen(-1, 0, np.empty(0, np.int64))
        self._loader: tuple[Any, Iterator[Any]] | None = None
        self._is_tracking = False
        self._log = SampleLog(log, dataset_size, seed, shuffle) if log is not None else None

    # Progress and state.

    @property
    def dataset_size(self) -> int:
        return self._ledger.dataset_size

    @property
    def epoch(self) -> int:
        """The number of epochs whose samples were all used in committed steps; equal on all peers after each step."""
        return self._ledger.lowest // self.dataset_size

    @property
    def batch_size(self) -> int | None:
        """This peer's batch size, which can be set at any time."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, batch_size: int) -> None:
        if self._batch_size is None:
            raise ValueError("batch_size can be set only if it was given when the sampler was created")
        self._batch_size = as_int("batch_size", batch_size, 1)

    @property
    def samples_per_step(self) -> int | None:
        return self._samples_per_step

    @property
    def drawn(self) -> int:
        """The number of samples this peer has drawn since its last step, usable as `outer_step(weight=)`."""
        return sum(end - begin for begin, end in self._trained)

    def __len__(self) -> int:
        """Return this peer's number of batches (without `batch_size`: indices) per epoch with the current members."""
        members = self._ledger.members
        share, rounds = self.dataset_size, 1
        if members:
            per_round = sum(member.block for member in members)
            share, rounds = members[self._own].block, -(-self.dataset_size // per_round)
        batch = self._batch_size or 1
        return rounds * -(-share // batch) if self._samples_per_step else -(-rounds * share // batch)

    def state_dict(self) -> dict[str, Any]:
        """Return the used positions, the same on all peers."""
        facts = {"dataset_size": self.dataset_size, "seed": self._seed, "shuffle": self._shuffle}
        return {**facts, **self._ledger.state()}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Load a state. Raises ValueError if it is from another data stream or is not a sampler's state."""
        try:
            for name, ours in (("dataset_size", self.dataset_size), ("seed", self._seed), ("shuffle", self._shuffle)):
                if state_dict[name] != ours:
                    raise ValueError(
                        f"the run's ElasticSampler has {name} {state_dict[name]!r}, not {ours!r} as here: use the same"
                    )
            self._ledger.load(state_dict)
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is not the state of an ElasticSampler: {error!r}") from error

    # Drawing.

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of the epoch. If the loader has workers, use `track` instead."""
        for indices in self._draws(lambda: self._batch_size or 1):
            yield indices.tolist() if self._batch_size is not None else int(indices[0])

    def batches(self, batch_size: int | None = None) -> Iterator[NDArray[np.int64]]:
        """Yield arrays of `batch_size` indices endlessly, for immediate use. None: the sampler's current size."""
        size = as_int("batch_size", self._batch_size if batch_size is None else batch_size, 1)
        return self._draws(lambda: size if batch_size is not None else self._batch_size or size, is_endless=True)

    def track(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of a DataLoader that draws from this sampler, for the rest of the epoch.

        Keeps batches that the loader has prepared for the next epoch. Raises ValueError if it uses another sampler.
        """
        draws_here: bool = (loader.batch_sampler if self._batch_size is not None else loader.sampler) is self
        if not draws_here:
            raise ValueError(
                "the DataLoader does not draw from this sampler: pass it as batch_sampler=, or, if it was created "
                "without batch_size, as sampler= with the loader's own batch_size="
            )
        draws: int = loader.batch_size or 1
        return self._tracked(loader, draws)

    def discard(self) -> None:
        """Put unused samples drawn since the last step back into the stream, so that they are drawn again."""
        count = self.drawn
        self._trained.clear()
        self._void_what_is_ahead()
        self._drawn -= count
        if self._log is not None:
            self._log.discarded(self._name, self._step)

    def _draws(self, size: Callable[[], int], *, is_endless: bool = False) -> Iterator[NDArray[np.int64]]:
        self._require_group()
        epoch = self.epoch
        while self._is_tracking or is_endless or self.epoch == epoch:
            draw = self._draw(size())
            if self._is_tracking:
                self._ahead.append(draw)
            else:
                self._hand_out(draw)
            yield draw.indices

    def _draw(self, count: int) -> _Draw:
        self._require_group()
        if self._generation != self._ledger.generation:
            self._generation = self._ledger.generation
            self._own = self._ledger.index(self._number)
            self._drawn = self._ledger.counts[self._own]
        if self._samples_per_step is not None:
            count = min(count, self._samples_per_step - self._drawn % self._samples_per_step)
        self._drawn += count
        ranges = self._ledger.ranges(self._own, self._drawn - count, self._drawn)
        return _Draw(self._generation, ranges, self._indices(self._drawn - count, self._drawn))

    def _indices(self, begin: int, end: int) -> NDArray[np.int64]:
        made = self._foreseen
        if made.generation != self._generation or not made.begin <= begin <= end <= made.begin + made.indices.size:
            ranges = self._ledger.ranges(self._own, begin, max(end, begin + min(FORESEEN, self.dataset_size)))
            self._foreseen = made = _Foreseen(self._generation, begin, self._indices_of(ranges))
        return made.indices[begin - made.begin : end - made.begin].copy()

    def _indices_of(self, ranges: Sequence[Range]) -> NDArray[np.int64]:
        positions = np.concatenate([np.arange(*each, dtype=np.int64) for each in ranges])
        return indices_at(positions, self.dataset_size, self._seed, self._shuffle)

    def _hand_out(self, draw: _Draw) -> None:
        quota = self._samples_per_step
        if quota is not None and self.drawn + draw.indices.size > quota:
            raise RuntimeError(
                f"{self.drawn} samples were drawn since the last step, and samples_per_step={quota} allows no more: "
                "take the step before drawing more, or discard() them; if a step accumulates several batches, "
                "samples_per_step must count the samples in all of them"
            )
        self._trained += draw.ranges
        if self._log is not None:
            self._log.drawn(self._name, self._step, draw.ranges, draw.indices)

    def _tracked(self, loader: Any, draws: int) -> Iterator[Any]:
        self._require_group()
        epoch = self.epoch
        while self.epoch == epoch:
            batch = self._next_of(loader)
            drawn = [self._ahead.popleft() for _ in range(draws)]
            if any(draw.generation != self._ledger.generation for draw in drawn):
                continue  # drawn before the group changed
            for draw in drawn:
                self._hand_out(draw)
            yield batch

    def _next_of(self, loader: Any) -> Any:
        self._is_tracking = True
        try:
            if self._loader is None or self._loader[0] is not loader:
                self._void_what_is_ahead()
                self._loader = (loader, iter(loader))
            return next(self._loader[1])
        except BaseException:
            self._void_what_is_ahead()
            raise
        finally:
            self._is_tracking = False

    def _void_what_is_ahead(self) -> None:
        self._loader = None
        if self._generation == self._ledger.generation:
            self._drawn -= sum(draw.indices.size for draw in self._ahead if draw.generation == self._generation)
        self._ahead.clear()

    def _require_group(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError("a forked process cannot draw from an ElasticSampler: draw in the process that joined")
        if not self._ledger.members:
            raise RuntimeError(
                "this ElasticSampler is not in a run yet: pass it to the training class, "
                'shared={"sampler": sampler}, and call join before drawing; without a run, call regroup(None)'
            )

    def close_log(self) -> None:
        """Close the log file, if there is one."""
        if self._log is not None:
            self._log.close()
            self._log = None

    # For training classes and custom training loops, which make these calls in the same order on all peers.

    def regroup(self, communicator: Communicator | None, tag: int = 0) -> None:
        """Form the group after newcomers have received the state. A group call. None: this peer is alone. Raises
        ValueError on newcomers if only some peers have `samples_per_step`."""
        rows = _gathered(communicator, self._announcement(), tag)
        self._form(own_number(communicator) if communicator is not None else 0, rows)

    def _announcement(self) -> list[int]:
        if not self._ledger.members or self._ledger.claims or self._trained:
            self._name = secrets.token_hex(6)  # distinguishes what it draws now from what it drew before
        return [int(self._name, 16), self._block, self._samples_per_step is not None]

    def _form(self, number: int, rows: Mapping[int, Sequence[int]]) -> None:
        is_fixed = rows[number][2]
        if any(row[2] != is_fixed for row in rows.values()):
            if not self._ledger.members:
                given = sorted(number for number, row in rows.items() if row[2])
                raise ValueError(
                    f"of the peers {sorted(rows)} only {given} have samples_per_step: set it on all peers, with "
                    "values that may differ, or on none"
                )
            rows = {number: row for number, row in rows.items() if row[2] == is_fixed}  # the newcomers leave
        self._number = number
        self._ledger.form([Member(number, f"{name:012x}", block) for number, (name, block, _) in rows.items()])
        self._trained.clear()

    def fix_steps(self) -> None:
        """Set `samples_per_step` to `batch_size` if it was not given. Raises ValueError if neither was given."""
        if self._samples_per_step is None and self._batch_size is None:
            raise ValueError(
                "DDP must know how many samples a peer trains on in a step: create the ElasticSampler with "
                "samples_per_step, or with batch_size for one batch per step"
            )
        self._samples_per_step = self._samples_per_step or self._batch_size

    def check_step(self, count: int | None = None) -> None:
        """Raise RuntimeError if the number of samples drawn since the last claim is not `samples_per_step`, or `count`
        without that."""
        quota = self._samples_per_step or count
        if quota is not None and self.drawn != quota:
            name = "samples_per_step" if self._samples_per_step else "this peer's share of global_batch, ddp.batch_size"
            raise RuntimeError(
                f"{self.drawn} samples were drawn for this step, but {name}={quota}: draw that many per step"
            )

    def claim(
        self,
        communicator: Communicator | None,
        tag: int = 0,
        on_their_way: int = 0,
        counts: Mapping[int, int] | None = None,
    ) -> None:
        """Claim the samples handed out since the last claim, before their average is launched. A group call without
        `counts`, the numbers of samples by peer.

        `on_their_way` is the number of averages in flight. Raises RuntimeError like `check_step`, before claiming.
        """
        is_repeated = self._ledger.claims > on_their_way  # an earlier claim's average was not launched
        if self.drawn or not is_repeated:
            self.check_step()
        if self._samples_per_step is not None and not is_repeated:
            amounts = {member.number: member.block for member in self._ledger.members}
        elif counts is not None:
            amounts = dict(counts)
        else:
            amounts = {number: row[0] for number, row in _gathered(communicator, [self.drawn], tag).items()}
        self._claim(amounts, on_their_way)

    def _claim(self, amounts: Mapping[int, int], on_their_way: int = 0) -> None:
        before = self._step
        self._ledger.claim(amounts, on_their_way)
        if self._log is not None and self._trained and self._step == before:
            self._log.discarded(self._name, before)
            self._log.drawn(self._name, before - 1, self._trained, self._indices_of(self._trained))
        self._trained.clear()

    def commit(self, peers: Collection[int] | None = None) -> None:
        """Commit the oldest claim for these contributing peers (None: this peer). All peers commit in the same order.

        Raises PCCLError INVALID_USAGE if peers without a claim took part.
        """
        numbers = {self._number} if peers is None else set(peers)
        known = {member.number for member in self._ledger.members}
        if not numbers or not numbers <= known:
            what = f"peers {sorted(numbers)} took part in a step, but only {sorted(known)} share the data"
            raise PCCLError(Result.INVALID_USAGE, "ElasticSampler.commit", what)
        commit = self._ledger.commit(numbers)
        if self._trained and self._generation != self._ledger.generation:
            raise RuntimeError(
                f"{self.drawn} samples were drawn between a claim and its commit, and the group has changed: claim "
                "samples before waiting for their average"
            )
        if self._log is not None:
            self._log.committed(commit)

    @property
    def _step(self) -> int:
        """The step for which samples drawn now will be claimed."""
        return self._ledger.steps + self._ledger.claims

    @property
    def _block(self) -> int:
        return self._samples_per_step or self._batch_size or 32


def _gathered(communicator: Communicator | None, row: list[int], tag: int) -> dict[int, list[int]]:
    if communicator is None:
        return {0: row}
    rows, _ = gather_among_all(communicator, np.array(row, np.int64), tag)
    return {number: [int(each) for each in numbers] for number, numbers in rows.items()}


def indices_at(positions: NDArray[np.int64], dataset_size: int, seed: int, shuffle: bool) -> NDArray[np.int64]:
    """Return the dataset indices of the samples at these stream positions."""
    epochs, places = np.divmod(positions, dataset_size)
    if not shuffle:
        return places
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        places[here] = permutation(dataset_size, seed, epoch)(places[here])
    return places
