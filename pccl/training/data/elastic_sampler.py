"""A data stream for a group whose members come and go: each sample of an epoch is used exactly once.

    sampler = ElasticSampler(len(dataset), seed=0, batch_size=32, samples_per_step=32)
    ddp = DDP(communicator, model, optimizer, shared={"sampler": sampler})
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2)
    ddp.join(peers_min=4)
    while sampler.epoch < 10:
        for images, labels in sampler.track(loader):  # the rest of the epoch
            loss(images, labels).backward()
            ddp.step()

Theory of operation. The samples of all epochs, each in an order of its own (`pccl.training.data.permutation`), are one
endless stream. Every peer holds the same account of which positions are used (`pccl.training.data.sample_ledger`), and
what a peer may draw next is a function of that account and of who is there. Peers say nothing about their data while
they train; what decides is what all know alike of every committed average: *whose contributions are in it*. A step goes
so:

    draw      each peer takes the next of its own positions, as many as it trains on
    claim     all note what each has trained on since its last claim, and only then launch the average
    commit    claims of the peers in the committed average are used; those of others are free, and given out again

1. *Used once.* No two peers draw one position (rule 1 of the ledger). An average that is aborted and made again among
   the survivors has the same claims. A claim is known to all before its average can commit: either it is always of
   `samples_per_step`, which all know since the group was formed, or peers tell theirs in an all-gather, which ends
   before the average is launched. Membership only shrinks between the two, so every contribution has a known claim.
2. *Lost with its peer, given out again.* That is a sample whose peer was lost before a step with it had committed. With
   DDP a peer counts only if all buckets had its part: a gradient that was in some of them is given up, and its samples
   come again.
3. *Drawn is not used.* A DataLoader with workers draws ahead. `track` hands its batches on and notes which ones; only
   those are claimed. Where the group changes, positions that were drawn ahead may be somebody else's: `track` leaves
   these batches out and the loader goes on with others, so a change costs what was loaded ahead and nothing else. What
   is left in a loader when its iteration ends for good is drawn again by the next one.
4. *Epochs end together.* `epoch` counts the epochs of which every sample is used and committed. It changes in steps
   only, on all peers in the same one, and loops end by it. Batches are always full: the step that uses an epoch's last
   samples fills up with the next one's, and where a loss gives samples back, the next epoch may have begun before.
5. *Newcomers and restarts.* The account is the sampler's `state_dict`, a part of the run's shared state: what is used,
   and nothing about who is there. After an admission all form the group anew, by an all-gather of a few numbers.

The peers of a sharded model (`pccl.training.group.site`) share a stream with those of their own peer group alone: give
each rank's sampler a part of the dataset that is its own.

With `samples_per_step` a step costs no message more. Without it, as where peers make as many inner steps as they can,
an outer step begins with a small all-gather, in which all wait for each other; `AsyncDiLoCo` then loses some of its
slack.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pccl import Communicator, PCCLError, Result
from pccl._integers import as_int
from pccl.training.data.deal import Range
from pccl.training.data.permutation import permutation
from pccl.training.data.sample_ledger import Ledger, Member
from pccl.training.data.sample_log import SampleLog
from pccl.training.group.membership import own_number
from pccl.training.group.seats import until_committed

FORESEEN = 1024
STACK_DEPTH = 12
"""Frames between a DataLoader's iterator and a sampler, at most."""


@dataclass(frozen=True, slots=True)
class _Draw:
    generation: int
    ranges: list[Range]
    """The positions."""
    indices: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Foreseen:
    """Indices of the next positions in a deal, made together because a single one takes almost as long."""

    generation: int
    begin: int
    """Which of the peer's own the first one is."""
    indices: NDArray[np.int64]


