"""Collects the texts of all errors and warnings from the source of this package.

How it works.  The modules are parsed, not imported.  A *site* is a place that makes a text for a
user: a call of an error class, `problems.add(...)`, a warning of a logger or of `warnings`.  The
text is an expression, which `_Package.texts` evaluates as far as possible: it follows variables,
constants, conditions, parameters (to the calls of their function) and results of functions.  What
is not known before the program runs becomes `...`, as in `the file ... exists already`.  A name
that may have several texts gives several texts.
"""

import ast
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

SOURCE = Path(__file__).parent.parent / "src" / "adk_secure_sessions"

UNKNOWN = "..."
# Raised for callers inside this package, or caught there: no user sees these.
_INTERNAL = {
    "AssertionError",
    "AttributeError",
    "NotADirectoryError",
    "OperationalError",
    "add_error",
}
_FAILURES = {"Failure", "Declined", "BadParameter"}
_LOGGED = {"warning", "error", "warn"}
# Sites that repeat the text of another error, or take it from a table.
_SEEN_ELSEWHERE = {"...", "root key ...: ...; ...", "root key ...: ... (...); ..."}
_DEPTH = 6  # how many variables, functions and parameters are followed, one after the other
_MOST = 64  # texts of one expression

Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = tuple[ast.Module, Function | None]
Node = TypeVar("Node", bound=ast.AST)


class Text(NamedTuple):
    """A text that a user may see, and the line of the source that makes it."""

    text: str
    place: str


@cache
def collect() -> list[Text]:
    """Return the texts of all errors and warnings; a text of several places several times."""
    return _Package().collect()


@cache
def printed() -> set[str]:
    """Return the lines that commands print as their result: some of them report a problem."""
    return _Package().printed()


