"""Late updates in DiLoCo, as in FedFix (Fraboni et al. 2022, arXiv:2206.10189)."""

from __future__ import annotations

import torch
from torch.nn.utils import parameters_to_vector

from common.gpt import GPT
from pccl.training import DiLoCo


class LateUpdates:
    """The work of a peer that needs `windows` outer steps for its inner steps, while the others do not wait for it.

    In each outer step it contributes a movement of zero until its inner steps are complete, and then the movement since
    it started, `windows` times, so that it counts as much as another peer in the long run.
    """

    def __init__(self, diloco: DiLoCo, model: GPT, windows: int) -> None:
        self._diloco, self._model, self._windows = diloco, model, windows
        self._made = 0
        self._start = self._own = self._outer()

    def _outer(self) -> torch.Tensor:
        return torch.from_numpy(self._diloco.outer_parameters.copy())

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _write(self, values: torch.Tensor) -> None:
        for parameter in self._model.parameters():
            parameter.copy_(values[: parameter.numel()].view_as(parameter))
            values = values[parameter.numel() :]

    def resume(self) -> None:
        """Return to the own parameters, before the inner steps of a window."""
        if self._made == 0:
            self._start = self._own = self._outer()
        self._write(self._own)

    def contribute(self) -> None:
        """Write what `outer_step` averages into the model, after the inner steps of a window."""
        self._own = parameters_to_vector(self._model.parameters()).detach().clone()
        self._made = (self._made + 1) % self._windows
        moved = self._own - self._start if self._made == 0 else torch.zeros_like(self._own)
        self._write(self._outer() + self._windows * moved)
