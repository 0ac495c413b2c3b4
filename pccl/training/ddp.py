"""Data parallelism: the gradients of every step are averaged, while the backward pass still goes on.

Theory of operation. The parameters are dealt into *buckets*, flat buffers of about `bucket_bytes`, last parameter
first, because backward passes produce gradients roughly in that order. A hook on each parameter notices that its
gradient is there; a bucket whose gradients all are is reduced at once, under its own tag. So all but the first layers'
communication happens during the backward pass. `step` launches the buckets that never became full (parameters without
a part in the loss count as zero), waits for all, and makes the optimizer's step.

After the first step gradients are views of their buckets: the backward pass writes into what is sent, and nothing is
copied, unless somebody sets them to None (`optimizer.zero_grad()`; use `zero_grad` of this class).

Modules on CUDA devices may be spread over several; a bucket is on one. Its gradients are waited for on the stream that
the last of them is accumulated on, which is that of all, unless the program has parts of its forward pass on different
streams of a device.

*What is shared*: the parameters, the floating buffers and the optimizer's tensors, so that a newcomer goes on with the
same moments as the others. All peers then make the same optimizer step from the same gradients; they stay bit-identical
as far as their CPUs and torch builds compute alike, which DiLoCo does not ask for; the step is made in the default
floating-point environment, whatever that of the program. Buffers that a forward pass changes,
such as running statistics, follow each peer's own data until the next newcomer comes.

*Coming and going*: a loss aborts some of the buckets, on all survivors the same; these are reduced again among those
who are left. Newcomers are let in every `admit_every` steps, because asking costs a round trip to the master.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import blake3

from pccl import Communicator, QuantizationOptions, SharedState, TensorInfo
from pccl.training.membership import Admission, Average, Averaged, Membership, fingerprint
from pccl.training.report import StepReport, report_of
from pccl.training.torch_arithmetic import default_torch_arithmetic

BUCKET_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Step(StepReport):
    """What a step did. `revision` counts the steps so far, `world_size` is the fewest peers in the average of any
    bucket (1: alone), and `waited_s` the time between the end of the backward pass and that of the last average."""


class _Bucket:
    """A flat buffer and the parameters whose gradients it holds."""

    def __init__(self, torch: Any, parameters: list[Any]) -> None:
        self.parameters = parameters
        first = parameters[0]
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        parts = self.flat.split([p.numel() for p in parameters])
        self.views = [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]
        self.missing = len(parameters)
        self.average: Average | None = None

    def take(self, i: int) -> None:
        """The gradient of parameter `i` is complete."""
        parameter, view = self.parameters[i], self.views[i]
        if parameter.grad.is_sparse:
            raise ValueError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse; only dense ones "
                "are averaged, as an Embedding has them without sparse=True"
            )
        if parameter.grad is not view:
            view.copy_(parameter.grad)
            parameter.grad = view
        self.missing -= 1


class DDP:
    """Averages the gradients of a torch module, on the CPU or CUDA devices, and steps its optimizer. Not thread-safe.

    Needs torch 2.1 or newer.
    """

    def __init__(
        self,
        communicator: Communicator,
        module: Any,
        optimizer: Any,
        *,
        quantization: QuantizationOptions | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        admit_every: int = 10,
        tag: int = 0,
    ) -> None:
        """All peers build the same module and optimizer and give the same arguments. Uses the tags from `tag` on: one
        for the roll call and one for each bucket.

        ValueError for a module without parameters that require gradients, for an optimizer with a state that is no
        tensor, and for other arguments (also TypeError); PCCLError INVALID_ARGUMENT for tensors that cannot be shared,
        such as distributed ones or those on devices of other kinds.
        """
        torch = sys.modules["torch"]
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
        for name, value in (("admit_every", admit_every), ("bucket_bytes", bucket_bytes)):
            if value < 1:
                raise ValueError(f"{name} {value}: must be at least 1")
        self._communicator = communicator
        self._optimizer = optimizer
        self._quantization = quantization
        self._admit_every = admit_every
        self._tag = tag
        self._is_synchronized = True
        parameters = [p for p in module.parameters() if p.requires_grad]
        if not parameters:
            raise ValueError(f"{type(module).__name__} has no parameters that require gradients")
        for name, parameter in module.named_parameters():
            TensorInfo.from_torch(parameter.detach(), name)  # raises, before anything is changed
        self._buckets = [_Bucket(torch, each) for each in _dealt(parameters, bucket_bytes)]
        _materialize(torch, optimizer, parameters)
        tensors = {name: p.detach() for name, p in module.named_parameters()}
        tensors |= {name: buffer for name, buffer in module.named_buffers() if buffer.is_floating_point()}
        tensors |= dict(_optimizer_tensors(torch, optimizer))
        self._tensors = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
        # Without content; its name says which peers can train together.
        buckets = [(bucket.flat.numel(), bucket.flat.dtype) for bucket in self._buckets]
        name = f"options of DDP {fingerprint(quantization, admit_every, buckets)}"
        options = {name: torch.zeros(1, device="cpu")}
        self._state = SharedState(
            [TensorInfo.from_torch(tensor, name) for name, tensor in {**self._tensors, **options}.items()]
        )
        self._membership = Membership(communicator, self._state, tag)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(number, i))
            for number, bucket in enumerate(self._buckets)
            for i, parameter in enumerate(bucket.parameters)
        ]

    @property
    def revision(self) -> int:
        """Steps so far, of the whole run."""
        return self._state.revision

    def digest(self) -> str:
        """BLAKE3 of the shared state in hexadecimal."""
        torch = sys.modules["torch"]
        hasher = blake3.blake3(self.revision.to_bytes(8, "little"))
        for tensor in self._tensors.values():
            hasher.update(tensor.cpu().view(-1).view(torch.uint8).numpy())
        return hasher.hexdigest()

    def join(self, peers_min: int = 1) -> Admission:
        """As `DiLoCo.join`."""
        return self._membership.join(peers_min)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here only add to the gradients; the first one outside averages the sum."""
        self._is_synchronized = False
        try:
            yield
        finally:
            self._is_synchronized = True

    def zero_grad(self) -> None:
        """Clears the gradients and leaves them where they are."""
        for bucket in self._buckets:
            bucket.flat.zero_()
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view

    def step(self) -> Step:
        """Call it after the backward pass, instead of the optimizer's: averages what is not averaged yet, steps, clears
        the gradients, and lets newcomers in when it is time. A joint call.

        PCCLError: the master is lost, or this peer was evicted; INVALID_USAGE: `join` was not called, or a former step
        was interrupted (`close` this one, and make a communicator and a DDP anew). Nothing
        was stepped then.
        """
        with self._membership.step("DDP.step"):
            started_s = time.monotonic()
            for number, bucket in enumerate(self._buckets):
                if bucket.average is None:
                    self._fill(bucket)
                    self._launch(number)
            done = [self._land(bucket) for bucket in self._buckets]
            waited_s = time.monotonic() - started_s
            with default_torch_arithmetic(sys.modules["torch"]):
                self._optimizer.step()
            self.zero_grad()
            self._state.revision += 1
            is_time = self.revision % self._admit_every == 0
            admission = self._membership.admit() if is_time and self._membership.are_peers_pending() else None
        world_size = min(each.world_size for each in done)
        return report_of(
            Step, done, revision=self.revision, world_size=world_size, admission=admission, waited_s=waited_s
        )

    def close(self) -> None:
        """Takes the hooks off the module, which is an ordinary one again."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, number: int, i: int) -> Any:
        ddp = weakref.ref(self)  # torch keeps hooks where Python's garbage collector does not see them

        def gradient_is_there(_: Any) -> None:
            there = ddp()
            if there is not None and there._is_synchronized:
                there._take(number, i)

        return gradient_is_there

    def _take(self, number: int, i: int) -> None:
        bucket = self._buckets[number]
        if bucket.average is not None:
            raise RuntimeError("a second backward pass since the last step: use no_sync() for all but the last")
        bucket.take(i)
        if bucket.missing == 0:
            self._launch(number)

    def _fill(self, bucket: _Bucket) -> None:
        """For parameters without a part in the loss: zero, or what earlier backward passes have added."""
        for i, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
            if parameter.grad is None:
                view.zero_()
                parameter.grad = view
            elif parameter.grad is not view:
                bucket.take(i)

    def _launch(self, number: int) -> None:
        bucket = self._buckets[number]
        tag = self._tag + 1 + number
        bucket.average = Average(self._communicator, bucket.flat, tag, self.revision, self._quantization)

    def _land(self, bucket: _Bucket) -> Averaged:
        assert bucket.average is not None
        averaged = bucket.average.wait()
        bucket.average = None
        bucket.missing = len(bucket.parameters)
        return averaged


def _dealt(parameters: list[Any], bucket_bytes: int) -> Iterator[list[Any]]:
    """Buckets of one dtype on one device, last parameter first."""
    bucket: list[Any] = []
    size_bytes = 0
    for parameter in reversed(parameters):
        kind = parameter.dtype, parameter.device
        if bucket and (size_bytes >= bucket_bytes or kind != (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket, size_bytes = [], 0
        bucket.append(parameter)
        size_bytes += parameter.numel() * parameter.element_size()
    if bucket:
        yield bucket


def _materialize(torch: Any, optimizer: Any, parameters: list[Any]) -> None:
    """Gives a fresh optimizer the state that its first step would create, so that there is something to receive."""
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    values = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    with torch.no_grad():
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for parameter, value in zip(parameters, values, strict=True):
            parameter.grad = None
            parameter.copy_(value)
        for _, tensor in _optimizer_tensors(torch, optimizer):
            tensor.zero_()


def _optimizer_tensors(torch: Any, optimizer: Any) -> Iterator[tuple[str, Any]]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        for name, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, torch.Tensor):
                yield f"optimizer {number} {name}", value
            elif value is not None:
                kind = type(value).__name__
                raise ValueError(f"the optimizer's state {name!r} is a {kind}, not a tensor: it cannot be shared")
