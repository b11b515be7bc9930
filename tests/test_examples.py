"""The programs of examples/ work, and print what a newcomer needs to see."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml  # type: ignore[import-untyped]

from adk_secure_sessions import generate_key
from examples import demo
from tests import pages
from tests.pages import DOCS, ROOT

EXAMPLES = ROOT / "examples"
README = (EXAMPLES / "README.md").read_text(encoding="utf-8")

# google-adk warns of its own experimental and deprecated parts.
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)

# What each program must say, in this order.
PROGRAMS = {
    "demo.py": [
        "'penicillin': not found",
        "'ada.lovelace': not found",
        "'clinic': found",
        "0000  41 4b 53 02",
        "rejected  secure_events row",
        "Try next",
    ],
    "quickstart.py": ["A new service", "You are Ada Lovelace.", "found          nothing"],
    "fastapi_app.py": ["message 2.", "starts again", "message 3.", "is wrapped by root key"],
    "aws_kms.py": [
        "sessions of ada: 1",
        "wrapped by aws-kms:arn:",
        "sessions of ada: 2",
        "Without KMS",
        "the key service cannot be reached",
    ],
    "migration.py": [
        "'penicillin' is in the file",
        "copied: 2 sessions, 2 events, 3 states",
        "equal in every field: 2 of 2",
        "deleted: 2 sessions, 2 events",
        "adk.db      'penicillin' is not in the file",
        "sessions.db 'penicillin' is not in the file",
        "ada: 1 event, state {'user:name': 'ada'}",
    ],
    "multi_tenant.py": [
        "tenant-7c31   ada   ada: I am allergic",
        "deleted: 1 data key, 1 session",
        "tenant-7c31   ada   no data",
        "tenant-b04e   ada   ada: I broke",
        "A backup",
        "tenant-7c31   ada   UnknownKeyError",
        "tenant-b04e   ada   ada: I broke",
    ],
    "adk_web.py": [
        "Message 1: ",
        "starts again",
        "Message 2: ",
        "sessions.db: nothing found",
        "adk_secure_sessions adk web",
    ],
}
ELSEWHERE = {"telemetry.py"}  # sets the providers of its process: tests/test_monitoring.py runs it
OF_DEVELOPMENT = {"freeze_release.py", "make_screenshot.py", "make_sql.py", "make_vectors.py"}


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A new directory, no settings of this machine, and a proxy that does not answer."""
    monkeypatch.chdir(tmp_path)
    with mock.patch.dict(os.environ):
        for name in ("GOOGLE_API_KEY", "GEMINI_API_KEY", "DATABASE_URL", "SESSION_KEY"):
            os.environ.pop(name, None)
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
            os.environ.pop(name.lower(), None)
            os.environ[name] = "" if name == "NO_PROXY" else "http://127.0.0.1:9"
        yield


def run(name: str, *arguments: str) -> object:
    """Run a program in this process, where google-adk is imported already; return its status."""
    path = str(EXAMPLES / name)
    with mock.patch.object(sys, "argv", [path, *arguments]):
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            return end.code or 0
    return 0


def assert_in_order(texts: list[str], shown: str) -> None:
    for text in texts:
        assert text in shown, f"{text!r} is missing, or not in its place"
        shown = shown.split(text, 1)[1]


