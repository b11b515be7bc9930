"""The commands that replace keys, and drop those that were replaced."""

import sys
from functools import partial
from typing import Any

import click

from adk_secure_sessions import maintenance
from adk_secure_sessions.cli.opening import on_database, run, watched, with_keys
from adk_secure_sessions.cli.output import show
from adk_secure_sessions.cli.program import main, with_dry_run, with_speed
from adk_secure_sessions.cli.wording import (
    data_rotation_lines,
    master_rotation_lines,
    retirement_lines,
    root_rotation_lines,
)
from adk_secure_sessions.maintenance import Database, DataRotation, MasterRotation

_with_restart = click.option(
    "--restart", is_flag=True, help="Begin anew, although a rotation before did not end."
)


@main.group()
def rotate() -> None:
    """Replace keys."""


@rotate.command()
@with_dry_run
@with_keys(required=True)
@on_database
def root(db: Database, as_json: bool, dry_run: bool) -> None:
    """Wrap the master keys with the root key --key, which --also-key unwraps.

    Services that run go on; those that start need the new root key.

    \b
    Example:
      adk-secure-sessions rotate root --db sqlite:///sessions.db \\
          --key file:new.key --also-key file:root.key
    """
    done = run(db, lambda opened: maintenance.rotate_root(opened, dry_run=dry_run))
    show(done, as_json, root_rotation_lines(done, dry_run))


@rotate.command()
@_with_restart
@with_dry_run
@with_speed
@with_keys(required=True)
@on_database
def master(db: Database, as_json: bool, dry_run: bool, **options: Any) -> None:
    """Make a new data master, and wrap all data keys with it: a row for each user and app.

    Services that run go on.  Killed, it is continued by the next run.  Exits 1 if data keys are
    left under another master.

    \b
    Example:
      adk-secure-sessions rotate master --db sqlite:///sessions.db --key file:root.key
    """
    done = watched(db, "rotate master", maintenance.rotate_master, dry_run=dry_run, **options)
    show(done, as_json, master_rotation_lines(done, dry_run))
    _end(done, dry_run)


@rotate.command()
@_with_restart
@with_dry_run
@with_speed
@with_keys(required=True)
@on_database
def data(db: Database, as_json: bool, dry_run: bool, **options: Any) -> None:
    """Give each user and app a new data key of --backend, and seal every record with it.

    Services that run go on.  Killed, it is continued by the next run.  Exits 1 if records are
    left under older keys, or of another backend.

    \b
    Example:
      adk-secure-sessions rotate data --db sqlite:///sessions.db --key file:root.key \\
          --backend aesgcm --also-backend fernet
    """
    done = watched(db, "rotate data", maintenance.rotate_data, dry_run=dry_run, **options)
    show(done, as_json, data_rotation_lines(done, dry_run))
    _end(done, dry_run)


def _end(done: MasterRotation | DataRotation, dry_run: bool) -> None:
    if done.bad or (done.left and not dry_run):
        sys.exit(1)


@main.command()
@with_dry_run
@with_speed
@on_database
def retire(db: Database, as_json: bool, dry_run: bool, **options: Any) -> None:
    """Drop the data keys and data masters that were replaced, and that nothing refers to.

    No key is needed.  Exits 1 if some are still referred to: they are kept.

    \b
    Example:
      adk-secure-sessions retire --db sqlite:///sessions.db
    """
    retiring = partial(maintenance.retire, dry_run=dry_run)
    done = watched(db, "retire", retiring, unit="owners", **options)
    show(done, as_json, retirement_lines(done, dry_run))
    if done.kept:
        sys.exit(1)
