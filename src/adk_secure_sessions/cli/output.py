"""Printing: results go to stdout, progress and errors to stderr."""

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from adk_secure_sessions.backends import AesGcmBackend, FernetBackend, NoOpBackend
from adk_secure_sessions.maintenance import Progress

_NAMES = {one.backend_id: one.name for one in (AesGcmBackend, FernetBackend, NoOpBackend)}
BAR_EVERY = 0.1  # seconds, on a terminal
LINE_EVERY = 10.0  # seconds, elsewhere


def backend_name(backend_id: int | None) -> str:
    """Return the name of a backend, or its id if it is a third party's; None is no record."""
    if backend_id is None:
        return "no record"
    return _NAMES.get(backend_id, f"backend {backend_id}")


def plain(value: Any) -> Any:
    """Return *value* as JSON values: named tuples become objects."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: plain(item) for name, item in value._asdict().items()}
    if isinstance(value, bytes):  # in a column of text that was tampered with
        return value.hex()
    return [plain(item) for item in value] if isinstance(value, tuple | list) else value


def show(result: Any, as_json: bool, lines: Iterable[str]) -> None:
    """Print *result* as JSON, or *lines*, which say the same."""
    if as_json:
        click.echo(json.dumps(plain(result), indent=2))
        return
    for line in lines:
        click.echo(without_controls(line))


def without_controls(text: str) -> str:
    """Return *text* with control characters escaped.

    A database that was tampered with may hold sequences that a terminal acts on.
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def counted(number: int, noun: str) -> str:
    """Return *number* and *noun*, such as `1 row` and `2 rows`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def table(rows: Sequence[Sequence[object]], indent: str = "") -> Iterator[str]:
    """Yield a line for each row, with columns of equal width."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"{indent}{'  '.join(padded)}".rstrip()


@contextmanager
def progress(label: str, unit: str = "rows") -> Iterator[Progress]:
    """Yield a function that shows progress: how many of how many *unit* are done.

    On a terminal it is a bar with rate and time left, elsewhere a line every 10 seconds.
    """
    began = last = time.monotonic()
    if not sys.stderr.isatty():

        def line(done: int, total: int) -> None:
            nonlocal last
            if (now := time.monotonic()) - last >= LINE_EVERY:
                last = now
                click.echo(f"{label}: {done:,} of {total:,} {unit}", err=True)

        yield line
        return
    rate = 0.0
    bar: Any
    with click.progressbar(
        length=1,
        label=label,
        show_pos=True,
        show_eta=True,
        item_show_func=lambda _: f"{rate:,.0f} {unit}/s",
        file=sys.stderr,
    ) as bar:

        def draw(done: int, total: int) -> None:
            nonlocal last, rate
            now = time.monotonic()
            if now - last < BAR_EVERY and done < total:
                return
            last, rate = now, done / max(now - began, 1e-9)
            bar.length = max(total, 1)
            bar.update(done - bar.pos)

        yield draw
