"""DiLoCo in the Hugging Face Trainer, which only needs a different optimizer.

pip install '.[torch,frameworks]'
pccl launch -n 2 examples/frameworks/with_transformers.py
"""

import tempfile
from typing import Any

import torch
from digits import INDEX, INNER_STEPS, PEERS, STEPS, accuracy, loss_of, network, own_part, show
from torch import nn
from transformers import Trainer, TrainingArguments

from pccl import Communicator
from pccl.training import DiLoCo, DiLoCoOptimizer


class Digits(nn.Module):  # type: ignore[misc]
    """The network in the form that the Trainer expects: it takes labels and returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, images: Any, labels: Any) -> dict[str, Any]:
        logits = self.network(images)
        return {"loss": loss_of(logits, labels), "logits": logits}


with Communicator() as communicator, tempfile.TemporaryDirectory() as folder:
    model = Digits()
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    diloco = DiLoCo(communicator, model, inner, inner_steps=INNER_STEPS)
    optimizer = DiLoCoOptimizer(diloco, peers_min=PEERS, on_outer_step=show)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    diloco.share({"scheduler": scheduler})  # newcomers receive its current state
    trainer = Trainer(
        model,
        TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=32,
            seed=INDEX,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=own_part,
        data_collator=lambda rows: {
            "images": torch.stack([image for image, _ in rows]),
            "labels": torch.stack([label for _, label in rows]),
        },
        optimizers=(optimizer, scheduler),
    )
    trainer.train()
    optimizer.finish()

print(f"{accuracy(model.network):.1%} of the held-out digits are recognized")
print("digest", diloco.digest()[:16])
