"""Signatures over a receipt (ed25519), and the receipt as an in-toto statement."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dure.base.errors import ReceiptWrong, UsageError
from dure.base.files import read_at_most, write_whole
from dure.proof.receipt_lines import sealed, unsealed

PREDICATE = "urn:dure:receipt:v1"
_LONGEST_KEY = 1 << 16
_NEEDS = "signatures need the package cryptography; install dure[sign]"


def sign(folder: Path, head: bytes, records: int, chain: str, key: Path) -> str:
    """Sign a verified receipt with a private key (ed25519, PEM); returns the public key."""
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError:
        raise UsageError(_NEEDS) from None
    try:
        private = load_pem_private_key(read_at_most(key, _LONGEST_KEY), password=None)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{key} is no private key in PEM without a password: {error}") from None
    if not isinstance(private, Ed25519PrivateKey):
        raise UsageError(f"{key} is no ed25519 key; make one: openssl genpkey -algorithm ed25519 -out {key}")
    public = private.public_key().public_bytes_raw().hex()
    value = {
        "key": public,
        "records": records,
        "chain": chain,
        "signature": private.sign(_signed(head, records, chain)).hex(),
    }
    write_whole(folder / "signature", sealed(value) + b"\n")
    return public


def check_signature(
    folder: Path, head: bytes, hash_after: Callable[[int], str], key: Path | None
) -> str | None:
    """The public key that a receipt is signed with, None when it is not signed; ReceiptWrong for a wrong signature, or
    when it is not `key`'s."""
    path = folder / "signature"
    if not path.exists():
        if key is not None:
            raise ReceiptWrong(f"{folder} is not signed; `dure receipt RUN --sign KEY` signs it")
        return None
    content = read_at_most(path, _LONGEST_KEY)
    value = unsealed(content.removesuffix(b"\n"), str(path))
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError:
        raise UsageError(f"{path}: {_NEEDS}") from None
    records, chain = int(value["records"]), str(value["chain"])
    if not content.endswith(b"\n") or hash_after(records) != chain:
        raise ReceiptWrong(f"{path} is of another chain than this receipt's")
    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(value["key"]))
        public.verify(bytes.fromhex(value["signature"]), _signed(head, records, chain))
    except (InvalidSignature, ValueError):
        raise ReceiptWrong(f"{path}: the signature is wrong") from None
    if key is not None and _public_key(key) != value["key"]:
        raise ReceiptWrong(f"{folder} is signed by {value['key']}, not by {key}")
    return str(value["key"])


def _public_key(path: Path) -> str:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        public = load_pem_public_key(read_at_most(path, _LONGEST_KEY))
    except ValueError as error:
        raise UsageError(f"{path} is no public key in PEM: {error}") from None
    if not isinstance(public, Ed25519PublicKey):
        raise UsageError(f"{path} is no ed25519 key")
    return public.public_bytes_raw().hex()


def _signed(head: bytes, records: int, chain: str) -> bytes:
    return b"\n".join(
        [b"dure receipt", hashlib.sha256(head).hexdigest().encode(), b"%d" % records, chain.encode()]
    )


def statement(head: dict[str, Any], verified: dict[str, Any], weights: Path | None) -> dict[str, Any]:
    """An in-toto statement (v1) of what was trained, and how; its subject is the file of weights, or their root."""
    if weights is not None:
        with weights.open("rb") as file:
            digest = {"sha256": hashlib.file_digest(file, "sha256").hexdigest()}
        subject = {"name": weights.name, "digest": digest}
    else:
        subject = {"name": "weights", "digest": {"dureMerkleRoot": verified["weights"] or ""}}
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [subject],
        "predicateType": PREDICATE,
        "predicate": {
            "recipe": head["recipe"],
            "recipeWords": head["recipe_words"],
            "versions": head["versions"],
            "image": head["image"],
            "shards": head["shards"],
            "steps": verified["steps"],
            "records": verified["records"],
            "chain": verified["chain"],
            "weightsRoot": verified["weights"],
        },
    }
