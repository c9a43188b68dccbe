"""What several tests need: helpers, servers, harnesses, and the models, jobs and scripts that ranks run.

Ranks find an entry point by its name, `support.features:train_all`, because pytest's search path (`tests`) is
handed on to them. Jobs and scripts that are named by their file are in `FOLDER`.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
