"""`python -m dure` is `dure`."""

from dure.cli import main

if __name__ == "__main__":
    main()
