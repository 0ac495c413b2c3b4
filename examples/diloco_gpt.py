"""DiLoCo: peers train a small GPT on the standard library's source code, and talk once every 50 steps.

    pccl launch -n 4 examples/diloco_gpt.py

Peer 0 prints the table. Kill any process with `kill -9`, and add others while it runs with what they print at the
start: the rest go on, newcomers get the state from them. With `--quantize 8` a quarter of the bytes is sent.
`--checkpoint run` keeps a file for each peer in the folder `run`; the same command once more resumes from there.
`--plot loss.png` draws the losses (pip install 'pccl[torch,plot]').

Between hosts, start `pccl master --listen 0.0.0.0:48148` on one and on each, with INDEX counting from 0:

    PCCL_MASTER=host:48148 python examples/diloco_gpt.py --peers 4 --index INDEX

The model starts from some steps that every peer makes alike before it connects (`--pretrain`), as the paper's do.
"""

import os

import torch
from common.gpt import GPT, Trainer
from common.progress import Progress, announce, gpt_arguments
from common.text import Corpus

from pccl import Communicator, DataType, QuantizationOptions
from pccl.training import DiLoCo

options = gpt_arguments("Trains a small GPT with DiLoCo.").parse_args()

torch.set_num_threads(1)  # several peers share this machine's cores
corpus = Corpus(shards=options.peers)
model = GPT()
trainer = Trainer(model, corpus, options.index, options.steps * options.inner)
trainer.warm_start(options.pretrain, options.start)
progress = Progress(options)
quantization = QuantizationOptions(DataType.UINT8, bits=options.quantize) if options.quantize else None
announce(options)

with Communicator(os.environ["PCCL_MASTER"]) as communicator:
    diloco = DiLoCo(communicator, model, trainer.optimizer, quantization=quantization)
    checkpoint = options.checkpoint / f"peer-{options.index}.npz" if options.checkpoint else None
    if checkpoint is not None:
        checkpoint.parent.mkdir(exist_ok=True)
        if checkpoint.exists():
            diloco.load(checkpoint)
    diloco.join(options.peers)  # waits for all, or enters a run that is under way
    while diloco.revision < options.steps:
        first = diloco.revision * options.inner
        loss = sum(trainer.step(first + i) for i in range(options.inner)) / options.inner
        step = diloco.outer_step()
        if checkpoint is not None:
            diloco.save(checkpoint)
        progress.add(
            step.revision * options.inner,
            step.revision,
            step.world_size,
            loss,
            model.validation_loss(corpus) if progress.is_shown else None,
            step.tx_bytes,
            step.waited_s,
            diloco.digest(),
        )

progress.finish(diloco.digest())
