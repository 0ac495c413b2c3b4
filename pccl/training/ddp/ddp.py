"""== ddp/module_face
The interface by which programs use torch's DistributedDataParallel as if it were the module.

== ddp/ddp
Data parallelism: the gradients of every step are averaged, while the backward pass still goes on.

Theory of operation. The parameters are dealt into *buckets* of about `bucket_bytes`
(`pccl.training.ddp.gradients`). A hook on each parameter notices that its gradient is there; a bucket whose
gradients all are is reduced at once, under its own tag. So all but the first layers' communication happens during the
backward pass. `synchronize` launches the buckets that never became full (parameters without a part in the loss count as
zero) and waits for all; then the gradients are the averages, for the program to clip, unscale or inspect. `step` calls
it if the program has not, and makes the optimizer's step.

After the first step gradients are views of their buckets: the backward pass writes into what is sent, and nothing is
copied, unless somebody sets them to None (`optimizer.zero_grad()`; use `zero_grad` of this class).

*Why a wrong order of calls does not part the peers*:

1. All peers have the same averages, also where one has written gradients that were in flight: it never had the memory
   in which they arrive (`pccl.training.ddp.gradients`).
2. Who has written gradients in flight says so before the step, and no peer makes it (`pccl.training.ddp.refusals`).
   Nothing can be written between that and the averages, because the program's thread is inside `synchronize` then.
3. The optimizer takes steps from `DDP.step` alone: a hook refuses any other before it has changed anything. So it has
   never stepped with a gradient that is not averaged.
4. Backward passes between `synchronize` and `step` are refused where the first of their gradients is complete.
5. All parameters of the optimizer are the module's, and one whose gradients are not averaged, since it was frozen when
   the DDP was made, has the step refused as in 2. So has a tensor in another's place
   (`pccl.training.state.torch_state`).

Modules on CUDA devices may be spread over several; a bucket is on one. Its gradients are waited for on the stream that
the last of them is accumulated on, which is that of all, unless the program has parts of its forward pass on different
streams of a device.

*What is shared*: the parameters, buffers, the optimizer's tensors and hyperparameters, and what the user hands over, so
that a newcomer goes on with the same moments and learning rates as the others (`pccl.training.state.replicated_state`).
All peers then make the same optimizer step from the same gradients; they stay bit-identical as far as their CPUs and
torch builds compute alike, which DiLoCo does not ask for; the step is made in the default floating-point environment,
whatever that of the program. Where it is not so, peers find out as they compare digests.

*Giving up*: a peer whose backward pass has failed has some buckets on their way, and the others wait for the rest. It
launches them as they are and refuses the step.

*Weights*, by what a peer's gradients count, are known after the backward pass; where they are given, buckets are
launched then (`pccl.training.ddp.gradients`).

*Coming and going*: a loss aborts some of the buckets, on all survivors the same; these are reduced again among those
who are left. Newcomers are let in every `admit_every` steps, because asking costs a round trip to the master.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from _pccl_torch import outside_graphs
from pccl import Communicator, PCCLError, QuantizationOptions, Result, SharedState, TensorInfo
from pccl._integers import as_int
from pccl.training.ddp.gradients import Bucket, CommHook, GradientAverages, dealt, name_of
from pccl.training.ddp.refusals import (
    ABANDONED,
    UNWEIGHTED,
    GradScalers,
    Refusal,
    RefusalExchange,
    StepRefusals,
    found_inf,
)
from pccl.training.group.membership import Admission, Membership, alike, fingerprint
from pccl.training.group.relaunch import own_number
from pccl.training.state.buffers import AVERAGE, exchanged_buffers
from pccl.training.state.checkpoint import Checkpointed, Snapshot, Stateful
from pccl.training.state.replicated_state import ParamGroups, ReplicatedState
from pccl.training.state.torch_arithmetic import default_torch_arithmetic
from pccl.training.state.torch_state import (
    HeldTensors,
    LateState,
    assign,
    assign_optimizer,
    buffers_of,
    class_of,
    layout_of,
    materialize,
    optimized,
    optimizer_tensors,
    require_like,
)
from pccl.training.step import GroupStep, StepReport, checked_weight

Face = TypeVar("Face", bound="ModuleFace")


class ModuleFace:
    """Passes on to `module` what concerns it alone. Names are the module's own, without torch's "module." in front, so
    that a checkpoint of the weights fits the bare module too."""

    def __init__(self, module: Any) -> None:
        self.module = module
        """The module that is trained: its attributes are found here."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass, with its hooks; also under `torch.autocast`."""
        return self.module(*args, **kwargs)

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        yield from self.module.parameters(recurse)

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, Any]]:
        yield from self.module.named_parameters(prefix, recurse)

    def buffers(self, recurse: bool = True) -> Iterator[Any]:
        yield from self.module.buffers(recurse)

    def named_buffers(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, Any]]:
        yield from self.module.named_buffers(prefix, recurse)

    def modules(self) -> Iterator[Any]:
        yield from self.module.modules()

    @property
    def training(self) -> bool:
        return bool(self.module.training)

    def train(self: Face, mode: bool = True) -> Face:
        self.module.train(mode)
        return self

    def eval(self: Face) -> Face:
        self.module.eval()
        return self

    def state_dict(self, **options: Any) -> dict[str, Any]:
        """The module's."""
        found: dict[str, Any] = self.module.state_dict(**options)
        return found

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
        """Puts values into the module's tensors, which stay the same ones. On all peers alike, or before `join`, which
        gives a newcomer those of the others."""
        return self.module.load_state_dict(state_dict, strict=strict)


