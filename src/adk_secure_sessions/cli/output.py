"""Print results to stdout, and progress to stderr."""

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
BAR_EVERY = 0.1  # seconds between updates of the bar, on a terminal
LINE_EVERY = 10.0  # seconds between lines, if stderr is not a terminal


def backend_name(backend_id: int | None) -> str:
    """Return a shipped backend's name, `backend ID` for another id, or `no record` for None."""
    if backend_id is None:
        return "no record"
    return _NAMES.get(backend_id, f"backend {backend_id}")


def plain(value: Any) -> Any:
    """Convert *value* for `json.dumps`: named tuples to dicts, and bytes to hexadecimal."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: plain(item) for name, item in value._asdict().items()}
    if isinstance(value, bytes):  # from a text column that was tampered with
        return value.hex()
    return [plain(item) for item in value] if isinstance(value, tuple | list) else value


def show(result: Any, as_json: bool, lines: Iterable[str]) -> None:
    """Print *result* as JSON if *as_json*; otherwise print *lines*, which describe *result*."""
    if as_json:
        click.echo(json.dumps(plain(result), indent=2))
        return
    for line in lines:
        click.echo(without_controls(line))


def without_controls(text: str) -> str:
    """Return *text* with control characters escaped.

    A tampered database may contain escape sequences that control the terminal.
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def counted(number: int, noun: str) -> str:
    """Return *number* and *noun*, such as `1 row` or `2 rows`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def table(rows: Sequence[Sequence[object]], indent: str = "") -> Iterator[str]:
    """Yield one line of text for each row; each column is as wide as its longest cell."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"{indent}{'  '.join(padded)}".rstrip()


@contextmanager
def progress(label: str, unit: str = "rows") -> Iterator[Progress]:
    """Yield a function that takes the number done and the total number, and shows the progress.

    On a terminal, the progress is a bar with the rate and the time left.  Elsewhere, it is a line
    every 10 seconds.  *unit* names what is counted.
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
