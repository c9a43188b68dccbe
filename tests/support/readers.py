"""Reads the lesson and a run's page over HTTP, as `dure lesson` and `dure page` serve them; needs no dure.

python readers.py DURE RUN: prints one JSON object.
"""

import contextlib
import json
import subprocess
import sys
import time
from urllib.request import Request, urlopen


@contextlib.contextmanager
def served(*command):
    """Where a command of dure serves."""
    with subprocess.Popen([*command, "--json", "--port=0"], stdout=subprocess.PIPE, text=True) as server:
        try:
            yield json.loads(server.stdout.readline())["url"]
        finally:
            server.terminate()
            server.wait(120)


def get(url):
    """An answer that was good."""
    with urlopen(url, timeout=120) as answer:
        return answer.read()


def experiment(url, name, **arguments):
    """Start one, and wait for its end."""
    headers = {"content-type": "application/json", "x-dure-lesson": "1", "origin": url.rstrip("/")}
    body = json.dumps({"name": name, "arguments": arguments}).encode()
    number = json.loads(get(Request(f"{url}api/experiments", data=body, headers=headers)))["id"]
    while (told := json.loads(get(f"{url}api/experiments/{number}")))["state"] == "running":
        time.sleep(0.5)
    return told


def main(dure, run):
    """What a reader gets."""
    with served(dure, "lesson") as url:
        lesson = {
            name: len(get(url + name)) for name in ("", "main.js", "lesson.css", "chapters/11_faults.js")
        }
        copies = experiment(url, "copies", how="seed", ranks=2)
    with served(dure, "page", run, "--no-open") as url:
        page = {name: len(get(url + name)) for name in ("", "static/app.js", "static/page.css")}
        state = json.loads(get(f"{url}api/state"))
        window = len(get(f"{url}api/window?from=0&to={state['steps'][1]}&columns=loss&stats=mean"))
    rows = [row for rows in copies["rows"].values() for row in rows]
    print(json.dumps({"lesson": lesson, "state": copies["state"], "trouble": copies["trouble"],
                      "fingerprints": [row["fingerprint"] for row in rows], "page": page,
                      "condition": state["condition"], "steps": state["steps"], "window": window}))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
