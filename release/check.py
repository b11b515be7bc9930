"""Say what prevents the release of this version.

Usage: python -m release.check [--notes FILE]

If the environment variable TAG is set, it is the tag of the release.  With `--notes`, the program
writes the section of this version in the changelog to FILE.
"""

import argparse
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TAKEN = "adk-secure-sessions"  # on the package index, by another author: RELEASING.md


def project(root: Path = ROOT) -> dict[str, Any]:
    """Return the table `[project]` of pyproject.toml."""
    content = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    table: dict[str, Any] = content["project"]
    return table


def unknown_addresses(root: Path = ROOT) -> list[str]:
    """Return the first column of the table of unknown addresses in RELEASING.md."""
    text = (root / "RELEASING.md").read_text(encoding="utf-8")
    section = text.partition("\n## Addresses that are not known yet\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("|")]
    return rows[2:]  # without the head of the table


def changelog_section(version: str, root: Path = ROOT) -> tuple[str, str]:
    """Return the date of *version* in the changelog, and the text of its section."""
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(
        rf"^## \[{re.escape(version)}\] - ([^\n]+)\n(.*?)(?=^## |\Z)",
        text,
        re.MULTILINE | re.DOTALL,
    )
    return (found[1], found[2].strip()) if found else ("", "")


def problems(root: Path = ROOT, tag: str | None = None) -> list[str]:
    """Return what prevents a release, one sentence for each problem."""
    table = project(root)
    version = table["version"]
    found = []
    if table["name"] == TAKEN:
        found.append(f"The name {TAKEN} belongs to another package on the index.")
    found += [f"Not known yet: {one}." for one in unknown_addresses(root)]
    date, notes = changelog_section(version, root)
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        found.append(f"CHANGELOG.md has no section for {version} with a date.")
    elif not notes:
        found.append(f"The section for {version} in CHANGELOG.md is empty.")
    unreleased = re.search(
        r"^## \[Unreleased\]\n(.*?)(?=^## |\Z)",
        (root / "CHANGELOG.md").read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    if unreleased and unreleased[1].strip():
        found.append(f"CHANGELOG.md has unreleased entries: move them to {version}.")
    if tag is not None and tag != f"v{version}":
        found.append(f"The tag is {tag}, and the version is {version}.")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Say what prevents the release of this version.")
    parser.add_argument("--notes", type=Path, help="write the release notes to this file")
    arguments = parser.parse_args()
    if arguments.notes is not None:
        _, notes = changelog_section(project()["version"])
        arguments.notes.write_text(notes + "\n", encoding="utf-8")
        return 0
    found = problems(tag=os.environ.get("TAG") or None)
    for problem in found:
        print(problem, file=sys.stderr)
    if found:
        print("Do not release. RELEASING.md says what to do.", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
