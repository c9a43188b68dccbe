"""torch's own tests of a backend, all in one launch: torch would start new processes for each of them.

Run it under `dure run --backend dure`: the tests believe to have gloo, and so none is left out that gloo passes.
"""

import datetime
import faulthandler
import json
import os
import re
import sys
import tempfile
import time
import unittest
import warnings

NOT_HERE = {
    "timeout|monitored_barrier_(allreduce|failure|gloo)": "end with a group that is broken, which all tests have here",
    "ddp_logging_data_cpu": "wants the name gloo from C++, which says dure",
    "init_process_group": "makes the default group again",
}
"""By pattern: why not."""


def tests(base):
    for name in sorted(vars(base)):
        if name.startswith("test_") and not re.search("|".join(("[cC]uda|nccl", *NOT_HERE)), name):
            yield name


def main(pattern):
    os.environ.setdefault("BACKEND", "gloo")
    folder = os.environ.setdefault("TEMP_DIR", tempfile.gettempdir())
    os.makedirs(f"{folder}/test_dir", exist_ok=True)
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed as dist
    from torch.testing._internal.common_utils import TestCase
    from torch.testing._internal.distributed import distributed_test

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    assert type(dist.group.WORLD).__name__ == os.environ.get("EXPECTED_GROUP", "ProcessGroupDure")
    # Its own barrier goes through files that torch's launcher makes.
    beside = dist.new_group(backend="gloo")
    distributed_test.Barrier.init = classmethod(lambda cls: None)
    distributed_test.Barrier.sync = classmethod(lambda cls, *_args, **_more: dist.barrier(beside))

    class Here(distributed_test.DistributedTest._DistTestBase, TestCase):
        rank = property(lambda self: dist.get_rank())
        world_size = property(lambda self: dist.get_world_size())

        def call_dist_op(self, *args, expect_event=True, **more):
            """Without a look for Gloo's own events in a profile."""
            return super().call_dist_op(*args, expect_event=False, **more)

    found = {"passed": [], "skipped": [], "failed": {}}
    for name in tests(distributed_test.DistributedTest._DistTestBase):
        if not re.search(pattern, name):
            continue
        faulthandler.dump_traceback_later(120, exit=True)
        began = time.monotonic()
        if dist.get_rank() == 0:
            print(f"# {name}", file=sys.stderr, flush=True)
        torch.manual_seed(0)
        try:
            test = Here(name)
            getattr(test, name)()
            found["passed"].append(name)
        except unittest.SkipTest:
            found["skipped"].append(name)
        except SystemExit as error:  # torch's decorators skip with an exit code
            found["skipped"].append(f"{name}: exit code {error.code}")
        except Exception as error:
            found["failed"][name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        if time.monotonic() - began > 20:
            print(f"# {name} took {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        dist.barrier(beside)
    faulthandler.cancel_dump_traceback_later()
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else ".")
