"""DiLoCo: peers train a small GPT on the standard library's source code, and communicate once every 50 steps.

    pccl launch -n 4 examples/diloco_gpt.py

Peer 0 prints the table. Kill any process with `kill -9`, and add others during the run with the command that each
process prints at the start: the rest continue, and newcomers receive the state. With `--quantize 8`, a quarter of the
bytes is sent. With `--steps-by-speed`, a slow machine takes fewer steps, so that the other peers need not wait for it.
`--checkpoint run` keeps the last two steps of each peer in a folder below `run`; the same command then resumes from it.
`--plot loss.png` plots the losses (pip install '.[torch,plot]').

Between hosts, start `pccl master --listen 0.0.0.0:48148` on one of them and this on each, with INDEX counting from 0:

    PCCL_MASTER=host:48148 python examples/diloco_gpt.py --peers 4 --index INDEX

As in the paper, the model is pretrained: every peer takes the same steps before it connects (`--pretrain`).
"""

from common.late import LateUpdates
from common.run import prepare

from pccl import Communicator
from pccl.training import DiLoCo

run = prepare("Trains a small GPT with DiLoCo.", is_unequal=True)
options, model, trainer, progress = run.options, run.model, run.trainer, run.progress

with Communicator() as communicator:
    diloco = DiLoCo(
        communicator,
        model,
        trainer.optimizer,
        outer=run.outer,
        quantization=run.quantization,
        compression=run.compression,
        inner_steps=options.inner,
        steps="by speed" if options.steps_by_speed else "fixed",
    )
    run.resume(diloco)
    diloco.join(options.peers)  # waits for all, or joins a run in progress
    progress.begin()
    late = LateUpdates(diloco, model, options.slow) if options.late else None
    while diloco.revision < options.steps:
        first, count = diloco.revision * options.inner, diloco.inner_steps // options.slow
        if late is not None:
            late.resume()
        # A slow peer's last step is that of the others, so that their learning rates are equal.
        steps = range(first + options.slow - 1, first + count * options.slow, options.slow)
        loss = sum(map(trainer.step, steps)) / count
        tokens = count * options.batch * model.size.context
        if late is not None:
            late.contribute()
        step = diloco.outer_step(weight=tokens if options.weighted else None)
        run.save(diloco)
        progress.add(
            step.revision * options.inner,
            step.revision,
            step.world_size,
            loss,
            model.validation_loss(run.corpus) if progress.is_shown else None,
            step.tx_bytes,
            step.waited_s,
            diloco.digest(),
            communicator.stats,
            run.test_loss(step.revision == options.steps),
        )

progress.finish(diloco.digest())
