"""The commands for the contents of artifacts, which are blobs in a directory or a bucket."""

from datetime import timedelta
from typing import TYPE_CHECKING

import click

from adk_secure_sessions.cli.options import age, on_database, with_dry_run, with_keys, with_store
from adk_secure_sessions.cli.output import finish
from adk_secure_sessions.cli.program import AGAIN, main, run

if TYPE_CHECKING:
    from adk_secure_sessions.maintenance import Database


@main.group()
def blobs() -> None:
    """Check and clean up the store that holds the contents of artifacts."""


@blobs.command()
@with_store(required=True)
@with_keys(required=True)
@on_database
def verify(db: "Database", as_json: bool, store: str, allow_http: bool) -> None:
    """Find contents of artifacts that are missing, or that no artifact names.

    Reads no contents: loading an artifact checks its content.  Exits 1 if contents are missing,
    have another length or are marked as deleted, or if rows cannot be decrypted.

    \b
    Example:
      adk-secure-sessions blobs verify --db sqlite:///sessions.db --key file:root.key \\
          --store ./artifacts
    """
    from adk_secure_sessions.integrations import artifact_blobs
    from adk_secure_sessions.integrations.object_store import ArtifactStore

    found = run(
        db,
        lambda opened: artifact_blobs.check_blobs(
            opened, ArtifactStore(store, allow_http=allow_http)
        ),
        again=None,
    )
    finish(found, as_json, [] if found.bad else ["no blob is missing"])


@blobs.command()
@click.option(
    "--older-than",
    default="30d",
    show_default=True,
    callback=age,
    metavar="AGE",
    help="Delete contents that were marked longer ago than this, at least 48h: a number and a "
    "unit: s, m, h, d or w.",
)
@with_dry_run
@with_store(required=True)
@with_keys(required=True)
@on_database
def purge(
    db: "Database",
    as_json: bool,
    store: str,
    allow_http: bool,
    older_than: timedelta,
    dry_run: bool,
) -> None:
    """Mark contents that no artifact names, and delete contents that were marked long ago.

    Such contents are those of erased users, deleted artifacts and failed uploads.  Run the command
    daily, on each database that uses the store.

    Exits 1 if rows cannot be decrypted, or if another copy of the database has marked contents that
    an artifact names.  The command withdraws these marks.  In both cases, it deletes nothing.

    \b
    Example:
      adk-secure-sessions blobs purge --db sqlite:///sessions.db --key file:root.key \\
          --store ./artifacts --dry-run
    """
    from adk_secure_sessions.integrations import artifact_blobs
    from adk_secure_sessions.integrations.object_store import ArtifactStore

    done = run(
        db,
        lambda opened: artifact_blobs.purge_blobs(
            opened,
            ArtifactStore(store, allow_http=allow_http),
            older_than=older_than,
            dry_run=dry_run,
        ),
        again=None if dry_run else AGAIN,
    )
    finish(done, as_json, dry_run=dry_run)
