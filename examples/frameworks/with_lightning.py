"""DiLoCo in a Lightning Trainer: only `configure_optimizers` changes, to return a different optimizer.

pip install '.[torch,frameworks]'
pccl launch -n 2 examples/frameworks/with_lightning.py
"""

from typing import Any

import lightning
import torch
from digits import INDEX, INNER_STEPS, PEERS, STEPS, accuracy, batches, loss_of, network, show

from pccl import Communicator
from pccl.training import DiLoCo, DiLoCoOptimizer


class Digits(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, communicator: Communicator) -> None:
        super().__init__()
        self.communicator, self.network = communicator, network()

    def training_step(self, batch: Any) -> Any:
        images, labels = batch
        return loss_of(self.network(images), labels)

    def configure_optimizers(self) -> Any:
        inner = torch.optim.AdamW(self.network.parameters(), lr=3e-3)
        diloco = DiLoCo(self.communicator, self.network, inner, inner_steps=INNER_STEPS)
        self.optimizer = DiLoCoOptimizer(diloco, peers_min=PEERS, on_outer_step=show)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        diloco.share({"scheduler": scheduler})  # newcomers receive its current state
        return {"optimizer": self.optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


with Communicator() as communicator:
    module = Digits(communicator)
    trainer = lightning.Trainer(
        max_steps=STEPS,
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    lightning.seed_everything(INDEX)
    trainer.fit(module, batches())
    module.optimizer.finish()

print(f"{accuracy(module.network):.1%} of the held-out digits are recognized")
print("digest", module.optimizer.diloco.digest()[:16])
