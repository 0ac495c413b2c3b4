"""The replicated state, which all peers of a training object share, and its transfer to newcomers.

Digests are compared during the run, at admissions and at its end (`pccl.training.state.digests`). Newcomers receive
tensors through the synchronization of the shared state, then encoded objects from the lowest-numbered peer under way.
Objects are sent once more at the beginning of the next step, because the other peers may step a scheduler after the
admitting step, whereas newcomers have only returned from `join`.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from pccl import Communicator, PCCLError, ReduceOp, Result, TensorInfo
from pccl.training.group.relaunch import Outcome, own_number, reduce_among_all
from pccl.training.state import codec
from pccl.training.state.buffers import Buffers
from pccl.training.state.digests import Check, DivergenceError, Snapshot, digest_of
from pccl.training.state.replica import local_shard, named_parameters
from pccl.training.state.tensor_file import CheckpointError


class Stateful(Protocol):
    """An object that can be saved with the model, such as a torch optimizer."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


@runtime_checkable
class StepListener(Protocol):
    """An object in `shared` that is notified of steps; see `ElasticSampler` for its methods."""

    def fix_steps(self) -> None: ...
    def check_step(self, count: int | None = None) -> None: ...
    def claim(
        self,
        communicator: Communicator | None,
        tag: int = 0,
        on_their_way: int = 0,
        counts: Mapping[int, int] | None = None,
    ) -> None: ...
    def commit(self, peers: Collection[int] | None = None) -> None: ...
    def discard(self) -> None: ...
    def regroup(self, communicator: Communicator | None, tag: int = 0) -> None: ...


TAGS = 1 << 62
"""The first tag of replicated states. Each tag of a training object has 8 of them; `tag_named` knows their use."""
CHECK, HAND_OVER, BUFFERS, FOLLOW, PART = 0, 1, 2, 3, 4
NO_SOURCE = -(2**62)
LATE = "late optimizer state"
HEADER_BYTES = 8
"""The size of the header, which is the length of the encoded objects, little-endian."""
PARTING_S = 1.0
"""How long, in seconds, a peer that ends its run waits for the others to compare the final state."""

logger = logging.getLogger(__name__)


class ParamGroups:
    """The hyperparameters of a torch optimizer: its `param_groups` without the parameters."""

    def __init__(self, optimizer: Any, parameters: Mapping[str, Any] | None = None) -> None:
        """With `parameters` by name, `load_state_dict` also adds groups that other peers have added later."""
        self._optimizer = optimizer
        self._parameters = parameters

    def state_dict(self) -> list[dict[str, Any]]:
        found = [{key: value for key, value in group.items() if key != "params"} for group in self._groups]
        if self._parameters is not None:
            for values, names in zip(found, self._names(), strict=True):
                values["params"] = names
        return found

    def _names(self) -> list[list[str]]:
        names = {id(parameter): name for name, parameter in (self._parameters or {}).items()}
        return [[names.get(id(each), "unknown") for each in group["params"]] for group in self._groups]

    def _add_groups(self, state: list[dict[str, Any]]) -> list[dict[str, Any]]:
        assert self._parameters is not None
        for number, (values, own) in enumerate(zip(state, self._names(), strict=False)):
            if values["params"] != own:
                raise ValueError(f"the others' param_groups[{number}] has {values['params']}, but this one's has {own}")
        for values in state[len(self._groups) :]:
            self._optimizer.add_param_group({**values, "params": [self._parameters[name] for name in values["params"]]})
        return [{key: value for key, value in values.items() if key != "params"} for values in state]

    def load_state_dict(self, state: list[dict[str, Any]], /) -> None:
        """Raises ValueError if the number of groups or their parameters differ."""
        if self._parameters is not None:
            state = self._add_groups(state)
        if len(state) != len(self._groups):
            raise ValueError(f"the others' optimizer has {len(state)} param_groups, not {len(self._groups)} as here")
        for group, values in zip(self._groups, state, strict=True):
            for key, value in values.items():
                held: Any = group.get(key)
                if hasattr(held, "copy_") and hasattr(value, "shape"):
                    held.copy_(value)  # a tensor in fused and capturable optimizers
                else:
                    group[key] = value

    @property
    def _groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        return groups


