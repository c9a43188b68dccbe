"""What a rank records: typed events, in JSON lines. Everything people see derives from them.

kinds.py     the events
lines.py     events as lines and back; many steps share a line
parts.py     a rank's event files: the one that is written, and the compacted ones before it
recorder.py  writes one rank's events off the training thread
"""

from dure.observe.events.kinds import (
    CheckpointSaved,
    Ended,
    Evaluated,
    Event,
    Loading,
    MemoryUsed,
    Noted,
    PartBegun,
    Proved,
    ShardAudited,
    Stepped,
    StorageUsed,
    TeamFormed,
    WeightsLoaded,
)
from dure.observe.events.lines import VERSION, Recorded, decode, encode, encode_all
from dure.observe.events.parts import (
    Follower,
    Reading,
    compacted_parts,
    lines_of_part,
    read_events,
    recent_events,
    sessions_in,
    totals_in,
)
from dure.observe.events.recorder import Recorder

__all__ = [
    "VERSION",
    "CheckpointSaved",
    "Ended",
    "Evaluated",
    "Event",
    "Follower",
    "Loading",
    "MemoryUsed",
    "Noted",
    "PartBegun",
    "Proved",
    "Reading",
    "Recorded",
    "Recorder",
    "ShardAudited",
    "Stepped",
    "StorageUsed",
    "TeamFormed",
    "WeightsLoaded",
    "compacted_parts",
    "decode",
    "encode",
    "encode_all",
    "lines_of_part",
    "read_events",
    "recent_events",
    "sessions_in",
    "totals_in",
]
