"""Running the command line in this process: importing google-adk takes seconds."""

import json
from typing import Any, NamedTuple

import click
from click.testing import CliRunner

from adk_secure_sessions.cli import main


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


def on(db: str, key: str | None = "env:OLD_KEY") -> list[str]:
    """Return the options for a database and a root key."""
    return ["--db", db, *(["--key", key] if key else [])]


def commands() -> dict[str, click.Command]:
    """Return all commands by the words that call them."""
    found: dict[str, click.Command] = {}
    groups: list[tuple[str, click.Group]] = [("", main)]
    while groups:
        prefix, group = groups.pop()
        for name, command in group.commands.items():
            if isinstance(command, click.Group):
                groups.append((f"{prefix}{name} ", command))
            else:
                found[prefix + name] = command
    return found
