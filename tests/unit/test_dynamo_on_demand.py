"""torch._dynamo comes when something is compiled, and until then what stands for it says what it would say.

In processes of their own: here it may be imported already.
"""

import subprocess
import sys

BEGIN = """if True:
    import sys, warnings
    warnings.simplefilter("ignore")  # torch warns of itself when its compiler is imported
    from dure.base import dynamo_on_demand
    dynamo_on_demand.install()
    import atexit, importlib, torch, torch.distributed as dist

    def is_there():
        return "torch._dynamo.eval_frame" in sys.modules or "sympy" in sys.modules

    config = importlib.import_module("torch._dynamo.config")
    config.automatic_dynamic_shapes = False
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(dist.destroy_process_group)  # Gloo's threads, left to the process's end, sometimes abort it
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    optimizers = [kind(model.parameters(), lr=0.1) for kind in (torch.optim.AdamW, torch.optim.SGD)]

    def train():
        for optimizer in optimizers:
            optimizer.zero_grad()
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
"""


def run(code):
    ran = subprocess.run(
        [sys.executable, "-c", BEGIN + code], capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr


def test_plain_training_with_ddp_does_not_import_it_and_what_is_compiled_later_is():
    run("""
    train()
    dist.new_group([0])
    assert not is_there()
    import torch._dynamo as before
    answered = before.utils.get_optimize_ddp_mode()
    seen = []
    def backend(graph, inputs):
        seen.append(graph)
        return graph.forward
    compiled = torch.compile(torch.nn.Linear(3, 2), backend=backend)
    compiled(torch.ones(4, 3))
    assert len(seen) == 1
    assert is_there()
    import torch._dynamo as now
    assert now is sys.modules["torch._dynamo"] is torch._dynamo and now is not before
    # What was asked before it came: the answers are its own.
    assert now.utils.get_optimize_ddp_mode() == answered == before.utils.get_optimize_ddp_mode()
    assert before.config is now.config is config and not config.automatic_dynamic_shapes
    assert before.disable is now.disable and before.graph_break is now.graph_break
    assert now.graph_break() is None
    train()  # goes through what was disabled before
    assert len(seen) == 1
    # A decorated function of torch's own is left out of what is compiled, though it was called before.
    @torch.compile(backend=backend)
    def steps(x):
        optimizers[0].zero_grad()
        return x + 1
    steps(torch.ones(2))
    for graph in seen:
        assert "zero_grad" not in graph.print_readable(print_output=False)
    """)


def test_any_other_name_or_module_of_it_imports_it():
    for ask in (
        "torch._dynamo.reset()",
        "import torch._dynamo.utils as u; assert u is sys.modules['torch._dynamo.utils'] and u.counters is not None",
        "from torch._dynamo import allow_in_graph",
        "torch._dynamo.utils.counters",
    ):
        run(f"""
    train()
    assert not is_there()
    {ask}
    assert is_there()
    train()
    """)


def test_a_setting_that_asks_for_another_ddp_is_obeyed():
    run("""
    config.optimize_ddp = "python_reducer"
    assert torch._dynamo.utils.get_optimize_ddp_mode() == "python_reducer"
    assert is_there()
    """)
