"""Format the results of commands as lines of text."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from adk_secure_sessions.cli.lazy_packages import maintenance
from adk_secure_sessions.cli.output import backend_name, counted, table
from adk_secure_sessions.errors import Reason

_INDENT = "  "


def check_notes(result: maintenance.Check) -> Iterator[str]:
    keys = "in the key database" if result.has_key_database else "in this database"
    yield (
        f"a service can start: format {result.format_version}, root key {result.root_key_id}, "
        f"{counted(result.master_count, 'master key')} {keys}"
    )
    if result.master_id is None:
        yield "the first service to start creates a data master"
    if result.has_plaintext_records:
        yield "some records are, or were, plaintext"


def status_notes(result: maintenance.Status) -> Iterator[str]:
    plaintext = "; some records are, or were, plaintext" if result.has_plaintext_records else ""
    yield f"format {result.format_version}{plaintext}"
    texts = {None: "", True: "unwrapped", False: "cannot be unwrapped"}
    masters = [
        (
            master.purpose,
            master.id,
            f"under {master.root_key_id}",
            f"of {utc_text(master.created_at, '%Y-%m-%d')}",
            _age_text(master.age),
            texts[master.is_unwrapped],
        )
        for master in result.master_keys
    ]
    yield from ("master keys", *table(masters, _INDENT))
    keys = [
        (backend_name(count.backend_id), f"under master key {count.master_id}", count.key_count)
        for count in result.data_keys
    ]
    yield from ("data keys", *table(keys, _INDENT))
    if result.spare_keys:
        spare = counted(result.spare_keys, "data key")
        yield f"{_INDENT}spare: {spare}; no row names them, and they encrypt nothing"
    is_rotating = any(run.name == "data" and run.done is not None for run in result.unfinished)
    under = "under keys of the rotation" if is_rotating else "under current key"
    rows = [
        (
            count.table,
            backend_name(count.backend_id),
            count.rows,
            f"{count.under_current} {under}",
            f"{100 * count.under_current // max(count.rows, 1)}%",  # 100% means all rows
        )
        for count in result.records
    ]
    yield from ("rows", *table(rows, _INDENT))
    if result.is_separating:
        yield f"unfinished separation, and services reject this copy; {_resume_hint('`separate`')}"
    elif result.unfinished:
        yield "unfinished rotations"
    for rotation in result.unfinished:
        again = "" if result.is_separating else f"; {_resume_hint('the same command')}"
        yield f"{_INDENT}{_rotation_text(rotation, again)}"
    if result.migration is not None:
        yield f"migration: {_migration_text(result.migration)}"
    if result.state_index is not None:
        yield f"search index: {_index_text(result.state_index)}"
    if result.audit_trail is not None:
        yield f"audit trail: {_trail_text(result.audit_trail)}"


def rotation_notes(
    result: maintenance.MasterRotation | maintenance.DataRotation, dry_run: bool
) -> Iterator[str]:
    if dry_run:
        return
    if left_in := getattr(result, "left_in", ()):
        yield from table(left_in, _INDENT)
    if result.bad and result.bad == getattr(result, "bad_blobs", 0):
        yield (
            "next: restore these blobs from a backup of the store, or delete their artifacts, then "
            "run this again"
        )
    elif result.problems and all(row.reason is Reason.UNKNOWN_BACKEND for row in result.problems):
        yield "next: run this again with --also-backend, for the backend that encrypted these rows"
    elif result.bad:
        yield (
            "next: repeat an `erase-user` that was interrupted, or run `verify` and restore the "
            "whole database from a backup (an older copy of a single row may be rejected); then "
            "run this again"
        )
    elif result.left:
        yield "next: once all services write with the same backend and root key, run this again"
    else:
        yield "next: `retire` deletes the keys that were replaced"


def retirement_notes(result: maintenance.Retirement) -> Iterator[str]:
    from adk_secure_sessions.storage.schema import data_keys, keyring

    # Suggest a rotation only if known rows need a kept key.  If it is unknown which rows need the
    # key, a rotation may not help.
    tables = {key.table for key in result.kept_keys if key.references}
    if data_keys.name in tables:
        yield "next: `rotate data` re-encrypts the records under them; then run `retire` again"
    if keyring.name in tables:
        yield "next: `rotate master` wraps the data keys under them; then run `retire` again"
    if tables:
        yield "if a key is still kept then, rows that need it cannot be decrypted: run `verify`"


def erasure_notes(result: maintenance.Erasure, dry_run: bool) -> Iterator[str]:
    is_unknown = not (result.rows or result.has_app)
    if is_unknown:
        yield "there is no such app"
    elif not result.rows:
        yield "there is no such user"
    elif result.missing_part:
        remain = "run `verify`, which lists any rows of the user that remain"
        yield f"{result.missing_part} was missing: {remain}"
    elif result.keys_were_already_gone:
        yield "a run that was interrupted had already deleted the data key"
    if result.cleared and not is_unknown:
        yield "freed space does not hold the wrapped data key"
    elif not (dry_run or is_unknown):
        yield f"freed space may hold the wrapped data key: {result.obstacle}"
    if result.has_migration_table:
        yield "the source of the migration may still contain the user: delete the user there, too"


def separation_notes(result: maintenance.Separation) -> Iterator[str]:
    if result.complete:
        yield f"the copy has the id {result.database_id} and keys of its own: services can start"
    else:
        yield (
            "the separation has not ended, and services reject the copy: run `verify`, delete or "
            "restore the rows that it names, and run this command again"
        )


def key_move_notes(result: maintenance.KeyMove) -> Iterator[str]:
    if result.to == "key-db":
        yield "the key database has the keys: start services with key_db_url"
    else:
        yield "the database has its keys: start services without key_db_url"
    for obstacle in result.obstacles:
        yield f"the file that had the keys before may contain copies of them: {obstacle}"


def continuation_note(unfinished: maintenance.UnfinishedRotation, dry_run: bool) -> str:
    verb = "would continue" if dry_run else "continues"
    assert unfinished.since is not None, "an authentic checkpoint has a time"
    return f"{verb} the rotation begun {utc_text(unfinished.since)}; --restart begins a new one"


def _rotation_text(rotation: maintenance.UnfinishedRotation, resume_hint: str) -> str:
    if rotation.is_authentic is False or rotation.since is None:
        return f"{rotation.name}: its checkpoint was tampered with; --restart begins a new rotation"
    assert rotation.done is not None
    assert rotation.total is not None
    percent = 100 * rotation.done // max(rotation.total, 1)
    total = counted(rotation.total, "data key" if rotation.name == "master" else "record")
    began = f"began {utc_text(rotation.since)}"
    unchecked = "" if rotation.is_authentic else "; not verified: that needs --key"
    replaced = f"{percent}%, {rotation.done:,} of {total}"
    return f"{rotation.name}: {replaced}; {began}{unchecked}{resume_hint}"


def _resume_hint(command: str) -> str:
    return f"it runs or was stopped; running {command} again is safe and continues it"


def _migration_text(migration: maintenance.MigrationStatus) -> str:
    tombstones = counted(migration.tombstones, "tombstone")
    counts = f"{counted(migration.sessions, 'session')} copied, {tombstones}"
    if not migration.is_complete:
        return f"{counts}; not complete: a service with plaintext fallback reads the source"
    if migration.is_authentic is False:
        return f"{counts}; its mark of completion was tampered with: run `migrate compare` again"
    unchecked = "" if migration.is_authentic else "; not verified: that needs --key"
    return f"{counts}; complete{unchecked}"


def _index_text(index: maintenance.IndexStatus) -> str:
    counts = f"{counted(index.rows, 'row')} of {counted(index.keys, 'key')}"
    if index.complete is None:
        return f"{counts}; not verified: that needs --key"
    if index.tampered:
        wrong = counted(index.tampered, "mark")
        return f"{counts}; {wrong} tampered with: run `index fill` for each app and key"
    left = index.keys - index.complete
    return f"{counts}; {left} not complete: `index fill` ends it" if left else f"{counts}; complete"


def _trail_text(trail: maintenance.TrailStatus) -> str:
    counts = f"{counted(trail.records, 'record')} in {counted(trail.chains, 'chain')}"
    return f"{counts}, the oldest of {utc_text(trail.since)}" if trail.since is not None else counts


def _age_text(seconds: float) -> str:
    days = f"{abs(seconds) / 86400:.0f} days"
    return f"{days} old" if seconds >= 0 else f"{days} in the future: a clock is or was wrong"


def utc_text(microseconds: int, form: str = "%Y-%m-%d %H:%M UTC") -> str:
    """Return the time of *microseconds* since 1970 as text, UTC."""
    try:
        return datetime.fromtimestamp(microseconds / 1e6, UTC).strftime(form)
    except (ValueError, OverflowError, OSError):
        return "an impossible time"
