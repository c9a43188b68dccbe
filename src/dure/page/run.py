"""One run as the page and the report see it: one shape for a live run, a finished one and a saved report.

`state` is small and asked for once a second; what is long in it (`items`) comes only once. `window` gives the steps
between two of them, as wide or as narrow as there is room for.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dure.base.files import read_at_most
from dure.base.run_folder import RunFolder
from dure.data.shards import shards_of_rank
from dure.page import samples
from dure.page.cache import Cache
from dure.page.columns import AT, COLUMNS
from dure.page.pyramid import STATS, grid_of
from dure.page.rank_feed import RankFeed
from dure.page.saved import saved_checkpoints
from dure.page.straggler import straggler

_MOST_RANKS = 512
_LOOK_SECONDS = 0.4
"""Between two looks at a run, however many ask."""
_SLICE_SECONDS = 0.05
_LIVE_SECONDS = 20.0
"""Events that are so young belong to a run that is under way, where locks cannot be seen."""
_RECENT = 200
"""Steps that speed and straggler are told from."""
_LONGEST_FILE = 4 << 20
_SAVED_SECONDS = 3.0
"""Between two looks at the checkpoints, whose manifests are hashed."""
_RANK = re.compile(r"rank-([0-9]{1,5})\.jsonl")
MOST_BINS = 4096


class RunView:
    """Reads a run's folder; safe to ask from several threads."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path)
        self.boot = secrets.token_hex(4)
        """Whoever asks again with another's `since` is told everything."""
        self._cache = Cache(self.folder.page)
        self._feeds: dict[int, RankFeed] = {}
        self._lock = threading.RLock()
        self._looked = -1e9
        self._more = False
        self._indexer: threading.Thread | None = None
        self._closed = False
        self._saved: tuple[float, list[dict[str, Any]]] = (-1e9, [])
        self._files: dict[str, tuple[tuple[int, int], Any]] = {}

    def close(self) -> None:
        """Let go of all files."""
        self._closed = True
        if self._indexer is not None:
            self._indexer.join(10)
        with self._lock:
            for feed in self._feeds.values():
                feed.close()
            self._cache.close()

    def look(self) -> None:
        """Read what is new; a long record is read on in a thread of its own."""
        with self._lock:
            if time.monotonic() - self._looked < _LOOK_SECONDS or self._closed:
                return
            self._looked = time.monotonic()
            self._find_ranks()
            if self._indexer is None or not self._indexer.is_alive():
                self._more = self._look_once()
                if self._more:
                    self._indexer = threading.Thread(target=self._read_on, name="reads events", daemon=True)
                    self._indexer.start()

    def read_all(self) -> None:
        """Read everything that is there by now."""
        with self._lock:
            self._find_ranks()
            while self._look_once():
                pass
            self._more = False

    def _read_on(self) -> None:
        while not self._closed:
            with self._lock:
                self._more = self._look_once()
                if not self._more:
                    return
            time.sleep(0.001)  # whoever waits for the lock comes first

    def _look_once(self) -> bool:
        more = [feed.look(_SLICE_SECONDS) for feed in self._feeds.values()]
        return any(more)

    def _find_ranks(self) -> None:
        found = []
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.folder.path / "events"):
                match = _RANK.fullmatch(entry.name)
                if match is not None and entry.is_file():
                    found.append((int(match[1]), self.folder.path / "events" / entry.name))
        for rank, path in sorted(found)[:_MOST_RANKS]:
            if rank not in self._feeds:
                self._feeds[rank] = RankFeed(path, rank, self._cache)

    @property
    def ranks(self) -> list[int]:
        """Those of the last team, as far as they have recorded something; of all sessions when none is known."""
        team = self._team()
        size = team.get("ranks") if team else None
        return [rank for rank in sorted(self._feeds) if size is None or rank < size]

    def state(self, since: str = "") -> dict[str, Any]:
        """What is shown now. `since`: what the last answer called `until`; items that came with it are left out."""
        self.look()
        with self._lock:
            known = self._known(since)
            items = [
                {"rank": rank, "kind": one.kind, "after": one.after, **one.values}
                for rank, feed in sorted(self._feeds.items())
                for of_kind in feed.events.values()
                for one in of_kind
                if one.number >= known.get(rank, 0)
            ]
            counts = ",".join(f"{rank}.{feed.kept}" for rank, feed in sorted(self._feeds.items()))
            team, job = self._team() or {}, self.job()
            gone = not self.folder.path.is_dir()
            return {
                "boot": self.boot,
                "until": f"{self.boot}:{counts}",
                "fresh": not known,
                "name": _text(job.get("name")) or self.folder.path.name,
                "id": self.folder.path.name,
                "condition": "gone" if gone else self._condition(team),
                "job": job,
                "team": team,
                "nodes": self._nodes(team),
                "progress": self._progress(team),
                "straggler": self._straggler(),
                "summary": self._json(self.folder.summary),
                "checkpoints": self._checkpoints(job),
                "restarts": self._restarts(),
                "errors": self._errors(),
                "skipped": sum(feed.skipped for feed in self._feeds.values()),
                "reading": self._more,
                "steps": [0, 1 + max((feed.pyramid.last_step for feed in self._feeds.values()), default=-1)],
                "items": items,
            }

    def window(
        self,
        first: int,
        end: int,
        bins: int,
        columns: Sequence[str],
        ranks: Sequence[int] | None = None,
        stats: Sequence[str] = STATS,
        most: int = MOST_BINS,
    ) -> tuple[dict[str, Any], Any]:
        """Steps from `first` to before `end`: what it is, and float32 [rank, stat, column, bin]."""
        with self._lock:
            chosen = [rank for rank in self.ranks if ranks is None or rank in ranks]
            end = max(first + 1, end)
            bins = max(1, min(bins, most))
            start, width, count = grid_of(first, end, bins)
            shape = (len(stats), len(columns), count)
            found = np.full((len(chosen), *shape), np.nan, np.float32)
            for at, rank in enumerate(chosen):
                with contextlib.suppress(OSError, ValueError):  # chunk files that somebody took away
                    found[at] = self._feeds[rank].pyramid.window(first, end, bins, columns, stats)
            head = {
                "from": start,
                "to": end,
                "width": width,
                "bins": count,
                "ranks": chosen,
                "columns": list(columns),
                "stats": list(stats),
            }
            return head, found

    def samples(self) -> dict[str, Any]:
        """Which rank took which sample."""
        with self._lock:
            team, job = self._team() or {}, self.job()
            total = team.get("samples", 0)
            of_ranks = {rank: self._feeds[rank].samples for rank in self.ranks}
            data = job.get("data")
            return {
                "samples": total,
                "drawn": min(total, samples.MOST),
                "kind": data.get("split") if isinstance(data, dict) else None,
                "shuffled": data.get("shuffle") is True if isinstance(data, dict) else None,
                "recorded": samples.recorded(of_ranks, total),
                "dealt": samples.dealt(total, job, team.get("shards", 0), team.get("ranks", 0)),
                "thumbnails": isinstance(data, dict) and data.get("factory") == "dure.tools.demo.cats:photos",
            }

    def thumbnails(self) -> bytes | None:
        """See `samples.thumbnails`."""
        return samples.thumbnails(self.job())

    def feeds(self) -> dict[int, RankFeed]:
        """The ranks of the last team; to be read while nobody else does."""
        return {rank: self._feeds[rank] for rank in self.ranks}

    def job(self) -> dict[str, Any]:
        """The job's settings, as they ran; empty when they cannot be read."""
        told = self._json(self.folder.job)
        job = told.get("job") if isinstance(told, dict) else None
        return job if isinstance(job, dict) else {}

    def _known(self, since: str) -> dict[int, int]:
        boot, _, counts = since.partition(":")
        if boot != self.boot or not re.fullmatch(r"[0-9.,]*", counts):
            return {}
        pairs = (pair.split(".") for pair in counts.split(",") if pair.count(".") == 1)
        return {int(rank): int(count) for rank, count in pairs if rank and count}

    def _team(self) -> dict[str, Any] | None:
        """What the rank with the newest session says."""
        told = [feed.events["team"][-1].values for feed in self._feeds.values() if feed.events.get("team")]
        return max(told, key=lambda values: values["session"], default=None)

    def _nodes(self, team: dict[str, Any]) -> list[dict[str, Any]]:
        nodes: dict[tuple[int, str], list[dict[str, Any]]] = {}
        shards, size = team.get("shards", 0), team.get("ranks", 0)
        for rank in self.ranks:
            feed = self._feeds[rank]
            own = feed.events["team"][-1].values if feed.events.get("team") else {}
            memory = feed.events["memory"][-1].values["bytes"] if feed.events.get("memory") else None
            run = shards_of_rank(rank, size, shards) if 0 < size <= shards <= 1 << 12 else range(0)
            nodes.setdefault((own.get("node", 0), _text(own.get("host")) or "?"), []).append(
                {
                    "rank": rank,
                    "pid": own.get("pid"),
                    "shards": list(run),
                    "memory": memory,
                    "step": feed.pyramid.last_step,
                    "requests": feed.storage[0],
                    "bytes": feed.storage[1],
                    "done": self._has_ended(feed),
                }
            )
        return [
            {"node": node, "host": host, "ranks": of_node} for (node, host), of_node in sorted(nodes.items())
        ]

    def _has_ended(self, feed: RankFeed) -> bool:
        ended, begun = feed.events.get("end"), feed.events.get("team")
        return bool(ended and begun and ended[-1].number > begun[-1].number)

    def _condition(self, team: dict[str, Any]) -> str:
        """running, finished, stopped (it can go on), failed or empty."""
        if not self._feeds:
            return "running" if self._is_locked() else "empty"
        if self.ranks and all(self._has_ended(self._feeds[rank]) for rank in self.ranks):
            return "finished"
        if self._is_locked() or (not self._sees_locks() and self._age_seconds() < _LIVE_SECONDS):
            return "running"
        return "failed" if self._errors() else "stopped"

    def _is_locked(self) -> bool:
        """Whether a launcher of this machine holds the run; asked of the kernel, so that nobody is disturbed."""
        try:
            found = os.stat(self.folder.lock)
            locks = Path("/proc/locks").read_text()
        except OSError:
            return False
        place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino} "
        return any(place in line and "FLOCK" in line for line in locks.splitlines())

    def _sees_locks(self) -> bool:
        """Whether the launcher was on this machine."""
        told = self._json(self.folder.lock)
        return isinstance(told, dict) and told.get("host") == os.uname().nodename

    def _age_seconds(self) -> float:
        """Since the last event of any rank; by this machine's clock, which may be another's than the file server's."""
        newest = 0.0
        for feed in self._feeds.values():
            with contextlib.suppress(OSError):
                newest = max(newest, os.stat(feed.path).st_mtime)
        return time.time() - newest

    def _progress(self, team: dict[str, Any]) -> dict[str, Any]:
        feeds = [self._feeds[rank] for rank in self.ranks]
        done = 1 + min((feed.pyramid.last_step for feed in feeds), default=-1)
        found = {
            "step": done,
            "steps": team.get("steps", 0),
            "epoch": max((f.epoch for f in feeds), default=-1),
        }
        if not feeds or done < 1:
            return found
        recent = feeds[0].pyramid.window(
            max(0, done - _RECENT), done, _RECENT, ("span", "samples", "loss", "lr"), ("last",)
        )
        span, count, loss, rate = recent[0]
        timed = np.isfinite(span) & np.isfinite(count)
        seconds = float(span[timed].sum()) / 1e6
        if seconds > 0:
            each = float(np.median(span[timed])) / 1e6
            found["samples_per_second"] = float(count[timed].sum()) / seconds
            found["step_seconds"] = each
            found["seconds_left"] = max(0, found["steps"] - done) * seconds / max(1, int(timed.sum()))
        found["loss"], found["lr"] = (float(v[-1]) if np.isfinite(v[-1]) else None for v in (loss, rate))
        return found

    def _straggler(self) -> dict[str, Any] | None:
        ranks = self.ranks
        end = 1 + min((self._feeds[rank].pyramid.last_step for rank in ranks), default=-1)
        if len(ranks) < 2 or end < 1:
            return None
        first = max(0, end - _RECENT)
        rows = [
            self._feeds[rank].pyramid.window(first, end, _RECENT, ("wait", "span"), ("mean",))[0]
            for rank in ranks
        ]
        found = straggler(np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows]))
        return None if found is None else {**found, "rank": ranks[found["rank"]], "from": first, "to": end}

    def _checkpoints(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        if time.monotonic() - self._saved[0] > _SAVED_SECONDS:
            self._saved = (time.monotonic(), saved_checkpoints(self.folder.path, job))
        return self._saved[1]

    def _restarts(self) -> list[dict[str, Any]]:
        """When and why the team was started again."""
        found = []
        with contextlib.suppress(OSError, ValueError):
            for line in read_at_most(self.folder.restarts, _LONGEST_FILE).splitlines()[-200:]:
                with contextlib.suppress(ValueError, TypeError, RecursionError):
                    told = json.loads(line)
                    names = ("number", "rank", "step", "ranks")
                    if all(type(told[name]) is int for name in names):
                        found.append({**{name: told[name] for name in names}, "cause": _text(told["cause"])})
        return found

    def _errors(self) -> list[dict[str, Any]]:
        found = []
        for rank in list(self._feeds)[:64]:
            told = self._json(self.folder.error(rank))
            if isinstance(told, dict):
                words = _text(told.get("message")) or _text(told.get("error")) or json.dumps(told)[:300]
                found.append({"rank": rank, "text": words})
        return found

    def _json(self, path: Path) -> Any:
        """A JSON file's value, None when there is none or it is damaged; read again when it changed."""
        try:
            status = os.stat(path)
            if not stat.S_ISREG(status.st_mode):
                return None
            stamp = (status.st_mtime_ns, status.st_size)
            known = self._files.get(path.name)
            if known is None or known[0] != stamp:
                value = json.loads(read_at_most(path, _LONGEST_FILE), parse_constant=lambda _: None)
                self._files[path.name] = known = (stamp, value)
            return known[1]
        except (OSError, ValueError, RecursionError):
            return None


def known_columns(names: Sequence[str]) -> list[str]:
    """Those that there are."""
    return [name for name in names if name in AT] or list(COLUMNS)


def _text(value: Any) -> str:
    return value[:500] if isinstance(value, str) else ""
