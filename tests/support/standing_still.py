"""A script that beats, and stands still on one rank."""

import os
import time

import dure


def stand_still():
    time.sleep(600)


for step in range(100):
    dure.heartbeat(step)
    time.sleep(0.02)
    if step == 5 and os.environ["RANK"] == "1":
        stand_still()
    if step == 9:
        while True:  # as one that waits for rank 1 would
            time.sleep(1)
