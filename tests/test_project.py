"""The project's README, metadata and public names agree with its code."""

import importlib.metadata
import inspect
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import adk_secure_sessions
from release import check, sbom
from tests.pages import PAGES, PROJECT, ROOT, name_of


def test_installed_version_is_the_one_in_pyproject() -> None:
    assert importlib.metadata.version("adk-secure-sessions") == PROJECT["version"]


def test_changelog_has_notes_for_this_version() -> None:
    _, notes = check.changelog_section(PROJECT["version"])
    assert notes.startswith("### Release notes\n")


def tracked() -> list[Path]:
    """Return the tracked files, and new ones that are not ignored."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("the list of the repository's files needs git and a clone")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def conflict_markers(text: bytes) -> list[bytes]:
    """Return the lines that git writes into a file for a person who merges."""
    return re.findall(rb"^(?:<{7}|\|{7}|>{7})(?: .*)?$|^={7}$", text, re.MULTILINE)


def test_no_file_has_markers_of_an_unresolved_merge() -> None:
    both = b"a\n<<<<<<< ours\nb\n||||||| base\n=======\nc\n>>>>>>> theirs\n"
    assert len(conflict_markers(both)) == 4
    found = {path.name: conflict_markers(path.read_bytes()) for path in tracked()}
    assert len(found) > 100
    assert {name: lines for name, lines in found.items() if lines} == {}


# --- addresses that nobody knows yet --------------------------------------------------------------

HOME_FILES = [
    ROOT / "mkdocs.yml", ROOT / "pyproject.toml", ROOT / "hatch_build.py",
    *sorted(ROOT.glob("*.md")),
    *(path for path in sorted((ROOT / ".github").rglob("*")) if path.is_file()),
]  # fmt: skip
# Everything that these files link to, outside this project.
KNOWN = (
    "http://127.0.0.1:8000",
    "https://github.com/Alberto-Codes/adk-secure-sessions",
    "https://google.github.io/adk-docs/",
    "https://keepachangelog.com/",
    "https://semver.org/",
)


def _has(pattern: str, *names: str) -> bool:
    return any(re.search(pattern, (ROOT / name).read_text(), re.MULTILINE) for name in names)


def test_each_unknown_address_is_listed_until_it_is_filled_in() -> None:
    """In both directions: no invented address, and no row for one that is known."""
    urls = PROJECT.get("urls", {})
    missing = {
        "name": PROJECT["name"] == check.TAKEN,
        "repository": "Repository" not in urls,
        "site": "Documentation" not in urls,
        "contact": not _has(r"[\w.-]+@[\w.-]+\.\w+", "SECURITY.md", "pyproject.toml"),
        "owner": not _has(r"^[^#\n]*@", ".github/CODEOWNERS"),
    }
    assert check.unknown_addresses() == [name for name, absent in missing.items() if absent]


@pytest.mark.parametrize("path", HOME_FILES, ids=lambda path: path.name)
def test_no_address_was_invented(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    known = (*KNOWN, *PROJECT.get("urls", {}).values())
    found = re.findall(r"https?://[^\s)>\"'`]+", text)
    assert [address for address in found if not address.startswith(known)] == []
    # `name @ git+URL`, `OWNER/NAME` and the like only occur where a reader puts something in.
    assert not re.search(r"\bTODO\b|\bFIXME\b|your-org|example\.(com|org)", text)


# --- what prevents a release ----------------------------------------------------------------------

TABLE = "\n## Addresses that are not known yet\n\n| unknown | places |\n|---|---|\n"


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    """A project that may be released."""
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "settled"\nversion = "2.1.0"\n')
    (tmp_path / "RELEASING.md").write_text(f"# Releasing\n{TABLE}\n## Each release\n")
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## [Unreleased]\n\n## [2.1.0] - 2030-01-31\n\nNotes.\n\n"
        "## [2.0.0] - 2030-01-01\n\nOlder.\n"
    )
    return tmp_path


def test_project_that_is_ready_may_be_released(ready: Path) -> None:
    assert check.problems(ready, tag="v2.1.0") == []
    assert check.changelog_section("2.1.0", ready) == ("2030-01-31", "Notes.")


@pytest.mark.parametrize(
    ("file", "old", "new", "problem"),
    [
        ("pyproject.toml", "settled", check.TAKEN, "belongs to another package"),
        ("RELEASING.md", "|---|---|\n", "|---|---|\n| owner | here |\n", "Not known yet: owner."),
        ("CHANGELOG.md", "2030-01-31", "unreleased", "no section for 2.1.0 with a date"),
        ("CHANGELOG.md", "Notes.\n\n", "", "2.1.0 in CHANGELOG.md is empty"),
        ("CHANGELOG.md", "[Unreleased]\n", "[Unreleased]\n\n- New.\n", "unreleased entries"),
        ("pyproject.toml", "2.1.0", "2.0.0", "The tag is v2.1.0, and the version is 2.0.0."),
    ],
)
def test_release_is_stopped(ready: Path, file: str, old: str, new: str, problem: str) -> None:
    text = (ready / file).read_text()
    assert old in text
    (ready / file).write_text(text.replace(old, new))
    (found,) = check.problems(ready, tag="v2.1.0")
    assert problem in found


def test_this_project_may_not_be_released_before_its_name_is_settled() -> None:
    if PROJECT["name"] == check.TAKEN:
        assert check.problems()[0].startswith("The name adk-secure-sessions belongs to another")
        assert "**Do not publish this package" in (ROOT / "RELEASING.md").read_text()


# --- licences -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("licences", "accepted"),
    [
        ([{"license": {"id": "MIT"}}], True),
        ([{"expression": "Apache-2.0 AND (MIT OR BSD-3-Clause)"}], True),
        ([{"expression": "MIT AND GPL-3.0-only"}], False),
        ([{"license": {"id": "MIT"}}, {"license": {"name": "Our own terms"}}], False),
        ([], False),
    ],
)
def test_licence_of_a_dependency_is_checked(
    licences: list[dict[str, object]], accepted: bool
) -> None:
    bom = {"components": [{"name": "library", "licenses": licences}]}
    assert (sbom.rejected(bom) == {}) is accepted


def test_list_of_packages_has_all_extras_for_users() -> None:
    assert set(sbom.EXTRAS.split(",")) == set(PROJECT["optional-dependencies"])


def test_runtime_dependencies_are_these_four() -> None:
    names = {re.split(r"[\[<>=]", line)[0] for line in PROJECT["dependencies"]}
    assert names == {"google-adk", "cryptography", "sqlalchemy", "aiosqlite"}


def test_extras_that_pages_and_messages_name_exist() -> None:
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    pages = "".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"'\.\[(\w+)\]'", pages))
    named |= set(re.findall(r'require\("(\w+)"', source))
    assert {"aws", "gcp", "pkcs11", "vault"} <= named <= set(PROJECT["optional-dependencies"])


def test_version_is_newer_than_the_other_package_of_this_name() -> None:
    assert int(PROJECT["version"].split(".")[0]) >= 2  # RELEASING.md


INSTALLERS = r"\b(pip3?|pipx|uv|uvx|poetry|pdm|conda)\b"
# From the repository: `name @ git+URL`, or `git+URL`.
BY_NAME = re.compile(INSTALLERS + r"[^\n]*?[\s'\"`]adk[-_]secure[-_]sessions(?! @ git\+)\b")


def installs_by_name(text: str) -> list[str]:
    found = [match[0] for match in BY_NAME.finditer(text) if "uninstall" not in match[0]]
    return found + re.findall(r"adk[-_]secure[-_]sessions\[[^\n]*", text)


@pytest.mark.parametrize(
    "line",
    [
        "pip install adk-secure-sessions",
        "uv add 'adk-secure-sessions>=2'",
        "pip install --upgrade adk_secure_sessions",
        "needs the extra adk-secure-sessions[vault]",
    ],
)
def test_command_that_installs_by_name_is_found(line: str) -> None:
    assert installs_by_name(line)


def test_no_page_or_message_installs_this_package_by_its_name() -> None:
    """By this name, an installer finds another author's package: RELEASING.md."""
    written = [ROOT / "Makefile", ROOT / "mkdocs.yml", *(ROOT / ".ci").iterdir(), *PAGES]
    written += (ROOT / ".github").rglob("*")
    for folder in ("src", "examples", "docs"):
        written += [
            path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".html", ".sh")
        ]
    texts = {path: path.read_text(encoding="utf-8") for path in written if path.is_file()}
    found = {path.name: installs_by_name(text) for path, text in texts.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_make_commands_in_the_pages_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z0-9-]+)", page.read_text()))
    named |= set(re.findall(r"^ *make ([a-z0-9-]+)", page.read_text(), re.MULTILINE))
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("name", adk_secure_sessions.__all__)
def test_public_name_and_its_methods_have_docstrings(name: str) -> None:
    thing = getattr(adk_secure_sessions, name)
    # Python does not keep the docstring of a variable; the site shows it.
    assert not callable(thing) or inspect.getdoc(thing)
    methods = inspect.getmembers(thing, inspect.isfunction) if inspect.isclass(thing) else []
    undocumented = [
        n for n, method in methods if not n.startswith("_") and not inspect.getdoc(method)
    ]
    assert undocumented == []


def test_package_is_marked_as_typed() -> None:
    assert (Path(adk_secure_sessions.__file__).parent / "py.typed").exists()
