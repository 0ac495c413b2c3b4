"""Asynchronous DiLoCo: as diloco_gpt.py, but the network works while the next 50 inner steps go on.

    pccl launch -n 4 examples/async_diloco_gpt.py

The column "waited s" is what is left of the network: the time that peer 0 stood still for it (and, on one machine, for
slower peers). An update comes one outer step late; who is killed or joins in between is taken care of. Options and
commands between hosts are those of diloco_gpt.py.
"""

import os

import torch
from common.gpt import GPT, Trainer
from common.progress import Progress, announce, gpt_arguments
from common.text import Corpus

from pccl import Communicator, DataType, QuantizationOptions
from pccl.training import AsyncDiLoCo, OuterStep

options = gpt_arguments("Trains a small GPT with asynchronous DiLoCo.").parse_args()

torch.set_num_threads(1)  # several peers share this machine's cores
corpus = Corpus(shards=options.peers)
model = GPT()
trainer = Trainer(model, corpus, options.index, options.steps * options.inner)
trainer.warm_start(options.pretrain, options.start)
progress = Progress(options)
quantization = QuantizationOptions(DataType.UINT8, bits=options.quantize) if options.quantize else None
announce(options)

with Communicator(os.environ["PCCL_MASTER"]) as communicator:
    diloco = AsyncDiLoCo(communicator, model, trainer.optimizer, quantization=quantization)

    def show(step: OuterStep, loss: float) -> None:
        # What the model holds is where this peer goes on from; validate what all have in common.
        validation_loss = None
        if progress.is_shown:
            here = [parameter.detach().clone() for parameter in model.parameters()]
            diloco.show_outer()
            validation_loss = model.validation_loss(corpus)
            for parameter, value in zip(model.parameters(), here, strict=True):
                parameter.data.copy_(value)
        progress.add(
            diloco.outer_steps * options.inner,
            step.revision,
            step.world_size,
            loss,
            validation_loss,
            step.tx_bytes,
            step.waited_s,
            diloco.digest(),
        )

    checkpoint = options.checkpoint / f"peer-{options.index}.npz" if options.checkpoint else None
    if checkpoint is not None:
        checkpoint.parent.mkdir(exist_ok=True)
        if checkpoint.exists():
            diloco.load(checkpoint)
    diloco.join(options.peers)  # waits for all, or enters a run that is under way
    loss = 0.0
    while diloco.outer_steps < options.steps:
        first = diloco.outer_steps * options.inner
        loss = sum(trainer.step(first + i) for i in range(options.inner)) / options.inner
        step = diloco.outer_step()
        if checkpoint is not None:
            diloco.save(checkpoint)
        show(step, loss)
    show(diloco.finish(), loss)
    if checkpoint is not None:
        diloco.save(checkpoint)

progress.finish(diloco.digest())
