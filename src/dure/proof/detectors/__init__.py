"""Silent mistakes of stock DDP scripts: found while they run, told in one line, never a reason to stop unless asked.

`start` is called in a rank of `dure run` before the script, `watch_model` by `dure.attach`. Nothing is exchanged in
the script's own process groups: ranks publish small hashes in the store that they met in, at their first steps and then
ever less often, and whoever is last compares. So nobody waits because of being watched.

    ddp.py        one DDP model: gradients, weights, buffers, inputs, random numbers
    unsynced.py, token_means.py     gradients that are clipped too early; means of means
    samplers.py   DistributedSampler: epochs, seeds, padding
    saves.py      torch.save and torch.load: several writers, the place of a resume
    board.py      what ranks tell each other
    report.py     what people are told

A team (`dure.start`) has none of these mistakes by construction, so it ends the watch.
"""

from dure.proof.detectors.watch import MODES, Mode, start, stop, watch_model

__all__ = ["MODES", "Mode", "start", "stop", "watch_model"]
