"""A peer's own model as flat tensors that are the model's own memory, for algorithms that may not copy it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pccl.training.spsa.elements import Elements, HostElements, TorchElements
from pccl.training.tensors.replica import replica_of
from pccl.training.tensors.shards import is_distributed


def tensors_of(model: Any) -> tuple[dict[str, Elements], str]:
    """The float32 parameters by name, without empty ones, and the layout: equal on all peers that train the same model.

    Of a torch module, those that require gradients. The module must keep its tensors: what is moved to another device
    or dtype afterwards is trained no more. TypeError or ValueError for what cannot be trained.
    """
    layout = replica_of(model).layout
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        tensors = {name: _of_torch(torch, name, p) for name, p in model.named_parameters() if p.requires_grad}
    else:
        tensors = {name: _of_numpy(name, array) for name, array in model.items()}
    return {name: tensor for name, tensor in tensors.items() if tensor.size}, layout


def _of_torch(torch: Any, name: str, parameter: Any) -> Elements:
    if is_distributed(parameter):
        raise ValueError(f"parameter {name!r} is a distributed tensor; only whole ones are trained in place")
    if parameter.dtype is not torch.float32 or not parameter.is_contiguous():
        raise ValueError(
            f"parameter {name!r} is {parameter.dtype}{'' if parameter.is_contiguous() else ', not contiguous'}; only "
            f"contiguous torch.float32 is trained in place"
        )
    flat = parameter.detach().view(-1)
    kind = kind_of_place(flat)
    if kind == "cpu":
        return HostElements(flat.numpy())
    if kind != "cuda":
        raise ValueError(f"parameter {name!r} is on {flat.device}; only the CPU and CUDA devices train in place")
    return TorchElements(torch, flat)


def kind_of_place(tensor: Any) -> str:
    return str(tensor.device.type)


def _of_numpy(name: str, array: NDArray[Any]) -> Elements:
    if array.dtype != np.float32 or not array.flags.c_contiguous:
        raise ValueError(
            f"parameter {name!r} is {array.dtype}{'' if array.flags.c_contiguous else ', not contiguous'}; only "
            f"contiguous float32 is trained in place"
        )
    return HostElements(array.reshape(-1))
