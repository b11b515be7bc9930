"""docs/architecture.md names files and functions that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "adk_secure_sessions"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
FILES = sorted(set(re.findall(r"`((?:[a-z_]+/)*[a-z_0-9]+\.(?:py|md|toml))`", PAGE)))
FOLDERS = sorted(set(re.findall(r"^\| `([a-z_]+)/` \|", PAGE, re.MULTILINE)))
SOURCE = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))


def test_files_that_the_page_names_exist() -> None:
    roots = [ROOT, PACKAGE, *(PACKAGE / folder for folder in FOLDERS)]
    missing = [name for name in FILES if not any((root / name).is_file() for root in roots)]
    assert missing == []


def test_page_names_every_package() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders == set(FOLDERS)
    assert len(FILES) > 20


def test_names_in_code_that_the_page_uses_exist() -> None:
    names = sorted(set(re.findall(r"`(?:[A-Za-z]+\.)?([A-Za-z_]{6,})`", PAGE)))
    assert len(names) > 20
    format_page = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
    known = set(re.findall(r"\w+", SOURCE + format_page))
    assert [name for name in names if name not in known and not (PACKAGE / name).is_dir()] == []
