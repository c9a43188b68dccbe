"""Connection settings of a bucket: endpoint, timeouts, a guard against use after fork (obstore cannot survive one)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from dure.base.errors import StorageError, UsageError
from dure.base.say import redacted
from dure.storage.answers import words_of
from dure.storage.protocol import clean_path

if TYPE_CHECKING:
    from obstore.store import S3Store

# No retry starts later than this after the first try: with a silent server, a read fails within 9.5 s and a
# write within 8 s. One try of a write has longer, as the server is silent until it has the whole part.
_RETRY = timedelta(seconds=6)
_CONNECT = timedelta(seconds=2)
_SILENCE_OF_READS = timedelta(seconds=3.5)
_SILENCE_OF_WRITES = timedelta(seconds=8)
_WHOLE_REQUEST = timedelta(minutes=2)
_FIRST_PAUSE = timedelta(seconds=0.1)
_LONGEST_PAUSE = timedelta(seconds=1)
_RETRIES = 100  # the time is what bounds them

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_used_by: set[int] = set()


@dataclass(frozen=True)
class Connection:
    """Two clients of one bucket, as reads and writes need different timeouts."""

    reads: S3Store
    writes: S3Store
    bucket: str
    server: str
    """For people: the endpoint, or Amazon."""


def connect(location: str) -> Connection:
    """The bucket of `s3://bucket/prefix`. Keys, region and endpoint come from the AWS_* environment; nothing is
    sent yet.
    """
    match = re.fullmatch(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(.*))?", location, re.DOTALL)
    if match is None:
        raise UsageError(
            f"{location}: not a bucket; write s3://bucket/prefix, with a bucket of 3 to 63 letters a-z, "
            "digits, dots and dashes"
        )
    bucket, prefix = match[1], clean_path(location, match[2] or "", may_be_top=True)
    endpoint = next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), None)
    return Connection(
        reads=_client(bucket, prefix, endpoint, _SILENCE_OF_READS),
        writes=_client(bucket, prefix, endpoint, _SILENCE_OF_WRITES),
        bucket=bucket,
        server=redacted(endpoint or "Amazon S3"),
    )


def refuse_after_fork(location: str) -> None:
    """obstore's threads do not follow a fork: in the child every call would wait for ever."""
    if _used_by and os.getpid() not in _used_by:
        raise StorageError(
            f"{location}: this process was forked from one that had used S3 already, and would wait for ever; "
            "use S3 after the fork only, or start the process with spawn or forkserver"
        )
    _used_by.add(os.getpid())


def _client(bucket: str, prefix: str, endpoint: str | None, silence: timedelta) -> S3Store:
    try:
        from obstore.exceptions import BaseError
        from obstore.store import S3Store
    except ImportError as error:
        raise UsageError(
            f"s3://{bucket}: storage on S3 takes one more package: pip install 'dure[s3]'"
        ) from error
    try:
        return S3Store(
            bucket,
            prefix=prefix or None,
            config={} if endpoint is None else {"endpoint": endpoint},
            client_options={
                # Only where the user named an http:// server: what is read and written then travels in the clear.
                "allow_http": endpoint is not None and endpoint.startswith("http://"),
                "connect_timeout": _CONNECT,
                "read_timeout": silence,
                "timeout": _WHOLE_REQUEST,
            },
            retry_config={
                "max_retries": _RETRIES,
                "retry_timeout": _RETRY,
                "backoff": {"init_backoff": _FIRST_PAUSE, "max_backoff": _LONGEST_PAUSE, "base": 2},
            },
        )
    except (BaseError, ValueError) as error:
        raise UsageError(f"s3://{bucket}: the AWS_* environment cannot be used: {words_of(error)}") from error