@pytest.mark.parametrize(
    "name",
    [
        # `integrations/test_adk_commands.py` does the same, and more, through our command.
        pytest.param(name, marks=[pytest.mark.soak] if name == "adk_web.py" else [])
        for name in PROGRAMS
    ],
)
def test_program_prints_what_it_is_for(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(name) == 0
    shown = capsys.readouterr()
    assert_in_order(PROGRAMS[name], shown.out)
    assert shown.err == ""
    assert list(tmp_path.iterdir()) == [], "it leaves files where it was started"


def test_every_program_is_run_by_tests_and_is_in_the_readme_and_on_a_page() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == (
        PROGRAMS.keys() | ELSEWHERE | OF_DEVELOPMENT
    )
    rows = re.findall(
        r"^\| \[(\w+\.py)\]\((\w+\.py)\) .*\(\.\./docs/([\w-]+\.md)(?:#[\w-]+)?\) \|$", README, re.M
    )
    assert {name for name, _, _ in rows} == PROGRAMS.keys() | ELSEWHERE
    for name, target, page in rows:
        assert name == target
        assert f"examples/{name}" in (DOCS / page).read_text(encoding="utf-8"), (name, page)
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (EXAMPLES / target.partition("#")[0]).exists(), target


def test_programs_that_pages_name_exist() -> None:
    for page in pages.PAGES:
        for name in re.findall(r"examples/(\w+\.\w+)", page.read_text(encoding="utf-8")):
            assert (EXAMPLES / name).exists(), (page.name, name)


# --- the demo ------------------------------------------------------------------------------------


def test_demo_ends_with_three_commands_that_a_shell_can_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`test_program_prints_what_it_is_for` runs these programs."""
    assert len(demo.NEXT) == 3
    for arguments, _ in demo.NEXT:
        python, program, *_ = shlex.split(demo.command(arguments))
        assert Path(python).absolute() == Path(sys.executable)
        assert Path(program).parent == EXAMPLES
        assert Path(program).name in PROGRAMS
    monkeypatch.chdir(ROOT)
    assert demo.command("a.py --b").endswith(f"python {Path('examples', 'a.py')} --b")


def test_demo_without_the_package_ends_with_a_sentence() -> None:
    """-S: without the installed packages."""
    done = subprocess.run(
        [sys.executable, "-S", str(EXAMPLES / "demo.py")], capture_output=True, text=True
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.endswith("in the clone of the repository, run `pip install .` with Python 3.11+")


# --- the quickstart and the README ---------------------------------------------------------------


def test_quickstart_keeps_its_database_and_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("quickstart.py", "--db", "kept.db") == 0
    capsys.readouterr()
    kept = (tmp_path / "kept.db").read_bytes()
    assert run("quickstart.py", "--db", "kept.db") == 2
    assert "kept.db exists already; name a new file" in capsys.readouterr().err
    assert (tmp_path / "kept.db").read_bytes() == kept


def test_whole_example_of_the_readme_works_again_and_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user generates the key, copies the script into a file, and runs this file twice."""
    regions = [region for _, region in pages.blocks(ROOT / "README.md").regions]
    _, source, *_ = (
        str(one.parsed["source"]) for one in regions if pages.language(one) == "python"
    )
    script = tmp_path / "first.py"
    script.write_text(source, encoding="utf-8")
    (tmp_path / "root.key").touch(mode=0o600)
    (tmp_path / "root.key").write_text(generate_key())
    for _ in range(3):
        runpy.run_path(str(script), run_name="__main__")
        assert capsys.readouterr().out == "{'user:allergies': ['penicillin']}\n"


# --- PostgreSQL ----------------------------------------------------------------------------------

COMPOSE = EXAMPLES / "compose.yaml"


def compose() -> Any:
    return yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))


def test_compose_file_is_reached_by_the_url_in_it_and_from_this_machine_only() -> None:
    """What a linter does not see; and some structure, for machines without docker compose."""
    assert compose().keys() == {"name", "services", "volumes"}
    (server,) = compose()["services"].values()
    assert server.keys() == {"environment", "healthcheck", "image", "ports", "volumes"}
    name, _, tag = server["image"].partition(":")
    assert (name, tag.isdigit()) == ("postgres", True)
    assert server["ports"] == ["127.0.0.1:5432:5432"]
    (volume,) = server["volumes"]
    assert volume.split(":") == [*compose()["volumes"], "/var/lib/postgresql/data"]
    of = server["environment"]
    login = f"{of['POSTGRES_USER']}:{of['POSTGRES_PASSWORD']}"
    url = f"DATABASE_URL=postgresql+asyncpg://{login}@127.0.0.1:5432/{of['POSTGRES_DB']}\n"
    assert url in COMPOSE.read_text(encoding="utf-8")
    check = server["healthcheck"]["test"]
    assert check[:2] == ["CMD", "pg_isready"]
    assert {f"--username={of['POSTGRES_USER']}", f"--dbname={of['POSTGRES_DB']}"} <= {*check}
