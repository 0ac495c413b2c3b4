"""The setup that all GPT training examples share: options, text, model, quantization, table."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch

from common.gpt import GPT, SIZES, Trainer
from common.progress import Progress, announce, gpt_arguments
from common.schedule import OuterSchedule
from common.text import Corpus
from pccl import DataType, QuantizationOptions
from pccl.training import DDP, AsyncDiLoCo, DiLoCo, OuterAdam, OuterMomentum, OuterNesterov, OuterOptimizer
from pccl.training.compression import (
    DGC,
    ARCTopK,
    Compressor,
    DCTTopK,
    Entropy,
    OneBitAdam,
    Owners,
    PerLayer,
    PowerSGD,
    RandomK,
    Sign,
    Sketch,
    TopK,
)
from pccl.training.group.relaunch import CompressionWord

COMPRESSORS = {
    "topk": TopK,
    "randomk": RandomK,
    "dgc": DGC,
    "perlayer": PerLayer,
    "sign": Sign,
    "onebitadam": OneBitAdam,
    "powersgd": PowerSGD,
    "dct": DCTTopK,
    "sketch": Sketch,
    "arc": ARCTopK,
    "entropy": Entropy,
}


def compression_of(options: argparse.Namespace) -> CompressionWord | Compressor | Owners | None:
    """Return the compressor that `--compression` names, or the word."""
    if options.compression is None or options.compression in get_args(CompressionWord):
        word: CompressionWord | None = options.compression
        return word
    name, _, numbers = options.compression.partition("=")
    made: list[Compressor] = []
    for part in numbers.split("/"):
        settings = [float(number) if "." in number else int(number) for number in part.split(",") if number]
        maker: Callable[..., Compressor] = COMPRESSORS[name]
        made.append(maker(*settings))
        if options.decay is not None:
            made[-1].decay = options.decay
    return Owners(*made) if len(made) > 1 else made[0]


def outer_of(options: argparse.Namespace) -> OuterOptimizer | None:
    """Return the outer optimizer, None for the class's default."""
    rate, momentum = options.outer_learning_rate, options.outer_momentum
    if options.outer == "nesterov" and rate is momentum is options.outer_end is None:
        return None
    rate, momentum = 0.7 if rate is None else rate, 0.9 if momentum is None else momentum
    if options.outer == "adam":
        return OuterAdam(rate, momentum)
    if options.outer == "momentum":
        return OuterMomentum(rate, momentum, options.outer_clip)
    if options.outer_end is not None:
        end = OuterNesterov(*options.outer_end)
        return OuterSchedule(learning_rate=rate, momentum=momentum, end_step=options.steps * 9 // 10, end=end)
    return OuterNesterov(rate, momentum)


@dataclass(frozen=True)
class Run:
    """One peer's part of a run, before it is connected."""

    options: argparse.Namespace
    corpus: Corpus
    model: GPT
    trainer: Trainer
    outer: OuterOptimizer | None
    quantization: QuantizationOptions | None
    compression: CompressionWord | Compressor | Owners | None
    progress: Progress

    def resume(self, trained: DiLoCo | AsyncDiLoCo | DDP) -> None:
        """Load this peer's newest checkpoint from `--checkpoint`, if there is one."""
        if self.options.checkpoint is not None:
            trained.load(self._folder, missing_ok=True)

    def test_loss(self, is_last: bool) -> float | None:
        """Return peer 0's loss on a text that no setting was chosen by, after the last step."""
        return self.model.test_loss(self.corpus) if is_last and self.progress.is_shown else None

    def save(self, trained: DiLoCo | AsyncDiLoCo | DDP) -> None:
        """Save in the background if `--checkpoint` is given."""
        if self.options.checkpoint is not None:
            trained.save(self._folder, keep=2, background=True)

    @property
    def _folder(self) -> Path:
        """This peer's own folder."""
        folder: Path = self.options.checkpoint / f"peer-{self.options.index}"
        return folder


def prepare(description: str, fragments: int | None = None, *, is_unequal: bool = False) -> Run:
    """Read the command line and set up everything up to a pretrained model. `fragments` is the default of an option
    that only some examples have; `is_unequal` adds the options for unequal peers."""
    parser = gpt_arguments(description)
    if is_unequal:
        parser.add_argument(
            "--steps-by-speed", action="store_true", help="--inner is for the fastest peer; slower ones take fewer"
        )
        parser.add_argument("--weighted", action="store_true", help="weight peers by the tokens they have trained on")
        parser.add_argument("--slow", type=int, default=1, metavar="N", help="take only 1/N of the inner steps")
        parser.add_argument(
            "--outer-end",
            type=float,
            nargs=2,
            metavar=("RATE", "MOMENTUM"),
            help="of --outer nesterov in the last tenth of the outer steps",
        )
        parser.add_argument("--late", action="store_true", help="with --slow: contribute only every N outer steps")
    if fragments is not None:
        parser.add_argument(
            "--fragments", type=int, default=fragments, help="model parts averaged in turn (default: %(default)s)"
        )
        parser.add_argument("--overlap", type=int, help="inner steps until an average is applied (default: the next)")
        parser.add_argument("--mixing", type=float, help="share of the local parameters that an average leaves")
        parser.add_argument("--ahead", choices=["own", "share"], default="own", help="estimate of an average in flight")
    parser.set_defaults(outer_end=None)
    options = parser.parse_args()
    if options.outer_end is not None and options.outer != "nesterov":
        parser.error("--outer-end is for --outer nesterov")
    torch.set_num_threads(1)  # several peers share this machine's cores
    corpus = Corpus(shards=options.peers, seed=options.seed)
    model = GPT(options.seed, SIZES[options.model])
    steps = options.steps * options.inner
    trainer = Trainer(
        model,
        corpus,
        options.index,
        steps,
        options.batch,
        options.step_ms / 1e3,
        options.optimizer,
        options.muon_rate,
        options.muon_momentum,
    )
    trainer.warm_start(options.pretrain, options.start)
    quantization = QuantizationOptions(DataType.UINT8, bits=options.quantize) if options.quantize else None
    progress = Progress(options)
    announce(options)
    return Run(options, corpus, model, trainer, outer_of(options), quantization, compression_of(options), progress)
