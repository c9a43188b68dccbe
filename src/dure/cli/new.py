"""`dure new`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dure.cli.options import Json, Lang


def new(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="The folder to write into; made if it is not there.")
    ] = Path("dure-project"),
    as_json: Json = False,
    lang: Lang = None,
) -> None:
    """Write a project that trains at once: a job, its model and data, a script of your own, a README.

    Nothing is asked, and no file that is there already is written over.
    """
    from dure.base.language import chosen_language
    from dure.tools.new import write_project

    language = chosen_language(lang)
    written = write_project(folder, language)
    if as_json:
        print(json.dumps({"folder": str(folder), "files": [path.name for path in written]}))
        return
    words = _KOREAN if language == "ko" else _ENGLISH
    print(words.format(folder=folder, files=", ".join(path.name for path in written)))


_ENGLISH = """{folder}: {files}

  cd {folder}
  dure train job.toml                 train it; --ranks 4 gives the same bits
  dure run --ranks 2 train.py         the same with a loop of your own"""

_KOREAN = """{folder}: {files}

  cd {folder}
  dure train job.toml                 학습하기. --ranks 4로도 같은 비트가 나옵니다
  dure run --ranks 2 train.py         직접 쓴 루프로 같은 학습"""
