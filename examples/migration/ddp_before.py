import hashlib

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 200
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
model = DistributedDataParallel(model)
torch.seed()  # each process draws samples of its own
for step in range(STEPS):
    optimizer.zero_grad()
    inputs = torch.randn(32, 16)
    loss = nn.functional.mse_loss(model(inputs), inputs.mean(dim=1, keepdim=True))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    if step % 50 == 49:
        print(f"step {step + 1}: loss {loss.item():.4f}")
print("weights", hashlib.sha256(nn.utils.parameters_to_vector(model.parameters()).detach().numpy()).hexdigest()[:16])
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
