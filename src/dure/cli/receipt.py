"""`dure receipt` and `dure verify`: what a run recorded of itself, and whether it is true. Neither imports torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dure.cli.options import Json

RunOrReceipt = Annotated[
    Path, typer.Argument(metavar="RUN", help="The run's folder, or a copy of its `receipt`.")
]
Weights = Annotated[
    Path | None,
    typer.Option(help="A safetensors file, to be compared with the run's last step.", metavar="FILE"),
]

VERIFY_EPILOG = "Example: dure export RUN model.safetensors && dure verify RUN --weights model.safetensors"


def verify(
    run: RunOrReceipt,
    weights: Weights = None,
    key: Annotated[
        Path | None, typer.Option(help="The public key (PEM) that must have signed it.", metavar="FILE")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a run's receipt offline: its chain, its signature, and checkpoints and weights against it.

    Ends with 3, and names the first thing that is not as it was recorded.
    """
    from dure.proof.verify_receipt import verify as check

    found = check(run, weights=weights, key=key).as_json()
    print(json.dumps(found) if as_json else "\n".join(_lines(found)) + "\nverified")


def receipt(
    run: RunOrReceipt,
    sign: Annotated[
        Path | None, typer.Option(help="Sign it with this ed25519 private key (PEM).", metavar="FILE")
    ] = None,
    in_toto: Annotated[
        Path | None, typer.Option("--in-toto", help="Write it as an in-toto statement.", metavar="FILE")
    ] = None,
    weights: Weights = None,
    as_json: Json = False,
) -> None:
    """Show a run's receipt, sign it, or export it; it is verified first.

    A key: openssl genpkey -algorithm ed25519 -out key.pem; openssl pkey -in key.pem -pubout -out public.pem
    """
    from dure.base.files import write_whole
    from dure.proof.sign_receipt import sign as signed
    from dure.proof.sign_receipt import statement
    from dure.proof.verify_receipt import ReceiptFolder
    from dure.proof.verify_receipt import verify as check

    folder = ReceiptFolder.of(run)
    found = check(run, weights=weights).as_json()
    if sign is not None:
        found["signed_by"] = signed(folder.path, folder.head_bytes, found["records"], found["chain"], sign)
    if in_toto is not None:
        write_whole(in_toto.absolute(), json.dumps(statement(folder.head, found, weights), indent=1) + "\n")
    print(json.dumps(found) if as_json else "\n".join(_lines(found)))


def _lines(found: dict[str, Any]) -> list[str]:
    rows = [
        ("recipe", found["recipe"]),
        ("steps", f"{found['steps']:,} in {found['records']:,} records, {found['sessions']} session(s)"),
        ("chain", found["chain"]),
        ("weights", found["weights"] or "the run has not ended"),
        ("loss", "" if found["loss"] is None else f"{found['loss']:.6g} in the last step"),
        ("signed by", found["signed_by"] or "nobody"),
        ("checkpoints", f"{len(found['checkpoints'])} compared"),
        ("file", found["weights_file"] or ""),
        *(("note", note) for note in found["notes"]),
    ]
    return [f"  {name:12}{value}" for name, value in rows if value]
