"""Print results to stdout, and progress to stderr."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO

import click

from adk_secure_sessions.cli import metrics
from adk_secure_sessions.cli.lazy_packages import maintenance
from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.results import Result

BAR_EVERY = 0.1  # seconds between updates of the bar, on a terminal
LINE_EVERY = 10.0  # seconds between lines, if stderr is not a terminal


def to_json_value(value: Any, name: str = "") -> Any:
    """Convert *value*, the value of the field *name*, for `json.dumps`.

    Named tuples become objects, and bytes become hexadecimal text.  Ids become strings, because
    many programs convert JSON numbers to floating point, which cannot represent all 63-bit ids.
    """
    if isinstance(value, Result):
        value = vars(value)
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {name: to_json_value(item, name) for name, item in value.items()}
    if isinstance(value, bytes):  # from a text column that was tampered with
        return value.hex()
    if isinstance(value, tuple | list):
        element = "id" if name.endswith("_ids") else ""
        return [to_json_value(item, element) for item in value]
    is_id = name in ("id", "row") or name.endswith("_id")
    return value if value is None or not is_id else str(value)


def option_value(option: str) -> Any:
    """Return the value of an option of the running command; None if there is no such option."""
    return click.get_current_context().params.get(option)


def print_result(result: Result, *, err: bool = False) -> None:
    """Print the result of a command, and end the command; see `end_command`."""
    print_lines(result, err=err)
    end_command(result, err=err)


def print_lines(part: Result, result: Result | None = None, *, err: bool = False) -> None:
    """Print the lines of *part*, except with --json, and keep *result*, of which it is a part.

    A command with several steps does this after each step, because the next one may fail: the
    failure, as JSON, and --metrics-file then contain *result*.  If it is None, *part* is all.
    """
    metrics.keep_result(result or part)
    if not option_value("as_json"):
        for line in part.lines(bool(option_value("dry_run"))):
            click.echo(escape_controls(line), err=err)


def end_command(result: Result, *, err: bool = False) -> None:
    """Print *result* as JSON with --json, and exit 1 if it has failed.

    If *err* is True, print to stderr, because stdout has the output of the command.
    """
    if option_value("as_json"):
        dry_run = option_value("dry_run")
        mode = {} if dry_run is None else {"dry_run": dry_run}
        click.echo(json.dumps(mode | to_json_value(result), indent=2), err=err)
    if not result.succeeded:
        sys.exit(1)


def escape_controls(text: str) -> str:
    """Return *text* with each control character replaced by its escape sequence in Python.

    A tampered database may contain control characters that let an attacker control the terminal.
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


@contextmanager
def private_file(name: str) -> Iterator[BinaryIO]:
    """Yield a new file that only its owner can read, and synchronize it to disk at the end.

    Do not open the file again by its name: somebody with write access to the directory may have
    replaced it by a link.  If the block raises an error, delete the incomplete file: the same
    command can then run again.
    """
    path = Path(name)
    try:
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigurationError(
            f"{name!r} exists already, and a file is not overwritten: move it away, or give "
            "another name"
        ) from None
    try:
        with os.fdopen(number, "wb") as file:
            yield file
            file.flush()
            os.fsync(number)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    if sys.platform != "win32":  # Windows cannot open a directory
        # The file is complete: ignore a directory that cannot be read, or that a network file
        # system cannot flush.
        with suppress(OSError):
            directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)


@contextmanager
def progress(label: str, nouns: str = "rows") -> "Iterator[maintenance.Progress]":
    """Yield a function that takes the numbers of processed and of all rows, and shows them.

    If stderr is a terminal, a bar shows the progress, the speed and the remaining time.  Otherwise,
    the function prints a line with the progress and the speed at most every 10 seconds.  *label* is
    the text before the numbers, and *nouns* is what is counted, in the plural.
    """
    began = shown_at = called_at = time.monotonic()
    previous = 0
    speed = f"0 {nouns}/s"
    context: Any = nullcontext()
    if sys.stderr.isatty():
        context = click.progressbar(
            length=1,
            label=label,
            show_pos=True,
            show_eta=True,
            item_show_func=lambda _: speed,
            file=sys.stderr,
        )
    with context as bar:
        every = LINE_EVERY if bar is None else BAR_EVERY

        def show(processed: int, total: int) -> None:
            nonlocal began, shown_at, called_at, previous, speed
            now = time.monotonic()
            if processed < previous:  # a command that counts several times, such as `separate`
                began = called_at
                if bar is not None:
                    bar.pos, bar.start, bar.avg = 0, time.time(), []
            called_at, previous = now, processed
            if now - shown_at < every and (bar is None or processed < total):
                return
            shown_at, speed = now, f"{processed / max(now - began, 1e-9):,.0f} {nouns}/s"
            if bar is None:
                click.echo(f"{label}: {processed:,} of {total:,} {nouns}, {speed}", err=True)
            else:
                bar.length, bar.finished = max(total, 1), False
                bar.update(processed - bar.pos)

        yield show
