"""A torch module's and optimizer's values as a nested state, and back into the same tensors.

Tensors keep their place in memory, where hooks, buckets and shared states refer to them: `load_state_dict` of an
optimizer would make new ones.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from pccl.training.state.tensor_file import CheckpointError
from pccl.training.state.tensor_tree import Shard
from pccl.training.tensors.held_tensors import placed
from pccl.training.tensors.shards import describe, is_distributed, local_shard


def buffers_of(model: Any) -> dict[str, Any]:
    """The buffers by name, also those that `state_dict()` leaves out. Models of NumPy arrays have none."""
    return dict(model.named_buffers()) if hasattr(model, "named_buffers") else {}


def layout_of(tensors: Mapping[str, Any]) -> str:
    """A line for each: name, shape, dtype, and where in a distributed tensor the shard is."""
    return "\n".join(
        f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{describe(tensor)}"
        for name, tensor in tensors.items()
    )


def optimizer_tensors(optimizer: Any) -> dict[str, Any]:
    """Return the tensors in the state of `optimizer`, named `optimizer 0 exp_avg` after the parameter's number."""
    torch = sys.modules["torch"]
    return {
        f"optimizer {number} {name}": value
        for number, parameter in enumerate(_parameters(optimizer))
        for name, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, torch.Tensor)
    }


def require_like(tensors: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """CheckpointError where names or shapes differ."""
    if missing := tensors.keys() ^ values.keys():
        name = min(missing)
        raise CheckpointError(f"tensor {name!r} is only {'here' if name in tensors else 'in the checkpoint'}")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != tuple(values[name].shape):
            shapes = tuple(values[name].shape), tuple(tensor.shape)
            raise CheckpointError(f"tensor {name!r} has shape {shapes[0]} in the checkpoint and {shapes[1]} here")


def assign(tensors: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Copies `values` into the tensors of the same names, which are to be as many as `require_like` says."""
    if not tensors:
        return  # torch may not be there
    torch = sys.modules["torch"]
    with torch.no_grad():
        for name, tensor in tensors.items():
            held, value = local_shard(tensor), local_shard(values[name])
            if _is_expanded(held) and torch.equal(held, value.to(held)):
                continue  # elements that share their memory cannot be written
            held.copy_(value)


def _is_expanded(tensor: Any) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def class_of(optimizer: Any) -> str:
    """Return the name of the optimizer's class in checkpoints."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def assign_optimizer(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Takes up what `optimizer.state_dict()` gave: tensors that are here are written, others come or go.
    CheckpointError where it is of another number of parameters."""
    torch = sys.modules["torch"]
    groups = state["param_groups"]
    counts = [[len(group["params"]) for group in each] for each in (groups, optimizer.param_groups)]
    if counts[0] != counts[1]:
        raise CheckpointError(f"the optimizer has groups of {counts[0]} parameters in the checkpoint, {counts[1]} here")
    numbers = [number for group in groups for number in group["params"]]
    saved = {index: state["state"].get(number, {}) for index, number in enumerate(numbers)}
    parameters = _parameters(optimizer)
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


def _parameters(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def distributed_like(model: Any, tensor: Any, shard: Shard) -> Any:
    """The distributed tensor that `tensor` is this rank's part of, on the mesh of a parameter of `model` that is placed
    so. CheckpointError, if there is none."""
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
    raise CheckpointError(f"it has a tensor in shards, {shard.place}; no parameter of this model is placed so")
