"""The page's modules as one script, for a file that must work without a server: browsers load no modules from file://.

The modules are written so that this stays simple: one `import { … } from "./x.js"` per line or over several, `export`
only before `function`, `class`, `const`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_IMPORT = re.compile(r"^import \{([^}]*)\} from \"\./([a-z_]+\.js)\";\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) (\w+))", re.MULTILINE)


def bundle(files: Mapping[str, bytes], entry: str) -> str:
    """All that `entry` imports, in order, each in a scope of its own."""
    done: dict[str, str] = {}

    def add(name: str) -> None:
        text = files[name].decode()
        for _, wanted in _IMPORT.findall(text):
            if wanted not in done:
                add(wanted)
        exported = [match[1] for match in _EXPORT.finditer(text)]
        body = _EXPORT.sub("", _IMPORT.sub(_bound, text))
        given = ", ".join(exported)
        done[name] = f'modules["{name}"] = (() => {{\n{body}\nreturn {{ {given} }};\n}})();\n'

    add(entry)
    return f'(() => {{\n"use strict";\nconst modules = {{}};\n{"".join(done.values())}}})();\n'


def _bound(match: re.Match[str]) -> str:
    names = match[1].replace(" as ", ": ").strip().rstrip(",")
    return f'const {{ {names} }} = modules["{match[2]}"];\n'
