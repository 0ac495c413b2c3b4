"""The state that a torch optimizer makes in its first step, made before it, so that there is something to receive.

A step with gradients of zero and a learning rate of zero makes the tensors; then they get the values that they have
before a first step. That is zero, as sums and averages begin, but for a few tensors of torch's optimizers, which are
listed here; SGD with dampening, which has no such values, makes its own (`pccl.training.tensors.held_tensors`). Of
other optimizers a tensor that gradients of zero have not left at zero began elsewhere, as copies of parameters do, and
is refused.
"""

from __future__ import annotations

from typing import Any

from pccl.training.tensors.held_tensors import begin_absent, optimized


def materialize(torch: Any, optimizer: Any, parameters: list[Any]) -> None:
    """Gives the optimizer the state of those `parameters` that have none. Parameters and hyperparameters are as before.
    TypeError for one that needs a closure, ValueError for one whose state cannot be made so."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("LBFGS computes the loss several times in a step, with gradients that would not be averaged")
    late = begin_absent(optimizer)
    fresh = [each for each in parameters if not optimizer.state.get(each) and id(each) not in late]
    if not fresh:
        return
    groups = [{key: group.get(key) for key in ("lr", "weight_decay")} for group in optimizer.param_groups]
    gradients = [(parameter, parameter.grad) for parameter in optimized(optimizer)]
    values = [parameter.detach().clone() for parameter in fresh]
    for parameter, _ in gradients:
        parameter.grad = None  # the step leaves it alone
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
    """Set the state that the step has made to what it is before a first step."""
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
                            "made before the first step: make one with the optimizer before the DDP is made"
                        )
                    value.fill_(initial)


def _initial(optim: Any, optimizer: Any, key: str, rate: Any) -> float:
    """Return the value that a tensor of the state begins with."""
    if isinstance(optimizer, optim.NAdam) and key == "mu_product":
        return 1.0
    if isinstance(optimizer, optim.ASGD) and key in ("mu", "eta"):
        return 1.0 if key == "mu" else float(rate)
    if isinstance(optimizer, optim.Rprop) and key == "step_size":
        return float(rate)
    return 0.0
