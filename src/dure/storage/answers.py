"""What an S3 server, or the way to it, answered: in plain words, with the way out."""

from __future__ import annotations

import re


def reason_for(error: Exception, server: str, bucket: str) -> str:
    """Why a request failed."""
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    text = words_of(error)
    code = re.search(r"<Code>(\w+)</Code>", text)
    status = status_of(error)
    said = " ".join(str(word) for word in (status, code and code[1]) if word)
    if code is not None and code[1] == "NoSuchBucket":
        reason = f"{server} has no bucket {bucket}"
    elif isinstance(error, FileNotFoundError):
        reason = "there is no such file in the bucket"
    elif isinstance(error, PermissionDeniedError | UnauthenticatedError):
        reason = (
            f"{server} refuses ({said}); are AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY right, "
            "and may they do this?"
        )
    elif "/latest/api/token" in text or "/latest/meta-data" in text:
        # Without keys, obstore looks for those of an Amazon machine, at an address that only those have.
        reason = (
            "no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
            "(or AWS_SKIP_SIGNATURE=true for a public bucket)"
        )
    elif status is not None and status >= 500:
        reason = f"{server} answers {said}{_tries(text)}; it is in trouble, try again later"
    elif status is not None:
        reason = f"{server} answers {said}; are AWS_REGION and AWS_ENDPOINT_URL right?"
    elif "HTTP error" in text:
        reason = f"no answer from {server}{_tries(text)}; is it running, and is AWS_ENDPOINT_URL right?"
    else:
        reason = text
    return reason


def words_of(error: Exception) -> str:
    """What obstore says, without the debug print of its own values."""
    return str(error).partition("\n\nDebug source")[0].strip()


def status_of(error: Exception) -> int | None:
    """The HTTP status that ended it, if a server answered at all."""
    found = re.search(r"non-2xx status code: (\d{3})", words_of(error))
    return int(found[1]) if found else None


def _tries(text: str) -> str:
    found = re.search(r" in ([0-9.]+)s, after (\d+) retries", text)
    return f" (tried {int(found[2]) + 1} times in {float(found[1]):.1f} s)" if found else ""
