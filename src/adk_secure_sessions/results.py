"""Results of commands: a counter is declared once, with its words.

The run of a command increments the counters of its result.  From the declaration, the command line
prints them and knows whether the command has succeeded.  A result is a dataclass:

    @dataclass
    class SessionPurge(Result):
        deleted: int = counter("session", "deleted", is_change=True)
        bad: int = counter("session", "cannot be decrypted, and kept", is_failure=True)
        problems: tuple[Problem, ...] = listing()

`SessionPurge(deleted=3, bad=1)` has the lines "deleted: 3 sessions" and "cannot be decrypted, and
kept: 1 session".  Whatever else the command has to say, such as the next step, the result yields in
`extra_lines`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field, fields
from datetime import UTC, datetime
from itertools import groupby
from typing import Any, ClassVar, NamedTuple


class _Counter(NamedTuple):
    """The words of a counter; see `counter`."""

    noun: str
    words: str
    hint: str
    shows_zero: bool
    is_change: bool
    is_failure: bool


def counter(
    noun: str,
    words: str,
    *,
    hint: str = "",
    shows_zero: bool = False,
    is_change: bool = False,
    is_failure: bool = False,
    default: object = 0,
) -> Any:
    """Declare a counter of a result, which is printed as `words: NUMBER nouns; hint`.

    Successive counters with the same words are one line.

    Args:
        noun: What is counted, in the singular.
        words: What happened to it.
        hint: What to do about it.
        shows_zero: Also print the counter if it is 0.
        is_change: What is counted was changed by the run.  A dry run changes nothing, so its line
            begins with "would be".
        is_failure: The command exits 1 unless the counter is 0.
        default: `()` for a field that is a tuple, whose length is printed; None for a field that is
            None if there was nothing to count.
    """
    declared = _Counter(noun, words, hint, shows_zero, is_change, is_failure)
    return field(default=default, metadata={"counter": declared})


def listing(*counters: str) -> Any:
    """Declare the tuple of the first rows of a kind, each of which has a `line`.

    The sum of *counters*, which are names of fields, says how many rows there are in all.
    """
    return field(default=(), metadata={"listing": counters})


def success_flag() -> Any:
    """Declare a field that is True if the command has succeeded."""
    return field(default=False, metadata={"success_flag": True})


class Result:
    """The base class of results.  Fields that are declared by no function here have no line."""

    success_line: ClassVar[str] = ""  # of a result that has succeeded

    @property
    def numbers(self) -> tuple[int, ...]:
        """The values of the counters."""
        return tuple(self._number(name) for name, _ in self._declared("counter"))

    @property
    def facts(self) -> dict[str, object]:
        """The integers, the booleans, and what is counted in tuples: values for JSON."""
        facts: dict[str, object]
        facts = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        for name, _ in self._declared("counter"):
            if isinstance(value := getattr(self, name), tuple):
                facts[name] = list(value)
        return facts

    @property
    def succeeded(self) -> bool:
        """Whether all is right and nothing is left to do: the command then exits 0."""
        failures = (
            getattr(self, name) for name, words in self._declared("counter") if words.is_failure
        )
        goals = (getattr(self, name) for name, _ in self._declared("success_flag"))
        return not any(failures) and all(goals)

    def lines(self, dry_run: bool = False) -> Iterator[str]:
        """Yield the lines of listed rows, of counters (failures last), and `extra_lines`."""
        for name, counters in self._declared("listing"):
            rows: tuple[Any, ...] = getattr(self, name)
            yield from (row.line for row in rows)
            more = sum(map(self._number, counters)) - len(rows)
            if counters and more > 0:
                yield f"and {more:,} more"
        declared = sorted(self._declared("counter"), key=lambda named: named[1].is_failure)
        same_line = groupby(declared, lambda named: (named[1].words, named[1].is_change))
        for (words, is_change), group in same_line:
            shown = [
                (number, counter)
                for name, counter in group
                if (number := self._number(name)) or counter.shows_zero
            ]
            if shown:
                would = "would be " if is_change and dry_run else ""
                numbers = ", ".join(counted(number, counter.noun) for number, counter in shown)
                hints = "".join(f"; {counter.hint}" for _, counter in shown if counter.hint)
                yield f"{would}{words}: {numbers}{hints}"
        if self.success_line and self.succeeded:
            yield self.success_line
        yield from self.extra_lines(dry_run)

    def extra_lines(self, dry_run: bool) -> Iterable[str]:
        """Return lines that no field declares.  Subclasses override this."""
        return ()

    def _number(self, name: str) -> int:
        value = getattr(self, name)
        return len(value) if isinstance(value, tuple) else value or 0

    def _declared(self, kind: str) -> Iterator[tuple[str, Any]]:
        for attribute in fields(self):  # type: ignore[arg-type]
            if kind in attribute.metadata:
                yield attribute.name, attribute.metadata[kind]


def counted(number: int, noun: str) -> str:
    """Return *number* and *noun*, such as `1 row` or `2 rows`."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def aligned(rows: Sequence[Sequence[object]], indent: str = "") -> Iterator[str]:
    """Yield one line of text for each row; each column is as wide as its longest cell."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"{indent}{'  '.join(padded)}".rstrip()


def utc_text(microseconds: int, form: str = "%Y-%m-%d %H:%M UTC") -> str:
    """Return the time of *microseconds* since 1970 as text, UTC."""
    try:
        return datetime.fromtimestamp(microseconds / 1e6, UTC).strftime(form)
    except (ValueError, OverflowError, OSError):
        return "an impossible time"
