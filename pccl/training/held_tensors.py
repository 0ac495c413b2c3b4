"""The tensors of a module and its optimizer that peers have in common, and whether they still are the ones in use.

Peers hand over and compare the tensors that were there when the training began. What replaces them, as `module.to()`
or `optimizer.load_state_dict()` may, would go on with others, unseen: newcomers would get stale values.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any


def optimized(optimizer: Any) -> list[Any]:
    """Its parameters."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def state_tensors(optimizer: Any) -> Iterator[tuple[str, Any, str, Any]]:
    """Of each tensor of the optimizer's state a name, the parameter, the key and itself. ValueError for a state that is
    no tensor."""
    torch = sys.modules["torch"]
    for number, parameter in enumerate(optimized(optimizer)):
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, torch.Tensor):
                yield f"optimizer {number} {key}", parameter, key, value
            elif value is not None:
                kind = type(value).__name__
                raise ValueError(f"the optimizer's state {key!r} is a {kind}, not a tensor: it cannot be shared")


class HeldTensors:
    """Those that are there when this is made. Not thread-safe."""

    def __init__(self, module: Any, optimizer: Any) -> None:
        """The optimizer's state exists already. ValueError as `state_tensors`."""
        self._optimizer = optimizer
        parameters = [(f"parameter {name}", p, p.detach()) for name, p in module.named_parameters() if p.numel()]
        self._parameters = [(p, tensor.data_ptr()) for _, p, tensor in parameters]
        states = [each for each in state_tensors(optimizer) if each[-1].numel()]
        self._states = [(parameter, key, tensor) for _, parameter, key, tensor in states]
        self.tensors: dict[str, Any] = {name: tensor for name, _, tensor in parameters}
        """By name; empty ones are left out."""
        self.tensors |= {name: tensor for name, _, _, tensor in states}

    def replaced(self) -> int | None:
        """The place in `tensors` of one that is not in use."""
        for place, (parameter, pointer) in enumerate(self._parameters):
            if parameter.data_ptr() != pointer:
                return place
        for place, (parameter, key, tensor) in enumerate(self._states, len(self._parameters)):
            if self._optimizer.state[parameter].get(key) is not tensor:
                return place
        return None

    def name(self, place: int) -> str:
        return list(self.tensors)[place]

    def take_back(self) -> None:
        """After `optimizer.load_state_dict`: puts what was loaded into the tensors that are held, and these in use.
        What it lacked, as that of an optimizer that has made no step, is zero. ValueError for other shapes."""
        torch = sys.modules["torch"]
        for parameter, key, tensor in self._states:
            state = self._optimizer.state[parameter]
            loaded = state.get(key)
            if loaded is tensor:
                continue
            if loaded is not None and tuple(loaded.shape) != tuple(tensor.shape):
                shapes = f"{tuple(loaded.shape)}, not {tuple(tensor.shape)}"
                raise ValueError(f"the loaded optimizer's state {key!r} has the shape {shapes}")
            with torch.no_grad():
                tensor.zero_() if loaded is None else tensor.copy_(loaded)
            state[key] = tensor
