"""Loops of people who never heard of dure, on a backend of one's choice: their losses and their weights' hash."""

import json
import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dure.device.fingerprint import weights_sha256
from support.attaching import Branching, batch, plain

STEPS = 4
DDP_OPTIONS = {
    "ddp": {},
    "ddp, views and a static graph": {"gradient_as_bucket_view": True, "static_graph": True},
    "ddp, small buckets": {"bucket_cap_mb": 0.1},
    "ddp, unused parameters": {"find_unused_parameters": True},
}


def loop(model, optimizer, backward=torch.Tensor.backward, call=None):
    losses = []
    for step in range(STEPS):
        x, y = batch(step, dist.get_rank())
        loss = F.mse_loss(call(model, x, step) if call else model(x), y)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def branch(model, x, step):
    return model(x, (step + dist.get_rank()) % 2 == 0)


def ddp(group):
    found = {}
    for name, options in DDP_OPTIONS.items():
        torch.manual_seed(1)
        unused = options.get("find_unused_parameters", False)
        module = Branching() if unused else plain()
        model = DistributedDataParallel(module, process_group=group, **options)
        losses = loop(model, sgd(model), call=branch if unused else None)
        found[name] = losses, weights_sha256(module)
    return found


def accumulated(group):
    torch.manual_seed(1)
    model = DistributedDataParallel(plain(), process_group=group)
    optimizer = sgd(model)
    losses = []
    for step in range(STEPS):
        x, y = batch(step, dist.get_rank())
        with model.no_sync():
            F.mse_loss(model(x), y).backward()
        losses.append(F.mse_loss(model(x.flip(0)), y))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses], weights_sha256(model.module)


def joined(group):
    """DDP's join(): ranks with other numbers of batches."""
    torch.manual_seed(1)
    model = DistributedDataParallel(plain(), process_group=group)
    optimizer, losses = sgd(model), []
    with model.join():
        for step in range(STEPS + dist.get_rank()):
            x, y = batch(step, dist.get_rank())
            losses.append(F.mse_loss(model(x), y))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
    return [loss.item() for loss in losses], weights_sha256(model.module)


def sync_batch_norm(group):
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    model = DistributedDataParallel(module, process_group=group)
    losses = loop(model, sgd(model))
    return losses, weights_sha256(nn.ParameterList(module.parameters()))


def zero(group):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(1)
    model = DistributedDataParallel(plain(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, process_group=group, lr=1e-2
    )
    losses = loop(model, optimizer)
    optimizer.consolidate_state_dict(0)
    return losses, weights_sha256(model.module)


def fsdp2(group):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    module = plain()
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in module:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    losses = loop(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
    whole = nn.ParameterList([parameter.full_tensor() for parameter in module.parameters()])
    return losses, weights_sha256(whole)


def checkpointed(group, folder):
    """torch.distributed.checkpoint: save a model, load it into another, with the same bits."""
    import torch.distributed.checkpoint as dcp

    torch.manual_seed(1)
    model = DistributedDataParallel(plain(), process_group=group)
    losses = loop(model, sgd(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about itself
        dcp.save({"model": model.module.state_dict()}, checkpoint_id=folder, process_group=group)
        other = plain()
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=folder, process_group=group)
    other.load_state_dict(state["model"])
    assert weights_sha256(other) == weights_sha256(model.module)
    return losses, weights_sha256(other)


def functional(group):
    """Functional collectives, which the compiler uses; from C++."""
    import torch.distributed._functional_collectives as funcol

    own = torch.arange(6.0) + dist.get_rank(group)
    total = funcol.all_reduce(own, "sum", group)
    mean = (
        funcol.all_reduce(own, "avg", group)
        if dist.get_backend(group) == "dure"
        else total / dist.get_world_size(group)
    )
    gathered = funcol.all_gather_tensor(own, 0, group)
    parts = funcol.reduce_scatter_tensor(own.repeat(dist.get_world_size(group)), "sum", 0, group)
    values = [funcol.wait_tensor(t) for t in (total, mean, gathered, parts)]
    return [float(v.sum()) for v in values], weights_sha256(nn.ParameterList([total, gathered]))


def torch_loops(folder):
    """Of each loop: losses and hash on the backend dure, twice, and on Gloo."""
    dist.init_process_group("dure")
    ours, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    found = {}
    for turn, group in enumerate((ours, ours, gloo)):
        for name, result in ddp(group).items():
            found.setdefault(name, []).append(result)
        others = {
            "accumulation": accumulated,
            "join": joined,
            "batch norm": sync_batch_norm,
            "zero": zero,
            "fsdp2": fsdp2,
            "functional": functional,
            "checkpoint": lambda group, turn=turn: checkpointed(group, f"{folder}/{turn}"),
        }
        for name, run in others.items():
            found.setdefault(name, []).append(run(group))
    dist.destroy_process_group()
    return found


def compiled(backend):
    dist.init_process_group(backend)
    torch.manual_seed(1)
    module = plain()
    model = torch.compile(DistributedDataParallel(module))
    losses = loop(model, sgd(module))
    dist.destroy_process_group()
    return losses, weights_sha256(module)


def accelerate(backend):
    """Accelerate on CPUs forces gloo, but keeps a group that is there."""
    from accelerate import Accelerator

    dist.init_process_group(backend)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(1)
    module = plain()
    model, optimizer = accelerator.prepare(module, sgd(module))
    losses = loop(model, optimizer, accelerator.backward)
    gathered = accelerator.gather_for_metrics(torch.tensor(losses))
    accelerator.wait_for_everyone()
    assert dist.get_backend() == backend
    dist.destroy_process_group()
    return gathered.tolist(), weights_sha256(module)


def fabric(backend):
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    strategy = DDPStrategy(process_group_backend=backend)
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy)
    fabric.launch()
    assert dist.get_backend() == backend
    torch.manual_seed(1)
    module = plain()
    model, optimizer = fabric.setup(module, sgd(module))
    losses = loop(model, optimizer, fabric.backward)
    gathered = fabric.all_gather(torch.tensor(losses))
    dist.destroy_process_group()
    return gathered.flatten().tolist(), weights_sha256(module)


def trainer(backend):
    """The HF Trainer's own loop, on random tokens; it keeps a group that is there."""
    import tempfile

    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    dist.init_process_group(backend)
    torch.manual_seed(1)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16)
    model = GPT2LMHeadModel(config)
    dice = torch.Generator().manual_seed(3)
    rows = torch.randint(64, (32, 12), generator=dice)
    samples = [{"input_ids": row, "labels": row} for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, use_cpu=True, max_steps=4, per_device_train_batch_size=2, logging_steps=1,
            report_to=[], save_strategy="no", seed=1, disable_tqdm=True, ddp_backend="gloo",
        )  # fmt: skip
        run = Trainer(model=model, args=arguments, train_dataset=samples, eval_dataset=samples[:4])
        run.train()
        judged = run.evaluate()["eval_loss"]
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert dist.get_backend() == backend
    dist.destroy_process_group()
    return [*losses, judged], weights_sha256(model)


LIBRARIES = {"compiled": compiled, "accelerate": accelerate, "fabric": fabric, "trainer": trainer}

if __name__ == "__main__":
    found = LIBRARIES[sys.argv[1]](sys.argv[2])
    if os.environ["RANK"] == "0":
        print(json.dumps(found))
