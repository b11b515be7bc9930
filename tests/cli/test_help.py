"""docs/cli.md and the help are complete, and the examples in the help work."""

import asyncio
import re
import shlex
import shutil
import tempfile
from pathlib import Path

import click
import pytest

from adk_secure_sessions import AesGcmBackend, Audit, EncryptedSessionService, maintenance
from adk_secure_sessions.cli import main
from adk_secure_sessions.cli.config import envvar
from tests.cli.support import commands, make_adk_tables, run
from tests.pages import DOCS, ROOT, public_names

PAGE = (DOCS / "cli.md").read_text(encoding="utf-8")
MIGRATE = (DOCS / "migrate.md").read_text(encoding="utf-8")
SHARED = [
    "Options of all commands with a database",
    "Configuration file",
    "JSON",
    "Shell completion",
]


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"docs/cli.md has no section {title!r}"
    return found[1]


def example(name: str) -> list[str]:
    said = run(*name.split(), "--help")
    assert said.code == 0
    found = re.search(r"Example:\n((?: {4,}\S.*\n)+)", said.stdout)
    assert found, f"the help of {name} has no example"
    return shlex.split(found[1].replace("\\\n", " "))


@pytest.mark.parametrize("name", commands())
def test_page_has_the_command_with_an_example_and_the_help_every_option(name: str) -> None:
    # Those that copy sessions link to the page that has their examples.
    text = section(name) + (MIGRATE if name.startswith(("migrate", "export")) else "")
    assert f"adk-secure-sessions {name} " in text.replace("\n", " \n")
    assert f"| [`{name}`](#{name.replace(' ', '-')}) |" in PAGE
    options = [one for one in commands()[name].params if isinstance(one, click.Option)]
    assert [one.opts[0] for one in options if not one.help] == []


def test_page_has_no_command_that_there_is_not() -> None:
    titles = re.findall(r"^## (.*)", PAGE, re.MULTILINE)
    assert [title for title in titles if title not in SHARED] == list(
        dict.fromkeys(re.findall(r"^\| \[`(.*?)`\]", PAGE, re.MULTILINE))
    )
    assert set(titles) == {*SHARED, *commands()}
    assert envvar("db") in PAGE


async def begin_trail() -> None:
    async with EncryptedSessionService(
        "sqlite:///sessions.db",
        AesGcmBackend("file:root.key"),
        audit=Audit("blind", table=True),
    ) as service:
        await service.create_session(app_name="clinic", user_id="ada")


def test_examples_in_the_help_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run("keygen", "--output", "new.key")
    Path("artifacts").mkdir()
    Path("adk-artifacts/apps").mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("ADK_CAPTURE_MESSAGE_CONTENT_IN_SPANS", "false")
    shutil.copytree(ROOT / "examples" / "adk_agent", "agents")
    order = ["keygen", "init", "check", "status", "verify", "debug lookup", "debug inspect"]
    order += ["purge sessions", "index fill", "index drop", "purge blobs"]
    order += ["audit export", "purge audit"]
    order += [
        "rotate master",
        "rotate data",
        "retire",
        "separate",
        "move-keys",
        "migrate copy",
        "migrate compare",
        "migrate erase-source",
        "migrate artifacts",
        "vacuum",
        "export",
        "erase-user",
        "rotate root",
        "adk doctor",
    ]
    assert sorted(order) == sorted(commands())
    for name in order:
        if name == "separate":
            shutil.copy("sessions.db", "staging.db")
        if name == "move-keys":
            shutil.copy("sessions.db", "before.db")
        if name == "audit export":
            asyncio.run(begin_trail())
        if name == "migrate copy":
            make_adk_tables(tmp_path / "adk.db")
        if name == "export":
            Path("adk.db").unlink()  # it writes another file with this name
        program, *arguments = example(name)
        assert program == "adk-secure-sessions"
        said = run(*arguments)
        assert (said.code, said.stderr) == (0, ""), name
        if name == "move-keys":  # the examples after it have no key database
            shutil.move("before.db", "sessions.db")


def test_program_is_installed_under_its_name() -> None:
    from importlib.metadata import entry_points

    (script,) = entry_points(group="console_scripts", name="adk-secure-sessions")
    assert script.load() is main


@pytest.mark.parametrize("name", public_names(maintenance))
def test_reference_has_the_public_name_of_maintenance(name: str) -> None:
    if name in ("Progress", "TABLE_NAMES"):  # a kind of function, and names of tables
        return
    api = (DOCS / "api.md").read_text(encoding="utf-8")
    found = getattr(maintenance, name)
    # A function with the name of its module: by the shorter path the page would show the module.
    module = f"{maintenance.__name__}.{name}"
    path = f"{module}.{name}" if found.__module__ == module else module
    assert f"\n::: {path}\n" in api
    assert found.__doc__