BUCKET_BYTES = 4 << 20

_of_thread = threading.local()
"""The last DDP that `connect` has made in this thread, as a weak reference."""
_connected: weakref.WeakSet[Any] = weakref.WeakSet()
"""The DDPs that `connect` has made."""

logger = logging.getLogger(__name__)


@atexit.register
def _close_connected() -> None:
    """Leave the runs of programs that end without `close`, unless they end by an exception."""
    if getattr(sys, "last_value", None) is not None:
        return
    for ddp in [each for each in _connected if each._is_connected_to()]:
        try:
            ddp.close()
        except Exception as error:
            logger.error("closing DDP at the end of the program failed: %s", error)


@dataclass(frozen=True, slots=True)
class Step(StepReport):
    """The outcome of a step of `DDP`. `revision` counts the steps so far, `world_size` is the fewest peers in the
    average of any bucket (1: alone), and `waited_s` the time that `synchronize` took."""

    is_skipped: bool = False
    """Whether the GradScaler left out the optimizer's step, for averages that are not finite: on all peers alike."""


@outside_graphs
class DDP(ModuleFace, Checkpointed):
    """Averages the gradients of a torch module, on the CPU or CUDA devices, and steps its optimizer. Can be called and
    asked as the module, which is its `module`. Not thread-safe. Needs torch 2.1 or newer."""

    def __init__(
        self,
        communicator: Communicator,
        module: Any,
        optimizer: Any,
        *,
        quantization: QuantizationOptions | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        admit_every: int = 10,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        shared: Mapping[str, Stateful] | None = None,
        buffers: str = AVERAGE,
        check_every: int | None = None,
        tag: int = 0,
    ) -> None:
        """All peers build the same module and optimizer and give the same arguments. Uses the tags from `tag` on: one
        for refusals and one for each bucket; and those of `pccl.training.state.replicated_state`.

        `shared` are objects whose `state_dict()` is part of the run, such as learning-rate schedulers and a GradScaler:
        newcomers load it, and it is compared. `buffers` is what becomes of the module's buffers in each step:
        "average" (floating-point ones by the mean, others by the maximum), "first" (from the peer of rank 0) or
        "local". `check_every` is after how many steps peers compare digests of all they have in common; None: as often
        as it takes less than a thousandth of the time.

        `find_unused_parameters` and `gradient_as_bucket_view` are there for programs that give them to torch's class.
        The first changes nothing: parameters without a part in the loss count as zero in any case. The second cannot be
        False: gradients are always views of their buckets.

        ValueError for a module without parameters that require gradients, for an optimizer with a state that is no
        tensor or with parameters that are not the module's, and for other arguments (also TypeError); PCCLError
        INVALID_ARGUMENT for tensors that cannot be shared, such as distributed ones or those on devices of other kinds.
        """
        torch = sys.modules["torch"]
        if isinstance(optimizer, (list, tuple)):
            raise TypeError(
                "optimizer must be a single torch.optim.Optimizer; give one all parameters, in param_groups"
            )
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
        if not gradient_as_bucket_view:
            raise ValueError("gradient_as_bucket_view=False: gradients are always views of their buckets here")
        tag, admit_every = as_int("tag", tag), as_int("admit_every", admit_every)
        bucket_bytes = as_int("bucket_bytes", bucket_bytes)
        for name, value in (("admit_every", admit_every), ("bucket_bytes", bucket_bytes)):
            if value < 1:
                raise ValueError(f"{name} {value}: must be at least 1")
        super().__init__(module)
        self._communicator = communicator
        self._owns_communicator = False
        self._optimizer = optimizer
        self._quantization = quantization
        self._admit_every = admit_every
        self._tag = tag
        self._scalers = GradScalers(optimizer, (shared or {}).values())
        self._must_synchronize = True
        """Outside of `no_sync`."""
        self._synchronized: GroupStep | None = None
        """The step, once its gradients are averages."""
        self._weight: float | None = None
        """The weight of this peer in this step."""
        self._is_stepping = False
        self._has_stepped = False
        self._has_failed = False
        parameters = [p for p in module.parameters() if p.requires_grad]
        if not parameters:
            raise ValueError(f"{type(module).__name__} has no parameters that require gradients")
        for name, parameter in module.named_parameters():
            TensorInfo.from_torch(parameter.detach(), name)  # raises, before anything is changed
        names = {id(p): name for name, p in module.named_parameters()}
        for parameter in optimized(optimizer):
            if id(parameter) not in names:
                raise ValueError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the module's, so its "
                    "gradients would not be averaged; put all that is trained into one module, such as a ModuleList"
                )
        self._buckets = [Bucket(torch, each) for each in dealt(parameters, bucket_bytes)]
        self._gradients = GradientAverages(communicator, self._buckets, tag + 1, quantization)
        materialize(torch, optimizer, parameters)
        self._held = HeldTensors(module, optimizer)
        self._refusals = StepRefusals(optimizer, names, self._buckets, self._held, self._scalers.is_unscaled)
        # Without content; its name says which peers can train together.
        buckets = [(bucket.flat.numel(), bucket.flat.dtype) for bucket in self._buckets]
        name = f"options of DDP {fingerprint(quantization, admit_every, buckets)}"
        options = {name: torch.zeros(1, device="cpu")}
        self._replicated = ReplicatedState(
            communicator,
            tensors=self._compared,
            buffers=exchanged_buffers(module, buffers),
            shared=shared,
            groups=ParamGroups(optimizer, dict(module.named_parameters())),
            late=LateState(self._held, optimizer),
            check_every=check_every,
            tag=tag,
            version=self._held.version,
        )
        self._replicated.fix_steps()
        infos = [TensorInfo.from_torch(tensor, name) for name, tensor in {**self._held.tensors, **options}.items()]
        self._state = SharedState([*infos, *self._replicated.infos()])
        alike_options = {
            "class": type(self).__name__,
            **self._replicated.options(),
            "optimizer": type(optimizer).__qualname__,
            "quantization": alike(quantization),
            "admit_every": admit_every,
            "bucket_bytes": bucket_bytes,
        }
        self._membership = Membership(communicator, self._state, alike_options, joint=self._replicated)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(number, i))
            for number, bucket in enumerate(self._buckets)
            for i, parameter in enumerate(bucket.parameters)
        ]
        self._hooks.append(optimizer.register_step_pre_hook(self._step_hook()))
        self._hooks.append(optimizer.register_load_state_dict_post_hook(self._held.load_hook()))

    @classmethod
    def connect(
        cls, module: Any, optimizer: Any, address: str | None = None, *, peers_min: int | None = None, **options: Any
    ) -> DDP:
        """Make a DDP with a communicator of its own, connected to the run at `address` (None: the environment's
        PCCL_MASTER), and join: with `peers_min` None as many peers as `pccl launch` has started. `options` are those of
        the constructor. `close` closes the communicator, too.

        A program that ends without `close` leaves the run in order all the same, and compares what its last step has
        left; a divergence that is found then is printed, and the exit status is 1.

        PCCLError as `Communicator.connect`, with INVALID_ARGUMENT where no address is given, INVALID_USAGE where this
        thread has another one in that run, and as `join`."""
        address = address or os.environ.get("PCCL_MASTER")
        if not address:
            text = (
                "there is no address of a master: give one, or start the program with pccl launch, or set PCCL_MASTER"
            )
            raise PCCLError(Result.INVALID_ARGUMENT, "DDP.connect", text)
        if (former := getattr(_of_thread, "latest", lambda: None)()) is not None and former._is_connected_to(address):
            text = (
                f"this thread is in the run at {address} already, by a DDP that could never let this one in: close() "
                "that one, or put all that is trained into one module, such as a ModuleDict, with one optimizer"
            )
            raise PCCLError(Result.INVALID_USAGE, "DDP.connect", text)
        if peers_min is None:
            peers_min = int(os.environ.get("PCCL_LAUNCH_COUNT", "1"))
        ddp = cls(Communicator(address), module, optimizer, **options)
        ddp._owns_communicator = True
        ddp._communicator.connect()
        ddp.join(peers_min)
        _of_thread.latest = weakref.ref(ddp)
        _connected.add(ddp)
        return ddp

    def _is_connected_to(self, address: str | None = None) -> bool:
        """Whether the communicator of `connect` is connected, to the run at `address` (None: to any)."""
        try:
            return self._communicator.world_size > 0 and address in (None, self._communicator.address)
        except PCCLError:
            return False

    @property
    def revision(self) -> int:
        """Steps so far, of the whole run."""
        return self._state.revision

    def digest(self) -> str:
        """BLAKE3, in hexadecimal, of all that peers have in common: the same on all of them after every step. Buffers
        that are local are left out."""
        return self._replicated.digest(self.revision)

    def _compared(self) -> Iterator[tuple[str, Any]]:
        yield from self._held.tensors.items()
        yield from ((name, tensor) for name, _, _, tensor in self._held.late())
        yield from self._replicated.buffers.module_tensors()

    def join(self, peers_min: int = 1) -> Admission:
        """Join the run, with at least `peers_min` peers if nobody is under way. See `DiLoCo.join`, whose errors it
        has."""
        return self._membership.join(peers_min)

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Has `hook(state, bucket)` average the buckets, as torch's class does: see `pccl.training.ddp.gradients`.
        Once, before `join`, the same on all peers, or every step is refused.

        PCCLError INVALID_USAGE where there is one, this peer has joined, or `quantization` was given.
        """
        if not callable(hook):
            raise TypeError(f"hook must be callable, not {type(hook).__name__}")
        what = ""
        if self._membership.is_under_way:
            what = "this peer has joined: register the hook before"
        elif self._gradients.comm_hook is not None:
            what = "there is a hook already"
        elif self._quantization is not None:
            what = "with quantization= there is no hook: give the options to bucket.average in it"
        if what:
            raise PCCLError(Result.INVALID_USAGE, "DDP.register_comm_hook", what)
        self._gradients.comm_hook = state, hook

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here only add to the gradients; the first one outside averages the sum."""
        before = self._must_synchronize
        self._must_synchronize = False
        try:
            yield
        finally:
            self._must_synchronize = before

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clears the gradients and leaves them where they are; with `set_to_none` torch makes them anew, and they are
        copied. After `synchronize`, on all peers alike, this gives up the step. PCCLError INVALID_USAGE while gradients
        are in flight."""
        if self._synchronized is None and any(bucket.average is not None for bucket in self._buckets):
            text = (
                "gradients are on their way to the other peers; write ddp.synchronize() before, or ddp.step() instead, "
                "or ddp.abandon() where the backward pass has failed"
            )
            raise PCCLError(Result.INVALID_USAGE, "DDP.zero_grad", text)
        if self._synchronized is not None:
            self._commit(self._synchronized)
        self._clear()
        if set_to_none:
            self.module.zero_grad(set_to_none=True)

    def synchronize(self, *, weight: float | None = None) -> None:
        """Call it after the backward pass, before anything that changes or judges gradients, such as clipping: returns
        when the gradients are the averages over all peers. A joint call; another one before `step` does nothing.

        `weight` is by what this peer counts in the averages, such as the tokens or samples of the step, with all that
        `no_sync` has accumulated, where the loss is their mean: `sum(w * gradient) / sum(w)`, the same bits on all. All
        peers give one, or none does. Weight 0 leaves a peer out. Gradients then travel after the backward pass
        (`pccl.training.ddp.gradients`).

        ValueError: a weight that is negative or not finite, or another one than in a former call of this step; it can
        be called again. PCCLError as `step`.
        """
        weight = self._valid_weight(weight, "DDP.synchronize")
        with self._step("DDP.synchronize"):
            self._synchronize("DDP.synchronize", weight)

    def abandon(self) -> None:
        """Gives up the step on all peers, as where the backward pass has failed on this one: call it instead of
        `synchronize` or `step`. The others' call of these raises PCCLError INVALID_USAGE, which names this peer;
        gradients are cleared on all, what samplers have handed out is handed out again, and all are ready for another
        backward pass. A joint call.

        PCCLError INVALID_USAGE where the gradients have been averaged already, else as `step`.
        """
        if self._synchronized is not None:
            text = "the gradients of this step have been averaged: all peers give it up by ddp.zero_grad()"
            raise PCCLError(Result.INVALID_USAGE, "DDP.abandon", text)
        with self._step("DDP.abandon"):
            self._exchange(None, (ABANDONED, 0, 0))

    def step(self, scaler: Any = None, *, weight: float | None = None) -> Step:
        """Call it instead of the optimizer's: averages what is not averaged yet, steps, clears the gradients, and lets
        newcomers in when it is time. A joint call.

        With a `torch.amp.GradScaler` it does what `scaler.step(optimizer)` and `scaler.update()` do, so write neither;
        a step that the scaler skips is skipped by all peers, which have the same averages, and counts as one. Put the
        scaler into `shared`, so that newcomers have its scale. `weight` is as in `synchronize`.

        ValueError as `synchronize`. PCCLError: the master is lost, or this peer was evicted; INVALID_USAGE on all
        peers, with the gradients cleared and all ready for another backward pass: on one or more of them gradients in
        flight were changed, or some are not averaged; INVALID_USAGE: `join` was not called, or a former step was
        interrupted or failed in the optimizer (`close` this one, and make a communicator and a DDP anew). `revision`
        says whether the step was made: if it has grown, it was, and what failed is the admission of newcomers.
        DivergenceError: peers differ in what they must have in common.
        """
        if scaler is not None and not all(callable(getattr(scaler, name, None)) for name in ("step", "update")):
            raise TypeError(f"scaler must be a torch.amp.GradScaler or None, not {type(scaler).__name__}")
        weight = self._valid_weight(weight, "DDP.step")
        with self._step("DDP.step"):
            if scaler is not None:
                self._scalers.add(scaler)
            self._synchronize("DDP.step", weight)
            step = self._synchronized
            assert step is not None
            self._commit(step)
            self._optimize(scaler)
            self._clear()
            self._state.revision += 1
            if self.revision % self._admit_every == 0 and step.are_peers_pending():
                self._gradients.forget_weights()
                step.admit()
            step.end()
        world_size = min(each.world_size for each in step.outcomes[: len(self._buckets)])
        return step.report(Step, world_size, is_skipped=not self._has_stepped)

    def finish(self) -> None:
        """Compares what all peers have in common: to be called on all after the last step. Raises what `step` does."""
        with self._step("DDP.finish"):
            self._replicated.check(self.revision)

    def close(self) -> None:
        """Takes the hooks off the module and the optimizer, which are ordinary ones again. One that `connect` has made
        leaves the run, as at the end of a `with` block of its communicator. OSError of a save in the background;
        DivergenceError of the last step."""
        for hook in self._hooks:
            hook.remove()
        with closing(self._communicator) if self._owns_communicator else nullcontext():
            super().close()

    def _snapshot(self) -> Snapshot:
        parameters = dict(self.module.named_parameters())
        buffers = buffers_of(self.module)
        state = {"parameters": parameters, "buffers": buffers, "optimizer": self._optimizer.state_dict()}
        state |= {"shared": self._replicated.state_dict(), "optimizer class": class_of(self._optimizer)}
        late = {name for name, *_ in self._held.late()}
        held = {name: each for name, each in optimizer_tensors(self._optimizer).items() if name not in late}
        return Snapshot(self.revision, state, layout_of({**parameters, **buffers, **held}))

    def _restore(self, state: dict[str, Any], revision: int) -> None:
        parameters = dict(self.module.named_parameters())
        require_like(parameters, state["parameters"])
        require_like(buffers_of(self.module), state["buffers"])
        with self._replicated.taking_up(state.get("shared", {})):
            assign_optimizer(self._optimizer, state["optimizer"])
            assign(parameters, state["parameters"])
            assign(buffers_of(self.module), state["buffers"])
        self._state.revision = revision

    @contextmanager
    def _step(self, func_name: str) -> Iterator[None]:
        """Surround what all peers do alike in a step. PCCLError as `Membership.step`; INVALID_USAGE after the optimizer
        failed in the middle of a step."""
        if self._has_failed:
            text = (
                "the optimizer failed in the middle of a step, and this peer's parameters may not be the others': "
                "close the communicator, and join anew"
            )
            raise PCCLError(Result.INVALID_USAGE, func_name, text)
        with self._membership.step(func_name):
            yield

    def _valid_weight(self, weight: float | None, func_name: str) -> float | None:
        weight = checked_weight(weight)
        if weight is not None and self._gradients.comm_hook is not None:
            text = "with a communication hook there is no weight=: have the hook send gradients times weights, and them"
            raise PCCLError(Result.INVALID_USAGE, func_name, text)
        if weight is not None and self._synchronized is not None and weight != self._weight:
            had = "no weight" if self._weight is None else f"weight {self._weight:g}"
            raise ValueError(
                f"weight {weight:g}: the gradients of this step have been averaged with {had}; give it to "
                "ddp.synchronize()"
            )
        return weight

    def _synchronize(self, func_name: str, weight: float | None) -> None:
        if self._synchronized is not None:
            return
        self._replicated.check_step()
        if refusals := self._exchange(weight, None):
            raise PCCLError(Result.INVALID_USAGE, func_name, self._refusals.explained(refusals))

    def _exchange(self, weight: float | None, what: tuple[int, int, int] | None) -> list[Refusal]:
        """Make the gradients the averages, or clear them if any peer refuses the step. `what` is this peer's refusal
        (None: to be found out)."""
        self._weight = weight
        step = GroupStep(self._membership, self._replicated)
        with step.waiting():
            step.begin()
            what = self._refusals.own() if what is None else what
            self._gradients.launch_rest(weight, self.revision)
            number = math.nan if weight is None else weight
            hook = name_of(self._gradients.comm_hook)
            exchange = RefusalExchange(self._communicator, self._tag, self.revision, what, alike=hook, number=number)
            step.launch_buffers()
            averages = self._gradients.land()
            refusals, cost = exchange.wait()
            step.land()
            without = [peer for peer, number in exchange.numbers.items() if math.isnan(number)]
            if not refusals and 0 < len(without) < len(exchange.numbers):
                own = own_number(self._communicator)
                refusals = [Refusal(peer, peer == own, (UNWEIGHTED, 0, 0)) for peer in without]
            if refusals:
                self._clear()
                self._scalers.forget()
                self._replicated.discard()
                return refusals
            averages = self._gradients.settle(averages, exchange.numbers, weight, self.revision)
            self._gradients.give()
        step.outcomes = [*averages, cost, *step.outcomes]
        self._synchronized = step
        return []

    def _commit(self, step: GroupStep) -> None:
        """Mark the samples of the averaged gradients as used, also where the step is given up. A peer counts if all
        buckets have its part; with a hook that averages nothing, if it was there."""
        *buckets, refusals = step.outcomes[: len(self._buckets) + 1]
        peers = [set(each.peers) for each in buckets if each.peers] or [set(refusals.peers)]
        step.claim()
        step.commit(set.intersection(*peers))

    def _optimize(self, scaler: Any) -> None:
        self._has_stepped = False
        self._is_stepping = self._has_failed = True
        try:
            with default_torch_arithmetic(sys.modules["torch"]):
                if scaler is None:
                    self._optimizer.step()
                else:
                    scaler.step(self._optimizer)
                    if found_inf(scaler, self._optimizer):
                        self._has_stepped = False  # fused optimizers are called all the same
                    scaler.update()
        finally:
            self._is_stepping = False
        self._has_failed = False

    def _clear(self) -> None:
        self._synchronized = None
        self._gradients.clear()

    def _hook(self, number: int, i: int) -> Any:
        ddp = weakref.ref(self)  # torch keeps hooks where Python's garbage collector does not see them

        def gradient_is_there(_: Any) -> None:
            there = ddp()
            if there is not None and there._membership.is_under_way:
                there._take(number, i)

        return gradient_is_there

    def _step_hook(self) -> Any:
        ddp = weakref.ref(self)

        def optimizer_steps(*_: Any) -> None:
            there = ddp()
            if there is None or not there._membership.is_under_way:
                return
            if not there._is_stepping:
                text = (
                    "a step that is not made by ddp.step() would lead this peer's parameters away from the others': "
                    "write ddp.step() instead of optimizer.step(), it averages the gradients and steps; "
                    "ddp.step(scaler) instead of scaler.step(optimizer) and scaler.update()"
                )
                raise PCCLError(Result.INVALID_USAGE, "optimizer.step", text)
            there._has_stepped = True

        return optimizer_steps

    def _take(self, number: int, i: int) -> None:
        if self._replicated.failure is not None:
            raise self._replicated.failure
        if self._synchronized is not None:
            raise RuntimeError(
                "a backward pass after ddp.synchronize() adds this peer's own gradients to the averages: call "
                "ddp.step() before it, or ddp.zero_grad() on all peers to give up the step"
            )
        if self._gradients.buckets[number].has(i):
            raise RuntimeError(
                "a second backward pass since the last step: use no_sync() for all but the last; or ddp.abandon(), to "
                "give up the step after one that has failed"
            )
        if not self._must_synchronize:
            return
        self._gradients.take(number, i, self.revision)
