"""Results in words."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from adk_secure_sessions.cli.output import backend_name, counted, table
from adk_secure_sessions.maintenance import (
    DataRotation,
    KeptKey,
    MasterRotation,
    Problem,
    RecordCount,
    Retirement,
    RootRotation,
    Status,
    UnfinishedRotation,
)

_UNLISTED = "additional_backends"  # as reasons name what is not listed
_NO_REFERENCES = "one before it is needed, or what needs it cannot be told: see `verify`"
_INDENT = "  "


def status_lines(found: Status) -> Iterator[str]:
    clear = "; some records are, or were, in clear" if found.has_plaintext_records else ""
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
                opens[one.unwraps],
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
            (
                one.table,
                backend_name(one.backend_id),
                one.rows,
                f"{one.newest} under newest key",
                _percent(one),
            )
            for one in found.records
        ],
        _INDENT,
    )
    if found.unfinished:
        yield "rotations that have not ended"
    for rotation in found.unfinished:
        yield f"{_INDENT}{_unfinished(rotation)}"


def root_rotation_lines(done: RootRotation, dry_run: bool) -> Iterator[str]:
    verb = "would be wrapped" if dry_run else "is now wrapped"
    for number in done.rotated:
        yield f"master key {number} {verb} by {done.root_key_id}"
    for number in done.unchanged:
        yield f"master key {number} was wrapped by it already"
    for number in done.plaintext:
        yield f"master key {number} is in clear, and was left so"


def master_rotation_lines(done: MasterRotation, dry_run: bool) -> Iterator[str]:
    yield from _beginning(done, dry_run)
    yield from problem_lines(done.problems, done.bad)
    if dry_run:
        master = "a new master key" if done.master_id is None else f"master key {done.master_id}"
        yield f"would be wrapped by {master}: {counted(done.rotated, 'data key')}"
    else:
        yield f"now wrapped by master key {done.master_id}: {counted(done.rotated, 'data key')}"
    if done.bad:
        yield f"cannot be unwrapped, and left: {counted(done.bad, 'data key')}"
    if dry_run:
        return
    if done.left:
        yield f"still wrapped by another: {counted(done.left, 'data key')}"
    yield from _next(done)


def data_rotation_lines(done: DataRotation, dry_run: bool) -> Iterator[str]:
    yield from _beginning(done, dry_run)
    yield from problem_lines(done.problems, done.bad)
    verb = "would be sealed anew" if dry_run else "sealed anew"
    with_keys = "" if dry_run else f", with {counted(done.keys, 'new data key')}"
    yield f"{verb}: {counted(done.reencrypted, 'record')}{with_keys}"
    if done.bad:
        yield f"cannot be opened, and left: {counted(done.bad, 'row')}"
    if dry_run:
        return
    if done.left:
        yield f"left under older keys: {counted(done.left, 'record')}"
        yield from table(done.left_in, _INDENT)
    yield from _next(done)


def retirement_lines(done: Retirement, dry_run: bool) -> Iterator[str]:
    for one in done.examples:
        yield f"{one.table} row {one.id} is kept: {_references(one)}"
    if done.kept > len(done.examples):
        yield f"and {done.kept - len(done.examples)} more"
    verb = "would be dropped" if dry_run else "dropped"
    data, masters = counted(done.data_keys, "data key"), counted(len(done.masters), "master key")
    yield f"{verb}: {data} and {masters}"
    if done.kept:
        yield f"kept: {counted(done.kept, 'older key')}"
        tables = {one.table for one in done.examples}
        if "secure_data_keys" in tables:
            yield "next: `rotate data` for what is under them, then this again"
        if "secure_keyring" in tables:
            yield "next: `rotate master` for what they wrap, then this again"


def problem_lines(problems: Sequence[Problem], count: int) -> Iterator[str]:
    for one in problems:
        yield f"{one.table} row {one.row}: {one.detail}"
    if count > len(problems):
        yield f"and {count - len(problems)} more"


def _beginning(done: MasterRotation | DataRotation, dry_run: bool) -> Iterator[str]:
    if done.resumed:
        verb = "would go on" if dry_run else "went on"
        yield f"{verb} with the rotation begun {_time(done.since)}; --restart begins anew"


def _next(done: MasterRotation | DataRotation) -> Iterator[str]:
    if done.problems and all(_UNLISTED in one.detail for one in done.problems):
        yield "next: this again, with --also-backend for the backend that sealed these rows"
    elif done.bad:
        yield "next: see what `verify` says, restore these rows from a backup, then this again"
    elif done.left:
        yield "next: this again, once all services write with the same backend and root key"
    else:
        yield "next: `retire` drops the keys that were replaced"


def _references(key: KeptKey) -> str:
    rows = (f"{counted(number, 'row')} of {name}" for name, number in key.references)
    return (
        ", ".join(rows) or "one before it is needed, or what needs it cannot be told: see `verify`"
    )


def _percent(count: RecordCount) -> str:
    return f"{100 * count.newest // max(count.rows, 1)}%"  # 100 only if it is all


def _unfinished(rotation: UnfinishedRotation) -> str:
    if rotation.genuine is False or rotation.since is None:
        return f"{rotation.rotation}: what is stored of it was altered; --restart begins anew"
    unchecked = "" if rotation.genuine else "; not checked, which needs --key"
    return f"{rotation.rotation}: begun {_time(rotation.since)}{unchecked}"


def _time(microseconds: int) -> str:
    try:
        return f"{datetime.fromtimestamp(microseconds / 1e6, UTC):%Y-%m-%d %H:%M} UTC"
    except (ValueError, OverflowError, OSError):
        return "at no possible time"


def _date(microseconds: int) -> str:
    try:
        return f"{datetime.fromtimestamp(microseconds / 1e6, UTC):%Y-%m-%d}"
    except (ValueError, OverflowError, OSError):
        return "no possible time"
