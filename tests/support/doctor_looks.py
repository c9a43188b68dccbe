"""The small job that doctors look at, and what they found wrong."""

JOB = """
name = "ten"
storage = "."
[model]
factory = "ddp.py:model"
[data]
factory = "ddp.py:data"
args = { folder = "{storage}/training_data" }
global_batch = 8
[train]
steps = 1
[team]
ranks = 2
"""


def failed(found):
    """Check and node of all that is wrong."""
    return {(finding["check"], finding["node"]) for finding in found["findings"] if finding["level"] == "bad"}
