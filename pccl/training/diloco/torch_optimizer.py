"""A training loop's optimizer that makes the outer steps by itself.

Theory of operation. Trainers of PyTorch (Lightning, Accelerate, the Hugging Face Trainer) leave a program no place to
call `outer_step`, but take any optimizer. `DiLoCoOptimizer` is one: `step` makes a step of the inner optimizer, and
when as many have been made as `diloco.inner_steps` tells, the outer step.

    diloco = DiLoCo(communicator, model, torch.optim.AdamW(model.parameters()), inner_steps=50)
    optimizer = DiLoCoOptimizer(diloco, peers_min=4)

*What counts* is a call of `step`. One that a GradScaler leaves out, because a gradient was not finite, or that a
trainer leaves out while it accumulates gradients, does not count. Peers need not agree on it: an outer step begins when
the last of them has come to its own.

*Joining* is done by `join`, or else by the first `step`, which then waits for `peers_min` peers; either connects the
communicator, unless that is connected, because a peer that has been let in must not leave the others waiting for its
`join`. If the weights that the gradients of this first step belong to are replaced by those of the run, these gradients
are dropped with them. (With a closure they are made afterwards.) Where others trained already the step does not count;
where all begin together it does, or else this peer's scheduler would be a step ahead of theirs at the outer step.

*Checkpoints*: `state_dict` is that of the inner optimizer, and beside it, as "diloco", the outer parameters, momentum
and revision, and the objects in `shared`. So a trainer's own checkpoint resumes a run, from its last outer step; what
inner steps after it have moved is lost.

*Where learning rates are*: `param_groups`, `state` and `defaults` are those of the inner optimizer, so schedulers may
be made for either. `diloco.share({"scheduler": scheduler})` has newcomers begin with the others' learning rate, instead
of the schedule's first. Peers compare hyperparameters as they come to an outer step. Where their schedulers may then
stand at different steps, they differ on purpose: give DiLoCo `compare_inner=False` and do not share the scheduler. So
it is with `steps="by speed"`, and with a scheduler that goes on where a GradScaler has left out a step.

A `torch.optim.Optimizer` it is by inheritance; since pccl does not import torch, the class that inherits is made when
the first object is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any, Generic, TypeVar, cast

import numpy as np

from pccl import Communicator
from pccl._integers import as_int
from pccl.training.diloco.async_diloco import AsyncDiLoCo
from pccl.training.diloco.diloco import DiLoCo, OuterStep
from pccl.training.group.membership import Admission
from pccl.training.step import as_float

Loop = TypeVar("Loop", bound=DiLoCo | AsyncDiLoCo)

OUTER = "diloco"
"""The outer state's key in a `state_dict`."""


