"""The commands that create, check, verify and rewrite a database, and count its rows."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import click

from adk_secure_sessions.cli.lazy_packages import (
    ArtifactStore,
    Database,
    blob_maintenance,
    maintenance,
)
from adk_secure_sessions.cli.options import POSITIVE_NUMBER, on_database, with_rate, with_store
from adk_secure_sessions.cli.output import (
    end_command,
    print_lines,
    print_result,
    private_file,
    progress,
)
from adk_secure_sessions.cli.program import Failure, main, one_line_errors, run, runner_for
from adk_secure_sessions.keys.providers import StaticKey, generate_key
from adk_secure_sessions.results import Result


@main.command()
@click.option(
    "--output", metavar="FILE", help="Write the key to a new file that only you may read."
)
def keygen(output: str | None) -> None:
    """Generate a root key: 32 random bytes, as base64 text.

    \b
    Example:
      adk-secure-sessions keygen --output root.key
    """
    key = generate_key()
    if output is None:
        click.echo(key)
        return
    with one_line_errors(), private_file(output) as file:
        file.write(f"{key}\n".encode("ascii"))
    click.echo(f"wrote root key {StaticKey(key).key_id} to {output}")


@main.command()
@on_database()
def init(db: Database) -> None:
    """Create the tables and master keys that do not exist.  A second run changes nothing.

    \b
    Example:
      adk-secure-sessions init --db sqlite:///sessions.db --key file:root.key
    """
    print_result(run(db, maintenance.init))


@main.command()
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=POSITIVE_NUMBER,
    default=10.0,
    show_default=True,
    help="Give up after this time.",
)
@on_database()
def check(db: Database, timeout: float) -> None:
    """Open the database and its keys as a service does, and say whether a service could start.

    Reads no sessions and writes nothing.  Exits 0 if a service could start, and 2 if it could not.

    \b
    Example:
      adk-secure-sessions check --db sqlite:///sessions.db --key file:root.key
    """

    async def in_time(db: Database) -> "maintenance.Check":
        try:
            async with asyncio.timeout(timeout):
                return await maintenance.check(db)
        except TimeoutError:
            raise Failure(
                f"no answer from the database or the key service within {timeout:g} s: check that "
                "they can be reached, or raise --timeout",
                "Timeout",
                retryable=True,
            ) from None

    print_result(run(db, in_time, resume_hint=None))


@main.command()
@with_rate
@on_database(keys="optional")
def status(db: Database, **options: Any) -> None:
    """Count records by backend, and data keys by data master.  No root key is needed.

    With --key, the command also says which master keys can be unwrapped.  It exits 1 if a master
    key cannot be unwrapped.  It also exits 1 if the stored checkpoint of an unfinished rotation was
    tampered with, or the stored mark of a complete migration or search index.  With or without
    --key, it exits 1 if a checkpoint is malformed, or a master key was created in the future.

    \b
    Example:
      adk-secure-sessions status --db sqlite:///sessions.db
    """
    print_result(run(db, maintenance.status, label="status", resume_hint=None, **options))


@dataclass
class VerifyOutput(Result):
    """The output of verify.

    Attributes:
        rows: The rows; null with --only.
        trail: The audit trail; null if there is none, or with --only.
        blobs: The contents of artifacts; null without --store.
    """

    rows: "maintenance.Verification | None" = None
    trail: "maintenance.AuditVerification | None" = None
    blobs: "blob_maintenance.BlobCheck | None" = None

    @property
    def succeeded(self) -> bool:
        return all(part is None or part.succeeded for part in vars(self).values())

    @property
    def bad(self) -> int:
        return sum(part.bad for part in vars(self).values() if part is not None)


@main.command()
@click.option(
    "--only",
    type=click.Choice(["rows", "trail", "blobs"]),
    help="Check only the rows, the audit trail or the contents of artifacts.",
)
@click.option(
    "--heads",
    metavar="FILE",
    type=click.Path(),
    multiple=True,
    help="Audit log, whose lines audit.head show whether records at the end of chains, or whole "
    "chains, were removed.  Repeatable.",
)
@with_store(required=False)
@with_rate
@on_database()
def verify(
    db: Database,
    only: str | None,
    heads: Sequence[str],
    store: ArtifactStore | None,
    **options: Any,
) -> None:
    """Decrypt every record, and name the rows that were modified, moved, removed or added.

    Also check the audit trail, if there is one, and with --store, whether contents of artifacts are
    missing.  Their bytes are not read.  Exits 1 if something is wrong, and leaves it unchanged.

    \b
    Example:
      adk-secure-sessions verify --db sqlite:///sessions.db --key file:root.key
    """
    if only == "blobs" and store is None:
        raise click.UsageError("--only blobs checks the contents in a store: add --store STORE")
    if only in ("rows", "trail") and store:
        raise click.UsageError(f"--only {only} checks no contents: omit --store or --only")
    if only not in (None, "trail") and heads:
        raise click.UsageError("--heads is for the audit trail")
    result = VerifyOutput()
    with ExitStack() as files, runner_for(db, resume_hint=None) as runner:
        # Only a line feed ends a line: other text of a line may contain a carriage return.
        logs = {
            name: files.enter_context(open(name, encoding="utf-8", errors="replace", newline="\n"))
            for name in heads
        }
        if heads and only is None and not runner.run(db.keyring()).has_audit_table:
            only = "trail"  # its error comes at once, not after all rows
        if only in (None, "rows"):
            with progress("verify") as report:
                result.rows = runner.run(maintenance.verify(db, progress=report, **options))
            print_lines(result.rows, result)
        if only == "trail" or heads or (only is None and runner.run(db.keyring()).has_audit_table):
            with progress("verify", "records") as report:
                work = maintenance.verify_audit(db, logs, progress=report, **options)
                result.trail = runner.run(work)
            print_lines(result.trail, result)
        if store is not None:
            result.blobs = runner.run(blob_maintenance.check_blobs(db, store))
            print_lines(result.blobs, result)
    end_command(result)


@main.command()
@on_database(keys="none")
def vacuum(db: Database) -> None:
    """Rewrite all tables, to remove replaced and deleted values from their free space.

    Services wait while a table is rewritten.  No root key is needed.  Exits 1 if a table could not
    be rewritten.

    \b
    Example:
      adk-secure-sessions vacuum --db sqlite:///sessions.db
    """
    print_result(run(db, maintenance.vacuum))
