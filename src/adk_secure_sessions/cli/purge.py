"""The commands that delete what is old: `purge`, and `erase-user`, which erases a user."""

from typing import Any

import click

from adk_secure_sessions.cli.lazy_packages import Database, blob_maintenance, maintenance
from adk_secure_sessions.cli.options import (
    age_option,
    on_database,
    with_app_and_user,
    with_confirm,
    with_dry_run,
    with_one_app,
    with_rate,
    with_store,
)
from adk_secure_sessions.cli.output import print_result
from adk_secure_sessions.cli.program import main, run


@main.group()
def purge() -> None:
    """Delete old sessions, old chains of the audit trail, or unused contents of artifacts."""


@purge.command("sessions")
@age_option("--older-than", "Also delete sessions whose last event is older; 0d: of any age.")
@with_app_and_user
@with_dry_run
@with_rate
@on_database()
def purge_sessions(db: Database, **options: Any) -> None:
    """Delete expired sessions, and sessions older than AGE, with all their events.

    Exits 1 if some of these sessions cannot be decrypted.  The command keeps such sessions.

    \b
    Example:
      adk-secure-sessions purge sessions --db sqlite:///sessions.db --key file:root.key \\
          --older-than 90d --dry-run
    """
    print_result(run(db, maintenance.purge_sessions, label="purge sessions", **options))


@purge.command("audit")
@age_option("--older-than", "At least 48h.", required=True)
@with_dry_run
@on_database()
def purge_audit(db: Database, **options: Any) -> None:
    """Delete the chains of the audit trail whose last record is older than AGE.

    A record names the deleted chains.  Exits 1 if a chain was kept because it has bad records.

    \b
    Example:
      adk-secure-sessions purge audit --db sqlite:///sessions.db --key file:root.key \\
          --older-than 2200d --dry-run
    """
    print_result(run(db, maintenance.purge_audit, label="purge audit", nouns="records", **options))


@purge.command("blobs")
@age_option(
    "--older-than",
    "Delete contents that were marked longer ago than this, at least 48h.",
    default="30d",
    show_default=True,
)
@with_dry_run
@with_store(required=True)
@on_database()
def purge_blobs(db: Database, **options: Any) -> None:
    """Mark contents that no artifact names, and delete contents that were marked long ago.

    Such contents are those of erased users, deleted artifacts and failed uploads.  Run the command
    daily, on each database that uses the store.

    Exits 1 if rows cannot be decrypted, or if another copy of the database has marked contents that
    an artifact names.  The command withdraws these marks.  In both cases, it deletes nothing.

    \b
    Example:
      adk-secure-sessions purge blobs --db sqlite:///sessions.db --key file:root.key \\
          --store ./artifacts --dry-run
    """
    print_result(run(db, blob_maintenance.purge_blobs, **options))


@main.command("erase-user")
@with_one_app
@click.option(
    "--user", "user_id", required=True, metavar="ID", help="The id of one of the app's users."
)
@with_dry_run
@click.option(
    "--rewrite",
    is_flag=True,
    help="Rewrite the table of data keys, to remove deleted keys from its free space.",
)
@with_confirm
@on_database()
def erase_user(db: Database, dry_run: bool, **options: Any) -> None:
    """Delete all data keys and rows of a user.

    Exits 1 if there is no such app or user, if the user's own row or, without a key database, the
    data keys were missing, or if --rewrite was not possible.

    \b
    Example:
      adk-secure-sessions erase-user --db sqlite:///sessions.db --key file:root.key \\
          --app clinic --user ada --confirm sessions.db
    """
    change = "" if dry_run else "erase a user of this database"
    print_result(run(db, maintenance.erase_user, change=change, dry_run=dry_run, **options))