class DiLoCoOptimizer(Generic[Loop]):
    """An optimizer whose every `diloco.inner_steps`-th step is followed by an outer step. See the module.

    It is a `torch.optim.Optimizer`: learning-rate schedulers, GradScaler, step hooks and trainers take it. Not
    thread-safe. Global optimizer hooks of torch see both it and the inner optimizer.
    """

    def __new__(cls, *_: Any, **__: Any) -> DiLoCoOptimizer[Loop]:
        kind: Any = cls
        return cast("DiLoCoOptimizer[Loop]", object.__new__(_optimizer_class(kind, sys.modules["torch"])))

    def __init__(
        self,
        diloco: Loop,
        *,
        peers_min: int = 1,
        weighted: bool = False,
        on_outer_step: Callable[[OuterStep], object] | None = None,
    ) -> None:
        """`diloco` was made with a torch module, and an inner optimizer of parameters that the module has. `peers_min`
        is how many peers a new run starts with. `weighted`: a peer counts in averages by the sum of what `count` was
        told since the last outer step; the same on all peers. `on_outer_step` is called after each.

        TypeError: there is no inner optimizer of torch. ValueError: it has parameters that would not be averaged.
        """
        torch = sys.modules["torch"]
        inner = diloco.inner
        if not isinstance(inner, torch.optim.Optimizer):
            raise TypeError(
                f"the inner optimizer of diloco must be a torch.optim.Optimizer, not {type(inner).__name__}"
            )
        self.diloco = diloco
        """The loop whose outer steps are made."""
        self.inner = inner
        """The inner optimizer."""
        self.inner_steps_made = 0
        """Since the last outer step."""
        self._peers_min = as_int("peers_min", peers_min)
        self._is_weighted = weighted
        self._counted = 0.0
        self._on_outer_step = on_outer_step
        for group in inner.param_groups:
            self._check(group["params"])
        torch.optim.Optimizer.__setstate__(self, {})  # what torch gives an optimizer that was not made by its __init__

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.inner.param_groups
        return groups

    @property
    def state(self) -> Any:
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:
        defaults: dict[str, Any] = self.inner.defaults
        return defaults

    @property
    def revision(self) -> int:
        """Outer updates so far, of the whole run."""
        return self.diloco.revision

    def join(self, peers_min: int | None = None) -> Admission:
        """Connects, if that is still to be done, and joins as `DiLoCo.join`; otherwise the first `step` does.
        `peers_min`: None for that of the constructor."""
        self.diloco.connect()
        self.inner_steps_made, self._counted = 0, 0.0
        return self.diloco.join(self._peers_min if peers_min is None else peers_min)

    def reconnect(self, communicator: Communicator, peers_min: int = 1) -> Admission:
        """Join a run again on another communicator; inner steps since the last outer one are lost. See
        `DiLoCo.reconnect`."""
        self.inner_steps_made, self._counted = 0, 0.0
        return self.diloco.reconnect(communicator, peers_min)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes an inner step, and the outer step when it is time; returns what the inner optimizer does. A joint call
        where it makes an outer step, or joins. PCCLError as `DiLoCo.outer_step` and `DiLoCo.join`."""
        if not self.diloco.has_joined:
            counted = self._counted
            admission = self.join()
            if admission.rx_bytes and closure is None:
                self.zero_grad()
                self.inner_steps_made = 0 if self.diloco.came_late else 1
                if self.inner_steps_made >= self.diloco.inner_steps:
                    self.outer_step()
                return None
            self._counted = counted
        loss = self.inner.step() if closure is None else self.inner.step(closure)
        self.inner_steps_made += 1
        if self.inner_steps_made >= self.diloco.inner_steps:
            self.outer_step()
        return loss

    def outer_step(self) -> OuterStep:
        """Makes the outer step now, as a loop may want it at the end of the data. A joint call."""
        weight = self._counted if self._is_weighted else None
        step = self.diloco.outer_step(weight=weight, inner_steps=self.inner_steps_made)
        self.inner_steps_made, self._counted = 0, 0.0
        if self._on_outer_step is not None:
            self._on_outer_step(step)
        return step

    def finish(self) -> None:
        """Puts the outer parameters into the model, after the last step, with the average that is in flight, and
        compares them with the others': call it on all peers. Inner steps since the last outer one are left out.
        DivergenceError, PCCLError as `step`."""
        if self.diloco.has_joined:
            self.diloco.finish()
        else:
            self.diloco.show_outer()
        self.inner_steps_made, self._counted = 0, 0.0

    def count(self, amount: float) -> None:
        """Add to the weight of this peer in the next average: the tokens or samples of a batch. ValueError: the
        optimizer is not `weighted`, or `amount` is no number that a float can hold."""
        if not self._is_weighted:
            raise ValueError("count: only an optimizer made with weighted=True, on all peers, counts")
        self._counted += as_float("amount", amount)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """ValueError for parameters that would not be averaged."""
        parameters = param_group["params"]
        self._check([parameters] if hasattr(parameters, "data_ptr") else list(parameters))
        self.inner.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer and of the outer loop. Tensors are not copied, as in torch's
        optimizers."""
        from_numpy = sys.modules["torch"].from_numpy
        outer = {
            name: from_numpy(value) if isinstance(value, np.ndarray) else value
            for name, value in self.diloco.outer_state().items()
        }
        return {**self.inner.state_dict(), OUTER: outer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what `state_dict` gave, or the state of an inner optimizer alone.

        ValueError: the outer state is of another model or has other `shared` objects, or it is another one than that of
        the run that this peer has joined: load before the first step. CheckpointError: one of these objects does not
        take what was saved of it."""
        outer = state_dict.get(OUTER)
        if outer is not None:
            is_tensor = sys.modules["torch"].is_tensor
            self.diloco.take_outer_state(
                {name: value.cpu().numpy() if is_tensor(value) else value for name, value in outer.items()}
            )
        self.inner.load_state_dict({name: value for name, value in state_dict.items() if name != OUTER})

    def __getstate__(self) -> Any:
        raise TypeError("a DiLoCoOptimizer cannot be pickled or copied; its state_dict() can")

    def __repr__(self) -> str:
        return f"{type(self.diloco).__name__} every {self.diloco.inner_steps} steps of {self.inner!r}"

    def _check(self, parameters: list[Any]) -> None:
        for parameter in parameters:
            if not self.diloco.trains(parameter):
                raise ValueError(
                    f"the inner optimizer has a parameter of shape {tuple(parameter.shape)} that is not among those of "
                    "the model that required gradients when DiLoCo was made: it would not be averaged"
                )


@cache
def _optimizer_class(cls: Any, torch: Any) -> Any:
    """`cls` as a kind of torch's optimizers. Hooks around state dicts are the inner optimizer's affair."""
    if issubclass(cls, torch.optim.Optimizer):
        return cls

    def of_inner(name: str) -> property:
        return property(lambda self: getattr(self.inner, name))

    what = ("state_dict_pre_hook", "state_dict_post_hook", "load_state_dict_pre_hook", "load_state_dict_post_hook")
    names = [f"register_{each}" for each in what]
    namespace = {"__module__": cls.__module__, "__doc__": cls.__doc__, **{name: of_inner(name) for name in names}}
    return type(cls.__name__, (cls, torch.optim.Optimizer), namespace)
