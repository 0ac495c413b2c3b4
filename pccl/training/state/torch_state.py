"""The state of a torch module and its optimizer: read, written in place, and created before the first step.

Tensors keep their place in memory, where hooks, buckets and shared states refer to them. *Held tensors*, those that
existed when training began, are checked before each step because `module.to()` and the like may have replaced them.

*Late state* is state that the optimizer created afterwards or that cannot exist before a first step, such as the
momentum of SGD with dampening. It is sent as an object.

*Fresh state* is state that an optimizer creates in its first step. A step in which gradients and learning rate are zero
creates the tensors. They then get their initial values: zero, except for a few tensors of torch's optimizers. For other
optimizers, a tensor that is not zero after such a step is rejected.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from pccl.training.state.replica import describe, is_distributed, local_shard, named_parameters, plain_name
from pccl.training.state.tensor_file import CheckpointError, Shard


def buffers_of(model: Any) -> dict[str, Any]:
    """Return the buffers by name, including those that `state_dict()` omits. Models of NumPy arrays have none."""
    found = model.named_buffers() if hasattr(model, "named_buffers") else ()
    return {plain_name(name): buffer for name, buffer in found}


def without_state_dict(model: Any) -> set[str]:
    """Return the names of the buffers that a torch module's `state_dict()` omits."""
    modules = model.named_modules() if hasattr(model, "named_modules") else ()
    return {
        plain_name(f"{prefix}.{key}" if prefix else key)
        for prefix, module in modules
        for key in module._non_persistent_buffers_set
    }


def optimized(optimizer: Any) -> list[Any]:
    """Return the optimizer's parameters in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def optimizer_tensors(optimizer: Any) -> dict[str, Any]:
    """Return the tensors in the state of `optimizer`, named `optimizer 0 exp_avg` after the parameter's number."""
    is_tensor = sys.modules["torch"].is_tensor
    return {name: value for name, _, _, value in _states(optimizer) if is_tensor(value)}


def _states(optimizer: Any) -> Iterator[tuple[str, Any, str, Any]]:
    """Yield the name, parameter, key and value of each entry of the optimizer's state."""
    for number, parameter in enumerate(optimized(optimizer)):
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            yield f"optimizer {number} {key}", parameter, key, value


