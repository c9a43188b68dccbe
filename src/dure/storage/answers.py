"""What an S3 server, or the way to it, answered: in plain words, with the way out."""

from __future__ import annotations

import re
from typing import Literal

from dure.base.say import redacted

Trouble = Literal["no_bucket", "no_file", "refused", "no_credentials", "failing", "odd", "silent", "other"]
"""What kind of trouble a failed request is in; `failing`: the server's own; `odd`: an answer that nobody expects."""


def trouble_of(error: Exception) -> Trouble:
    """What kind of trouble ended a request of obstore's."""
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    text, status = words_of(error), status_of(error)
    kinds: tuple[tuple[Trouble, bool], ...] = (
        ("no_bucket", "<Code>NoSuchBucket</Code>" in text),
        ("no_file", isinstance(error, FileNotFoundError)),
        # Without keys, obstore looks for those of an Amazon machine, at an address that only those have.
        ("no_credentials", "/latest/api/token" in text or "/latest/meta-data" in text),
        # Where a list is refused, obstore has no error of its own for it.
        ("refused", isinstance(error, PermissionDeniedError | UnauthenticatedError) or status in (401, 403)),
        ("failing", status is not None and status >= 500),
        ("odd", status is not None),
        ("silent", "HTTP error" in text),
    )
    return next((kind for kind, is_it in kinds if is_it), "other")


def reason_for(error: Exception, server: str, bucket: str) -> str:
    """Why a request failed: what happened; then, after a semicolon, the way out."""
    text = words_of(error)
    code = re.search(r"<Code>(\w+)</Code>", text)
    said = " ".join(str(word) for word in (status_of(error), code and code[1]) if word)
    reasons: dict[Trouble, str] = {
        "no_bucket": f"{server} has no bucket {bucket}",
        "no_file": "there is no such file in the bucket",
        "refused": f"{server} refuses ({said}); are AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY right, and may they "
        "do this?",
        "no_credentials": "no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or "
        "AWS_SKIP_SIGNATURE=true for a public bucket)",
        "failing": f"{server} answers {said}{_tries(text)}; it is in trouble, try again later",
        "odd": f"{server} answers {said}; are AWS_REGION and AWS_ENDPOINT_URL right?",
        "silent": f"no answer from {server}{_tries(text)}; is it running, and is AWS_ENDPOINT_URL right?",
        "other": text,
    }
    return reasons[trouble_of(error)]


def words_of(error: Exception) -> str:
    """What obstore says, without the debug print of its own values, and without passwords in addresses."""
    return redacted(str(error).partition("\n\nDebug source")[0].strip())


def status_of(error: Exception) -> int | None:
    """The HTTP status that ended it, if a server answered at all."""
    found = re.search(r"non-2xx status code: (\d{3})", words_of(error))
    return int(found[1]) if found else None


def _tries(text: str) -> str:
    found = re.search(r" in ([0-9.]+)s, after (\d+) retries", text)
    return f" (tried {int(found[2]) + 1} times in {float(found[1]):.1f} s)" if found else ""
