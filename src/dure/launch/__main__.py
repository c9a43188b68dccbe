"""`python -m dure.launch run SCRIPT --ranks N [-m] [--cold] [--port P] [--run-dir D] [-- ARGS…]`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from dure.errors import DureError, RankFailed
from dure.launch import run_script
from dure.run_folder import RunFolder
from dure.say import keep_output_harmless, say


def main(argv: list[str]) -> int:
    """Run a stock script on every rank and return the exit code of the command."""
    own, _, rest = (
        (argv, "", []) if "--" not in argv else (argv[: argv.index("--")], "--", argv[argv.index("--") + 1 :])
    )
    parser = argparse.ArgumentParser(prog="python -m dure.launch")
    parser.add_argument("verb", choices=["run"])
    parser.add_argument("target")
    parser.add_argument("-m", dest="module", action="store_true")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--run-dir", type=Path)
    options = parser.parse_args(own)
    folder = RunFolder(options.run_dir or Path(tempfile.mkdtemp(prefix="dure-run-")))
    try:
        return run_script(
            options.target,
            rest,
            module=options.module,
            ranks=options.ranks,
            folder=folder,
            cold=options.cold,
            port=options.port,
        )
    except DureError as error:
        say(str(error))
        if isinstance(error, RankFailed) and error.details:
            print(error.details, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    keep_output_harmless()
    sys.exit(main(sys.argv[1:]))
