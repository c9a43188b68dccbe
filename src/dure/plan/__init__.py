"""The planner: what a job would take on more nodes, or on other machines. No torch: it computes from stored figures.

links.py        seconds of one all-reduce, from latency and bandwidth of the links
step.py         seconds of one step, by phase
failures.py     how often to save, and what failures cost
machine.py      descriptions of machines: `machines/*.toml`, or a file of the user's
measurement.py  what was measured here, as a file
outlook.py      a job on so many nodes: speed, memory, time, price, with uncertainty; what limits it, what helps
words.py        the outlook in words and as a picture
published.py    published tables (`tables/*.toml`), and how far the planner is from them
probe.py        entry point of ranks that measure an exchange here; the only part that imports torch
"""
