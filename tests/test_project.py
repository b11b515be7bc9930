"""The project's README, metadata and public names agree with its code."""

import importlib.metadata
import inspect
import re
import tomllib
from pathlib import Path

import pytest

import adk_secure_sessions
from tests.pages import name_of

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def test_installed_version_is_the_one_in_pyproject() -> None:
    assert importlib.metadata.version("adk-secure-sessions") == PROJECT["version"]


def test_changelog_has_a_section_for_this_version() -> None:
    assert f"## [{PROJECT['version']}]" in (ROOT / "CHANGELOG.md").read_text()


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
    for folder in ("src", "examples", "docs"):
        written += [
            path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".html", ".sh")
        ]
    texts = {path: path.read_text(encoding="utf-8") for path in written if path.is_file()}
    found = {path.name: installs_by_name(text) for path, text in texts.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_make_commands_in_the_pages_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)", page.read_text()))
    named |= set(re.findall(r"^ *make ([a-z-]+)", page.read_text(), re.MULTILINE))
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("name", adk_secure_sessions.__all__)
def test_public_name_has_a_docstring(name: str) -> None:
    assert inspect.getdoc(getattr(adk_secure_sessions, name))


@pytest.mark.parametrize("name", adk_secure_sessions.__all__)
def test_public_methods_have_docstrings(name: str) -> None:
    thing = getattr(adk_secure_sessions, name)
    methods = inspect.getmembers(thing, inspect.isfunction) if inspect.isclass(thing) else []
    undocumented = [
        n for n, method in methods if not n.startswith("_") and not inspect.getdoc(method)
    ]
    assert undocumented == []


def test_package_is_marked_as_typed() -> None:
    assert (Path(adk_secure_sessions.__file__).parent / "py.typed").exists()
