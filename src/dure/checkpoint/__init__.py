"""Checkpoints: what the next step depends on, saved whole, found again, and trusted only when verified.

manager        what a run calls: resume, keep, save, stop
state          the state's facts, tensors and layout, and the hash of the neighbour's share
capture        a replica's state, as shares
restore        a state into a replica
memory_tier    the last two states in the launcher's memory; memory_slot: one of them
storage_tier   when checkpoints are saved; writer: to a folder or a bucket, off the step path; snapshot: its copy
manifest       what a checkpoint is, on disk
find           where checkpoints are, and the newest that is whole
rescue         the last state, when its storage refuses it
export         lists checkpoints, and exports weights
"""
