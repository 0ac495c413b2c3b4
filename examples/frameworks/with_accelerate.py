"""DiLoCo in a Hugging Face Accelerate loop, with gradients accumulated over two batches.

pip install '.[torch,frameworks]'
pccl launch -n 2 examples/frameworks/with_accelerate.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from digits import INDEX, INNER_STEPS, PEERS, STEPS, accuracy, batches, loss_of, network, show

from pccl import Communicator
from pccl.training import DiLoCo, DiLoCoOptimizer

with Communicator() as communicator:
    model = network()
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    diloco = DiLoCo(communicator, model, inner, inner_steps=INNER_STEPS)
    optimizer = DiLoCoOptimizer(diloco, peers_min=PEERS, on_outer_step=show)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    diloco.share({"scheduler": scheduler})  # newcomers receive its current state
    optimizer.join()

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(INDEX)
    model, prepared, loader, scheduler = accelerator.prepare(model, optimizer, batches(), scheduler)
    while diloco.revision < STEPS // INNER_STEPS:
        for images, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model(images), labels))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                prepared.step()
                scheduler.step()
                prepared.zero_grad()
            if diloco.revision == STEPS // INNER_STEPS:
                break
    optimizer.finish()

print(f"{accuracy(model):.1%} of the held-out digits are recognized")
print("digest", diloco.digest()[:16])