class _Package:
    def __init__(self) -> None:
        self._modules = {path: ast.parse(path.read_text("utf-8")) for path in sorted(_files())}
        self._bound: tuple[Function | None, ast.Call | None] = (None, None)
        self._known: dict[tuple[ast.expr, int], list[str]] = {}
        self._scopes: dict[ast.AST, Scope] = {}
        self._calls: dict[str, list[ast.Call]] = defaultdict(list)
        self._functions: dict[str, list[Function]] = defaultdict(list)
        self._constants: dict[str, list[ast.expr]] = defaultdict(list)
        self._fields: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for module in self._modules.values():
            self._index(module, (module, None))
            for statement in module.body:
                for name, value in _assigned(statement):
                    self._constants[name].append(value)
                if isinstance(statement, ast.AugAssign):  # a table that is extended
                    self._constants[_name(statement.target)].append(statement.value)

    def _index(self, node: ast.AST, scope: Scope) -> None:
        for child in ast.iter_child_nodes(node):
            self._scopes[child] = scope
            inner = scope
            if isinstance(child, Function):
                self._functions[child.name].append(child)
                inner = (scope[0], child)
            elif isinstance(child, ast.Call):
                self._calls[_name(child.func)].append(child)
            elif isinstance(child, ast.ClassDef):
                fields = [one for one in child.body if isinstance(one, ast.AnnAssign)]
                for number, field in enumerate(fields):
                    self._fields[_name(field.target)].append((child.name, number))
            self._index(child, inner)

    # --- sites -----------------------------------------------------------------------------------

    def collect(self) -> list[Text]:
        found = []
        for path, module in self._modules.items():
            for node in ast.walk(module):
                if not isinstance(node, ast.Call):
                    continue
                expression = _message(node, path)
                if expression is None:
                    continue
                place = f"{path.relative_to(SOURCE.parent)}:{node.lineno}"
                for text in self._site(expression):
                    if _is_logged(node):
                        text = re.sub(r"%[srd]", UNKNOWN, text)
                    found.append(Text(" ".join(text.split()), place))
        found += self._advice()
        return [one for one in found if one.text not in _SEEN_ELSEWHERE]

    def _advice(self) -> Iterator[Text]:
        """Yield the texts that key services make from their tables `_ADVICE`."""
        for value in self._constants["_ADVICE"]:
            module, _ = self._scopes[value]
            (path,) = (path for path, one in self._modules.items() if one is module)
            named = [
                self._nearest(one, self._constants.get(_name(one), []))
                for one in ast.walk(value)
                if isinstance(one, ast.Name)
            ]
            for node in itertools.chain(ast.walk(value), *named):
                match node:
                    case ast.Tuple(elts=[ast.Constant(value=str(what)), ast.Constant()]):
                        place = f"{path.relative_to(SOURCE.parent)}:{node.lineno}"
                        yield Text(f"root key ...: {what}", place)

    def printed(self) -> set[str]:
        words = {  # of the counters of results
            str(call.args[1].value)
            for call in self._calls["count"]
            if len(call.args) > 1 and isinstance(call.args[1], ast.Constant)
        }
        return words | {
            " ".join(text.split())
            for path, module in self._modules.items()
            if path.parent.name == "cli"
            for node in ast.walk(module)
            if isinstance(node, ast.Yield) and node.value is not None
            for text in self.texts(node.value)
        }

    def _site(self, expression: ast.expr) -> Iterator[str]:
        """Yield the texts of a site.  If it uses parameters, evaluate each call of its function."""
        _, function = self._scopes.get(expression, (None, None))
        calls: list[ast.Call | None] = [None]
        if function is not None:
            names = {one.id for one in ast.walk(expression) if isinstance(one, ast.Name)}
            if names & set(_parameters(function)) and function.name != "__init__":
                calls = [*self._calls_of(function)] or calls
        for call in calls:
            self._known.clear()
            self._bound = (function, call)
            yield from self.texts(expression)
        self._bound = (None, None)
        self._known.clear()

    # --- expressions -----------------------------------------------------------------------------

    def texts(self, node: ast.expr, depth: int = _DEPTH) -> list[str]:
        """Return the texts that the expression *node* may have."""
        if (node, depth) not in self._known:
            self._known[node, depth] = [UNKNOWN]  # until it is known: an expression may use itself
            found = itertools.islice(self._texts(node, depth), _MOST)
            self._known[node, depth] = list(dict.fromkeys(found)) or [UNKNOWN]
        return self._known[node, depth]

    def _texts(self, node: ast.expr, depth: int) -> Iterable[str]:
        if depth < 0:
            return [UNKNOWN]
        match node:
            case ast.Constant(value=str(value)):
                return [value]
            case ast.JoinedStr(values=values):
                parts = [
                    self._placeholder(part.value, depth)
                    if isinstance(part, ast.FormattedValue)
                    else self.texts(part, depth)
                    for part in values
                ]
                return map("".join, itertools.islice(itertools.product(*parts), _MOST))
            case ast.BinOp(op=ast.Add(), left=left, right=right):
                both = itertools.product(self.texts(left, depth), self.texts(right, depth))
                return map("".join, both)
            case ast.IfExp(body=body, orelse=orelse):
                return [*self.texts(body, depth), *self.texts(orelse, depth)]
            case ast.BoolOp(values=values):
                return itertools.chain.from_iterable(self.texts(one, depth) for one in values)
            case ast.Dict(values=values):
                return itertools.chain.from_iterable(self.texts(one, depth) for one in values)
            case ast.Await(value=value):
                return self.texts(value, depth)
            case ast.Subscript(value=ast.Name() as value):
                return self.texts(value, depth)
            case ast.Name(id=name):
                return self._variable(name, node, depth - 1)
            case ast.Attribute(attr=name):
                return self._field(name, node, depth - 1)
            case ast.Call(
                func=ast.Name(id=name)
                | ast.Attribute(value=ast.Name(id="self" | "cls" | "plaintext_guard"), attr=name)
            ):
                return self._result(name, node, depth - 1)
        return [UNKNOWN]

    def _placeholder(self, node: ast.expr, depth: int) -> list[str]:
        """Return the texts of a placeholder that are more than one word; otherwise `...`."""
        texts = (text if " " in text.strip() else UNKNOWN for text in self.texts(node, depth))
        return list(dict.fromkeys(texts))

    def _variable(self, name: str, node: ast.AST, depth: int) -> Iterator[str]:
        _, function = self._scopes[node]
        if function is not None:
            values = [
                value
                for statement in ast.walk(function)
                for assigned, value in _assigned(statement)
                if assigned == name and not _is_none(value)
            ]
            parameters = _parameters(function)
            if name in parameters:
                values += self._arguments(function, name)
            if values or name in parameters:
                for value in values:
                    yield from self.texts(value, depth)
                return
        for value in self._nearest(node, self._constants.get(name, [])):
            yield from self.texts(value, depth)

    def _nearest(self, node: ast.AST, found: list[Node]) -> list[Node]:
        """Return those of *found* that are in the module of *node*; all if none is there."""
        module, _ = self._scopes[node]
        return [one for one in found if self._scopes[one][0] is module] or found

    def _calls_of(self, function: Function) -> list[ast.Call]:
        is_method = "self" in _parameters(function)  # which subclasses call, too
        if function.name.startswith("_") and not is_method:
            return self._nearest(function, self._calls.get(function.name, []))
        return self._calls.get(function.name, [])

    def _arguments(self, function: Function, name: str) -> Iterator[ast.expr]:
        """Yield what the package's calls of *function* pass as *name*, and its default."""
        if function.name == "__init__":  # its callers have the name of its class
            return
        parameters = _parameters(function)
        position = parameters.index(name) - (parameters[0] in ("self", "cls"))
        bound, only = self._bound
        calls = [only] if only is not None and bound is function else self._calls_of(function)
        given = False
        for call in calls:
            named = [one.value for one in call.keywords if one.arg == name]
            values = named or call.args[position : position + 1]
            given = bool(values)
            yield from values
        if only is not None and bound is function and given:
            return
        plain = [*function.args.posonlyargs, *function.args.args]
        defaults = dict(zip([one.arg for one in plain][::-1], function.args.defaults[::-1]))  # noqa: B905
        if name in defaults:
            yield defaults[name]

    def _field(self, name: str, node: ast.AST, depth: int) -> Iterator[str]:
        """Yield the texts of a field of a named tuple of this module."""
        module, _ = self._scopes[node]
        for of, number in self._fields.get(name, ()):
            for call in self._calls.get(of, ()):
                if self._scopes[call][0] is not module:
                    continue
                named = [one.value for one in call.keywords if one.arg == name]
                for value in named or call.args[number : number + 1]:
                    yield from self.texts(value, depth)

    def _result(self, name: str, node: ast.AST, depth: int) -> Iterator[str]:
        for function in self._nearest(node, self._functions.get(name, [])):
            for node in ast.walk(function):
                if isinstance(node, ast.Return) and node.value and not _is_none(node.value):
                    yield from self.texts(node.value, depth)


