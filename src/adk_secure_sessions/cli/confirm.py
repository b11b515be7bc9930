"""Asking the user for the name of a database before a command changes it irrevocably.

The commands that a scheduler runs, such as `purge` and `retire`, ask nothing.
"""

import os
import sys
from typing import TYPE_CHECKING

import click

from adk_secure_sessions.cli.notes import utc_text
from adk_secure_sessions.cli.options import Decorator
from adk_secure_sessions.cli.output import counted, without_controls
from adk_secure_sessions.cli.program import Failure

if TYPE_CHECKING:
    from adk_secure_sessions.maintenance.database import Description

with_confirm: Decorator = click.option(
    "--confirm",
    metavar="NAME",
    help="Name of what the command may change: the database (SQLite: path of the file), or the "
    "directory or the bucket.  Without this option, the command asks on a terminal.",
)


def require_confirmation(described: "Description", name: str | None, change: str) -> None:
    """Raise an error unless the user names what is *described*: the URL may be a wrong one.

    *name* is the value of --confirm; if it is None, ask on the terminal.  *change* is what the
    command does, such as `erase the user`.
    """
    server, own_name, number, updated_at, kind, noun = described
    where = "" if server is None else f" on {server}"
    last = "" if updated_at is None else f", last updated {utc_text(updated_at)}"
    text = f"the {kind} {own_name}{where} has {counted(number, noun)}{last}"
    if name is None and sys.stdin.isatty():
        click.echo(without_controls(text), err=True)
        question = f"To {change}, enter its name"
        entered = click.prompt(question, default="", show_default=False, err=True)
        if not _is_name(described, entered):
            raise Failure("nothing was changed: this is not its name", "Declined", exit_code=1)
    elif name is None or not _is_name(described, name):
        raise Failure(
            f"nothing was changed: to {change}, give its name with --confirm; {text}",
            "NotConfirmed",
        )


def _is_name(described: "Description", name: str) -> bool:
    if described.server is None and name:  # a relative path is a name, too
        return os.path.realpath(name) == os.path.realpath(described.name)
    return name == described.name
