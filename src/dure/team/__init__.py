"""A team of ranks, for a script with a plain loop of its own.

    import dure

    with dure.start(seed=42) as team:
        model = team.replicate(Net())
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for batch in team.batches(photos, global_batch=40, epochs=3):
            loss = team.step(model, optimizer, batch, F.cross_entropy)
        team.prove(model, optimizer)

`dure train` runs on the same class.
"""

from dure.team.attached import Attached, attach
from dure.team.checkpoint import Checkpoint
from dure.team.joining import start
from dure.team.steps import Loss
from dure.team.team import Team

__all__ = ["Attached", "Checkpoint", "Loss", "Team", "attach", "start"]
