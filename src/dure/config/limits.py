"""How large the numbers of a job may be: more than anybody needs, and no more than what is made of them can bear."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

MOST_RANKS = 1024
"""On one node: a state in memory has room for so many parts."""
MOST_SHARDS = 65_536
"""Of a batch: every step exchanges some numbers for each of them."""
MOST_THREADS = 1024
"""Of a rank; loader workers of a rank too."""
MOST_NODES = 16_384
LARGEST_SEED = (1 << 63) - 1
LONGEST_SECONDS = 1e8
"""About three years."""
LARGEST_COUNT = 1 << 53

Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
CountOrNone = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
"""0 turns it off."""
Ranks = Annotated[int, Field(ge=1, le=MOST_RANKS)]
Threads = Annotated[int, Field(ge=1, le=MOST_THREADS)]
Nodes = Annotated[int, Field(ge=1, le=MOST_NODES)]
Seconds = Annotated[float, Field(gt=0, le=LONGEST_SECONDS)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
