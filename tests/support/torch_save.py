"""A script that knows nothing of dure: stock DDP, saves with torch.save, fails now and then, and goes on when it is
started again."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

out, file = Path(sys.argv[1]), Path(sys.argv[1]).with_suffix(".pt")
rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
most = os.environ["TORCHELASTIC_MAX_RESTARTS"]
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first = 0
if file.exists():
    state = torch.load(file, weights_only=True)
    model.module.load_state_dict(state["model"])
    first = state["step"]
for step in range(first, 9):
    loss = model(torch.full((2, 4), float(step + rank))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if (step, restarts) == (3, 0) and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if (step, restarts) == (6, 1) and rank == 0:
        raise ValueError("a mistake of its own")
    if "hopeless" in sys.argv and rank == 1:
        sys.exit(5)
    optimizer.step()
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "step": step + 1}, f"{file}.new")
        os.replace(f"{file}.new", file)
    dist.barrier()
if rank == 0:
    out.write_text(json.dumps({"restarts": restarts, "first": first, "most": most}))
dist.destroy_process_group()
