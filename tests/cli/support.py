"""Running the command line in this process: importing google-adk takes seconds."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import click
import sqlalchemy as sa
from click.testing import CliRunner

from adk_secure_sessions import AesGcmBackend, Audit, EncryptedSessionService
from adk_secure_sessions.cli import main
from adk_secure_sessions.cli.adk_commands import AdkCommand
from tests.maintenance.support import OLD


class Said(NamedTuple):
    """The exit status of a command, and what it printed."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


def run(*arguments: str, **environment: str) -> Said:
    result = CliRunner(env=environment).invoke(main, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Said(result.exit_code, result.stdout, result.stderr)


def on(db: str, key: str | None = "env:OLD_KEY", *, command: str = "") -> list[str]:
    """Return the options for a database and a root key."""
    option = "--to" if command.startswith("migrate") else "--db"
    return [option, db, *(["--key", key] if key else [])]


def confirmed(url: str) -> list[str]:
    """Return the option that confirms a command which changes the database irrevocably."""
    return ["--confirm", sa.make_url(url).database or ""]


def make_adk_tables(path: Path) -> None:
    """Create google-adk's tables, without rows, with the columns that `migrate` reads."""
    columns = "app_name, user_id, session_id, id, state, create_time, update_time, timestamp"
    with closing(sqlite3.connect(path)) as connection:
        for name in ("sessions", "events", "app_states", "user_states"):
            key = {"app_states": "app_name", "user_states": "app_name, user_id"}.get(name, "id")
            connection.execute(
                f"CREATE TABLE {name} ({columns}, invocation_id, event_data, PRIMARY KEY ({key}))"
            )


def commands() -> dict[str, click.Command]:
    """Return all commands but those of google-adk, by the words that call them."""
    found: dict[str, click.Command] = {}
    groups: list[tuple[str, click.Group]] = [("", main)]
    while groups:
        prefix, group = groups.pop()
        for name, command in group.commands.items():
            if isinstance(command, click.Group):
                groups.append((f"{prefix}{name} ", command))
            elif not isinstance(command, AdkCommand):
                found[prefix + name] = command
    return found


async def begin_trail(url: str) -> None:
    async with EncryptedSessionService(
        url, AesGcmBackend(OLD), audit=Audit("blind", table=True)
    ) as service:
        await service.prepare_tables()
