"""A script for `dure run --arithmetic portable`: what each rank found, as one line of JSON."""

import json
import sys

import torch
import torch.nn.functional as F

import dure
from dure.base.errors import ModelRefused


def mask():
    torch.manual_seed(5)
    return [
        torch.empty(7, 13).bernoulli_(0.3),
        torch.empty(6, 4).t().bernoulli_(0.5),
        F.dropout(torch.ones(999), 0.1),
    ]


def drawn_from_uniform():
    torch.manual_seed(5)
    return (torch.rand(7, 13, dtype=torch.float64) < 0.3).float()


stock = mask()
with dure.start(arithmetic="portable") as team:
    ours = mask()
    try:
        torch.empty(3).exponential_()
        refused = ""
    except ModelRefused as error:
        refused = str(error)
    compiled = torch.compile(torch.nn.Linear(3, 2), backend=lambda graph, inputs: sys.exit("compiled"))
    compiled(torch.ones(1, 3))
    print(
        json.dumps(
            {
                "as stock": all(torch.equal(one, other) for one, other in zip(stock, ours, strict=True)),
                "as uniform": torch.equal(ours[0], drawn_from_uniform()),
                "refused": refused,
                "capability": torch.backends.cpu.get_cpu_capability(),
            }
        ),
        flush=True,
    )