class ReplicatedState:
    """One peer's replicated state. Methods are group calls unless noted. Not thread-safe."""

    def __init__(
        self,
        communicator: Communicator,
        *,
        tensors: Callable[[], Iterable[tuple[str, Any]]],
        frozen: Mapping[str, Any] | None = None,
        buffers: Buffers,
        shared: Mapping[str, Stateful] | None,
        groups: ParamGroups | None = None,
        compares_groups: bool = True,
        late: Stateful | None = None,
        check_every: int | None = None,
        tag: int = 0,
        adopt: Callable[[], None] | None = None,
        version: Callable[[], int] | None = None,
    ) -> None:
        """Args:
            tensors: Returns the tensors to compare, by name.
            frozen: Torch tensors that peers build identically, which are compared but never sent.
            late: Sent after all other objects, and compared as part of `tensors`.
            adopt: Called after the shared state has been synchronized.
            version: Returns a number that changes when `tensors` are written. Required if the program can write them.

        Raises ValueError or TypeError if an object cannot be shared.
        """
        self._check = Check(communicator, _tag(tag, CHECK), check_every, parting_tag=_tag(tag, PART))
        self._tag = tag
        self._communicator = communicator
        self._tensors = tensors
        self._adopt = adopt
        self._version = version
        self._version_at_end = 0
        self._frozen = frozen or {}
        self._frozen_digests: dict[str, tuple[Any, bytes]] = {}
        self.buffers = buffers
        self._groups = groups
        self._late = late
        self._uncompared = {LATE} if compares_groups else {LATE, "param_groups"}
        self._marker = np.zeros(1, np.uint8)
        self._shared: list[str] = []
        self._objects: dict[str, Stateful] = {}
        self.share(shared or {})
        self._is_new = False
        self._must_align = False
        self.history = secrets.randbits(60)
        """The history of the state: see `pccl.training.group.membership`."""

    def share(self, objects: Mapping[str, Stateful]) -> None:
        """Add objects before any peer joins; this changes `infos`. Raises like the constructor. Not a group call."""
        for name, each in objects.items():
            if not isinstance(name, str) or not hasattr(each, "state_dict") or not hasattr(each, "load_state_dict"):
                raise TypeError(
                    f"shared[{name!r}] must have state_dict and load_state_dict, but {type(each).__name__} does not"
                )
        held = {name: self._objects[name] for name in self._shared}
        held |= {f"shared {name}": each for name, each in objects.items()}
        self._objects = dict(sorted(held.items()))
        self._shared = [*self._objects]
        self._listeners = [each for each in self._objects.values() if isinstance(each, StepListener)]
        if self._groups is not None:  # loaded after the other objects, which may overwrite learning rates
            self._objects["param_groups"] = self._groups
        if self._late is not None:  # loaded after the groups, whose parameters it refers to
            self._objects[LATE] = self._late
        self._encoded()  # raises

    def infos(self) -> list[TensorInfo]:
        """Return the shared state: the common buffers, and a dummy tensor whose name holds options to compare."""
        rule, layout = self.buffers.rule, hashlib.sha256(self.buffers.layout.encode()).hexdigest()[:12]
        names = ", ".join(f"{name} (not compared)" if name in self._uncompared else name for name in self._objects)
        options = f"replicated state: {names or 'no objects'}; buffers {rule} {layout}; check_every {self._check.every}"
        return [*self.buffers.infos(), TensorInfo.from_numpy(self._marker, options)]

    def options(self) -> dict[str, object]:
        """Return the options that must be equal on all peers. Not a group call."""
        shared = [name.removeprefix("shared ") for name in self._shared]
        return {"tag": self._tag, "buffers": self.buffers.rule, "check_every": self._check.every, "shared": shared}

    def renew(self, communicator: Communicator) -> None:
        """Start again with another communicator. Not a group call."""
        self._communicator = communicator
        self._check.restart(communicator)
        self.buffers.drop()
        self._must_align = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the shared objects, for checkpoints. Not a group call."""
        return {name: self._objects[name].state_dict() for name in self._shared}

    @contextmanager
    def taking_up(self, state: Mapping[str, Any]) -> Iterator[None]:
        """Load the result of `state_dict`. Undo this if it fails, or if the `with` block, which loads the rest, fails.

        Raises CheckpointError.
        """
        taken = [name for name in self._shared if name in state]
        former = {name: codec.encode(self._objects[name].state_dict()) for name in taken}
        try:
            for name in taken:
                try:
                    self._objects[name].load_state_dict(state[name])
                except (ValueError, KeyError, TypeError, RuntimeError) as error:
                    raise CheckpointError(f"{name} rejects its saved state: {error}") from error
            yield
        except BaseException:
            for name in taken:
                self._objects[name].load_state_dict(codec.decode(former[name]))
            raise
        self.buffers.adopt()

    @property
    def failure(self) -> DivergenceError | None:
        """The divergence that ended the run, or None. Not a group call."""
        return self._check.failure

    # Listeners, whose methods are documented in `ElasticSampler`.

    def fix_steps(self) -> None:
        """Fix the samples per step, because gradients are sent before a step is complete. Raises ValueError."""
        for each in self._listeners:
            each.fix_steps()

    def check_step(self, count: int | None = None) -> None:
        """Raise RuntimeError if this peer has not drawn the step's samples. Not a group call."""
        for each in self._listeners:
            each.check_step(count)

    def claim(self, in_flight: int = 0, counts: Mapping[int, int] | None = None) -> None:
        for each in self._listeners:
            each.claim(self._communicator, _tag(self._tag, FOLLOW), in_flight, counts)

    def commit(self, peers: Collection[int]) -> None:
        """Commit the oldest claim; `peers` contributed to its average."""
        for each in self._listeners:
            each.commit(peers)

    def discard(self) -> None:
        """Discard the samples drawn since the last claim. Not a group call."""
        for each in self._listeners:
            each.discard()

    # Around a step.

    def begin(self, revision: int) -> None:
        """Align objects if newcomers were admitted, and launch a comparison if it is due. Raises DivergenceError."""
        if self._must_align:
            self._hand_over(revision, is_source=not self._is_new, has_them=True)
            self._must_align = self._is_new = False
        self._check.launch()

    def launch_buffers(self, revision: int) -> None:
        """Launch the exchange of buffers after the step's forward passes."""
        self.buffers.launch(self._communicator, _tag(self._tag, BUFFERS), revision)

    def exchange_own_buffers(self, revision: int) -> Outcome:
        """Immediately exchange the buffers that forward passes within `Buffers.own` have changed."""
        self.buffers.show_own()
        self.launch_buffers(revision)
        return self.buffers.land()

    def land_comparison(self) -> None:
        """Wait for the comparison. Raises DivergenceError."""
        self._check.land()

    def end(self, revision: int) -> None:
        """Take a snapshot if a comparison is due. Not a group call."""
        self._check.move_on()
        self._version_at_end = self._own_version()
        if self._check.expects(revision):
            self._check.note(lambda: self.snapshot(revision))

    def _own_version(self) -> int:
        return self._version() + self.buffers.version() if self._version is not None else 0

    def check(self, revision: int) -> None:
        """Compare now, between two steps. Raises DivergenceError."""
        self._frozen_digests.clear()
        self._check.check(lambda: self.snapshot(revision))

    def part(self, revision: int) -> None:
        """Compare the final state with the peers that end within `PARTING_S`. Raises DivergenceError."""
        if not self._check.has_snapshot and self._own_version() != self._version_at_end:
            logger.info("the state was written after the last step, so revision %d is not compared", revision)
            return
        try:
            self._check.part(lambda: self.snapshot(revision), PARTING_S)
        except PCCLError as error:
            logger.warning(
                "the state after the last step, revision %d, was not compared with other peers: %s. Call finish() on "
                "all peers after the last step",
                revision,
                error,
            )

    def snapshot(self, revision: int) -> Snapshot:
        """Return the digests of the state. Not a group call."""
        objects = self._encoded([name for name in self._objects if name not in self._uncompared])
        return Snapshot(revision, self._tensors(), objects, self._digests_of_frozen())

    # Around an admission.

    def after_admission(self, revision: int, *, world_size: int, is_source: bool, is_new: bool) -> None:
        """Align the state on all peers, which have the same shared state. `is_source`: this peer had it before;
        `is_new`: this peer has joined a run that was under way."""
        if world_size < 2:
            self._regroup()
            self._check.come_soon(revision)
            return
        if self._adopt is not None:
            self._adopt()
        self._hand_over(revision, is_source, has_them=is_source)
        self._regroup()
        if not is_source:
            self.buffers.show()
        self._is_new, self._must_align = is_new, True
        self._check.check(lambda: self.snapshot(revision), is_new=is_new)
        self._check.come_soon(revision)

    def _regroup(self) -> None:
        for each in self._listeners:
            each.regroup(self._communicator, _tag(self._tag, FOLLOW))

    def _digests_of_frozen(self) -> dict[str, bytes]:
        """Return the digests of frozen tensors, updated if written. Only `check` detects writes through `.data`."""
        found = {}
        for name, tensor in self._frozen.items():
            shard = local_shard(tensor)
            # Tensors created in inference mode have no version.
            key = None if shard.is_inference() else (shard.data_ptr(), shard._version)
            known = self._frozen_digests.get(name)
            if known is None or key is None or known[0] != key:
                known = self._frozen_digests[name] = key, digest_of(shard)
            found[name] = known[1]
        return found

    def _encoded(self, names: Iterable[str] | None = None) -> dict[str, bytes]:
        found = {}
        for name in names if names is not None else self._objects:
            try:
                found[name] = codec.encode(self._objects[name].state_dict())
            except ValueError as error:
                raise ValueError(f"the state_dict of {name} cannot be shared: {error}") from error
        return found

    def _hand_over(self, revision: int, is_source: bool, has_them: bool) -> None:
        """Replace the objects of peers that are not sources with those of the lowest-numbered source.

        Raises PCCLError if this peer lacks the objects and all sources are lost.
        """
        if not self._objects:
            return
        own = codec.encode(self._encoded())
        number = own_number(self._communicator)
        while True:
            facts = np.array([-number, len(own)] if is_source else [NO_SOURCE, 0], np.int64)
            self._reduced(facts, revision)
            source, size = facts.tolist()
            if source == NO_SOURCE and has_them:
                return
            if source == NO_SOURCE:
                raise PCCLError(
                    Result.NO_SHARED_STATE_AVAILABLE,
                    "join",
                    "all peers that had the run's shared objects were lost before sending them: join again",
                )
            # The maximum of the source's bytes and the other peers' zeros is the source's bytes.
            data = np.zeros(HEADER_BYTES + size, np.uint8)
            if source == -number:
                data[:HEADER_BYTES] = np.array([len(own)], "<u8").view(np.uint8)
                data[HEADER_BYTES : HEADER_BYTES + len(own)] = np.frombuffer(own, np.uint8)
            self._reduced(data, revision)
            end = int(data[:HEADER_BYTES].view("<u8")[0])
            if end:
                break
            # The source was lost in the meantime, so try the next one.
        if not is_source:
            self._load(codec.decode(data[HEADER_BYTES : HEADER_BYTES + end].tobytes()))

    def _reduced(self, vector: NDArray[Any], step: int) -> None:
        reduce_among_all(self._communicator, vector, ReduceOp.MAX, _tag(self._tag, HAND_OVER), step)

    def _load(self, encoded: Mapping[str, bytes]) -> None:
        for name, own in self._encoded().items():
            if encoded.get(name, own) != own:
                self._objects[name].load_state_dict(codec.decode(encoded[name]))


def frozen_parameters(model: Any) -> dict[str, Any]:
    """Return the parameters of a torch module that do not require gradients, by name."""
    if not hasattr(model, "named_parameters"):
        return {}
    return {f"frozen parameter {name}": p for name, p in named_parameters(model).items() if not p.requires_grad}


def _tag(tag: int, number: int) -> int:
    return TAGS + 8 * tag % TAGS + number
