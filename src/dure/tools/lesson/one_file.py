"""The whole lesson as one HTML file, with recordings in place of runs: for a lecture, or a plain web server."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from dure.base.language import Language

_IMPORT = re.compile(r'^import \{[^}]*\} from "(\./|\.\./)([\w/]+\.js)";\n', re.MULTILINE)


def static_files() -> dict[str, bytes]:
    """The lesson's own files, by their path below static/."""
    return dict(_below(files("dure.tools.lesson") / "static", ""))


def recordings() -> dict[str, Any]:
    """What experiments told when they were recorded, by name; each with its command, date and machine."""
    folder = files("dure.tools.lesson") / "recordings"
    found = [one for one in folder.iterdir() if one.name.endswith(".json")] if folder.is_dir() else []
    return {one.name.removesuffix(".json"): json.loads(one.read_text(encoding="utf-8")) for one in found}


def in_one_file(language: Language | None) -> str:
    """The page with its styles, scripts and recordings inside; it asks nobody for anything."""
    own = {name: content.decode() for name, content in static_files().items()}
    given = {"live": False, "recordings": recordings(), "language": language}
    # `<` cannot end the script early when it is written as an escape.
    told = json.dumps(given, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    script = f"globalThis.LESSON = {told};\n{_joined(own)}".replace("</script", "<\\/script")
    page = own["lesson.html"]
    page = page.replace('<link rel="stylesheet" href="lesson.css">', f"<style>\n{own['lesson.css']}</style>")
    return page.replace(
        '<script type="module" src="main.js"></script>', f'<script type="module">\n{script}</script>'
    )


def _joined(own: dict[str, str]) -> str:
    """All modules in the order of their imports; each in a function of its own, so that names do not clash."""
    done: dict[str, str] = {}

    def visit(name: str) -> None:
        folder = name.rpartition("/")[0]
        imports = []
        for found in _IMPORT.finditer(own[name]):
            other = found[2] if found[1] == "../" else f"{folder}/{found[2]}".lstrip("/")
            if other not in done:
                visit(other)
            imports.append((found[0], other))
        text = own[name]
        for line, other in imports:
            names = line[line.index("{") : line.index("}") + 1]
            text = text.replace(line, f"const {names} = modules[{json.dumps(other)}];\n", 1)
        exported = re.findall(r"^export (?:const|function|async function) (\w+)", text, re.MULTILINE)
        text = re.sub(r"^export ", "", text, flags=re.MULTILINE)
        body = f"{text}\nreturn {{ {', '.join(exported)} }};"
        done[name] = f"modules[{json.dumps(name)}] = (() => {{\n{body}\n}})();\n"

    visit("main.js")
    return "const modules = {};\n" + "".join(done.values())


def _below(folder: Traversable, prefix: str) -> list[tuple[str, bytes]]:
    found = []
    for one in folder.iterdir():
        if one.is_dir():
            found += _below(one, f"{prefix}{one.name}/")
        elif one.name.endswith((".js", ".css", ".html")):
            found.append((f"{prefix}{one.name}", one.read_bytes()))
    return found
