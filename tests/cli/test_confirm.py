"""The commands that nobody can undo: they change nothing unless their database is named."""

import asyncio
import re
import shutil
from pathlib import Path

import pytest
import sqlalchemy as sa
from google.adk.sessions import DatabaseSessionService
from google.genai import types

from adk_secure_sessions import AesGcmBackend, EncryptedArtifactService, EncryptedSessionService
from adk_secure_sessions.migration import AdkTables, migrate
from tests.attacks.support import Dump, dump
from tests.cli.support import commands, confirmed, on, run
from tests.cli.test_running import on_terminal
from tests.maintenance.support import OLD, event, fill, query
from tests.migration.support import database
from tests.sqlite_files import execute

IRREVOCABLE = ("erase-user", "migrate erase-source", "move-keys", "separate")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two databases, google-adk's and ours, and copies of both."""
    directory = tmp_path_factory.mktemp("made")
    url = f"sqlite:///{directory}/sessions.db"

    async def make() -> None:
        adk = DatabaseSessionService(f"sqlite+aiosqlite:///{directory}/adk.db")
        session = await adk.create_session(app_name="clinic", user_id="ada")
        await adk.append_event(session, event(1))
        await adk.db_engine.dispose()
        await fill(url)
        async with AdkTables(f"sqlite:///{directory}/adk.db") as source, database(url) as db:
            assert (await migrate(source, db)).copied == 1

    asyncio.run(make())
    for name in ("adk", "sessions"):
        execute(directory / f"{name}.db", "VACUUM INTO ?", [str(directory / f"{name}-copy.db")])
    return directory


@pytest.fixture
def files(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def arguments(command: str, suffix: str = "") -> list[str]:
    """Return the command for the databases, or for their copies."""
    url = f"sqlite:///sessions{suffix}.db"
    return {
        "erase-user": ["erase-user", *on(url), "--app", "clinic", "--user", "ada"],
        "separate": ["separate", *on(url)],
        "move-keys": ["move-keys", *on(url), "--key-db", "sqlite:///keys.db", "--to", "key-db"],
        "migrate erase-source": [
            *("migrate", "erase-source", "--from", f"sqlite:///adk{suffix}.db"),
            *on(url, command="migrate"),
        ],
    }[command]


def name(command: str, suffix: str = "") -> str:
    return f"adk{suffix}.db" if command == "migrate erase-source" else f"sessions{suffix}.db"


def contents(directory: Path) -> dict[str, Dump]:
    return {path.name: dump(path) for path in directory.glob("*.db")}


def test_only_irrevocable_commands_ask_for_a_name() -> None:
    """The others may be scheduled."""
    asking = [
        one
        for one, command in commands().items()
        if "--confirm" in {text for option in command.params for text in option.opts}
    ]
    # `migrate artifacts` asks only before it erases the source: see test_migrate_artifacts.py.
    assert sorted(asking) == sorted([*IRREVOCABLE, "migrate artifacts"])


@pytest.mark.parametrize("command", IRREVOCABLE)
def test_without_a_terminal_the_database_must_be_named(command: str, files: Path) -> None:
    before = contents(files)
    sessions = "1 session" if command == "migrate erase-source" else "5 sessions"
    for option in ([], ["--confirm", ""], ["--confirm", name(command, "-copy")]):
        said = run(*arguments(command), *option, "--json")
        assert (said.code, said.json["error"]) == (2, "NotConfirmed")
        assert (
            f"the database {files / name(command)} has {sessions}, last updated 20" in said.stderr
        )
        assert contents(files) == before
    # The URL of a copy, and the name of the original.
    assert run(*arguments(command, "-copy"), "--confirm", name(command)).code == 2
    assert contents(files) == before
    done = run(*arguments(command), "--confirm", name(command))
    assert (done.code, done.stderr) == (0, "")
    assert contents(files) != before


def test_on_a_terminal_the_name_is_asked_for(files: Path) -> None:
    before, command = contents(files), "erase-user"
    code, stdout, shown = on_terminal("y", *arguments(command))
    assert (code, stdout) == (1, "")
    assert f"the database {files / name(command)} has " in shown
    assert re.search("To .*, enter its name", shown)
    assert "nothing was changed" in shown
    assert contents(files) == before
    code, _, shown = on_terminal(str(files / name(command)), *arguments(command))
    assert (code, "nothing was changed" in shown) == (0, False)
    assert contents(files) != before


@pytest.mark.parametrize("place", ["postgresql", "mariadb"], indirect=True)
def test_name_of_a_database_on_a_server_is_the_name_that_the_server_knows(
    filled: str, place: sa.URL
) -> None:
    url = sa.make_url(filled)
    erase = ["erase-user", *on(filled), "--app", "clinic", "--user", "ada"]
    said = run(*erase, "--confirm", f"{url.database}x")
    described = rf"the database {url.database} on \S+ has 4 sessions, last updated"
    assert (said.code, bool(re.search(described, said.stderr))) == (2, True)
    assert url.password is None or url.password not in said.stderr
    assert query(place, "SELECT count(*) FROM secure_users") == [(2,)]
    assert run(*erase, *confirmed(filled)).code == 0
    assert query(place, "SELECT count(*) FROM secure_users") == [(1,)]


def test_erasing_a_user_with_artifacts_names_the_command_that_deletes_their_contents(
    file: str, tmp_path: Path
) -> None:
    async def save() -> None:
        async with EncryptedSessionService(file, AesGcmBackend(OLD)) as sessions:
            artifacts = EncryptedArtifactService(sessions, tmp_path / "artifacts")
            part = types.Part(text="scan")
            ids = {"app_name": "clinic", "user_id": "ada", "filename": "user:scan"}
            await artifacts.save_artifact(**ids, artifact=part)  # type: ignore[arg-type]

    asyncio.run(save())
    erased = {
        user: run("erase-user", *on(file), "--app", "clinic", "--user", user, *confirmed(file))
        for user in ("ada", "bob")
    }
    assert [said.code for said in erased.values()] == [0, 0]
    assert "deleted: 1 data key, 1 user, 2 sessions, 7 events" in erased["ada"].stdout
    assert "1 collection; `purge blobs` deletes" in erased["ada"].stdout
    assert "purge blobs" not in erased["bob"].stdout
