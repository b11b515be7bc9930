"""Each text of an error or a warning says what to do, or has an entry in docs/troubleshooting.md.

The texts are those that stand in the source where an error is raised or a warning is logged.  `...`
stands for what is not known before the program runs.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "adk_secure_sessions"
PAGE = ROOT / "docs" / "troubleshooting.md"
HEADS = r"^\| text \| .* \|\n\|---\|---\|\n((?:\|.*\n)+)"
UNKNOWN = "..."
# A shorter entry could also match the texts of other errors, unless it is a whole text.
SHORTEST = 14  # letters
REPORTS = re.compile(r"\w+Error|Failure|BadParameter|warning|warn")
# They name the argument, or the value in it, that was not accepted.
ARGUMENTS = {"InputValidationError", "TypeError", "ValueError"}
# Whatever their text is, the remedy is in the section "Damaged rows"; for rows that `migrate` and
# `export` cannot convert, in the sections of these commands.
REJECTIONS = {"DecryptionError", "PlaintextRefusedError", "TamperedError", "UnknownKeyError"}
REJECTIONS |= {"ConversionError"}
# A text names an action if it has a verb in the imperative, or says what is needed or allowed.
VERBS = (
    "add allow ask call change check choose close compare continue copy correct create delete do "
    "drop erase export fill find free get give grant install keep leave list load log look make "
    "move name omit open pass put raise read register remove rename replace report restart restore "
    "run save send set start stop store switch try unset update upgrade use wait write"
)
ACTION = re.compile(
    r"(?:^|[:;,.(]|\b(?:and|or|then)) ?(?:(?:first|then|otherwise|either|also),? )?"
    rf"(?:{VERBS.replace(' ', '|')})\b"
    r"|\b(?:must|needs?|only|cannot be combined|at most|more than|is written)\b",
    re.IGNORECASE,
)
# Raised for callers inside this package, or made of texts that stand elsewhere in the source.
NO_ENTRY = {
    "... of the plaintext source cannot be read: ...",
    "SQLite ended the transaction",
    "a key provider ...",
    "create_tables is False",
    "module ... has no attribute ...",
    "root key ...: ...; ...",
}


@cache
def entries() -> list[str]:
    """The texts in the first column of the page's tables."""
    found = []
    for table in re.findall(HEADS, PAGE.read_text("utf-8"), re.MULTILINE):
        for row in table.splitlines():
            text, remedy = row.strip("|").split(" | ")
            assert remedy.strip(), row
            cells = [one.removeprefix("• ") for one in text.strip().split("<br>")]
            assert all(re.fullmatch("`[^`]+`", one) for one in cells), row
            found += [one.strip("`") for one in cells]
    return found


def text_of(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(value)):
            return re.sub("%[srd]", UNKNOWN, value)
        case ast.JoinedStr(values=values):
            return "".join(map(text_of, values))
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return text_of(left) + text_of(right)
    return UNKNOWN


@cache
def modules() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text("utf-8")) for path in sorted(SOURCE.rglob("*.py"))}


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    for path, module in modules().items():
        for node in ast.walk(module):
            yield path, node


@cache
def reported() -> dict[str, str]:
    """The texts of errors and warnings, each with its place in the source."""
    found = {}
    for path, node in nodes():
        if isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            text = " ".join(text_of(node.args[0]).split())
            if name in REJECTIONS | ARGUMENTS or not REPORTS.fullmatch(name):
                continue
            if letters(text) and text not in NO_ENTRY:
                found[text] = f"{path.relative_to(ROOT)}:{node.lineno}"
    return found


@cache
def written() -> str:
    """All texts in the source, a line each."""
    texts = [text_of(node) for _, node in nodes() if isinstance(node, ast.expr)]
    return "\n".join(" ".join(text.split()) for text in texts if text != UNKNOWN)


@cache  # the cache of `re` is smaller than the page
def pattern(entry: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, entry.removesuffix(UNKNOWN).split(UNKNOWN))))


def letters(text: str) -> int:
    return len(re.findall("[A-Za-z]", text))


def test_each_text_of_an_error_names_an_action_or_has_an_entry() -> None:
    missing = {
        f"{text!r} ({place})"
        for text, place in reported().items()
        if not ACTION.search(text)
        # The page may also say what stands for `...` in the source.
        if not any(pattern(one).match(text) or pattern(text).match(one) for one in entries())
    }
    assert not missing, (
        "these texts do not say what to do: add that to the text, or add the text (`...` for what "
        "differs) to docs/troubleshooting.md, in a row with the same remedy:\n"
        + "\n".join(sorted(missing))
    )


def stands_in_the_source(part: str) -> bool:
    """Whether the source has *part*, or both halves of it: the code may join a name and a text."""
    ends = [len(part), *(one.start() for one in re.finditer(" ", part))]
    return any(part[:end].strip() in written() and part[end:].strip() in written() for end in ends)


def test_each_entry_is_a_text_of_the_source() -> None:
    dead = [
        one
        for one in entries()
        if not all(map(stands_in_the_source, re.split(r"\.\.\.|[();:]|'s ", one)))
    ]
    assert not dead, f"no code has these texts any more: remove them from the page: {dead}"


def test_each_entry_is_specific() -> None:
    vague = [one for one in entries() if letters(one) < SHORTEST and one not in written()]
    assert not vague, f"these entries may match texts of other errors: {vague}"
    assert len(entries()) == len(set(entries())), "an entry is there twice"


def test_error_classes_are_known_to_the_search() -> None:
    """A class whose name does not end with Error would not be searched."""
    source = (SOURCE / "errors.py").read_text("utf-8")
    names = re.findall(r"^class (\w+)\(\w*(?:Error|Exception)\b", source, re.MULTILINE)
    assert names
    assert [name for name in names if not name.endswith("Error")] == []