class ElasticSampler:
    """A sampler that gives each sample of an epoch to one peer, once, whoever comes and goes.

    Iterating gives this peer's part of the rest of the epoch: lists of `batch_size` indices, for
    `DataLoader(batch_sampler=sampler)`, or without `batch_size` single indices, for `DataLoader(sampler=sampler)`. With
    `num_workers` above 0 iterate over `sampler.track(loader)`. What is drawn counts as trained on in the next step, so
    draw no batch more (`zip(range(50), loader)`, not `zip(loader, range(50))`), or `discard` it.

    Not thread-safe; not to be drawn from in a loader's worker, nor in a forked process."""

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
        """`dataset_size`, `seed` (64 bits) and `shuffle` are the same on all peers, and whether `samples_per_step` is
        given; its value and `batch_size` may differ. `samples_per_step` is how many samples this peer trains on in each
        step (`DDP`, all accumulated batches) or outer step; batches end with it. `log` is a file that this peer adds
        its samples to (`pccl.tools.audit`). ValueError, TypeError; OSError of the file.
        """
        dataset_size, seed = _integer("dataset_size", dataset_size), _integer("seed", seed)
        batch_size = _integer("batch_size", batch_size) if batch_size is not None else None
        if samples_per_step is not None:
            samples_per_step = _integer("samples_per_step", samples_per_step)
        for name, value in (("batch_size", batch_size), ("samples_per_step", samples_per_step)):
            if value is not None and value < 1:
                raise ValueError(f"{name} {value}: must be at least 1")
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed {seed}: must be from 0 to 2**64 - 1")
        permutation(dataset_size, seed, 0)  # raises
        self._seed = seed
        self._shuffle = shuffle
        self._batch_size = batch_size
        self._samples_per_step = samples_per_step
        self._ledger = Ledger(dataset_size)
        self._process = os.getpid()
        self._number = 0
        """The number of this peer; `_name` is its name as a member."""
        self._name = ""
        self._own = 0
        """Which member this peer is."""
        self._generation = 0
        """The ledger's, that the following belong to."""
        self._drawn = 0
        """The count of this peer's positions in that deal that are drawn."""
        self._trained: list[Range] = []
        """Handed out since the last claim."""
        self._ahead: deque[_Draw] = deque()
        """The draws that a tracked loader has made and not given yet."""
        self._foreseen = _Foreseen(-1, 0, np.empty(0, np.int64))
        self._loader: tuple[Any, Iterator[Any]] | None = None
        self._is_tracking = False
        self._log = SampleLog(log, dataset_size, seed, shuffle) if log is not None else None

    # Where the run stands.

    @property
    def dataset_size(self) -> int:
        return self._ledger.dataset_size

    @property
    def epoch(self) -> int:
        """Epochs of which every sample is used, in committed steps; the same on all peers after each step."""
        return self._ledger.lowest // self.dataset_size

    @property
    def batch_size(self) -> int | None:
        """Settable at any time; of this peer alone."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, batch_size: int) -> None:
        batch_size = _integer("batch_size", batch_size)
        if batch_size < 1 or self._batch_size is None:
            raise ValueError(f"batch_size {batch_size}: must be at least 1, and was given when the sampler was made")
        self._batch_size = batch_size

    @property
    def samples_per_step(self) -> int | None:
        return self._samples_per_step

    @property
    def drawn(self) -> int:
        """Samples that this peer has been given since its last step, as a weight for `outer_step(weight=)`."""
        return sum(end - begin for begin, end in self._trained)

    def __len__(self) -> int:
        """Batches of this peer in an epoch (indices, without `batch_size`), if its members stay as they are."""
        members = self._ledger.members
        share = members[self._own].block if members else self._block
        rounds = -(-self.dataset_size // sum(member.block for member in members)) if members else 1
        if not members:
            share = self.dataset_size
        batch = self._batch_size or 1
        return rounds * -(-share // batch) if self._samples_per_step else -(-rounds * share // batch)

    def state_dict(self) -> dict[str, Any]:
        """Return what is used so far, the same on all peers."""
        facts = {"dataset_size": self.dataset_size, "seed": self._seed, "shuffle": self._shuffle}
        return {**facts, **self._ledger.state()}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Takes up another peer's or a former state. ValueError: it is of another data stream, or none at all."""
        try:
            for name, ours in (("dataset_size", self.dataset_size), ("seed", self._seed), ("shuffle", self._shuffle)):
                if state_dict[name] != ours:
                    raise ValueError(
                        f"the run's ElasticSampler has {name} {state_dict[name]!r}, this one {ours!r}: make it alike"
                    )
            self._ledger.load(state_dict)
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is no state of an ElasticSampler: {error!r}") from error

    # Drawing.

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch. Over a loader with workers use `track`."""
        for indices in self._draws(lambda: self._batch_size or 1):
            yield indices.tolist() if self._batch_size is not None else int(indices[0])

    def batches(self, batch_size: int | None = None) -> Iterator[NDArray[np.int64]]:
        """Indices as arrays of `batch_size` (None: the sampler's), without an end; each counts as trained on."""
        size = batch_size or self._batch_size
        if not size or size < 1:
            raise ValueError(f"batch_size {batch_size}: must be at least 1")
        return self._draws(lambda: size, is_endless=True)

    def track(self, loader: Any) -> Iterator[Any]:
        """The batches of a DataLoader that draws from this sampler, for the rest of the epoch. Those that the loader
        has ready for the next epoch are kept for the next call with the same loader. ValueError: it draws elsewhere."""
        draws_here: bool = (loader.batch_sampler if self._batch_size is not None else loader.sampler) is self
        if not draws_here:
            raise ValueError(
                "the DataLoader does not draw from this sampler: give it as batch_sampler=, or, made without "
                "batch_size, as sampler= beside the loader's own batch_size="
            )
        draws: int = loader.batch_size or 1
        return self._tracked(loader, draws)

    def discard(self) -> None:
        """Take back what was drawn since the last step: it was not trained on, and is drawn again."""
        count = self.drawn
        self._trained.clear()
        self._void_what_is_ahead()
        self._drawn -= count
        if self._log is not None:
            self._log.discarded(self._name, self._step)

    def _draws(self, size: Callable[[], int], *, is_endless: bool = False) -> Iterator[NDArray[np.int64]]:
        self._require_group()
        if not self._is_tracking:
            self._refuse_a_loader_with_workers()
        epoch = self.epoch
        while self._is_tracking or is_endless or self.epoch == epoch:
            draw = self._draw(size())
            if self._is_tracking:
                self._ahead.append(draw)
            else:
                self._hand_out(draw)
            yield draw.indices

    def _draw(self, count: int) -> _Draw:
        """The next positions of this peer."""
        self._require_group()
        if self._generation != self._ledger.generation:
            self._generation = self._ledger.generation
            self._own = self._ledger.index(self._number)
            self._drawn = self._ledger.claimed(self._own)
        if self._samples_per_step is not None:
            count = min(count, self._samples_per_step - self._drawn % self._samples_per_step)
        self._drawn += count
        ranges = self._ledger.ranges(self._own, self._drawn - count, self._drawn)
        return _Draw(self._generation, ranges, self._indices(self._drawn - count, self._drawn))

    def _indices(self, begin: int, end: int) -> NDArray[np.int64]:
        """Return the dataset's indices at this peer's positions number `begin` to before `end`."""
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
                f"{self.drawn} samples were drawn since the last step, which are all of samples_per_step={quota}: make "
                "the step before drawing more, or discard() them; where a step accumulates several batches, give the "
                "number of samples in all of them"
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
                continue  # before the group changed
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
        """The loader that had it is given up."""
        self._loader = None
        if self._generation == self._ledger.generation:
            self._drawn -= sum(draw.indices.size for draw in self._ahead if draw.generation == self._generation)
        self._ahead.clear()

    def _require_group(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError("an ElasticSampler is drawn from in a process forked from that of its run: draw there")
        if not self._ledger.members:
            raise RuntimeError(
                "this ElasticSampler is not in a run yet: give it to the training class, "
                'shared={"sampler": sampler}, and call join before drawing; or, without a run, regroup(None)'
            )

    def _refuse_a_loader_with_workers(self) -> None:
        frame = sys._getframe(1)
        for _ in range(STACK_DEPTH):
            if type(frame.f_locals.get("self")).__name__ == "_MultiProcessingDataLoaderIter":
                raise RuntimeError(
                    "a DataLoader with num_workers above 0 draws batches that may never be trained on: iterate over "
                    "sampler.track(loader) instead of the loader"
                )
            if frame.f_back is None:
                return
            frame = frame.f_back

    def close_log(self) -> None:
        """Ends the log file; without one it does nothing."""
        if self._log is not None:
            self._log.close()
            self._log = None

    # What a training class, or a loop of one's own, calls: all peers in the same order.

    def regroup(self, communicator: Communicator | None, tag: int = 0) -> None:
        """A joint call, after newcomers were let in and have the state: who is there from here on. None: this peer is
        alone, without a run. ValueError, on those who are new, where only some have `samples_per_step`."""
        rows = _gathered(communicator, self._announcement(), tag)
        self._form(own_number(communicator) if communicator is not None else 0, rows)

    def _announcement(self) -> list[int]:
        if not self._ledger.members or self._ledger.claims or self._trained:
            self._name = secrets.token_hex(6)  # what it draws is not to be taken for what it has drawn before
        return [int(self._name, 16), self._block, self._samples_per_step is not None]

    def _form(self, number: int, rows: Mapping[int, Sequence[int]]) -> None:
        """The announcements of all, by number."""
        is_fixed = rows[number][2]
        if any(row[2] != is_fixed for row in rows.values()):
            if not self._ledger.members:
                given = sorted(number for number, row in rows.items() if row[2])
                raise ValueError(
                    f"of the peers {sorted(rows)} only {given} have samples_per_step: give it on all, with a value of "
                    "each one's own, or on none"
                )
            rows = {number: row for number, row in rows.items() if row[2] == is_fixed}  # the newcomers leave
        self._number = number
        self._ledger.form([Member(number, f"{name:012x}", block) for number, (name, block, _) in rows.items()])
        self._trained.clear()

    def fix_steps(self) -> None:
        """Set `samples_per_step` to the batch's size where it was not given. Called before the group is formed.
        ValueError: there is no batch size either."""
        if self._samples_per_step is None and self._batch_size is None:
            raise ValueError(
                "DDP must know how many samples a peer trains on in a step: make the ElasticSampler with "
                "samples_per_step, or with batch_size, of which a step then takes one"
            )
        self._samples_per_step = self._samples_per_step or self._batch_size

    def check_step(self) -> None:
        """RuntimeError: another number of samples was drawn since the last claim than `samples_per_step`."""
        quota = self._samples_per_step
        if quota is not None and self.drawn != quota:
            raise RuntimeError(
                f"{self.drawn} samples were drawn for this step, but samples_per_step={quota}: draw as many before each"
            )

    def claim(self, communicator: Communicator | None, tag: int = 0, on_their_way: int = 0) -> None:
        """A joint call, before the average of a step is launched: what was handed out since the last one is in it.
        `on_their_way` is how many averages are at this moment. RuntimeError, before anything is claimed, where this
        peer has not drawn `samples_per_step`."""
        is_repeated = self._ledger.claims > on_their_way  # a former call's average was not made
        if self.drawn or not is_repeated:
            self.check_step()
        if self._samples_per_step is not None and not is_repeated:
            amounts = {member.number: member.block for member in self._ledger.members}
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
        """Note that the average of the oldest claim has committed with the contributions of these peers (their numbers;
        None: of this one alone). Called on all peers in the same order.

        PCCLError INVALID_USAGE: others took part than have claimed, as a peer does that a call of `update_topology`
        outside of the training class has let in."""
        numbers = {self._number} if peers is None else set(peers)
        known = {member.number for member in self._ledger.members}
        if not numbers or not numbers <= known:
            what = f"peers {sorted(numbers)} took part in a step of which only {sorted(known)} share the data"
            raise PCCLError(Result.INVALID_USAGE, "ElasticSampler.commit", what)
        commit = self._ledger.commit(numbers)
        if self._trained and self._generation != self._ledger.generation:
            raise RuntimeError(
                f"{self.drawn} samples were drawn between a claim and its commit, and the group has changed: claim "
                "what is trained on before an average is waited for"
            )
        if self._log is not None:
            self._log.committed(commit)

    @property
    def _step(self) -> int:
        """The step that what is drawn now will be claimed for."""
        return self._ledger.steps + self._ledger.claims

    @property
    def _block(self) -> int:
        return self._samples_per_step or self._batch_size or 32


def _integer(name: str, value: Any) -> int:
    """Return a Python integer, also for NumPy's and torch's, which no state that is shared may have in it. TypeError
    for anything else."""
    try:
        return as_int(name, value)
    except ValueError as error:
        raise TypeError(str(error)) from None


def _gathered(communicator: Communicator | None, row: list[int], tag: int) -> dict[int, list[int]]:
    """Everybody's numbers, by the peers' numbers."""
    if communicator is None:
        return {0: row}
    numbers = np.array(row, np.int64)
    info, _ = until_committed(communicator, lambda: communicator.all_gather_async(numbers, tag=tag).result())
    if info is None:
        return {own_number(communicator): row}
    return dict(zip(info.membership.peers, info.array.tolist(), strict=True))


def indices_at(positions: NDArray[np.int64], dataset_size: int, seed: int, shuffle: bool) -> NDArray[np.int64]:
    """Which samples of the dataset are at these positions of a stream."""
    epochs, places = np.divmod(positions, dataset_size)
    if not shuffle:
        return places
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        places[here] = permutation(dataset_size, seed, epoch)(places[here])
    return places
