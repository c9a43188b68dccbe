"""`python -m dure.launch JOB.toml|SCRIPT …`: `dure train` or `dure run`, with the node that variables say."""

from __future__ import annotations

import os
import sys

from dure.base.errors import DureError
from dure.base.say import say
from dure.launch.variables import command_for


def main() -> None:
    """Become the command."""
    try:
        words = command_for(sys.argv[1:], os.environ)
    except DureError as error:
        say(str(error))
        sys.exit(error.exit_code)
    os.execv(sys.executable, [sys.executable, "-m", "dure", *words])


if __name__ == "__main__":
    main()
