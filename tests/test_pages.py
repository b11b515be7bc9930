"""The code on the README and the site runs, and prints what the page says."""

import contextlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from adk_secure_sessions import audit_actor
from examples.vectors.page import worked_example
from tests import pages
from tests.pages import PAGES, Page
from tests.servers import PostgreSQL

# google-adk warns of its own experimental and deprecated parts.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

# No block prints these: the bytes of the stored format, which examples/make_vectors.py makes.
NOTATION = re.findall(r"^```text\n(.*?)^```", worked_example() + "\n", re.MULTILINE | re.DOTALL)
WITH_CODE = [page for page in PAGES if pages.blocks(page).regions]
assert WITH_CODE, "no code found: an empty search must not pass as success"
# It starts `adk web` twice; tests/integrations/test_adk_commands.py starts it by default.
SLOW = pages.DOCS / "adk-commands.md"


@pytest.fixture
def audit_log_as_it_was() -> Iterator[None]:
    """Undo what the page on the audit log does to the logger and to the actor of this process."""
    logger = logging.getLogger("adk_secure_sessions.audit")
    before = logger.level, logger.propagate, list(logger.handlers)
    yield
    audit_actor.set(None)
    for handler in logger.handlers:
        if handler not in before[2]:
            handler.close()
    logger.level, logger.propagate, logger.handlers = before
    logger.setLevel(before[0])  # which empties logging's cache of levels


@pytest.mark.usefixtures("audit_log_as_it_was")
@pytest.mark.parametrize(
    "path",
    [pytest.param(one, marks=pytest.mark.soak if one == SLOW else ()) for one in WITH_CODE],
    ids=pages.name_of,
)
def test_code_in_the_page_runs_and_prints_what_it_says(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    def server() -> PostgreSQL:
        started: PostgreSQL = request.getfixturevalue("postgresql")
        return started

    with contextlib.ExitStack() as stack:
        page = Page(tmp_path, monkeypatch, server, stack, expected=NOTATION)
        pages.run(path, page)


@pytest.mark.parametrize("path", PAGES, ids=pages.name_of)
def test_every_block_is_in_a_language_that_is_run(path: Path) -> None:
    document = pages.blocks(path)
    found = [pages.language(region) for _, region in document.regions]
    assert [language for language in found if language not in pages.RUNNERS] == []
    fences = re.findall(r"^[ \t>]*(?:```|~~~)", document.text, re.MULTILINE)
    hidden = document.text.count("<!--- invisible-code:")
    assert len(fences) == 2 * (len(found) - hidden), "Sybil does not find every block"


@pytest.mark.parametrize("path", PAGES, ids=pages.name_of)
def test_no_page_has_an_indented_block(path: Path) -> None:
    """Markdown shows it as code, and no test would run it."""
    text = re.sub(r"^```.*?^```|<!--.*?-->", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"\n\n(?: {4}|\t).*", text) == []


@pytest.mark.parametrize("path", PAGES, ids=pages.name_of)
def test_every_table_has_a_head(path: Path) -> None:
    """Without the line below it, as after an empty line, Markdown shows the rows as text."""
    found = re.findall(r"(?:^|\n\n)\|.*\n(.*)", path.read_text(encoding="utf-8"))
    assert [line for line in found if not re.fullmatch(r"\|[-| :]+\|", line)] == []
