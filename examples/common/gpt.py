"""A GPT over bytes, for CPUs: small (tens of thousands of parameters, a few milliseconds per step) or large (two
million, about 0.2 s)."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from common.text import Corpus

CONTEXT = 32
BATCH = 8
LEARNING_RATE = 6e-3
MUON_RATE = 2 * LEARNING_RATE
"""Muon's learning rate, for both sizes of the model."""
FRESH_STEPS = 20
"""Number of warm-up steps for an optimizer without history."""


@dataclass(frozen=True)
class Size:
    """The size of a model, and AdamW's learning rate for it."""

    width: int = 64
    heads: int = 4
    layers: int = 1
    context: int = CONTEXT
    learning_rate: float = LEARNING_RATE


SMALL = Size()
SIZES = {"small": SMALL, "large": Size(width=192, layers=5, context=48, learning_rate=1e-3)}


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):  # type: ignore[misc]
    """A GPT with pre-norm blocks, learned positions and tied embeddings. A seed gives the same weights on every
    machine."""

    def __init__(self, seed: int = 0, size: Size = SMALL) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.size = size
        self.embedding = nn.Embedding(256, size.width)
        self.positions = nn.Parameter(0.02 * torch.randn(size.context, size.width))
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        for block in self.blocks:
            for linear in (block.qkv, block.up, block.out, block.down):
                nn.init.normal_(linear.weight, std=0.02)
                nn.init.zeros_(linear.bias)
            for linear in (block.out, block.down):
                linear.weight.data /= math.sqrt(2 * size.layers)

    def forward(self, tokens: Any) -> Any:
        x = self.blocks(self.embedding(tokens) + self.positions[: tokens.shape[1]])
        return functional.linear(self.norm(x), self.embedding.weight)

    def loss(self, stretches: Any) -> Any:
        """Return the loss of predicting each byte of `stretches` (sequences, context + 1) from its prefix, in nats per
        byte."""
        stretches = torch.from_numpy(stretches).long()
        logits = self(stretches[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), stretches[:, 1:].flatten())

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def validation_loss(self, corpus: Corpus) -> float:
        return float(self.loss(corpus.validation(self.size.context + 1)))

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def test_loss(self, corpus: Corpus) -> float:
        return float(self.loss(corpus.test(self.size.context + 1)))


class Joined(torch.optim.Optimizer):  # type: ignore[misc]
    """Several optimizers, each for some of the parameters, as one: with one state, and the groups of all."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        first = 0
        for part in self._parts:
            # `load_state_dict` replaces the groups and the state.
            last = first + len(part.param_groups)
            part.param_groups, part.state = self.param_groups[first:last], self.state
            part.step()
            first = last
        return loss


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)


def muon(model: nn.Module, rate: float, momentum: float) -> torch.optim.Optimizer:
    """Return Muon (Jordan et al. 2024) for the blocks' matrices, and AdamW for all other parameters."""
    matrices = [parameter for parameter in model.blocks.parameters() if parameter.ndim == 2]
    others = [each for each in model.parameters() if not any(each is matrix for matrix in matrices)]
    return Joined(torch.optim.Muon(matrices, lr=rate, momentum=momentum), adamw(others))


class Trainer:
    """Takes a peer's own steps on its shard of the text, with a common learning-rate schedule.

    A step takes at least `least_s` seconds, for trials with slow peers."""

    def __init__(
        self,
        model: GPT,
        corpus: Corpus,
        index: int,
        steps: int,
        batch: int = BATCH,
        least_s: float = 0.0,
        optimizer: str = "adamw",
        muon_rate: float = MUON_RATE,
        muon_momentum: float = 0.95,
    ) -> None:
        self.model, self.corpus, self.index, self.steps = model, corpus, index, steps
        self.batch, self.least_s = batch, least_s
        self.muon_rate = muon_rate
        self.optimizer = muon(model, muon_rate, muon_momentum) if optimizer == "muon" else adamw(model.parameters())

    def backward(self, step: int) -> float:
        """Compute loss and gradients of the batch for `step`, which depends only on the step and the peer."""
        self._schedule(step)
        self.optimizer.zero_grad()
        loss = self.model.loss(self.corpus.batch(self.index, step, self.batch, self.model.size.context + 1))
        loss.backward()
        return float(loss.detach())

    def step(self, step: int) -> float:
        end_s = time.monotonic() + self.least_s
        loss = self.backward(step)
        self.optimizer.step()
        time.sleep(max(0.0, end_s - time.monotonic()))
        return loss

    def _schedule(self, step: int) -> None:
        """Set the learning rate: half a cosine down to a tenth, with a short warm-up for an optimizer without
        history."""
        history = self.optimizer.state.get(self.model.embedding.weight, {}).get("step", 0)
        fresh = min(1.0, (float(history) + 1) / FRESH_STEPS)
        cosine = 0.55 + 0.45 * math.cos(math.pi * min(1.0, step / self.steps))
        for group in self.optimizer.param_groups:
            rate = self.muon_rate if "ns_steps" in group else self.model.size.learning_rate
            group["lr"] = rate * fresh * cosine

    def warm_start(self, steps: int, path: Path | None = None) -> None:
        """Pretrain with AdamW for `steps` steps on text from all shards, the same on every peer, as DiLoCo's authors
        do. The result is saved at `path` for other runs. Muon starts without history."""
        if steps == 0:
            return
        own, self.optimizer = self.optimizer, adamw(self.model.parameters())
        if path is not None and path.exists():
            saved = torch.load(path, weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
        else:
            for step in range(-steps, 0):
                self._schedule(0)
                self.optimizer.zero_grad()
                self.model.loss(self.corpus.batch_of_all(step, BATCH, self.model.size.context + 1)).backward()
                self.optimizer.step()
            if path is not None:
                whole = path.with_name(f"{path.name}.{os.getpid()}")  # other processes may read `path` at any time
                torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, whole)
                whole.replace(path)
        if isinstance(own, Joined):
            matrices = {each for group in own.param_groups if "ns_steps" in group for each in group["params"]}
            own.state.update({each: found for each, found in self.optimizer.state.items() if each not in matrices})
            self.optimizer = own
