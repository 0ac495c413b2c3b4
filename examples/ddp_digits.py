"""The simplest form of data parallelism: handwritten digits, a small network, gradients averaged at every step.

    pccl launch -n 2 examples/ddp_digits.py

The digits are scikit-learn's own, 1797 images of 8 by 8 pixels that come with the package (pip install
'.[torch,examples]'). Each peer trains on its own part; every fifth image is kept for validation. `--plot
loss.png` plots the losses. Kill a process, and start it again with the command that it prints.

Between hosts, start `pccl master --listen 0.0.0.0:48148` on one of them and this on each, with INDEX counting from 0:

    PCCL_MASTER=host:48148 python examples/ddp_digits.py --peers 2 --index INDEX
"""

import torch
from common.progress import Progress, announce, arguments
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from pccl import Communicator
from pccl.training import DDP

parser = arguments("Trains a small network on digits with data parallelism.")
parser.add_argument("--steps", type=int, default=400, help="steps (default: %(default)s)")
parser.add_argument("--show-every", type=int, default=40, metavar="STEPS", help="steps per row (default: %(default)s)")
options = parser.parse_args()

torch.set_num_threads(1)  # several peers share this machine's cores
digits = load_digits()
images = torch.from_numpy(digits.data).float() / 16
labels = torch.from_numpy(digits.target).long()
is_held_out = torch.arange(len(labels)) % 5 == 0
own_images = images[~is_held_out][options.index % options.peers :: options.peers]
own_labels = labels[~is_held_out][options.index % options.peers :: options.peers]

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
progress = Progress(options)
announce(options)

with Communicator() as communicator:
    ddp = DDP(communicator, model, optimizer, bucket_bytes=32 << 10)
    ddp.join(options.peers)  # waits for all, or joins a run in progress
    train_loss, sent_bytes, waited_s = 0.0, 0, 0.0
    while ddp.revision < options.steps:
        random = torch.Generator().manual_seed(ddp.revision)
        batch = torch.randint(len(own_labels), (32,), generator=random)
        loss = functional.cross_entropy(model(own_images[batch]), own_labels[batch])
        loss.backward()
        step = ddp.step()
        train_loss += float(loss.detach()) / options.show_every
        sent_bytes += step.tx_bytes
        waited_s += step.waited_s
        if step.revision % options.show_every == 0:
            with torch.no_grad():
                logits = model(images[is_held_out])
                validation_loss = float(functional.cross_entropy(logits, labels[is_held_out]))
                accuracy = float((logits.argmax(1) == labels[is_held_out]).float().mean())
            progress.add(
                step.revision,
                step.revision,
                step.world_size,
                train_loss,
                validation_loss,
                sent_bytes,
                waited_s,
                ddp.digest(),
            )
            train_loss, sent_bytes, waited_s = 0.0, 0, 0.0

print(f"{accuracy:.1%} of the held-out digits are recognized")
progress.finish(ddp.digest())
