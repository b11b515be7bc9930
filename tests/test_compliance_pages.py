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
