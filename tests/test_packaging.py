"""The wheel and the source distribution hold the right files, and an index can show the README."""

import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import NamedTuple

import pytest

# The environments that test one release of google-adk do not have it.
pytest.importorskip("hatchling", reason="building the package needs the group dev")

from hatch_build import description
from tests.pages import ROOT
from tests.test_project import tracked

pytestmark = pytest.mark.soak  # `make dist-check` checks the files of a release

README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "src" / "adk_secure_sessions"


class Built(NamedTuple):
    sdist: Path
    wheel: Path
    wheel_of_sdist: Path


def hatchling(source: Path, target: Path, kind: str) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (path,) = target.iterdir()
    return path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Both distributions; the second wheel is built from the sdist, whose files get other modes."""
    folder = tmp_path_factory.mktemp("built")
    sdist = hatchling(ROOT, folder / "sdist", "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "source", filter="data")
    (source,) = (folder / "source").iterdir()
    for path in source.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    wheel = hatchling(ROOT, folder / "wheel", "wheel")
    return Built(sdist, wheel, hatchling(source, folder / "again", "wheel"))


@pytest.fixture(scope="module")
def metadata(built: Built) -> Message:
    with zipfile.ZipFile(built.wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_wheel_holds_the_package_and_nothing_else(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        names = set(archive.namelist())
    info = {name for name in names if ".dist-info/" in name}
    assert {name.split(".dist-info/")[1] for name in info} == {
        "METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE",
    }  # fmt: skip
    package = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert names - info == {str(path.relative_to(PACKAGE.parent)) for path in package}
    assert "adk_secure_sessions/py.typed" in names
    assert {Path(name).suffix for name in names - info} == {".py", ".typed"}


def test_source_distribution_holds_the_files_of_the_repository(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        members = archive.getmembers()
    assert all(member.isfile() for member in members), "a link or a device"
    names = {member.name.partition("/")[2] for member in members}
    assert names - {"PKG-INFO"} == {str(path.relative_to(ROOT)) for path in tracked()}


def test_source_distribution_builds_the_same_wheel(built: Built) -> None:
    assert built.wheel_of_sdist.read_bytes() == built.wheel.read_bytes()


def test_metadata_is_of_a_version_that_installers_know(metadata: Message) -> None:
    assert metadata["Metadata-Version"] == "2.4"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"


def links(markdown: str) -> list[str]:
    return re.findall(r"\]\(([^)]+)\)", markdown)


def test_description_is_the_readme_without_links_that_lead_nowhere(metadata: Message) -> None:
    shown = metadata.get_payload()
    assert isinstance(shown, str)
    assert [link for link in links(shown) if not link.startswith("https://")] == []
    assert "[start:" not in shown
    # The text of the links, and the blocks of code, stay.
    assert "[tutorial](docs/tutorial.md)" in README
    assert ", tutorial, " in shown
    code = re.findall(r"^```.*?^```$", README, re.MULTILINE | re.DOTALL)
    assert len(code) >= 3
    assert [block for block in code if block not in shown] == []


def test_links_of_the_description_lead_to_the_tag_of_the_version() -> None:
    top = "https://git.test/team/project"
    shown = description(README, f"{top}/", "7.8.9")
    of_files = [link for link in links(README) if "://" not in link]
    assert len(of_files) >= 20
    assert [link for link in links(shown) if link.startswith(top)] == [
        f"{top}/blob/v7.8.9/{link}" for link in of_files
    ]
    assert [link for link in links(shown) if not link.startswith("https://")] == []


def test_links_in_code_stay_as_they_are() -> None:
    text = "[a](b.md)\n```python\nx = y[0](z)\n```\n[c](https://d.test)\n"
    assert description(text, None, "1") == "a\n```python\nx = y[0](z)\n```\n[c](https://d.test)\n"


def test_tools_of_a_release_are_pinned_with_hashes_and_no_address() -> None:
    text = (ROOT / "release" / "requirements.txt").read_text(encoding="utf-8")
    entry = r"[a-z0-9-]+==[\w.]+(?: ; [^\\\n]+)? \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+"
    assert re.sub(entry, "", text) == ""
    wanted = (ROOT / "release" / "requirements.in").read_text(encoding="utf-8")
    tools = re.findall(r"^[a-z][a-z-]*", wanted, re.MULTILINE)
    assert len(tools) >= 4
    assert set(tools) <= set(re.findall(r"^([a-z0-9-]+)==", text, re.MULTILINE))


def test_release_is_built_with_the_pinned_tools_alone() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("dist", "sbom"):
        found = re.search(rf"^{target}: .*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
        assert found, target
        programs = [line.split()[0] for line in found[1].splitlines()]
        assert {name for name in programs if name != "rm"} <= {
            ".venv-release/bin/python", ".venv-release/bin/twine",
        }  # fmt: skip
    made = re.search(r"^\.venv-release/\.installed: .*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert made
    assert "--require-hashes" in made[1]
