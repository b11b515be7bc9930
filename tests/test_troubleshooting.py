"""docs/troubleshooting.md has an entry for each text of an error or a warning."""

import re
from functools import cache
from pathlib import Path

import pytest

from tests import error_texts
from tests.error_texts import SOURCE, UNKNOWN

PAGE = Path(__file__).parent.parent / "docs" / "troubleshooting.md"
HEAD = "| text | cause | remedy |"
# A shorter entry could also match the texts of other errors, unless it is a whole text.
SHORTEST = 14  # letters


@cache
def entries() -> list[str]:
    """The texts in the first column of the page's tables."""
    found = []
    for table in PAGE.read_text("utf-8").split(HEAD)[1:]:
        rows = re.match(r"\n\|---\|---\|---\|\n((?:\|.*\n?)*)", table)
        assert rows, f"a table does not have three columns: {table[:100]!r}"
        for row in rows[1].splitlines():
            text, cause, remedy = row.strip("|").split(" | ")
            assert cause.strip(), row
            assert remedy.strip(), row
            cells = [one.removeprefix("• ") for one in text.strip().split("<br>")]
            assert all(re.fullmatch("`[^`]+`", one) for one in cells), row
            found += [one.strip("`") for one in cells]
    return found


@cache  # the cache of `re` is smaller than the page
def pattern(entry: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, entry.removesuffix(UNKNOWN).split(UNKNOWN))))


def matches(entry: str, text: str) -> bool:
    """Whether *text* begins with *entry*, in which `...` stands for any text."""
    return pattern(entry).match(text) is not None


def letters(text: str) -> int:
    return len(re.findall("[A-Za-z]", text))


def test_each_text_of_an_error_has_an_entry() -> None:
    missing = {
        f"{text!r} (src/{place})"
        for text, place in error_texts.collect()
        if not any(matches(one, text) for one in entries())
    }
    assert not missing, (
        "docs/troubleshooting.md has no entry for these texts: add a row with the text (`...` for "
        "what differs), its cause and its remedy, or add the text to a row with the same remedy:\n"
        + "\n".join(sorted(missing))
    )


def test_each_entry_is_the_text_of_an_error() -> None:
    texts = {text for text, _ in error_texts.collect()} | error_texts.printed()
    dead = [one for one in entries() if not any(matches(one, text) for text in texts)]
    assert not dead, f"no code has these texts any more: remove them from the page: {dead}"


def test_each_entry_is_specific() -> None:
    texts = {text for text, _ in error_texts.collect()} | error_texts.printed()
    vague = [one for one in entries() if letters(one) < SHORTEST and one not in texts]
    assert not vague, f"these entries may match texts of other errors: {vague}"
    assert len(entries()) == len(set(entries())), "an entry is there twice"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        # One of each kind of site: a class, a default, a condition, a table, a parameter, a logger.
        ("a Fernet key is ... bytes, got ...", "backends/fernet.py"),
        ("wrong key, or the value was modified or moved", "crypto/aead.py"),
        ("backend ... stores plaintext", "backends/registry.py"),
        ("root key ...: the PIN is wrong", "keys/pkcs11.py"),
        ("root key ...: Vault is sealed or in maintenance (...); check its ...", "keys/remote.py"),
        ("left out of a listing: ...", "service.py"),
        ("its owner's row was removed", "maintenance/verify.py"),
        ("key_db_url names a database of sessions ...", "storage/survey.py"),
    ],
)
def test_texts_are_found_in_the_source(text: str, place: str) -> None:
    found = [one.text for one in error_texts.collect() if f"/{place}:" in one.place]
    assert any(matches(text, one) for one in found)


def test_error_classes_are_known_to_the_search() -> None:
    """A class whose name does not end with Error would not be searched."""
    source = (SOURCE / "errors.py").read_text("utf-8")
    names = re.findall(r"^class (\w+)\(\w*(?:Error|Exception)\b", source, re.MULTILINE)
    assert names
    assert [name for name in names if not name.endswith("Error")] == []
