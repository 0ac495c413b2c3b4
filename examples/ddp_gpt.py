"""Data parallelism at every step, to compare with diloco_gpt.py: the same model, text and tokens, 50 times the bytes.

    pccl launch -n 4 examples/ddp_gpt.py

The run takes `--steps` times `--inner` steps. After every `--inner` steps it shows a row and, with `--checkpoint run`,
saves a checkpoint. Between hosts, start it like diloco_gpt.py.
"""

from common.run import prepare

from pccl import Communicator
from pccl.training import DDP

run = prepare("Trains a small GPT with data parallelism.")
options, model, trainer, progress = run.options, run.model, run.trainer, run.progress

with Communicator() as communicator:
    ddp = DDP(communicator, model, trainer.optimizer, quantization=run.quantization, bucket_bytes=64 << 10)
    run.resume(ddp)
    ddp.join(options.peers)  # waits for all, or joins a run in progress
    loss, sent_bytes, waited_s = 0.0, 0, 0.0
    while ddp.revision < options.steps * options.inner:
        loss += trainer.backward(ddp.revision) / options.inner
        step = ddp.step()
        sent_bytes += step.tx_bytes
        waited_s += step.waited_s
        if step.revision % options.inner == 0:
            run.save(ddp)
            validation_loss = model.validation_loss(run.corpus) if progress.is_shown else None
            progress.add(
                step.revision,
                step.revision,
                step.world_size,
                loss,
                validation_loss,
                sent_bytes,
                waited_s,
                ddp.digest(),
                communicator.stats,
                run.test_loss(step.revision == options.steps * options.inner),
            )
            loss, sent_bytes, waited_s = 0.0, 0, 0.0

progress.finish(ddp.digest())
