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


def require_confirmation(
    place: "Description",
    name: str | None,
    change: str,
    *,
    kind: str = "database",
    noun: str = "session",
) -> None:
    """Raise an error unless the user names *place*, because the URL may be a wrong one.

    *name* is the value of --confirm; if it is None, ask on the terminal.  *change* is what the
    command does, such as `erase the user`.  *place* is a *kind* of place: a database, a directory
    or a bucket, and its `sessions` counts *noun*s.
    """
    where = "" if place.server is None else f" on {place.server}"
    last = "" if place.updated_at is None else f", last updated {utc_text(place.updated_at)}"
    described = f"the {kind} {place.name}{where} has {counted(place.sessions, noun)}{last}"
    if name is None and sys.stdin.isatty():
        click.echo(without_controls(described), err=True)
        question = f"To {change}, enter its name"
        if not _is_name(place, click.prompt(question, default="", show_default=False, err=True)):
            raise Failure("nothing was changed: this is not its name", "Declined", exit_code=1)
    elif name is None or not _is_name(place, name):
        raise Failure(
            f"nothing was changed: to {change}, give its name with --confirm; {described}",
            "NotConfirmed",
        )


def _is_name(place: "Description", name: str) -> bool:
    if place.server is None and name:  # a relative path is a name, too
        return os.path.realpath(name) == os.path.realpath(place.name)
    return name == place.name
