"""Data parallelism: the gradients of every step are averaged during the backward pass.

The parameters are assigned to *buckets* of about `bucket_bytes` (`pccl.training.ddp.gradients`). A bucket is reduced
under its own tag as soon as all its gradients are complete. `synchronize` launches the remaining buckets (unused
parameters count as zero) and waits for all. `step` calls it if the program has not, and steps the optimizer.

A peer that has written to gradients in flight, or has replaced a replicated tensor, refuses the step, and then no peer
takes it (`pccl.training.ddp.refusals`). Hooks reject optimizer steps outside of `DDP.step`, and backward passes
between `synchronize` and `step`.
"""

from __future__ import annotations

import atexit
import copy
import logging
import math
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from _pccl_torch import outside_graphs
from pccl import Communicator, PCCLError, QuantizationOptions, Result, SharedState, TensorInfo
from pccl._integers import as_int
from pccl.training.ddp.gradients import BUCKET_BYTES, Bucket, CommHook, GradientAverages, bucketed, name_of
from pccl.training.ddp.refusals import (
    ABANDONED,
    FINE,
    NONFINITE,
    UNWEIGHTED,
    GradScalers,
    Refusal,
    RefusalExchange,
    StepRefusals,
    found_inf,
)
from pccl.training.group.membership import Churn, Membership, alike, fingerprint
from pccl.training.group.relaunch import Compression, CompressionWord, own_number
from pccl.training.state.buffers import AVERAGE, exchanged_buffers
from pccl.training.state.checkpoint import Snapshot, is_one_file
from pccl.training.state.replica import as_real, default_torch_arithmetic, layout_of, named_parameters
from pccl.training.state.replicated_state import ParamGroups, ReplicatedState, Stateful
from pccl.training.state.torch_state import (
    HeldTensors,
    assign,
    assign_optimizer,
    buffers_of,
    class_of,
    materialize,
    optimized,
    optimizer_tensors,
    require_like,
    without_state_dict,
)
from pccl.training.step import (
    GroupStep,
    OnNonfinite,
    StepReport,
    TrainingLoop,
    checked_on_nonfinite,
    checked_weight,
    encoded_max,
    nonfinite_text,
    shorten,
)

_of_thread = threading.local()
"""A weak reference to the DDP that `connect` most recently created in this thread."""
_connected: weakref.WeakSet[Any] = weakref.WeakSet()

logger = logging.getLogger(__name__)


@atexit.register
def _close_connected() -> None:
    """Leave the run if the program ends without `close`, unless it ends with an exception."""
    if getattr(sys, "last_value", None) is not None:
        return
    for ddp in [each for each in _connected if each._is_connected_to()]:
        try:
            ddp.close()
        except Exception as error:
            logger.error("cannot close DDP at the end of the program: %s", error)


@dataclass(frozen=True, slots=True)
class Step(StepReport):
    """The outcome of a step of `DDP`.

    `world_size` is the smallest number of peers in any bucket's average (0: `on_nonfinite` skipped the step), and
    `waited_s` is the time in `synchronize`.
    """

    is_skipped: bool = False
    """Whether all peers skipped the optimizer's step, because of `on_nonfinite`, or because the GradScaler found an
    average that is not finite."""


