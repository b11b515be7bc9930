"""The mutants of a module: copies with one small change each, which a test should notice.

The changes are mutmut's (`mutmut.node_mutation`), and two more: a `raise` is removed, and a
condition is negated.  Those that nearly always end in a TypeError are left out: a variable that
becomes None, an argument that is removed, and the arguments of `len` and `isinstance`.  Unlike with
mutmut, functions with a decorator and code outside of functions are mutated: most functions that
take keys are decorated, and the layouts of stored bytes are constants.  Not changed are texts of
error messages and of the log, which other tests compare with the documentation; annotations;
imports; protocols; and names of type variables and loggers.
"""

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

import libcst as cst
from mutmut import node_mutation

# Calls whose arguments are texts for people, and calls that only matter to type checkers.
_SPEAKING = re.compile(
    r"(\w*Error|\w*Refused|_\w*malformed|_reject\w*|warn|\w*replayed|_failure"
    r"|_unreachable)"
)
_LOGGING = ("logger", "logging")
_CRUDE = (node_mutation.operator_assignment, node_mutation.operator_augmented_assignment)
_OPERATORS = [
    (kind, operator)
    for kind, operator in node_mutation.mutation_operators
    if operator not in _CRUDE
]
# Constants with pairs of texts: what happened and what to do.
_ADVICE = ("_ADVICE", "_CREDENTIALS", "_NOT_ALLOWED", "_PENDING")
_TYPING = ("TypeVar", "ParamSpec", "NewType", "cast")


class Mutant(NamedTuple):
    """A changed copy of a module.

    Attributes:
        function: The qualified name of the changed function; `module` outside of functions.
        old: The changed code, on one line.
        new: The code in its place.
        number: 0 for the first such change in the function, 1 for the second.
        line: The number of the line.
        source: The whole changed module.
    """

    function: str
    old: str
    new: str
    number: int
    line: int
    source: str

    @property
    def name(self) -> str:
        """What identifies the mutant as long as its function is not changed."""
        which = f" ({self.number + 1})" if self.number else ""
        return f"`{self.function}`: `{self.old}` → `{self.new}`{which}"


def mutants(source: str) -> Iterator[Mutant]:
    """Yield the mutants of the module *source*; each has a syntax tree of its own."""
    module = cst.parse_module(source)
    known = {ast.dump(ast.parse(source))}
    numbers: dict[tuple[str, str, str], int] = {}
    for function, node, new in _changes(module):
        changed = module.deep_replace(node, new).code
        try:
            tree = ast.dump(ast.parse(changed))
        except SyntaxError:
            continue
        if tree in known:
            continue
        known.add(tree)
        old_code, new_code = _shortened(_code(module, node), _code(module, new))
        key = (function, old_code, new_code)
        numbers[key] = numbers.get(key, -1) + 1
        line = _first_difference(source, changed)
        yield Mutant(function, old_code, new_code, numbers[key], line, changed)


def _changes(module: cst.Module) -> Iterator[tuple[str, cst.CSTNode, cst.CSTNode]]:
    """Yield each change: the function, the changed node and the new node."""

    def visit(
        node: cst.CSTNode, names: tuple[str, ...], constant: str, speaks: bool
    ) -> Iterator[tuple[str, cst.CSTNode, cst.CSTNode]]:
        if _is_left_out(node):
            return
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            names = (*names, node.name.value)
        function = ".".join(names) or "module"
        if isinstance(node, cst.Assign):
            constant = _last_name(node.targets[0].target)
        if isinstance(node, cst.Call):
            name = _last_name(node.func)
            if name in _TYPING or _first_name(node.func) == "logging":
                return
            speaks = speaks or bool(_SPEAKING.fullmatch(name))
            speaks = speaks or _first_name(node.func) in _LOGGING
        if isinstance(node, cst.Tuple) and constant in _ADVICE:
            speaks = True
        if isinstance(node, cst.Raise):
            yield function, node, cst.Pass()
        if isinstance(node, cst.If | cst.IfExp):
            yield function, node.test, cst.UnaryOperation(cst.Not(), _in_parentheses(node.test))
        if not (speaks and _is_text(node)):
            for kind, operator in _OPERATORS:
                if isinstance(node, kind):
                    for new in operator(node):
                        if not (_is_crude(node, new) or (speaks and _drops_text(node, new))):
                            yield function, node, new
        for child in node.children:
            yield from visit(child, names, constant, speaks)

    yield from visit(module, (), "", False)


def _is_left_out(node: cst.CSTNode) -> bool:
    if isinstance(node, cst.Annotation | cst.Import | cst.ImportFrom | cst.FormattedString):
        return True
    if isinstance(node, cst.Expr) and _is_text(node.value):
        return True  # a docstring
    if isinstance(node, cst.If) and _last_name(node.test) == "TYPE_CHECKING":
        return True
    if isinstance(node, cst.ClassDef):
        return any(_last_name(base.value) == "Protocol" for base in node.bases)
    if isinstance(node, cst.Assign):  # __slots__ have no behaviour that is promised
        return _last_name(node.targets[0].target) in ("__slots__", "__all__")
    return False


def _is_text(node: cst.CSTNode) -> bool:
    if isinstance(node, cst.SimpleString):
        return not node.prefix.lower().startswith(("b", "rb"))
    return isinstance(node, cst.ConcatenatedString | cst.FormattedString)


def _is_crude(node: cst.CSTNode, new: cst.CSTNode) -> bool:
    """Return whether *new* is a call without one of its arguments, or one that raises TypeError."""
    if not (isinstance(node, cst.Call) and isinstance(new, cst.Call)):
        return False
    return len(new.args) < len(node.args) or _last_name(node.func) in ("len", "isinstance")


def _drops_text(node: cst.CSTNode, new: cst.CSTNode) -> bool:
    """Return whether *new* is the call *node* without one of its texts."""
    if not (isinstance(node, cst.Call) and isinstance(new, cst.Call)):
        return False
    kept = {id(argument.value) for argument in new.args}
    return any(
        id(argument.value) not in kept and argument.keyword is None for argument in node.args
    )


def _in_parentheses(node: cst.BaseExpression) -> cst.BaseExpression:
    return node.with_changes(
        lpar=[cst.LeftParen(), *node.lpar], rpar=[*node.rpar, cst.RightParen()]
    )


def _last_name(node: cst.CSTNode) -> str:
    if isinstance(node, cst.Attribute):
        node = node.attr
    return str(node.value) if isinstance(node, cst.Name) else ""


def _first_name(node: cst.CSTNode) -> str:
    while isinstance(node, cst.Attribute):
        node = node.value
    return str(node.value) if isinstance(node, cst.Name) else ""


def _code(module: cst.Module, node: cst.CSTNode) -> str:
    return " ".join(module.code_for_node(node).split())


_CONTEXT = 24  # characters that are shown around a change


def _shortened(old: str, new: str) -> tuple[str, str]:
    """Return the differing parts of two texts, with some characters around them."""
    start = 0
    while start < min(len(old), len(new)) and old[start] == new[start]:
        start += 1
    end = 0
    while end < min(len(old), len(new)) - start and old[-1 - end] == new[-1 - end]:
        end += 1
    first, last = max(0, start - _CONTEXT), max(0, end - _CONTEXT)
    return old[first : len(old) - last], new[first : len(new) - last]


def _first_difference(one: str, other: str) -> int:
    pairs = zip(one.splitlines(), other.splitlines(), strict=False)
    return next((number for number, (a, b) in enumerate(pairs, 1) if a != b), 0)
