"""The commands for the contents of artifacts, which are blobs in a directory or a bucket."""

import sys
from datetime import timedelta
from typing import TYPE_CHECKING

import click

from adk_secure_sessions.cli.options import age, on_database, with_dry_run, with_keys, with_store
from adk_secure_sessions.cli.output import counted, show
from adk_secure_sessions.cli.program import AGAIN, main, run
from adk_secure_sessions.cli.text import problem_lines

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

    Reads no contents: loading an artifact checks its content.  Exits 1 if contents are missing or
    have another length, or if rows cannot be decrypted.

    \b
    Example:
      adk-secure-sessions blobs verify --db sqlite:///sessions.db --key file:root.key \\
          --store ./artifacts
    """
    from adk_secure_sessions.integrations import artifact_blobs

    found = run(
        db,
        lambda opened: artifact_blobs.check_blobs(opened, store, allow_http=allow_http),
        again=None,
    )
    blobs, artifacts = counted(found.blobs, "blob"), counted(found.artifacts, "artifact")
    lines = [*problem_lines(found.problems, found.bad), f"{artifacts} with {blobs}"]
    if found.unused:
        unused = counted(found.unused, "blob")
        lines.append(f"named by no artifact: {unused}, which `blobs purge` deletes")
    if found.missing:
        lines.append(f"missing, or of another length: {counted(found.missing, 'blob')}")
    if found.bad > found.missing:
        undecryptable = counted(found.bad - found.missing, "row")
        lines.append(f"cannot be decrypted: {undecryptable}; run `verify`")
    show(found, as_json, lines if found.bad else [*lines, "no blob is missing"])
    if found.bad:
        sys.exit(1)


@blobs.command()
@click.option(
    "--older-than",
    default="1d",
    show_default=True,
    callback=age,
    metavar="AGE",
    help="Longer than any upload takes: a number and a unit: s, m, h, d or w.",
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
    """Delete contents that no artifact names, such as those of erased users and failed uploads.

    Exits 1 if rows cannot be decrypted.  The command then deletes nothing, because such a row may
    name any content.

    \b
    Example:
      adk-secure-sessions blobs purge --db sqlite:///sessions.db --key file:root.key \\
          --store ./artifacts --dry-run
    """
    from adk_secure_sessions.integrations import artifact_blobs

    done = run(
        db,
        lambda opened: artifact_blobs.purge_blobs(
            opened, store, older_than=older_than, dry_run=dry_run, allow_http=allow_http
        ),
        again=None if dry_run else AGAIN,
    )
    verb = "would be deleted" if dry_run else "deleted"
    lines = [
        *problem_lines(done.problems, done.bad),
        f"{verb}: {counted(done.deleted, 'blob')}; named by artifacts: {done.kept:,}",
    ]
    if done.bad:
        undecryptable = counted(done.bad, "row")
        lines.append(f"cannot be decrypted: {undecryptable}, so nothing is deleted; run `verify`")
    show(done, as_json, lines, dry_run=dry_run)
    if done.bad:
        sys.exit(1)
