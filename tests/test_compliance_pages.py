"""The pages on compliance and on other products keep what they promise in their first lines."""

import re

from tests.pages import DOCS

PRODUCTS = [
    "this package", "ADK alone", "disk or TDE", "pgcrypto", "1.x", "LangGraph", "OpenAI Agents",
    "Rails", "MongoDB",
]  # fmt: skip
SOURCE = re.compile(r"\]\(|\]\[")  # a link in a cell


def tables(page: str) -> list[list[list[str]]]:
    """Return the tables of a page: rows of cells, with the head and without the line below it."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    rows = [[line.strip("|").split("|") for line in table.splitlines()] for table in found]
    return [[[cell.strip() for cell in row] for row in [t[0], *t[2:]]] for t in rows]


def controls() -> list[list[str]]:
    (found,) = (table for table in tables("compliance.md") if "the library provides" in table[0])
    return found


def test_every_control_says_whether_the_library_serves_it() -> None:
    head, *rows = controls()
    for row in rows:
        assert len(row) == len(head), row
        assert row[2].startswith(("**Yes", "**In part", "**Not provided")), row
        assert row[3], row
    named = " ".join(row[0] for row in rows)
    assert [name for name in ("HIPAA", "GDPR", "PCI", "SOC 2") if name not in named] == []


def test_controls_that_the_library_serves_link_to_the_page_that_says_how() -> None:
    for row in controls()[1:]:
        if not row[2].startswith("**Not"):
            assert SOURCE.search(row[2]) or "like all contents" in row[2], row


def test_every_comparison_names_every_product_and_every_cell_its_source() -> None:
    first, *others = tables("comparison.md")
    assert [row[0] for row in first[1:]] == PRODUCTS
    assert len(others) == 4
    for table in others:
        assert [row[0] for row in table[1:]] == PRODUCTS
        for row in table[1:]:
            for cell in row[1:]:
                assert SOURCE.search(cell) or cell == "not documented", row


def test_every_source_of_the_comparison_is_defined_and_used() -> None:
    text = (DOCS / "comparison.md").read_text(encoding="utf-8")
    defined = re.findall(r"^\[([\w-]+)\]: https://", text, re.MULTILINE)
    used = set(re.findall(r"\]\[([\w-]+)\]", text))
    assert len(defined) == len(set(defined))
    assert used == set(defined)
