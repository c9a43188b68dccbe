"""Every message of the source that users may see, as a template, found in the syntax tree.

A message is what is given to an error, to `Failure`, or to a function that tells the user. Where it is put together
from parts, the parts count too: names that get their text in the same function, tables and arguments of functions in
the same module, and what its functions return. Values are numbered: `f"{path} is {size:,} bytes long"` is
`{0} is {1} bytes long`.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dure.base import errors
from support.commands import ROOT

SOURCE = ROOT / "src" / "dure"
TELLING = {"say", "tell", "note", "_tell", "_say", "Noted", "Said", "Failure", "Report"}
CAUGHT = {"ValueError", "OSError", "_NotThisWay"}
"""What these hold becomes part of a message."""
ERRORS = {
    name for name, found in inspect.getmembers(errors, inspect.isclass) if issubclass(found, errors.DureError)
}
_DEEPEST = 4


@dataclass(frozen=True)
class Message:
    """A template and where it is."""

    template: str
    room: str
    place: str


def all_messages(source: Path = SOURCE) -> list[Message]:
    """All messages of all modules, each once."""
    found: dict[str, Message] = {}
    for path in sorted(source.rglob("*.py")):
        module = _Module(ast.parse(path.read_text(encoding="utf-8")))
        where = path.relative_to(source)
        for template, line in module.messages():
            found.setdefault(
                template, Message(template, where.parts[0].removesuffix(".py"), f"{where}:{line}")
            )
    return list(found.values())


def all_texts(source: Path = SOURCE) -> set[str]:
    """Every text of the source as a template, message or not."""
    return {
        template
        for path in source.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp)
        and (template := _template(node)) is not None
    }


class _Module:
    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.functions = {
            node.name: node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        self.inside: dict[ast.AST, ast.FunctionDef | ast.AsyncFunctionDef] = {}
        for function in self.functions.values():  # inner functions come later, and win
            for node in ast.walk(function):
                self.inside[node] = function

    def messages(self) -> Iterator[tuple[str, int]]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and node.args and _name(node.func) in ERRORS | TELLING | CAUGHT:
                for template in self.resolve(node.args[0], _DEEPEST):
                    if _is_message(template):
                        yield template, node.lineno

    def resolve(self, node: ast.expr, depth: int) -> Iterator[str]:
        """The templates that an expression may give; `depth` bounds names and calls that are followed."""
        if depth < 0:
            return
        template = _template(node)
        if template is not None:
            yield template
            for part in ast.walk(node):
                if isinstance(part, ast.FormattedValue):
                    yield from filter(_is_message, self.resolve(part.value, depth - 1))
        elif isinstance(node, ast.Name):
            yield from self._named(node, depth - 1)
        elif isinstance(node, ast.Call) and _name(node.func) in self.functions:
            for part in ast.walk(self.functions[_name(node.func)]):
                if isinstance(part, ast.Return | ast.Yield) and part.value is not None:
                    yield from self.resolve(part.value, depth - 1)
        else:
            for part in _alternatives(node):
                yield from self.resolve(part, depth)

    def _named(self, node: ast.Name, depth: int) -> Iterator[str]:
        for part in self.tree.body:
            if isinstance(part, ast.Assign | ast.AnnAssign) and part.value is not None:
                targets = part.targets if isinstance(part, ast.Assign) else [part.target]
                if any(_name(target) == node.id for target in targets):
                    yield from self.resolve(part.value, depth)
        function = self.inside.get(node)
        if function is None:
            return
        for part in ast.walk(function):
            targets = part.targets if isinstance(part, ast.Assign) else []
            if isinstance(part, ast.NamedExpr):
                targets = [part.target]
            if any(_name(target) == node.id for target in targets):
                yield from self.resolve(part.value, depth)
        parameters = [argument.arg for argument in function.args.args if argument.arg not in ("self", "cls")]
        if node.id not in parameters:
            return
        position = parameters.index(node.id)
        for call in ast.walk(self.tree):
            if isinstance(call, ast.Call) and _name(call.func) == function.name:
                given = [keyword.value for keyword in call.keywords if keyword.arg == node.id]
                for value in given or call.args[position : position + 1]:
                    yield from self.resolve(value, depth)


def _alternatives(node: ast.expr) -> list[ast.expr]:
    """The expressions of which this one gives one, or all."""
    match node:
        case ast.IfExp(body=one, orelse=other):
            return [one, other]
        case (
            ast.BoolOp(values=values)
            | ast.Dict(values=values)
            | ast.List(elts=values)
            | ast.Tuple(elts=values)
        ):
            return values
        case ast.GeneratorExp(elt=each) | ast.ListComp(elt=each) | ast.Subscript(value=each):
            return [each]
        case ast.Call(func=ast.Attribute(attr="join"), args=joined):
            return joined
        case ast.Call(func=ast.Attribute(attr="get", value=table), args=[_, *default]):
            return [table, *default]
        case _:
            return []


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _template(node: ast.expr) -> str | None:
    pieces = _pieces(node)
    if pieces is None or not any(isinstance(piece, str) for piece in pieces):
        return None
    text, number = "", 0
    for piece in pieces:
        if isinstance(piece, str):
            text += piece.replace("{", "{{").replace("}", "}}")
        else:
            text += f"{{{number}}}"
            number += 1
    return text


def _pieces(node: ast.expr) -> list[str | ast.expr] | None:
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return [value.value for value in node.values]  # a text, or the expression of a value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _pieces(node.left), _pieces(node.right)
        if left is not None or right is not None:
            return [*(left or [node.left]), *(right or [node.right])]
    return None


def _words(template: str) -> list[str]:
    return re.findall(r"[A-Za-z]{2,}", re.sub(r"\{\d+\}", " ", template))


def _is_message(template: str) -> bool:
    """Whether it has words for people; a shell command has not."""
    return (
        len(_words(template)) >= 2 and " " in template.strip() and not re.search(r" && |^import ", template)
    )
