"""Asynchronous DiLoCo: as diloco_gpt.py, but the network works while the next 50 inner steps go on.

    pccl launch -n 4 examples/async_diloco_gpt.py

The column "waited s" is what is left of the network: the time that peer 0 stood still for it (and, on one machine, for
slower peers). An update comes one outer step late; who is killed or joins in between is taken care of. Options and
commands between hosts are those of diloco_gpt.py.
"""

import os

from common.run import prepare

from pccl import Communicator
from pccl.training import AsyncDiLoCo, OuterStep

run = prepare("Trains a small GPT with asynchronous DiLoCo.")
options, model, trainer, progress = run.options, run.model, run.trainer, run.progress

with Communicator(os.environ["PCCL_MASTER"]) as communicator:
    diloco = AsyncDiLoCo(communicator, model, trainer.optimizer, quantization=run.quantization)

    def show(step: OuterStep, loss: float) -> None:
        # What the model holds is where this peer goes on from; validate what all have in common.
        validation_loss = None
        if progress.is_shown:
            here = [parameter.detach().clone() for parameter in model.parameters()]
            diloco.show_outer()
            validation_loss = model.validation_loss(run.corpus)
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

    checkpoint = run.resume(diloco)
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
