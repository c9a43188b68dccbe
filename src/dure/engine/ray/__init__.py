"""Ray's nodes: a placement group of one bundle per node, and in each an actor that runs the node's agent.

`fit(job)` is for a driver of your own; `dure train --engine ray` and `dure submit --engine ray` are commands.
"""

from dure.engine.ray.result import Result, fit

__all__ = ["Result", "fit"]
