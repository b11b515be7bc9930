"""The commands that replace keys, and that delete replaced keys."""

import sys
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import click

from adk_secure_sessions.cli.lazy_packages import ArtifactStore, Database, maintenance
from adk_secure_sessions.cli.options import (
    on_database,
    with_all,
    with_confirm,
    with_dry_run,
    with_rate,
    with_store,
)
from adk_secure_sessions.cli.output import end_command, print_lines, print_result, progress
from adk_secure_sessions.cli.program import AGAIN, Failure, main, run, runner_for
from adk_secure_sessions.results import utc_text

_with_rotation_options = with_all(
    click.option(
        "--yes",
        is_flag=True,
        help="Continue an unfinished rotation without asking.  Only a terminal is asked.",
    ),
    click.option(
        "--restart", is_flag=True, help="Begin a new rotation, even if the last one is unfinished."
    ),
    click.option(
        "--retire",
        is_flag=True,
        help="Then delete the replaced keys, as the command `retire` does.",
    ),
    with_dry_run,
    with_rate,
    on_database(),
)


@main.group()
def rotate() -> None:
    """Replace root keys, data masters or data keys."""


@rotate.command()
@with_dry_run
@on_database()
def root(db: Database, **options: Any) -> None:
    """Wrap the master keys with a new root key.

    --key names the new root key, and --also-key names the old root key.  Running services are not
    interrupted.  Services that start later need the new root key.

    \b
    Example:
      adk-secure-sessions rotate root --db sqlite:///sessions.db \\
          --key file:new.key --also-key file:root.key
    """
    print_result(run(db, maintenance.rotate_root, **options))


@rotate.command()
@_with_rotation_options
def master(db: Database, **options: Any) -> None:
    """Create a new data master, and wrap the data keys of all users and apps with it.

    Running services are not interrupted.  If this command is killed, the next run continues its
    work.  Exits 1 if data keys are left under another data master.

    \b
    Example:
      adk-secure-sessions rotate master --db sqlite:///sessions.db --key file:root.key
    """
    _rotate(db, "master", maintenance.rotate_master, **options)


@rotate.command()
@with_store(required=False)
@_with_rotation_options
def data(db: Database, store: ArtifactStore | None, **options: Any) -> None:
    """Create new data keys for all users and apps, and re-encrypt their records with --backend.

    Running services are not interrupted.  If this command is killed, the next run continues its
    work.  Exits 1 if records are left under older keys or another backend.

    With --store, the command then re-encrypts the contents of artifacts.  Without --store, contents
    keep their keys, which are in the records.

    \b
    Example:
      adk-secure-sessions rotate data --db sqlite:///sessions.db --key file:root.key \\
          --backend aesgcm --also-backend fernet
    """
    work: Callable[..., Coroutine[Any, Any, Any]] = maintenance.rotate_data
    if store is not None:
        from adk_secure_sessions.integrations.blob_rotation import rotate_data_and_blobs

        work = partial(rotate_data_and_blobs, store=store)
    _rotate(db, "data", work, **options)


def _rotate(
    db: Database,
    name: str,
    work: Callable[..., Coroutine[Any, Any, Any]],
    *,
    dry_run: bool,
    retire: bool,
    restart: bool,
    yes: bool,
    rows_per_second: float | None,
) -> None:
    """Run the rotation *name*, print its result, and exit 1 if something is left.

    If the run would continue an unfinished rotation, first tell the user so and, on a terminal, ask
    whether to continue.
    """
    if retire and dry_run:
        raise click.UsageError("--dry-run cannot tell what --retire would delete: omit one of them")
    # Until the new rotation is stored, a run without --restart would continue the old one.
    without = ", without --restart if `status` shows the new rotation" if restart else ""
    with runner_for(db, resume_hint=f"{AGAIN}{without}") as runner:
        if not restart:
            for unfinished in runner.run(maintenance.unfinished_rotations(db)):
                if unfinished.name == name:
                    _confirm_continuation(unfinished, dry_run=dry_run, yes=yes)
        with progress(f"rotate {name}") as report:
            options: dict[str, Any] = {"progress": report, "rows_per_second": rows_per_second}
            result = runner.run(work(db, dry_run=dry_run, restart=restart, **options))
        try:
            if retire and result.succeeded:
                with progress("retire", "owners") as report:
                    options["progress"] = report
                    result.retirement = runner.run(maintenance.retire(db, **options))
        finally:
            print_lines(result)
    end_command(result)


def _confirm_continuation(
    unfinished: "maintenance.UnfinishedRotation", *, dry_run: bool, yes: bool
) -> None:
    if not unfinished.is_authentic:
        return  # say nothing: the rotation then raises an error, which names the checkpoint
    assert unfinished.since is not None, "an authentic checkpoint has a time"
    verb, began = "would continue" if dry_run else "continues", utc_text(unfinished.since)
    click.echo(f"{verb} the rotation begun {began}; --restart begins a new one", err=True)
    if dry_run or yes or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    if not click.confirm("Continue it?", default=True, err=True):
        raise Failure(
            "nothing was changed; --restart begins a new rotation", "Declined", exit_code=1
        )


@main.command()
@with_dry_run
@with_rate
@on_database()
def retire(db: Database, **options: Any) -> None:
    """Delete the data keys and data masters that were replaced and that no row needs any more.

    The command keeps replaced keys that rows still need.  It exits 1 if it has kept a key.

    \b
    Example:
      adk-secure-sessions retire --db sqlite:///sessions.db --key file:root.key
    """
    print_result(run(db, maintenance.retire, label="retire", nouns="owners", **options))


@main.command()
@with_confirm
@with_rate
@on_database()
def separate(db: Database, **options: Any) -> None:
    """Give a copy of a database an id and keys of its own.

    Run the command on the copy, for example a staging clone, before a service uses the copy.
    Services reject the copy until the separation has ended.  If the command is interrupted, run it
    again to continue.  The command exits 1 if the separation has not ended, for example because a
    row cannot be decrypted.

    \b
    Example:
      adk-secure-sessions separate --db sqlite:///staging.db --key file:root.key \\
          --confirm staging.db
    """
    change = "replace all keys of this database"
    print_result(run(db, maintenance.separate, label="separate", change=change, **options))


@main.command("move-keys")
@click.option(
    "--to",
    required=True,
    type=click.Choice(["key-db", "db"]),
    help="Where the keys shall be: in the database of --key-db, or beside the data, in --db.",
)
@with_confirm
@on_database()
def move_keys(db: Database, **options: Any) -> None:
    """Move all keys into a key database, or from a key database back into the database.

    Stop all services first.  Services reject the databases until the move has ended.  If the
    command is interrupted, run it again to continue.  The command exits 1 if the file that had the
    keys before may still contain copies of them.

    \b
    Example:
      adk-secure-sessions move-keys --db sqlite:///sessions.db --key-db sqlite:///keys.db \\
          --to key-db --key file:root.key --confirm sessions.db
    """
    options |= {"nouns": "data keys", "change": "move the keys of this database"}
    print_result(run(db, maintenance.move_keys, label="move-keys", **options))
