"""The commands that decrypt sessions, and records of the audit trail, into files or tables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from adk_secure_sessions.cli.lazy_packages import Database, maintenance, migration
from adk_secure_sessions.cli.options import on_database, parse_time, with_app_and_user
from adk_secure_sessions.cli.output import option_value, print_result, private_file, progress
from adk_secure_sessions.cli.program import AGAIN, Failure, main, one_line_errors, run, runner_for

T = TypeVar("T")

_STDOUT = "-"


@main.command()
@click.option("--to", metavar="URL", help="Write to google-adk's tables in this database.")
@click.option(
    "--jsonl",
    metavar="FILE",
    help="Write one line of JSON for each session to a new file; - stands for stdout.",
)
@click.option(
    "--decrypt", is_flag=True, help="Required: confirms that the output contains plaintext."
)
@with_app_and_user
@click.option(
    "--skip-bad", is_flag=True, help="Continue after a session or state that cannot be exported."
)
@click.option(
    "--verify",
    is_flag=True,
    help="With --to: afterwards, read both databases again and compare every field.",
)
@on_database()
def export(
    db: Database, to: str | None, jsonl: str | None, decrypt: bool, verify: bool, **options: Any
) -> None:
    """Decrypt sessions into google-adk's own database (--to), or into lines of JSON (--jsonl).

    The output is plaintext.  Only you may read a file that the command creates.  The command
    overwrites nothing.  It exits 1 if a session or state was not exported, or if --verify finds a
    difference.

    \b
    Example:
      adk-secure-sessions export --db sqlite:///sessions.db --key file:root.key \\
          --to sqlite:///adk.db --decrypt --verify
    """
    if (to is None) == (jsonl is None):
        raise click.UsageError("give either --to URL or --jsonl FILE")
    if not decrypt:
        raise click.UsageError("the output contains all content as plaintext: add --decrypt")
    if jsonl is not None and verify:
        raise click.UsageError("--verify compares two databases: give it with --to")
    if jsonl == _STDOUT and option_value("as_json"):
        raise click.UsageError("stdout has the sessions: give --json with --jsonl FILE")
    if to is not None:
        result = _export_to_adk(db, to, verify=verify, **options)
    else:
        assert jsonl is not None
        result = _export_to_file(db, jsonl, "export", "sessions", migration.export_lines, **options)
        result.file = None if jsonl == _STDOUT else jsonl
    print_result(result, err=jsonl == _STDOUT)


def _export_to_adk(db: Database, url: str, **options: Any) -> migration.Export:
    with one_line_errors():
        target = migration.AdkTarget(url)

    async def work(db: Database, **options: Any) -> migration.Export:
        async with target:
            return await migration.export_to_adk(db, target, **options)

    incomplete = "the target has only a part of the sessions, as plaintext"
    try:
        resume_hint = f"{AGAIN}; {incomplete}"
        return run(db, work, label="export", nouns="sessions", resume_hint=resume_hint, **options)
    except Failure as error:
        if error.error_name == "Interrupted" or not target.is_open:
            raise
        message = f"{error.message}; {incomplete}: to continue, {AGAIN}"
        raise Failure(message, error.error_name, retryable=error.retryable) from None


def _export_to_file(
    db: Database,
    file: str,
    label: str,
    nouns: str,
    work: Callable[..., Coroutine[Any, Any, T]],
    **options: Any,
) -> T:
    """Let *work* write to stdout, or to a new file, and return its result."""
    with progress(label, nouns) as report, runner_for(db, resume_hint=None) as runner:
        runner.run(db.keyring())  # report a wrong key before the file is created
        with _output_to(file) as write:
            return runner.run(work(db, write, progress=report, **options))


@main.group()
def audit() -> None:
    """Export the audit trail; `verify` checks it, and `purge audit` deletes old records."""


@audit.command("export")
@click.option(
    "--output",
    metavar="FILE",
    default=_STDOUT,
    show_default=True,
    help="Write to a new file, which only you may read; - stands for stdout.",
)
@click.option(
    "--since", metavar="TIME", type=parse_time, help="Only records of this time or later."
)
@click.option("--until", metavar="TIME", type=parse_time, help="Only records before this time.")
@on_database()
def export_audit(db: Database, output: str, **options: Any) -> None:
    """Write the records as lines of JSON.

    Exits 1 if a record is not authentic; one that cannot be decrypted is not written.

    \b
    Example:
      adk-secure-sessions audit export --db sqlite:///sessions.db --key file:root.key \\
          --since 2026-01-01 --output january.jsonl
    """
    if output == _STDOUT and option_value("as_json"):
        raise click.UsageError("stdout has the records: give --json with --output FILE")
    work = maintenance.export_audit
    result = _export_to_file(db, output, "audit export", "records", work, **options)
    print_result(result, err=output == _STDOUT)


@contextmanager
def _output_to(name: str) -> Iterator[Callable[[bytes], object]]:
    """Yield a function that writes to stdout, or to a new file: see `private_file`."""
    if name != _STDOUT:
        with private_file(name) as file:
            yield file.write
        return
    buffer = getattr(sys.stdout, "buffer", None)  # a stream that replaces stdout may have none
    yield buffer.write if buffer else lambda line: sys.stdout.write(line.decode())
    sys.stdout.flush()