# --- syntax --------------------------------------------------------------------------------------


def _files() -> Iterator[Path]:
    return SOURCE.rglob("*.py")


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_logged(call: ast.Call) -> bool:
    return (
        isinstance(call.func, ast.Attribute)
        and call.func.attr in _LOGGED
        and _name(call.func.value) in ("logger", "warnings")
    )


def _message(call: ast.Call, path: Path) -> ast.expr | None:
    """Return the text that *call*, in the file *path*, reports; None if it reports nothing."""
    name = _name(call.func)
    if name == "add" and len(call.args) == 4:  # of `Problems`
        return call.args[3]
    if name == "__init__" and len(call.args) == 2 and path.parent.name == "cli":  # of `Failure`
        return call.args[0]
    is_error = name.endswith("Error") and name not in _INTERNAL
    if not (is_error or name in _FAILURES or _is_logged(call)):
        return None
    if call.args:
        return call.args[0]
    return ast.Constant("wrong key, or the value was modified or moved") if is_error else None


def _parameters(function: Function) -> list[str]:
    arguments = function.args
    return [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _assigned(statement: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that *statement* assigns, each with its expression."""
    match statement:
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
            for name, value in zip(names, values, strict=False):
                yield _name(name), value
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield _name(target), value
        case (
            ast.AnnAssign(target=target, value=ast.expr() as value)
            | ast.NamedExpr(target=target, value=value)
        ):
            yield _name(target), value
