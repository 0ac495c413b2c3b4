"""Training with forward passes only: a small GPT that has learned Python's source code is fine-tuned to its bytecode.

    pccl launch -n 4 examples/spsa.py

There are no backward passes, gradients or optimizer states. In each step, every peer evaluates the loss twice, a little
to either side along its own random direction, and sends one byte to the others; from these bytes all peers compute the
same step. Peer 0 prints the table. Kill any process with `kill -9`, and add others during the run with the printed
command: the rest continue, and newcomers receive the few bytes of each step that they have missed, and replay it.
`--plot loss.png` plots the losses (pip install '.[torch,plot]').

`--directions 4` with one process takes the same steps as four peers, bit for bit. With `--log run`, each peer writes a
log of all steps to the folder `run`; `--replay run/peer-0.log` replays one without data or a network, and ends with the
same digest. compare_spsa.py demonstrates all of this.

Between hosts, start `pccl master --listen 0.0.0.0:48148` on one of them and this on each, with INDEX counting from 0:

    PCCL_MASTER=host:48148 python examples/spsa.py --peers 4 --index INDEX

The model is pretrained: every peer takes the same steps before it connects (`--pretrain`).
"""

import os
import time
from pathlib import Path

import torch
from common.bytecode import Bytecode
from common.gpt import CONTEXT, GPT, Trainer
from common.progress import Progress, announce, arguments
from common.text import Corpus

from pccl import Communicator
from pccl.training import SPSA, SPSAOptions

parser = arguments("Trains a small GPT by SPSA with shared seeds.")
parser.add_argument("--steps", type=int, default=400, help="steps (default: %(default)s)")
parser.add_argument("--directions", type=int, default=1, help="per peer and step (default: %(default)s)")
parser.add_argument("--batch", type=int, default=16, help="sequences per direction (default: %(default)s)")
parser.add_argument("--show-every", type=int, default=20, metavar="STEPS", help="steps per row (default: %(default)s)")
parser.add_argument("--pretrain", type=int, default=500, help="pretraining steps (default: %(default)s)")
parser.add_argument("--start", type=Path, metavar="FILE", help="the pretrained model; created if missing")
parser.add_argument("--log", type=Path, metavar="FOLDER", help="write a log of all steps there")
parser.add_argument("--replay", type=Path, metavar="FILE", help="replay a log, without data or a network")
parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS", help="extra time in each step")
options = parser.parse_args()

torch.set_num_threads(1)  # several peers share this machine's cores
model = GPT()
Trainer(model, Corpus(shards=4), 0, 1).warm_start(options.pretrain, options.start)
communicator = Communicator(os.environ.get("PCCL_MASTER", "127.0.0.1"))
settings = SPSAOptions(learning_rate=3e-3, decay_steps=400, directions=options.directions)
if options.log is not None:
    options.log.mkdir(exist_ok=True)
log = options.log / f"peer-{options.index}.log" if options.log is not None else None
spsa = SPSA(communicator, model, settings, log=log)

if options.replay is not None:
    print(f"{spsa.replay(options.replay)} steps replayed")
    print(f"digest {spsa.digest()[:16]}")
    raise SystemExit

data = Bytecode()
progress = Progress(options)
announce(options)


@torch.no_grad()  # type: ignore[untyped-decorator]
def loss(direction: int) -> float:
    time.sleep(options.pause / 2 / options.directions)
    return float(model.loss(data.batch(spsa.revision, direction, options.batch, CONTEXT + 1)))


with communicator:
    spsa.join(options.peers)  # waits for all, or joins a run in progress
    first = spsa.revision
    train_loss, sent_bytes, waited_s, exchanged_bytes = 0.0, 0, 0.0, 0
    while spsa.revision < options.steps:
        step = spsa.step(loss)
        train_loss += step.loss / options.show_every
        sent_bytes += step.tx_bytes
        waited_s += step.waited_s
        if step.revision % options.show_every == 0:
            with torch.no_grad():
                validation_loss = float(model.loss(data.validation(CONTEXT + 1))) if progress.is_shown else None
            digest = spsa.digest()
            progress.add(
                step.revision, step.revision, step.world_size, train_loss, validation_loss, sent_bytes, waited_s, digest
            )
            exchanged_bytes += sent_bytes
            train_loss, sent_bytes, waited_s = 0.0, 0, 0.0

spsa.close_log()
print(f"sent {exchanged_bytes + sent_bytes} bytes of payload in {spsa.revision - first} steps", flush=True)
progress.finish(spsa.digest())
