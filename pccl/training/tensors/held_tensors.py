"""The tensors of a module and its optimizer that peers have in common, and whether they still are the ones in use.

Peers hand over and compare the tensors that were there when the training began. What replaces them, as `module.to()`
or `optimizer.load_state_dict()` may, would go on with others, unseen: newcomers would get stale values.

*Late state* is what the optimizer has of its parameters beyond that, as after momentum was switched on in
`param_groups`, or a group was added. Newcomers, who begin without it, get it as an object beside the tensors. So they
do with what cannot exist before an optimizer's first step: of SGD with dampening, which takes its first gradient whole,
the momentum.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import Any


def optimized(optimizer: Any) -> list[Any]:
    """Return the parameters of the optimizer, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def state_tensors(optimizer: Any) -> Iterator[tuple[str, Any, str, Any]]:
    """Yield for each tensor of the optimizer's state a name, the parameter, the key and the tensor. ValueError: a state
    is no tensor."""
    torch = sys.modules["torch"]
    for number, parameter in enumerate(optimized(optimizer)):
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, torch.Tensor):
                yield f"optimizer {number} {key}", parameter, key, value
            elif value is not None:
                kind = type(value).__name__
                raise ValueError(f"the optimizer's state {key!r} is a {kind}, not a tensor: it cannot be shared")


def begin_absent(optimizer: Any) -> set[int]:
    """The `id` of parameters whose state there is no way to have before their first step."""
    if not isinstance(optimizer, sys.modules["torch"].optim.SGD):
        return set()
    return {id(p) for group in optimizer.param_groups if group.get("dampening") for p in group["params"]}


def placed(group: Mapping[str, Any], parameter: Any, key: str, value: Any) -> Any:
    """A copy of a tensor of the state of `parameter`, where torch's optimizers have it."""
    is_with_it = key != "step" or group.get("capturable") or group.get("fused")
    return value.detach().to(parameter.device if is_with_it else "cpu", copy=True)


class HeldTensors:
    """The tensors of a module and its optimizer that are there when this is made. Not thread-safe."""

    def __init__(self, module: Any, optimizer: Any) -> None:
        """The optimizer's state exists already. ValueError as `state_tensors`."""
        self._optimizer = optimizer
        parameters = [(f"parameter {name}", p, p.detach()) for name, p in module.named_parameters() if p.numel()]
        self._parameters = [(p, tensor.data_ptr()) for _, p, tensor in parameters]
        late = begin_absent(optimizer)
        states = [each for each in state_tensors(optimizer) if each[-1].numel() and id(each[1]) not in late]
        self._states = [(parameter, key, tensor) for _, parameter, key, tensor in states]
        self.tensors: dict[str, Any] = {name: tensor for name, _, tensor in parameters}
        """The tensors by name; empty ones are left out."""
        self.tensors |= {name: tensor for name, _, _, tensor in states}

        self._counted = [tensor for tensor in self.tensors.values() if not tensor.is_inference()]

    def version(self) -> int:
        """Return a number that is another one once a held tensor has been written; by torch, and not through
        `.data`."""
        return sum(tensor._version for tensor in self._counted)

    def replaced(self) -> int | None:
        """The place in `tensors` of one that is not in use."""
        for place, (parameter, pointer) in enumerate(self._parameters):
            if parameter.data_ptr() != pointer:
                return place
        for place, (parameter, key, tensor) in enumerate(self._states, len(self._parameters)):
            if self._optimizer.state[parameter].get(key) is not tensor:
                return place
        return None

    def late(self) -> Iterator[tuple[str, Any, str, Any]]:
        """Yield the optimizer's tensors that are not held, as `state_tensors` does. ValueError."""
        held = {(id(parameter), key) for parameter, key, _ in self._states}
        for each in state_tensors(self._optimizer):
            if each[-1].numel() and (id(each[1]), each[2]) not in held:
                yield each

    def name(self, place: int) -> str:
        return list(self.tensors)[place]

    def load_hook(self) -> Any:
        """Return a hook for `optimizer.register_load_state_dict_post_hook`, which calls `take_back`."""
        held = weakref.ref(self)

        def state_is_loaded(_: Any) -> None:
            there = held()
            if there is not None:
                there.take_back()

        return state_is_loaded

    def take_back(self) -> None:
        """Put what `optimizer.load_state_dict` has loaded into the tensors that are held, and these in use. A tensor
        that it lacked, as the state of an optimizer that has made no step does, becomes zero. ValueError: shapes
        differ."""
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


class LateState:
    """The optimizer's late state as an object with a state. Not thread-safe."""

    def __init__(self, held: HeldTensors, optimizer: Any) -> None:
        self._held = held
        self._optimizer = optimizer

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """Return the late state by the parameter's number and key."""
        numbers = {id(parameter): number for number, parameter in enumerate(optimized(self._optimizer))}
        found: dict[int, dict[str, Any]] = {}
        for _, parameter, key, value in self._held.late():
            found.setdefault(numbers[id(parameter)], {})[key] = value
        return found

    def load_state_dict(self, state: Mapping[int, Mapping[str, Any]], /) -> None:
        """Late state that it lacks is gone then. ValueError where there are not so many parameters."""
        places = [(p, group) for group in self._optimizer.param_groups for p in group["params"]]
        if max(state, default=-1) >= len(places):
            raise ValueError(f"the others' optimizer has more than the {len(places)} parameters of this one")
        for _, parameter, key, _ in list(self._held.late()):
            del self._optimizer.state[parameter][key]
        for number, values in state.items():
            parameter, group = places[number]
            for key, value in values.items():
                self._optimizer.state[parameter][key] = placed(group, parameter, key, value)
