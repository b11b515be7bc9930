"""The commands that fill and delete the search index."""

from typing import Any

import click

from adk_secure_sessions.cli.lazy_packages import Database, maintenance
from adk_secure_sessions.cli.options import on_database, with_one_app, with_rate
from adk_secure_sessions.cli.output import print_result
from adk_secure_sessions.cli.program import main, run

_with_state_keys = click.argument("keys", metavar="STATE_KEY...", nargs=-1, required=True)


@main.group()
def index() -> None:
    """Fill or delete the search index, which finds sessions by a value of their state."""


@index.command()
@_with_state_keys
@with_one_app
@click.option(
    "--skip-unreadable",
    is_flag=True,
    help="Allow searches even if some sessions cannot be decrypted.",
)
@with_rate
@on_database()
def fill(db: Database, **options: Any) -> None:
    """Store the missing rows of the search index of some state keys, and then allow searches.

    Before, restart all services with these keys in indexed_state_keys.  A second run corrects what
    is wrong.  Exits 1 if searches are not allowed because some rows cannot be decrypted.

    \b
    Example:
      adk-secure-sessions index fill --db sqlite:///sessions.db --key file:root.key \\
          --app clinic ticket user:mrn
    """
    print_result(run(db, maintenance.fill_index, label="index fill", **options))


@index.command()
@_with_state_keys
@with_one_app
@on_database()
def drop(db: Database, **options: Any) -> None:
    """Delete the search index of some state keys.  Searches by these keys then fail.

    Before, restart all services without these keys in indexed_state_keys.

    \b
    Example:
      adk-secure-sessions index drop --db sqlite:///sessions.db --key file:root.key \\
          --app clinic ticket
    """
    print_result(run(db, maintenance.drop_index, **options))