@outside_graphs
class DDP(TrainingLoop):
    """Averages the gradients of a torch module, on the CPU or CUDA devices, and steps its optimizer.

    Can be called like its `module` and has the module's attributes. All peers must build the same module and optimizer
    and give the same arguments. Uses one tag for refusals and one per bucket, from `tag` up. Not thread-safe. Example::

        ddp = DDP(communicator, model, optimizer)
        ddp.join(peers_min=4)
        for images, labels in loader:
            loss(ddp(images), labels).backward()
            ddp.step()
    """

    def __init__(
        self,
        communicator: Communicator,
        module: Any,
        optimizer: Any,
        *,
        quantization: QuantizationOptions | None = None,
        compression: CompressionWord | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        admit_every: int = 10,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        shared: Mapping[str, Stateful] | None = None,
        buffers: str = AVERAGE,
        check_every: int | None = None,
        tag: int = 0,
        on_nonfinite: OnNonfinite | None = None,
        global_batch: int | None = None,
        **churn: Unpack[Churn],
    ) -> None:
        """Args:
            quantization: How to quantize the gradients that are sent.
            compression: A word that sets quantization and error feedback (`pccl.ErrorFeedback`), for float32
                gradients. "8bit": MIN_MAX codes of 8 bits, no feedback. "4bit": MIN_MAX codes of 4 bits, decay 1.
                "2bit": LLOYD_MAX and decay 0.4. "1bit": SIGN and decay 0.4.
            bucket_bytes: The size of a bucket.
            admit_every: Admit newcomers after this many steps.
            find_unused_parameters: Accepted for compatibility with torch; unused parameters always count as zero.
            gradient_as_bucket_view: Accepted for compatibility with torch; must be True.
            shared: Objects whose `state_dict()` is replicated, such as schedulers and a GradScaler.
            buffers: "average" (mean of floats, maximum of others), "first" (from rank 0) or "local".
            check_every: Compare digests after this many steps; None: as often as possible while costing less than
                0.1 % of the time.
            tag: The first tag.
            on_nonfinite: What all peers do if a peer's gradients or buffers have NaN or infinity: "raise" an error
                and clear the gradients, "skip" the step, or "leave out" that peer, which sends gradients only after
                the backward pass. All name the peer. None does not check; a GradScaler does so by itself.
            global_batch: The number of samples that all peers together use in a step, whatever their number: each
                trains on `batch_size` samples, and its gradients weigh as much. Loss functions return means.
            churn: `rejoin`, `hold_below` and `on_older_run`: see `pccl.training.group.membership.Churn`.

        Raises:
            ValueError, TypeError: The module has no parameters that require gradients, the optimizer has state that
                is not a tensor or parameters that are not the module's, or an argument is invalid.
            PCCLError: INVALID_ARGUMENT if a tensor cannot be shared, for example a distributed one.
        """
        torch = sys.modules["torch"]
        if not isinstance(optimizer, torch.optim.Optimizer):
            kind = type(optimizer).__name__
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {kind}; pass one for all parameters")
        if not gradient_as_bucket_view:
            raise ValueError("gradient_as_bucket_view=False: gradients are always views of their buckets here")
        tag, admit_every = as_int("tag", tag), as_int("admit_every", admit_every, 1)
        self._global_batch = None if global_batch is None else as_int("global_batch", global_batch, 1)
        bucket_bytes = as_int("bucket_bytes", bucket_bytes, 1)
        self.module = module
        """The module being trained."""
        self._communicator = communicator
        self._address: str | None = None
        self._optimizer = optimizer
        how = Compression.of(compression, quantization)
        quantization = self._quantization = how.quantization
        self._admit_every = admit_every
        self._tag = tag
        self._scalers = GradScalers(optimizer, (shared or {}).values())
        self._on_nonfinite = checked_on_nonfinite(on_nonfinite)
        self._is_left_out = False
        """Whether the step in progress will not call the optimizer."""
        self._left_out: set[int] = set()
        """The peers that the averages of the step in progress leave out."""
        self._must_synchronize = True
        self._synchronized: GroupStep | None = None
        """The step in progress, after its gradients have been averaged."""
        self._weight: float | None = None
        self._has_warned = False
        self._share: int | None = None
        self._place = 0, 1
        """The rank and the number of peers of the last share."""
        self._counts: dict[int, int] | None = None
        """The samples of each peer in the averaged step, with `global_batch`."""
        """This peer's part of the global batch in the step in progress, once it is known."""
        self._is_stepping = False
        self._has_stepped = False
        self._has_failed = False
        parameters = [p for p in module.parameters() if p.requires_grad]
        if not parameters:
            raise ValueError(f"{type(module).__name__} has no parameters that require gradients")
        named = named_parameters(module)
        for name, parameter in named.items():
            TensorInfo.from_torch(as_real(parameter.detach()), name)  # raises before anything is changed
        names = {id(p): name for name, p in named.items()}
        for parameter in optimized(optimizer):
            if id(parameter) not in names:
                raise ValueError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the module's, so its "
                    "gradients would not be averaged; put everything that is trained into one module, like a ModuleList"
                )
        self._buckets = [Bucket(torch, each) for each in bucketed(parameters, bucket_bytes)]
        self._gradients = GradientAverages(communicator, self._buckets, tag + 1, how)
        if on_nonfinite is not None:
            self._gradients.limit = encoded_max(quantization)
        materialize(torch, optimizer, parameters)
        self._held = HeldTensors(module, optimizer)
        self._refusals = StepRefusals(optimizer, names, self._buckets, self._held, self._scalers.is_unscaled)
        # Only the tensor's name matters: peers can train together only if their names are equal.
        buckets = [(bucket.flat.numel(), bucket.flat.dtype) for bucket in self._buckets]
        name = f"options of DDP {fingerprint(quantization, admit_every, buckets)}"
        options = {name: torch.zeros(1, device="cpu")}
        self._replicated = ReplicatedState(
            communicator,
            tensors=self._compared,
            buffers=exchanged_buffers(module, buffers),
            shared=shared,
            groups=ParamGroups(optimizer, named),
            late=self._held,
            check_every=check_every,
            tag=tag,
            version=self._held.version,
        )
        if self._global_batch is None:
            self._replicated.fix_steps()
        tensors = {**self._held.tensors, **options}
        infos = [TensorInfo.from_torch(as_real(tensor), name) for name, tensor in tensors.items()]
        self._state = SharedState([*infos, *self._replicated.infos()])
        alike_options = {
            "class": type(self).__name__,
            **self._replicated.options(),
            "optimizer": type(optimizer).__qualname__,
            "quantization": alike(quantization),
            **({"compression": compression} if compression is not None else {}),
            "admit_every": admit_every,
            "bucket_bytes": bucket_bytes,
            **({"on_nonfinite": on_nonfinite} if on_nonfinite is not None else {}),
            **({"global_batch": self._global_batch} if self._global_batch is not None else {}),
        }
        self._membership = Membership(communicator, self._state, alike_options, joint=self._replicated, churn=churn)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(number, i))
            for number, bucket in enumerate(self._buckets)
            for i, parameter in enumerate(bucket.parameters)
        ]
        self._hooks.append(optimizer.register_step_pre_hook(self._step_hook()))
        self._hooks.append(optimizer.register_load_state_dict_post_hook(self._held.load_hook()))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass with its hooks. Works under `torch.autocast`."""
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module, such as `parameters` or `state_dict`."""
        if name == "module" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.module, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy of the module, without this DDP, so that `AveragedModel(ddp)` works."""
        return copy.deepcopy(self.module, memo)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.module!r})"

    def train(self, mode: bool = True) -> DDP:
        self.module.train(mode)
        return self

    def eval(self) -> DDP:
        return self.train(False)

    @classmethod
    def connect(
        cls,
        module: Any,
        optimizer: Any,
        address: str | None = None,
        *,
        peers_min: int | None = None,
        load: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> DDP:
        """Create a DDP with its own communicator, connect to the run at `address`, and join.

        Use it in a `with closing(...)` block or call `close`, which closes the communicator too. If the program ends
        without doing so, the DDP compares the final state, leaves the run, and logs an error if either fails.

        Args:
            address: The master's address; None uses the environment variable PCCL_MASTER.
            peers_min: The number of peers needed to start a new run; None: as many as `pccl launch` started.
            load: A checkpoint to resume from: a file, or a folder, which may hold none yet.
            options: Options of the constructor.

        Raises:
            PCCLError: Raised by `Communicator.connect` or `join`. INVALID_ARGUMENT if the address is missing;
                INVALID_USAGE if this thread has another DDP in that run.
            OSError, CheckpointError: Raised by `load`.
        """
        address = address or os.environ.get("PCCL_MASTER")
        if not address:
            text = "the master's address is missing: pass one, start the program with pccl launch, or set PCCL_MASTER"
            raise PCCLError(Result.INVALID_ARGUMENT, "DDP.connect", text)
        if (former := getattr(_of_thread, "latest", lambda: None)()) is not None and former._is_connected_to(address):
            text = (
                f"this thread already has a DDP in the run at {address}, which could never admit this one: close() "
                "that one, or put everything that is trained into one module, such as a ModuleDict, with one optimizer"
            )
            raise PCCLError(Result.INVALID_USAGE, "DDP.connect", text)
        if peers_min is None:
            peers_min = int(os.environ.get("PCCL_LAUNCH_COUNT", "1"))
        ddp = cls(Communicator(address), module, optimizer, **options)
        ddp._address = address
        if load is not None:
            ddp.load(load, missing_ok=not is_one_file(Path(load)))
        ddp._communicator.connect()
        ddp.join(peers_min)
        _of_thread.latest = weakref.ref(ddp)
        _connected.add(ddp)
        return ddp

    def _is_connected_to(self, address: str | None = None) -> bool:
        try:
            return self._communicator.world_size > 0 and address in (None, self._address)
        except PCCLError:
            return False

    def _compared(self) -> Iterator[tuple[str, Any]]:
        yield from self._held.tensors.items()
        yield from ((name, tensor) for name, _, _, tensor in self._held.late())
        yield from self._replicated.buffers.module_tensors()

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Average the buckets with `hook(state, bucket)`, as torch's DDP does: see `pccl.training.comm_hooks`.

        Call it once, before `join`, with the same hook on all peers. Raises PCCLError INVALID_USAGE.
        """
        if not callable(hook):
            raise TypeError(f"hook must be callable, not {type(hook).__name__}")
        what = ""
        if self._membership.is_under_way:
            what = "this peer has joined: register the hook before join"
        elif self._gradients.comm_hook is not None:
            what = "a hook is already registered"
        elif self._on_nonfinite == "leave out":
            what = 'a hook cannot be combined with on_nonfinite="leave out", which needs weights'
        elif self._quantization is not None:
            what = "a hook cannot be combined with quantization=: pass the options to bucket.average in the hook"
        if what:
            raise PCCLError(Result.INVALID_USAGE, "DDP.register_comm_hook", what)
        self._gradients.comm_hook = state, hook

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients in this block's backward passes; the next one outside averages the sum."""
        before = self._must_synchronize
        self._must_synchronize = False
        try:
            yield
        finally:
            self._must_synchronize = before

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zero the gradients in place, or set them to None if `set_to_none`.

        After `synchronize`, this gives up the step; call it on all peers. Raises PCCLError INVALID_USAGE if gradients
        are in flight.
        """
        if self._synchronized is None and any(bucket.average is not None for bucket in self._buckets):
            text = (
                "gradients are being sent to the other peers; call ddp.synchronize() first, or ddp.step() instead, or "
                "ddp.abandon() if the backward pass has failed"
            )
            raise PCCLError(Result.INVALID_USAGE, "DDP.zero_grad", text)
        if self._synchronized is not None and not self._synchronized.rejoined:
            self._commit(self._synchronized)
        self._clear()
        if set_to_none:
            self.module.zero_grad(set_to_none=True)

    def synchronize(self, *, weight: float | None = None) -> None:
        """Replace the gradients by the averages over all peers. A group call after the backward pass.

        Args:
            weight: This peer's weight, such as its number of tokens: `sum(w * gradient) / sum(w)`. Give one on all
                peers or on none; 0 excludes a peer. Weighted gradients are sent after the backward pass.

        Raises ValueError if the weight is negative, not finite, or differs from an earlier call in this step;
        PCCLError like `step`.
        """
        weight = self._valid_weight(weight, "DDP.synchronize")
        with self._step("DDP.synchronize") as step:
            self._synchronize(step, "DDP.synchronize", weight)
        if step.rejoined:
            self._synchronized = step  # `step` reports it

    def abandon(self) -> None:
        """Give up the step on all peers, for example after a failed backward pass. A group call instead of `step`.

        On the other peers, `synchronize` or `step` raises PCCLError INVALID_USAGE. All peers clear their gradients and
        draw the step's samples again. Raises PCCLError INVALID_USAGE if the gradients have been averaged, otherwise
        the errors of `step`.
        """
        if self._synchronized is not None:
            text = "the gradients of this step have been averaged: to give it up, call ddp.zero_grad() on all peers"
            raise PCCLError(Result.INVALID_USAGE, "DDP.abandon", text)
        with self._step("DDP.abandon") as step:
            self._exchange(step, None, (ABANDONED, 0, 0))

    def step(self, scaler: Any = None, *, weight: float | None = None) -> Step:
        """Average gradients, step the optimizer, clear gradients and admit newcomers. A group call.

        Args:
            scaler: A `torch.amp.GradScaler`, whose `step(optimizer)` and `update()` are called, with the same result
                on all peers. Put it into `shared`.
            weight: As in `synchronize`.

        Raises:
            PCCLError: The master was lost or this peer was evicted, and it could not rejoin. INVALID_USAGE on all
                peers, with gradients cleared, if any peer refused the step. INVALID_USAGE on this peer if `join` was
                not called, or if an earlier step was interrupted or failed in the optimizer: close, and create a new
                communicator and DDP.
            DivergenceError: Replicated state differs between peers.
            ValueError: See `synchronize`.
        """
        if scaler is not None and not all(callable(getattr(scaler, name, None)) for name in ("step", "update")):
            raise TypeError(f"scaler must be a torch.amp.GradScaler or None, not {type(scaler).__name__}")
        if scaler is not None and self._on_nonfinite is not None:
            raise ValueError("a GradScaler skips steps that are not finite by itself: leave out on_nonfinite=")
        weight = self._valid_weight(weight, "DDP.step")
        if (step := self._synchronized) is not None and step.rejoined:
            self._clear()
            return step.report(Step)
        with self._step("DDP.step") as call:
            if scaler is not None:
                self._scalers.add(scaler)
            self._synchronize(call, "DDP.step", weight)
            step = self._synchronized
            assert step is not None
            averages = step.outcomes[: len(self._buckets)]
            world_size = min(each.world_size - len(self._left_out.intersection(each.peers)) for each in averages)
            step.world_size = 0 if self._is_left_out else world_size
            self._commit(step)
            if self._is_left_out:
                self._has_stepped = False
            else:
                self._optimize(scaler)
            self._clear()
            self._state.revision += 1
            if (self.revision % self._admit_every == 0 or step.is_short) and step.must_admit():
                self._gradients.forget_weights()
                step.admit()
            step.end()
        if step is None or call.rejoined:
            return call.report(Step)
        return step.report(Step, is_skipped=not self._has_stepped)

    def finish(self) -> None:
        """Compare the replicated state after the last step. A group call. Raises the errors of `step`."""
        with self._step("DDP.finish", rejoins=False):
            self._replicated.check(self.revision)

    def close(self) -> None:
        """Remove the hooks and, after `connect`, leave the run. Raises DivergenceError, and OSError from a save."""
        for hook in self._hooks:
            hook.remove()
        with closing(self._communicator) if self._address is not None else nullcontext():
            super().close()

    def _snapshot(self) -> Snapshot:
        parameters = named_parameters(self.module)
        buffers = buffers_of(self.module)
        state = {"parameters": parameters, "buffers": buffers, "optimizer": self._optimizer.state_dict()}
        state |= {"shared": self._replicated.state_dict(), "optimizer class": class_of(self._optimizer)}
        late = {name for name, *_ in self._held.late()}
        held = {name: each for name, each in optimizer_tensors(self._optimizer).items() if name not in late}
        layout = layout_of({**parameters, **buffers, **held})
        return Snapshot(self.revision, state, layout, unnamed=without_state_dict(self.module))

    def _restore(self, state: dict[str, Any], revision: int) -> None:
        parameters = named_parameters(self.module)
        require_like(parameters, state["parameters"])
        require_like(buffers_of(self.module), state["buffers"])
        with self._replicated.taking_up(state.get("shared", {})):
            assign_optimizer(self._optimizer, state["optimizer"])
            assign(parameters, state["parameters"])
            assign(buffers_of(self.module), state["buffers"])
        self._state.revision = revision

    def _drop(self) -> None:
        super()._drop()
        self._clear()
        self._gradients.forget_weights()
        self._scalers.forget()

    def _step(self, func_name: str, *, rejoins: bool = True) -> AbstractContextManager[GroupStep]:
        if self._has_failed:
            text = (
                "the optimizer failed during a step, and this peer's parameters may differ from the others': "
                "close the communicator and join again"
            )
            raise PCCLError(Result.INVALID_USAGE, func_name, text)
        return self._group_step(func_name, rejoins=rejoins)

    @property
    def batch_size(self) -> int:
        """This peer's share of `global_batch` in this step. It changes with the membership, but not during a step.

        Raises ValueError without `global_batch`, or if that is less than the number of peers.
        """
        if self._share is None:
            try:
                self._place = self._communicator.rank, self._communicator.world_size
            except PCCLError as error:
                if not self._membership.may_rejoin(error):
                    raise
            rank, size = self._place
            if self._global_batch is None or self._global_batch < size:
                raise ValueError(f"global_batch must be at least the number of peers, {size}, not {self._global_batch}")
            self._share = self._global_batch // size + (rank < self._global_batch % size)
        return self._share

    @property
    def _count(self) -> int | None:
        """The number of samples that this peer must draw for this step, if `global_batch` says so."""
        return None if self._global_batch is None else self.batch_size

    def _valid_weight(self, weight: float | None, func_name: str) -> float | None:
        weight = checked_weight(weight)
        if weight is None and self._global_batch is not None and self._synchronized is None:
            weight = float(self.batch_size)
        if weight is not None and self._gradients.comm_hook is not None:
            text = "weight= cannot be given with a communication hook: let the hook send gradients times weights"
            raise PCCLError(Result.INVALID_USAGE, func_name, text)
        if weight is not None and self._synchronized is not None and weight != self._weight:
            had = "no weight" if self._weight is None else f"weight {self._weight:g}"
            raise ValueError(
                f"weight {weight:g}: the gradients of this step have been averaged with {had}; pass the weight to "
                "ddp.synchronize()"
            )
        return weight

    def _synchronize(self, step: GroupStep, func_name: str, weight: float | None) -> None:
        if self._synchronized is not None:
            return
        self._replicated.check_step(self._count)
        if refusals := self._exchange(step, weight, None):
            raise PCCLError(Result.INVALID_USAGE, func_name, self._refusals.explained(refusals))

    def _exchange(self, step: GroupStep, weight: float | None, what: tuple[int, int, int] | None) -> list[Refusal]:
        """Average the gradients, or clear them if any peer refuses. `what` is this peer's refusal, if known."""
        self._weight = weight
        with step.waiting():
            step.begin()
            what = self._refusals.own() if what is None else what
            if what == FINE and weight != 0 and all(bucket.is_untouched for bucket in self._buckets):
                self._warn_of_zeros()
            if self._on_nonfinite == "leave out" and weight is None:
                weight = 1.0
            is_finite = self._on_nonfinite is None or self._replicated.buffers.is_finite()
            if what == FINE and not (is_finite and (self._on_nonfinite is None or self._gradients.are_finite())):
                what = NONFINITE, 0, 0
                self._replicated.buffers.show()
                self._gradients.discard()
                weight = weight if weight is None else 0.0
            self._gradients.launch_rest(weight, self.revision)
            number = math.nan if weight is None else weight
            hook = name_of(self._gradients.comm_hook)
            exchange = RefusalExchange(
                self._communicator, self._tag, self.revision, what, alike=hook, number=number, count=self._count or 0
            )
            step.launch_buffers()
            averages = self._gradients.land()
            refusals, cost = exchange.wait()
            step.land()
            nonfinite = [each.peer for each in refusals if each.what[0] == NONFINITE]
            refusals = [each for each in refusals if each.what[0] != NONFINITE]
            without = [peer for peer, number in exchange.numbers.items() if math.isnan(number)]
            if not refusals and 0 < len(without) < len(exchange.numbers):
                own = own_number(self._communicator)
                refusals = [Refusal(peer, peer == own, (UNWEIGHTED, 0, 0)) for peer in without]
            if refusals:
                self._clear()
                self._scalers.forget()
                self._replicated.discard()
                return refusals
            if nonfinite:
                is_skipped = self._on_nonfinite != "leave out" or len(nonfinite) == len(exchange.numbers)
                text = nonfinite_text(self._communicator, nonfinite, "a gradient or buffer", is_skipped)
                if self._on_nonfinite == "raise":
                    self._clear()
                    self._replicated.discard()
                    raise PCCLError(Result.INVALID_USAGE, "DDP.step", f"{text}, and all gradients are cleared")
                logger.warning("revision %d: %s", self.revision, text)
                self._is_left_out = is_skipped
            self._left_out = set(nonfinite)
            if self._is_left_out:
                for bucket in self._buckets:
                    bucket.keep_none()
            else:
                averages = self._gradients.settle(averages, exchange.numbers, weight, self.revision)
            self._gradients.give()
        self._counts = None if self._global_batch is None else exchange.counts
        step.outcomes = [*averages, cost, *step.outcomes]
        self._synchronized = step
        return []

    def _warn_of_zeros(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            text = "revision %d: DDP.step without a backward pass: this peer adds zeros to the others' gradients"
            logger.warning(text + "; give weight=0 on a peer without samples, and weights on the others", self.revision)

    def _commit(self, step: GroupStep) -> None:
        """Mark samples as used by the peers that contributed to all buckets, even if the step is given up."""
        *buckets, refusals = step.outcomes[: len(self._buckets) + 1]
        peers = [set(each.peers) for each in buckets if each.peers] or [set(refusals.peers)]
        step.claim(counts=self._counts)
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
                        self._has_stepped = False  # the scaler calls fused optimizers even if it skips the step
                    scaler.update()
        finally:
            self._is_stepping = False
        self._has_failed = False

    def _clear(self) -> None:
        self._synchronized = None
        self._is_left_out = False
        self._share = None
        self._gradients.clear()

    def _hook(self, number: int, i: int) -> Any:
        ddp = weakref.ref(self)  # Python's garbage collector does not see torch's references to hooks

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
                    "a step outside of ddp.step() would make this peer's parameters diverge from the others': "
                    "call ddp.step() instead of optimizer.step(), which also averages the gradients, or "
                    "ddp.step(scaler) instead of scaler.step(optimizer) and scaler.update()"
                )
                raise PCCLError(Result.INVALID_USAGE, "optimizer.step", text)
            there._has_stepped = True

        return optimizer_steps

    def _take(self, number: int, i: int) -> None:
        if self._replicated.failure is not None:
            raise self._replicated.failure.with_traceback(None)
        if self._synchronized is not None:
            raise RuntimeError(
                "a backward pass after ddp.synchronize() would add this peer's own gradients to the averages: call "
                "ddp.step() first, or ddp.zero_grad() on all peers to give up the step"
            )
        if self._gradients.buckets[number].has(i):
            raise RuntimeError(
                "a second backward pass since the last step: use no_sync() for all but the last one, or ddp.abandon() "
                "to give up the step after a backward pass that failed"
            )
        if not self._must_synchronize:
            return
        try:
            self._gradients.take(number, i, self.revision)
        except PCCLError as error:
            if not self._membership.may_rejoin(error):  # otherwise `step` rejoins
                shorten(error)
                raise
