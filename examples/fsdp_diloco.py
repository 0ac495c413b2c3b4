"""DiLoCo over shards: each peer is a site of several processes that together hold one small GPT, sharded by FSDP2.

    pccl launch -n 2 examples/fsdp_diloco.py

Within a site, the processes ("ranks", `--ranks 2`) shard parameters, gradients and optimizer with
`torch.distributed.fsdp.fully_shard` over Gloo and communicate at every step. Across sites, the ranks with the same
number form a peer group, which averages the changes of their shards once every `--inner` steps. No rank ever holds or
sends more than its shard.

Site 0 prints the table. Kill any process with `kill -9`, a rank or a whole site: the site's other ranks end, too, but
the other sites continue. Restart the site with the command that it printed at the start: it receives the shards from
the others. `--quantize 8` sends a quarter of the bytes, `--checkpoint run` keeps the last two steps of each rank and
resumes from there, `--plot loss.png` plots the losses (pip install '.[torch,plot]').

Between hosts, start `pccl master --listen 0.0.0.0:48148` on one of them and this on each, with INDEX counting from 0:

    PCCL_MASTER=host:48148 python examples/fsdp_diloco.py --peers 2 --index INDEX
"""

import argparse
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from common.gpt import BATCH, CONTEXT, GPT, LEARNING_RATE
from common.progress import Progress, announce, arguments
from common.text import Corpus
from torch.distributed.fsdp import fully_shard

from pccl import DataType, QuantizationOptions
from pccl.training import DiLoCo, Site


def train(rank: int, options: argparse.Namespace, rendezvous: str) -> None:
    """Run one rank of this site."""
    torch.set_num_threads(1)  # all share this machine's cores
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=options.ranks)
    corpus = Corpus(shards=options.peers)
    model = GPT()  # the same on all ranks of all sites
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    quantization = QuantizationOptions(DataType.UINT8, bits=options.quantize) if options.quantize else None
    progress = Progress(options) if rank == 0 else None

    site = Site.of_process_group()
    with site.communicator(os.environ["PCCL_MASTER"]) as communicator:
        diloco = DiLoCo(communicator, model, optimizer, quantization=quantization, site=site)
        folder = options.checkpoint / f"site-{options.index}" if options.checkpoint is not None else None
        if folder is not None:
            diloco.load(folder, missing_ok=True)  # the newest step that all ranks have saved
        diloco.join(options.peers)  # waits for all sites, or joins a run in progress
        while diloco.revision < options.steps:
            first = diloco.revision * options.inner
            loss = 0.0
            for step in range(first, first + options.inner):
                # Each rank has its own part of the site's batch; FSDP averages their gradients.
                batch = corpus.batch(options.index, step * options.ranks + rank, BATCH // options.ranks, CONTEXT + 1)
                optimizer.zero_grad()
                inner_loss = model.loss(batch)
                inner_loss.backward()
                optimizer.step()
                loss += float(inner_loss.detach()) / options.inner
            outer = diloco.outer_step()
            if folder is not None:
                diloco.save(folder, keep=2, background=True)
            validation_loss = model.validation_loss(corpus)  # on all ranks, since it gathers the layers from all
            losses, sent_bytes, waited_s = zip(*gather((loss, outer.tx_bytes, outer.waited_s)), strict=True)
            digest = joint_digest(diloco)
            if progress is not None:
                progress.add(
                    outer.revision * options.inner,
                    outer.revision,
                    outer.world_size,
                    sum(losses) / options.ranks,
                    validation_loss,
                    sum(sent_bytes),
                    max(waited_s),
                    digest,
                )
        digest = joint_digest(diloco)
    if progress is not None:
        progress.finish(digest)
    dist.destroy_process_group()


def gather(mine: Any) -> list[Any]:
    """Return the values that the site's ranks passed, by rank."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def joint_digest(diloco: DiLoCo) -> str:
    """Return a digest of all shards, which is equal at all sites."""
    return hashlib.sha256("".join(gather(diloco.digest())).encode()).hexdigest()


if __name__ == "__main__":
    parser = arguments("Trains a small GPT in shards with DiLoCo.")
    parser.add_argument("--ranks", type=int, default=2, help="processes of each site (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="outer steps (default: %(default)s)")
    parser.add_argument("--inner", type=int, default=50, help="inner steps per outer step (default: %(default)s)")
    parser.add_argument("--quantize", type=int, choices=[8, 4], help="bits per element on the wire")
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="save every outer step there, and resume")
    options = parser.parse_args()
    announce(options)
    with tempfile.TemporaryDirectory() as folder:
        # `spawn` ends all ranks when one fails; when this process is killed, its ranks end, too.
        processes.spawn(train, (options, f"file://{folder}/ranks"), nprocs=options.ranks)
