"""Training by forward passes alone: a small GPT that has learned Python's source code is tuned to its bytecode.

    pccl launch -n 4 examples/spsa.py

No backward pass, no gradients, no optimizer state: each peer evaluates the loss twice in a step, a little to either
side along a random direction of its own, and sends one byte to the others; from these bytes all make the same step.
Peer 0 prints the table. Kill any process with `kill -9`, and add others during the run by the printed command: the
rest continue, newcomers get the few bytes of each step they have missed, and make these. `--plot loss.png` draws the
losses (pip install 'pccl-collectives[torch,plot]').

`--directions 4` with one process makes the steps of four peers, bit for bit. With `--log run` each peer keeps the log
of all steps in the folder `run`; `--replay run/peer-0.log` plays one, without data and without a network, and ends with
the same digest. compare_spsa.py shows all this.

Between hosts, start `pccl master --listen 0.0.0.0:48148` on one and on each, with INDEX counting from 0:

    PCCL_MASTER=host:48148 python examples/spsa.py --peers 4 --index INDEX

The model starts from some steps that every peer makes alike before it connects (`--pretrain`).
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
parser.add_argument("--directions", type=int, default=1, help="of each peer in a step (default: %(default)s)")
parser.add_argument("--batch", type=int, default=16, help="sequences for a direction (default: %(default)s)")
parser.add_argument("--show-every", type=int, default=20, metavar="STEPS", help="a row each (default: %(default)s)")
parser.add_argument("--pretrain", type=int, default=500, help="steps before the first (default: %(default)s)")
parser.add_argument("--start", type=Path, metavar="FILE", help="the pretrained model; made if it is not there")
parser.add_argument("--log", type=Path, metavar="FOLDER", help="keep the log of all steps there")
parser.add_argument("--replay", type=Path, metavar="FILE", help="play a log, without data and network")
parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS", help="in each step, as if it took longer")
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
    spsa.join(options.peers)  # waits for all, or enters a run that is under way
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
