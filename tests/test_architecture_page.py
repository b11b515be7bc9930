"""docs/architecture.md names files and functions that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "adk_secure_sessions"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
FILES = sorted(set(re.findall(r"`((?:[a-z_]+/)*[a-z_0-9]+\.(?:py|md|toml))`", PAGE)))
FOLDERS = sorted(set(re.findall(r"^\| `([a-z_]+)/` \|", PAGE, re.MULTILINE)))
SOURCE = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("name", FILES)
def test_file_that_the_page_names_exists(name: str) -> None:
    places = [ROOT / name, PACKAGE / name, *(PACKAGE / folder / name for folder in FOLDERS)]
    assert any(place.is_file() for place in places)


def test_page_names_every_package() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders == set(FOLDERS)
    assert len(FILES) > 20


@pytest.mark.parametrize(
    "name", sorted(set(re.findall(r"`(?:[A-Za-z]+\.)?([A-Za-z_]{6,})`", PAGE)))
)
def test_name_in_code_that_the_page_uses_exists(name: str) -> None:
    texts = (SOURCE, (ROOT / "docs" / "format.md").read_text(encoding="utf-8"))
    assert any(re.search(rf"\b{name}\b", text) for text in texts) or (PACKAGE / name).is_dir()
