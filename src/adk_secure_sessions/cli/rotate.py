"""The commands that replace keys, and that remove replaced keys."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import click

from adk_secure_sessions import maintenance
from adk_secure_sessions.cli.options import on_database, with_dry_run, with_keys, with_speed
from adk_secure_sessions.cli.output import show
from adk_secure_sessions.cli.program import main, run, run_with_progress
from adk_secure_sessions.cli.text import (
    data_rotation_lines,
    master_rotation_lines,
    retirement_lines,
    root_rotation_lines,
)
from adk_secure_sessions.maintenance import Database, DataRotation, MasterRotation


def _with_rotation_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add all options of `rotate master` and `rotate data`."""
    restart_help = "Begin a new rotation, even if the last one is unfinished."
    restart = click.option("--restart", is_flag=True, help=restart_help)
    for add_options in (on_database, with_keys(required=True), with_speed, with_dry_run, restart):
        command = add_options(command)
    return command


@main.group()
def rotate() -> None:
    """Replace root keys, data masters or data keys."""


@rotate.command()
@with_dry_run
@with_keys(required=True)
@on_database
def root(db: Database, as_json: bool, dry_run: bool) -> None:
    """Wrap the master keys with a new root key.

    --key names the new root key, --also-key the old one.  Running services are not interrupted.
    Services that start later need the new root key.

    \b
    Example:
      adk-secure-sessions rotate root --db sqlite:///sessions.db \\
          --key file:new.key --also-key file:root.key
    """
    done = run(db, lambda opened: maintenance.rotate_root(opened, dry_run=dry_run))
    show(done, as_json, root_rotation_lines(done, dry_run))


@rotate.command()
@_with_rotation_options
def master(db: Database, as_json: bool, dry_run: bool, **options: Any) -> None:
    """Create a new data master, and wrap the data keys of all users and apps with it.

    Running services are not interrupted.  If this command is killed, the next run continues its
    work.  Exits 1 if data keys are left under another data master.

    \b
    Example:
      adk-secure-sessions rotate master --db sqlite:///sessions.db --key file:root.key
    """
    work = partial(maintenance.rotate_master, dry_run=dry_run)
    done = run_with_progress(db, "rotate master", work, **options)
    show(done, as_json, master_rotation_lines(done, dry_run))
    _exit(done, dry_run)


@rotate.command()
@_with_rotation_options
def data(db: Database, as_json: bool, dry_run: bool, **options: Any) -> None:
    """Create new data keys of --backend for all users and apps, and re-encrypt their records.

    Running services are not interrupted.  If this command is killed, the next run continues its
    work.  Exits 1 if records are left under older keys or another backend.

    \b
    Example:
      adk-secure-sessions rotate data --db sqlite:///sessions.db --key file:root.key \\
          --backend aesgcm --also-backend fernet
    """
    work = partial(maintenance.rotate_data, dry_run=dry_run)
    done = run_with_progress(db, "rotate data", work, **options)
    show(done, as_json, data_rotation_lines(done, dry_run))
    _exit(done, dry_run)


def _exit(done: MasterRotation | DataRotation, dry_run: bool) -> None:
    if done.bad or (done.left and not dry_run):
        sys.exit(1)


@main.command()
@with_dry_run
@with_speed
@on_database
def retire(db: Database, as_json: bool, dry_run: bool, **options: Any) -> None:
    """Remove the data keys and data masters that were replaced and that no row needs any more.

    No root key is needed.  The command keeps replaced keys that are still needed, and then exits 1.

    \b
    Example:
      adk-secure-sessions retire --db sqlite:///sessions.db
    """
    work = partial(maintenance.retire, dry_run=dry_run)
    done = run_with_progress(db, "retire", work, unit="owners", **options)
    show(done, as_json, retirement_lines(done, dry_run))
    if done.kept:
        sys.exit(1)
