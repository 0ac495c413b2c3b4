"""Why a step of `DDP` is refused: the kinds of objections that peers tell each other (`pccl.training.veto`), and what
they say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pccl.training.veto import UNLIKE, Objection

# Kinds; the two integers that follow:
CHANGED = 1
"""Gradients in flight were written: bucket, and place in it."""
NOT_AVERAGED = 2
"""A parameter of the optimizer has a gradient and is in no bucket: its number."""
UNSCALED = 3
"""A GradScaler has looked for infinities among gradients that were not averages."""
REPLACED = 4
"""A tensor that peers have in common is not in use: its place among them."""
UNWEIGHTED = 5
"""Gave no weight, where others did."""
ABANDONED = 6
"""Gave up the step."""

REASONS = {
    UNLIKE: "has another communication hook than this peer, or other options of it: register the same on all",
    CHANGED: (
        "has changed the gradient of {name} while it was on its way to the others: write ddp.synchronize() before what "
        "changes gradients, such as clip_grad_norm_ or scaler.unscale_; from then on they are the averages"
    ),
    NOT_AVERAGED: (
        "has a gradient of {name}, which is not averaged, since it did not require gradients or was not there when the "
        "DDP was made: make it anew after what unfreezes or adds parameters"
    ),
    UNSCALED: (
        "has called scaler.unscale_(optimizer) before the gradients were averaged: write ddp.synchronize() before it"
    ),
    REPLACED: (
        "has replaced the tensor {name}, which peers have in common, as module.to() does: move and convert the module "
        "before the DDP is made"
    ),
    ABANDONED: "has given up the step, by ddp.abandon()",
    UNWEIGHTED: "gave no weight=, as others did: all give one to ddp.step() or ddp.synchronize(), or none does",
}
"""What a peer has done, with a `{name}` of what it has done it to."""
SHOWN = 3


def explained(objections: Sequence[Objection], reason: Callable[[int, int, int], str]) -> str:
    """What all peers are told; `reason` gives that of an objection's three integers."""
    told = "; ".join(
        f"{'this peer' if each.is_own else f'peer {each.peer}'} {reason(*each.what)}" for each in objections[:SHOWN]
    )
    more = f" (and {len(objections) - SHOWN} more)" if len(objections) > SHOWN else ""
    return f"{told}{more}. No peer has made this step, and its gradients are cleared on all"