def require_like(tensors: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raise CheckpointError if names or shapes differ."""
    if missing := tensors.keys() ^ values.keys():
        name = min(missing)
        raise CheckpointError(f"tensor {name!r} is only {'here' if name in tensors else 'in the checkpoint'}")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != tuple(values[name].shape):
            shapes = tuple(values[name].shape), tuple(tensor.shape)
            raise CheckpointError(f"tensor {name!r} has shape {shapes[0]} in the checkpoint and {shapes[1]} here")


def assign(tensors: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Copy `values` into the tensors of the same names."""
    if not tensors:
        return  # torch may not be imported
    torch = sys.modules["torch"]
    with torch.no_grad():
        for name, tensor in tensors.items():
            held, value = local_shard(tensor), local_shard(values[name])
            if _is_expanded(held) and torch.equal(held, value.to(held)):
                continue  # elements that share memory cannot be written
            held.copy_(value)


def _is_expanded(tensor: Any) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def class_of(optimizer: Any) -> str:
    """Return the name of the optimizer's class in checkpoints."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def assign_optimizer(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Load an `optimizer.state_dict()`, in place if possible. Raises CheckpointError if parameters differ."""
    torch = sys.modules["torch"]
    groups = state["param_groups"]
    counts = [[len(group["params"]) for group in each] for each in (groups, optimizer.param_groups)]
    if counts[0] != counts[1]:
        raise CheckpointError(f"the optimizer has groups of {counts[0]} parameters in the checkpoint, {counts[1]} here")
    numbers = [number for group in groups for number in group["params"]]
    saved = {index: state["state"].get(number, {}) for index, number in enumerate(numbers)}
    parameters = optimized(optimizer)
    values = {
        f"optimizer {index} {name}": value
        for index, entries in saved.items()
        for name, value in entries.items()
        if isinstance(value, torch.Tensor)
    }
    tensors = optimizer_tensors(optimizer)
    common = tensors.keys() & values.keys()
    require_like({name: tensors[name] for name in common}, {name: values[name] for name in common})
    assign({name: tensors[name] for name in common}, values)
    places = [group for group in optimizer.param_groups for _ in group["params"]]
    for index, parameter in enumerate(parameters):
        own_state, entries = optimizer.state[parameter], saved[index]
        for name in [name for name in own_state if name not in entries]:
            del own_state[name]
        for name, value in entries.items():
            if not isinstance(value, torch.Tensor):
                own_state[name] = value
            elif f"optimizer {index} {name}" not in common:
                own_state[name] = placed(places[index], parameter, name, value)
    for own, group in zip(optimizer.param_groups, groups, strict=True):
        for name, value in group.items():
            if name == "params":
                continue
            if isinstance(own.get(name), torch.Tensor) and isinstance(value, torch.Tensor):
                own[name].copy_(value)
            else:
                own[name] = value


def distributed_like(model: Any, tensor: Any, shard: Shard) -> Any:
    """Return a distributed tensor made from this rank's part on a parameter's mesh. Raises CheckpointError."""
    for parameter in model.parameters() if hasattr(model, "parameters") else ():
        if is_distributed(parameter) and describe(parameter).strip() == shard.place:
            return type(parameter.data).from_local(
                tensor.to(parameter.device),
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=shard.shape,
                stride=shard.stride,
            )
    raise CheckpointError(f"it has a sharded tensor, {shard.place}; no parameter of this model is sharded this way")


def state_tensors(optimizer: Any) -> Iterator[tuple[str, Any, str, Any]]:
    """Yield name, parameter, key and tensor of each state entry. Raises ValueError if an entry is not a tensor."""
    is_tensor = sys.modules["torch"].is_tensor
    for each in _states(optimizer):
        if is_tensor(each[-1]):
            yield each
        elif each[-1] is not None:
            kind = type(each[-1]).__name__
            raise ValueError(f"the optimizer's state {each[2]!r} is a {kind}, not a tensor: it cannot be shared")


def begin_absent(optimizer: Any) -> set[int]:
    """Return the `id` of parameters whose state cannot exist before their first step."""
    if not isinstance(optimizer, sys.modules["torch"].optim.SGD):
        return set()
    return {id(p) for group in optimizer.param_groups if group.get("dampening") for p in group["params"]}


def placed(group: Mapping[str, Any], parameter: Any, key: str, value: Any) -> Any:
    """Return a copy of a state tensor of `parameter` on the device where torch's optimizers keep it."""
    is_with_it = key != "step" or group.get("capturable") or group.get("fused")
    return value.detach().to(parameter.device if is_with_it else "cpu", copy=True)


class HeldTensors:
    """The tensors of a module and its optimizer at the creation of this object. The state dict holds the late state.
    Not thread-safe."""

    def __init__(self, module: Any, optimizer: Any) -> None:
        """The optimizer's state must exist. Raises ValueError like `state_tensors`."""
        self._optimizer = optimizer
        named = named_parameters(module).items()
        parameters = [(f"parameter {name}", p, p.detach()) for name, p in named if p.numel()]
        self._parameters = [(p, tensor.data_ptr()) for _, p, tensor in parameters]
        late = begin_absent(optimizer)
        states = [each for each in state_tensors(optimizer) if each[-1].numel() and id(each[1]) not in late]
        self._states = [(parameter, key, tensor) for _, parameter, key, tensor in states]
        self.tensors: dict[str, Any] = {name: tensor for name, _, tensor in parameters}
        self.tensors |= {name: tensor for name, _, _, tensor in states}

        self._counted = [tensor for tensor in self.tensors.values() if not tensor.is_inference()]

    def version(self) -> int:
        """Return a number that changes when torch writes a held tensor, except through `.data`."""
        return sum(tensor._version for tensor in self._counted)

    def replaced(self) -> int | None:
        """Return the index in `tensors` of a tensor that is no longer in use, or None."""
        for place, (parameter, pointer) in enumerate(self._parameters):
            if parameter.data_ptr() != pointer:
                return place
        for place, (parameter, key, tensor) in enumerate(self._states, len(self._parameters)):
            if self._optimizer.state[parameter].get(key) is not tensor:
                return place
        return None

    def late(self) -> Iterator[tuple[str, Any, str, Any]]:
        """Yield the optimizer's tensors that are not held, in the form of `state_tensors`."""
        held = {(id(parameter), key) for parameter, key, _ in self._states}
        for each in state_tensors(self._optimizer):
            if each[-1].numel() and (id(each[1]), each[2]) not in held:
                yield each

    def name(self, place: int) -> str:
        return list(self.tensors)[place]

    def load_hook(self) -> Any:
        """Return a hook for `optimizer.register_load_state_dict_post_hook`, which calls `take_back`."""
        method = weakref.WeakMethod(self.take_back)

        def hook(_: Any) -> None:
            if (take_back := method()) is not None:
                take_back()

        return hook

    def take_back(self) -> None:
        """Copy the state loaded by `optimizer.load_state_dict` into the held tensors; missing tensors become zero.

        Raises ValueError.
        """
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

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """Return the late state by parameter number and key."""
        numbers = {id(parameter): number for number, parameter in enumerate(optimized(self._optimizer))}
        found: dict[int, dict[str, Any]] = {}
        for _, parameter, key, value in self.late():
            found.setdefault(numbers[id(parameter)], {})[key] = value
        return found

    def load_state_dict(self, state: Mapping[int, Mapping[str, Any]], /) -> None:
        """Replace the late state. Raises ValueError if the new one has more parameters."""
        places = [(p, group) for group in self._optimizer.param_groups for p in group["params"]]
        if max(state, default=-1) >= len(places):
            raise ValueError(f"the others' optimizer has more than the {len(places)} parameters of this one")
        for _, parameter, key, _ in list(self.late()):
            del self._optimizer.state[parameter][key]
        for number, values in state.items():
            parameter, group = places[number]
            for key, value in values.items():
                self._optimizer.state[parameter][key] = placed(group, parameter, key, value)


def materialize(torch: Any, optimizer: Any, parameters: list[Any]) -> None:
    """Create the optimizer state of `parameters` that have none. Raises TypeError or ValueError if it cannot."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("LBFGS computes the loss several times in a step, with gradients that would not be averaged")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise TypeError("SparseAdam needs sparse gradients, which cannot be averaged; use Adam and dense gradients")
    late = begin_absent(optimizer)
    fresh = [each for each in parameters if not optimizer.state.get(each) and id(each) not in late]
    if not fresh:
        return
    groups = [{key: group.get(key) for key in ("lr", "weight_decay")} for group in optimizer.param_groups]
    gradients = [(parameter, parameter.grad) for parameter in optimized(optimizer)]
    values = [parameter.detach().clone() for parameter in fresh]
    for parameter, _ in gradients:
        parameter.grad = None  # so that the step skips the parameter
    for parameter in fresh:
        parameter.grad = torch.zeros_like(parameter)
    try:
        for group, options in zip(optimizer.param_groups, groups, strict=True):
            group.update({key: 0.0 for key, value in options.items() if value is not None})
        optimizer.step()
        _rewind(torch, optimizer, fresh, [options["lr"] for options in groups])
    except BaseException:
        for parameter in fresh:
            optimizer.state.pop(parameter, None)
        raise
    finally:
        for group, options in zip(optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in options.items() if value is not None})
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for parameter, value in zip(fresh, values, strict=True):
                parameter.grad = None
                parameter.copy_(value)


def _rewind(torch: Any, optimizer: Any, fresh: list[Any], rates: list[Any]) -> None:
    made = {id(parameter) for parameter in fresh}
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")
    with torch.no_grad():
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            for parameter in group["params"]:
                state = optimizer.state.get(parameter) if id(parameter) in made else None
                for key, value in (state or {}).items():
                    if not isinstance(value, torch.Tensor):
                        continue
                    initial = _initial(torch.optim, optimizer, key, rate)
                    if initial == 0 and not is_torchs and key != "step" and value.count_nonzero():
                        raise ValueError(
                            f"the state {key!r} of {type(optimizer).__name__} does not begin at zero, and so cannot be "
                            "created before the first step: take a step with the optimizer before creating the DDP"
                        )
                    value.fill_(initial)


def _initial(optim: Any, optimizer: Any, key: str, rate: Any) -> float:
    if isinstance(optimizer, optim.NAdam) and key == "mu_product":
        return 1.0
    if isinstance(optimizer, optim.ASGD) and key in ("mu", "eta"):
        return 1.0 if key == "mu" else float(rate)
    if isinstance(optimizer, optim.Rprop) and key == "step_size":
        return float(rate)
    return 0.0
