"""DiLoCo as a torch optimizer, for trainers that run their own loop (Lightning, Accelerate, Hugging Face).

`DiLoCoOptimizer.step` takes a step of the inner optimizer, and an outer step after every `diloco.inner_steps` of them.
A step that a GradScaler skips, or that a trainer omits while it accumulates gradients, does not count. The first `step`
joins unless `join` was called; if the run's weights then replace the peer's own, the step's gradients are dropped.

The class inherits from `torch.optim.Optimizer`. Since pccl does not import torch, the first object creates the class.
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


class DiLoCoOptimizer(Generic[Loop]):
    """A `torch.optim.Optimizer` that takes an outer step after every `diloco.inner_steps` steps.

    Works with schedulers, GradScaler, step hooks and trainers. Not thread-safe. Example::

        diloco = DiLoCo(communicator, model, torch.optim.AdamW(model.parameters()), inner_steps=50)
        optimizer = DiLoCoOptimizer(diloco, peers_min=4)

    Args:
        diloco: Created with a torch module and an inner optimizer of its parameters.
        peers_min: The number of peers needed to start a new run.
        weighted: Weight each peer by the sum of `count` since the last outer step. The same on all peers.
        on_outer_step: Called with each `OuterStep`.

    Raises:
        TypeError: The inner optimizer is missing or not torch's.
        ValueError: The inner optimizer has parameters that would not be averaged.
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
        torch = sys.modules["torch"]
        inner = diloco.inner
        if not isinstance(inner, torch.optim.Optimizer):
            raise TypeError(
                f"the inner optimizer of diloco must be a torch.optim.Optimizer, not {type(inner).__name__}"
            )
        self.diloco = diloco
        self.inner = inner
        self.inner_steps_made = 0
        self._peers_min = as_int("peers_min", peers_min)
        self._is_weighted = weighted
        self._counted = 0.0
        self._on_outer_step = on_outer_step
        for group in inner.param_groups:
            self._check(group["params"])
        torch.optim.Optimizer.__setstate__(self, {})  # torch's attributes for an optimizer created without its __init__

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
        """The number of outer updates in the whole run."""
        return self.diloco.revision

    def join(self, peers_min: int | None = None) -> Admission:
        """Connect unless already connected, and join like `DiLoCo.join`. `peers_min` defaults to the constructor's."""
        self.diloco.connect()
        self.inner_steps_made, self._counted = 0, 0.0
        return self.diloco.join(self._peers_min if peers_min is None else peers_min)

    def reconnect(self, communicator: Communicator, peers_min: int = 1) -> Admission:
        """Rejoin with another communicator; inner steps since the last outer step are lost. See `DiLoCo.reconnect`."""
        self.inner_steps_made, self._counted = 0, 0.0
        return self.diloco.reconnect(communicator, peers_min)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take an inner step, and an outer step when it is due. Return the result of the inner optimizer.

        A group call if it joins or takes an outer step. Raises PCCLError.
        """
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
        """Take the outer step now, for example at the end of the data. A group call."""
        weight = self._counted if self._is_weighted else None
        step = self.diloco.outer_step(weight=weight, inner_steps=self.inner_steps_made)
        self.inner_steps_made, self._counted = 0, 0.0
        if self._on_outer_step is not None:
            self._on_outer_step(step)
        return step

    def finish(self) -> None:
        """Call `DiLoCo.finish` after the last step, on all peers. If not joined, only write the outer parameters."""
        if self.diloco.has_joined:
            self.diloco.finish()
        else:
            self.diloco.show_outer()
        self.inner_steps_made, self._counted = 0, 0.0

    def count(self, amount: float) -> None:
        """Add tokens or samples to this peer's weight in the next average. Raises ValueError unless `weighted`."""
        if not self._is_weighted:
            raise ValueError("count: the optimizer must be created with weighted=True, on all peers")
        self._counted += as_float("amount", amount)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ValueError if a parameter would not be averaged."""
        parameters = param_group["params"]
        self._check([parameters] if hasattr(parameters, "data_ptr") else list(parameters))
        self.inner.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer and of the outer loop, not copied."""
        from_numpy = sys.modules["torch"].from_numpy
        outer = {
            name: from_numpy(value) if isinstance(value, np.ndarray) else value
            for name, value in self.diloco.outer_state().items()
        }
        return {**self.inner.state_dict(), OUTER: outer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict` or an inner optimizer's state, before the first step. Raises ValueError."""
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
    """Return a subclass of `cls` and torch's Optimizer whose state dict hooks register with the inner optimizer."""
    if issubclass(cls, torch.optim.Optimizer):
        return cls

    def of_inner(name: str) -> property:
        return property(lambda self: getattr(self.inner, name))

    what = ("state_dict_pre_hook", "state_dict_post_hook", "load_state_dict_pre_hook", "load_state_dict_post_hook")
    names = [f"register_{each}" for each in what]
    namespace = {"__module__": cls.__module__, "__doc__": cls.__doc__, **{name: of_inner(name) for name in names}}
    return type(cls.__name__, (cls, torch.optim.Optimizer), namespace)
