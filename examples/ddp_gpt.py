"""Every-step data parallelism for comparison with diloco_gpt.py: the same model, text and tokens, 50 times the bytes.

    pccl launch -n 4 examples/ddp_gpt.py

`--steps` times `--inner` steps are made, and a row is shown after each `--inner`. Between hosts as diloco_gpt.py.
"""

import os

import torch
from common.gpt import GPT, Trainer
from common.progress import Progress, announce, gpt_arguments
from common.text import Corpus

from pccl import Communicator, DataType, QuantizationOptions
from pccl.training import DDP

options = gpt_arguments("Trains a small GPT with data parallelism.").parse_args()

torch.set_num_threads(1)  # several peers share this machine's cores
corpus = Corpus(shards=options.peers)
model = GPT()
trainer = Trainer(model, corpus, options.index, options.steps * options.inner)
trainer.warm_start(options.pretrain, options.start)
progress = Progress(options)
quantization = QuantizationOptions(DataType.UINT8, bits=options.quantize) if options.quantize else None
announce(options)

with Communicator(os.environ["PCCL_MASTER"]) as communicator:
    ddp = DDP(communicator, model, trainer.optimizer, quantization=quantization, bucket_bytes=64 << 10)
    ddp.join(options.peers)  # waits for all, or enters a run that is under way
    loss, sent_bytes, waited_s = 0.0, 0, 0.0
    while ddp.revision < options.steps * options.inner:
        loss += trainer.backward(ddp.revision) / options.inner
        step = ddp.step()
        sent_bytes += step.tx_bytes
        waited_s += step.waited_s
        if step.revision % options.inner == 0:
            validation_loss = model.validation_loss(corpus) if progress.is_shown else None
            progress.add(
                step.revision,
                step.revision,
                step.world_size,
                loss,
                validation_loss,
                sent_bytes,
                waited_s,
                ddp.digest(),
            )
            loss, sent_bytes, waited_s = 0.0, 0, 0.0

progress.finish(ddp.digest())
