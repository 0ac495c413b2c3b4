"""c10d's reductions in terms of pccl's.

    dtype                 SUM AVG PRODUCT MIN MAX    BAND BOR BXOR             PREMUL_SUM
    integers              the engine's               gathered, folded here     multiplied here, then SUM
    floats                the engine's               rejected                  multiplied here, then SUM
    bool                  as bytes: SUM and MAX are "or", PRODUCT and MIN are "and"; AVG is rejected
    complex               SUM AVG as pairs of reals; others are rejected       multiplied here, then SUM
    8-bit floats          rejected: they can only be copied

A reduction that the engine lacks is *folded*: every rank gathers the tensors of all ranks and folds them in rank order,
so that all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed import ReduceOp as TorchOp

from pccl.torch.tensors import REDUCIBLE, Tensor, fail
from pccl.types import ReduceOp

Fold = Callable[[Tensor, Tensor], Tensor]

ENGINE = {"SUM": ReduceOp.SUM, "AVG": ReduceOp.AVG, "PRODUCT": ReduceOp.PROD, "MIN": ReduceOp.MIN, "MAX": ReduceOp.MAX}
FOLDS: dict[str, Fold] = {
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
OF_BOOL = {
    "SUM": ReduceOp.MAX,
    "MAX": ReduceOp.MAX,
    "BOR": ReduceOp.MAX,
    "PRODUCT": ReduceOp.MIN,
    "MIN": ReduceOp.MIN,
    "BAND": ReduceOp.MIN,
}

_NAMES = {getattr(TorchOp, name): name for name in (*ENGINE, *FOLDS, "PREMUL_SUM")}


class Reduction(NamedTuple):
    """A reduction by the engine, or by `fold` if the engine lacks it."""

    op: ReduceOp
    fold: Fold | None = None
    factor: Any = None
    """The factor that each rank's tensor is multiplied by before the sum, if any."""


SUM = Reduction(ReduceOp.SUM)
_PLAIN = {name: Reduction(op) for name, op in ENGINE.items()}


def name_of(op: Any) -> str:
    """Return the name of a c10d ReduceOp object or constant."""
    kind = getattr(op, "op", op)
    return _NAMES.get(kind) or str(kind).rpartition(".")[2]


def reduction(what: str, op: Any, dtype: Any) -> Reduction:
    """Return the reduction for a c10d ReduceOp and a dtype. Raises ArgumentError if there is none."""
    name = name_of(op)
    plain = _PLAIN.get(name)
    if plain is not None and dtype in REDUCIBLE:
        return plain
    if dtype is torch.bool:
        if name in OF_BOOL:
            return Reduction(OF_BOOL[name])
        if name == "BXOR":
            return Reduction(ReduceOp.SUM, FOLDS[name])
        raise fail(what, f"ReduceOp.{name} cannot be used with bool tensors")
    if dtype.is_complex:
        if name in ("SUM", "AVG"):
            return _PLAIN[name]
        if name == "PREMUL_SUM":
            return Reduction(ReduceOp.SUM, None, _factor(op))
        raise fail(what, f"ReduceOp.{name} is not supported for complex tensors")
    if dtype not in REDUCIBLE:
        raise fail(what, f"tensors of {dtype} can be copied but not reduced: convert them first")
    if name in FOLDS:
        if dtype.is_floating_point:
            raise fail(what, f"ReduceOp.{name} cannot be used with {dtype}: bitwise operations take integers")
        return Reduction(ReduceOp.SUM, FOLDS[name])
    if name == "PREMUL_SUM":
        return Reduction(ReduceOp.SUM, None, _factor(op))
    raise fail(what, f"unsupported reduction operation {op}")


def _factor(op: Any) -> Any:
    if hasattr(op, "factor"):
        return op.factor
    state = op.__getstate__()
    return state[1]


def arithmetic(tensor: Tensor) -> Tensor:
    """Return a view of a contiguous tensor whose elements the engine can reduce."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor


def premultiplied(tensor: Tensor, factor: Any) -> Tensor:
    """Return a new tensor equal to `tensor * factor`, or `tensor` itself if `factor` is None."""
    if factor is None:
        return tensor
    if isinstance(factor, torch.Tensor):
        factor = factor.to(tensor.device)
    with torch.no_grad():
        return (tensor.detach() * factor).to(tensor.dtype)


def folded(fold: Fold, parts: Tensor) -> Tensor:
    """Return the rows of a tensor folded from the first to the last."""
    result = parts[0].clone()
    for part in parts[1:]:
        result = fold(result, part)
    return result
