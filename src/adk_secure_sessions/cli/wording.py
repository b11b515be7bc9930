"""Results in words."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from adk_secure_sessions.cli.output import backend_name, table
from adk_secure_sessions.maintenance import Problem, Status

_INDENT = "  "


def status_lines(found: Status) -> Iterator[str]:
    clear = "; some records are, or were, in clear" if found.has_clear_records else ""
    yield f"format {found.format_version}{clear}"
    yield "master keys"
    opens = {None: "", True: "opens", False: "does not open"}
    yield from table(
        [
            (
                one.purpose,
                one.id,
                f"under {one.root_key_id}",
                f"of {_date(one.created_at)}",
                f"{one.age / 86400:.0f} days old",
                opens[one.opens],
            )
            for one in found.masters
        ],
        _INDENT,
    )
    yield "data keys"
    yield from table(
        [
            (backend_name(one.backend_id), f"under master key {one.master_id}", one.keys)
            for one in found.data_keys
        ],
        _INDENT,
    )
    yield "rows"
    yield from table(
        [
            (one.table, backend_name(one.backend_id), one.rows, f"{one.newest} under newest key")
            for one in found.records
        ],
        _INDENT,
    )


def problem_lines(problems: Sequence[Problem], count: int) -> Iterator[str]:
    for one in problems:
        yield f"{one.table} row {one.row}: {one.reason}"
    if count > len(problems):
        yield f"and {count - len(problems)} more"


def _date(microseconds: int) -> str:
    try:
        return f"{datetime.fromtimestamp(microseconds / 1e6, UTC):%Y-%m-%d}"
    except (ValueError, OverflowError, OSError):
        return "no possible time"
