"""Compare every session and state of a source with its copy in an encrypted database."""

from collections.abc import Iterator
from dataclasses import dataclass

from adk_secure_sessions.audit import audited_command
from adk_secure_sessions.concurrency import in_groups
from adk_secure_sessions.errors import DecryptionError
from adk_secure_sessions.formats import json_text
from adk_secure_sessions.formats.records import EncodedEvent
from adk_secure_sessions.maintenance import Database, Progress
from adk_secure_sessions.maintenance.progress import Meter
from adk_secure_sessions.migration.encrypted_source import owner_state, session_content
from adk_secure_sessions.migration.findings import Finding, Findings
from adk_secure_sessions.migration.source_scan import (
    CONFLICT_REASONS,
    DigestSet,
    GoneCopy,
    SessionEntry,
    SourceScan,
    StateEntry,
    undecryptable_reason,
)
from adk_secure_sessions.migration.sources import (
    EVERYTHING,
    Selection,
    SessionContent,
    Source,
    Unreadable,
)
from adk_secure_sessions.results import Result, counter, listing
from adk_secure_sessions.storage.features.imports import ImportStatus

_READS_AT_ONCE = 4  # the maximum number of sessions of the target that are read at the same time

_REASONS = {
    ImportStatus.NEW: "it was not copied",
    ImportStatus.OUTDATED: "it has changed in the source since it was copied",
    ImportStatus.UNCHANGED: "it is different",
    **CONFLICT_REASONS,
}


@dataclass
class Comparison(Result):
    """The result of `compare`.

    Attributes:
        sessions: How many sessions of the source were examined.
        events: How many events these sessions have.
        states: How many states of users and apps were examined.
        equal: How many sessions are equal in every field; or were continued by services in the
            target, and are equal up to there.
        deleted: How many sessions and states have no copy, because the target has deleted it: a
            service deleted the session, it expired, or its user was erased.  They do not count as
            differences.  The source has the last copy, which `erase_source` deletes.
        missing: How many sessions were not copied.
        different: How many sessions and states differ or are in conflict, cannot be decrypted in
            the target, or, of a state, were not copied.
        bad: How many sessions and states of the source cannot be read.
        changed_in_source: How many sessions were created or changed in the source during the
            comparison, plus the copied sessions that the source no longer has.  Expired and
            continued copies do not count.
        all_equal: Whether no session and no state is missing, different, bad or changed.
        mark_stored: Whether this run has stored the mark that ends the migration, because the
            comparison included everything, found a session or a state, and all were equal.
        mark_withdrawn: Whether this run has removed the mark of an earlier comparison, because not
            all were equal.
        findings: The first 1000 sessions and states that are missing, different, bad or changed.
        seconds: How long the comparison took.
    """

    sessions: int = counter("session", "compared", shows_zero=True)
    events: int = counter("event", "compared", shows_zero=True)
    states: int = counter("state", "compared", shows_zero=True)
    equal: int = counter("session", "equal in every field that was copied")
    deleted: int = counter(
        "item",
        "in the source only, because they were deleted, erased or expired in the target",
        hint="`migrate erase-source` deletes their last copy",
    )
    missing: int = counter("session", "not copied", is_failure=True)
    different: int = counter("item", "different or in conflict", is_failure=True)
    bad: int = counter("item", "cannot be read in the source", is_failure=True)
    changed_in_source: int = counter(
        "session", "deleted, created or changed in the source", is_failure=True
    )
    all_equal: bool = False
    mark_stored: bool = False
    mark_withdrawn: bool = False
    findings: tuple[Finding, ...] = listing("missing", "different", "bad", "changed_in_source")
    seconds: float = 0.0

    def extra_lines(self, dry_run: bool) -> Iterator[str]:
        if not self.all_equal:
            yield "the two sides are not equal; next: run `migrate copy`, then compare again"
            if self.mark_withdrawn:
                yield (
                    "the mark that ends the migration, from an earlier comparison, was withdrawn: "
                    "restart services with a fallback, so that they read the source again"
                )
        elif self.mark_stored:
            yield (
                "everything was copied: the database now has the mark that ends the migration, so "
                "services no longer read the source"
            )
        elif not self.sessions + self.states:
            yield "the source has nothing to compare: check --from and, if you gave it, --app"
        elif not dry_run:
            yield "both sides are equal; to end the migration, compare without --app and --since"


@audited_command
async def compare(
    source: Source,
    db: Database,
    *,
    selection: Selection = EVERYTHING,
    show_ids: bool = False,
    progress: Progress | None = None,
) -> Comparison:
    """Compare every session and state of *source* with its copy in *db*, field by field.

    The fields of a session are its ids, its state, its times, and the content, the time and the
    order of its events.  If a service continued a session in the target, only the time of its
    creation and the copied events are compared.

    If *selection* is everything, *source* is not empty and no `ServiceSource`, and all is equal,
    this function stores an authenticated mark in the target.  The mark ends the migration:
    `PlaintextFallbackService` no longer reads the source.  The mark says nothing about another
    source, for example if *source* is an old backup of a database that is still in use.  If a later
    comparison finds a difference, that comparison removes the mark, unless `erase_source` may have
    deleted rows of the source meanwhile.  This function changes nothing else.
    """
    return await ComparisonRun(source, db, selection, show_ids=show_ids).run(progress)


class ComparisonRun:
    """One run of `compare`; *equal_states* has the ids of each equal state, with its JSON."""

    scan: SourceScan
    _meter: Meter

    def __init__(
        self, source: Source, db: Database, selection: Selection, *, show_ids: bool
    ) -> None:
        self.equal_states: DigestSet = DigestSet()
        self._source, self._db = source, db
        self._selection = selection
        self._findings = Findings(with_ids=show_ids)
        self._result = Comparison()

    async def run(self, progress: Progress | None, *, stores_mark: bool = True) -> Comparison:
        """Compare everything; if *stores_mark* is True, store or remove the mark."""
        db, result = self._db, self._result
        self.scan = SourceScan(self._source, db, (await db.keyring()).index_master, self._selection)
        self._meter = Meter(progress, await self._source.count(self._selection), None)
        async for sessions in self.scan.sessions():
            await in_groups(_READS_AT_ONCE, self._compare, sessions)
        async for batch in self.scan.states():
            for state in batch:
                await self._compare(state)
        async for found in self.scan.rescan():
            is_unreadable = isinstance(found, GoneCopy) and found.migrated_row is None
            result.different += is_unreadable
            result.changed_in_source += not is_unreadable
            if isinstance(found, GoneCopy):
                self._findings.add(found.tag, found.reason, *found.ids)
            else:
                tag = self.scan.tag(found.ids)
                self._findings.add(tag, _REASONS[ImportStatus.OUTDATED], *found.ids)
        self._meter.finish()
        result.all_equal = result.succeeded
        is_whole = self._selection == EVERYTHING and self._source.has_all_apps
        result.mark_stored = (
            stores_mark and result.all_equal and is_whole and result.sessions + result.states > 0
        )
        if result.mark_stored:
            await db.imports.store_mark()
        if stores_mark and not result.all_equal:
            result.mark_withdrawn = await db.imports.withdraw_mark()
        return self._findings.copy_into(result)

    async def _compare(self, entry: SessionEntry | StateEntry) -> None:
        reason = await self._reason(entry)
        if reason and not isinstance(entry.content, Unreadable):
            # A service or another run may have written meanwhile: compare once more.
            reread = await self.scan.read_again(entry)
            if reread is None:
                await self._meter.advance()
                return
            entry, reason = reread, await self._reason(reread)
        result, content = self._result, entry.content
        if isinstance(content, Unreadable):
            result.bad += 1
        elif reason:
            is_missing = isinstance(entry, SessionEntry) and entry.status is ImportStatus.NEW
            result.missing += is_missing
            result.different += not is_missing
        result.deleted += reason is None
        if reason:
            self._findings.add(entry.tag, reason, *entry.ids)
        if isinstance(entry, SessionEntry):
            self.scan.processed_versions.add(entry.session)
            result.sessions += 1
            if isinstance(content, SessionContent):
                result.events += len(content.events)
                result.equal += reason == ""
            await self._meter.advance()
        else:
            result.states += 1
            if not reason and isinstance(content, bytes):
                self.equal_states.add((*entry.ids, content))

    async def _reason(self, entry: SessionEntry | StateEntry) -> str | None:
        """Return why the entry is not equal; empty if it is, or was continued.

        Return None if the target has deleted the copy.
        """
        content, status = entry.content, entry.status
        if isinstance(content, Unreadable):
            return content.reason
        try:
            if isinstance(content, bytes):
                is_same = is_same_state(content, await owner_state(self._db, *entry.ids))
                if is_same or status is ImportStatus.CONTINUED:
                    return ""
                return None if status is ImportStatus.DELETED else _REASONS[status]
            if status is ImportStatus.NEW or status in CONFLICT_REASONS:
                return _REASONS[status]
            # Try to read the session even if its row is not stored.  If an attacker has removed
            # only this row, the read raises an error.
            copy = await session_content(self._db, *entry.ids)
        except DecryptionError as error:
            return undecryptable_reason(error)
        if copy is None or status is ImportStatus.DELETED:
            return None
        assert isinstance(entry, SessionEntry)
        assert content is not None
        event_count = entry.copied_event_count if status is ImportStatus.CONTINUED else None
        different = session_difference(content, copy, event_count=event_count)
        is_outdated = different and status is ImportStatus.OUTDATED
        return f"{_REASONS[status]}; {different}" if is_outdated else different


# --- fields --------------------------------------------------------------------------------------


def session_difference(
    content: SessionContent,
    copy: SessionContent,
    *,
    event_count: int | None = None,
    numbers_may_differ: bool = False,
) -> str:
    """Return the fields in which a session and its copy differ, as a reason; empty if in none.

    If services have continued the copy, only `created_at` and the first *event_count* events are
    compared.  If *numbers_may_differ* is True, `1` and `1.0` are the same.
    """
    fields = []
    if event_count is None:
        event_count = len(copy.events)
        if not is_same_state(content.state, copy.state, numbers_may_differ=numbers_may_differ):
            fields.append("state")
        if content.updated_at != copy.updated_at:
            fields.append("updated_at")
        # `migrate` may have given the copy an expiry that the source does not have.
        if content.expires_at not in (None, copy.expires_at):
            fields.append("expires_at")
    if content.created_at != copy.created_at:
        fields.append("created_at")
    if len(content.events) != event_count:
        fields.append(f"number of events ({len(content.events)}, {event_count})")
    pairs = zip(content.events, copy.events[:event_count], strict=False)
    for number, (event, other) in enumerate(pairs, 1):
        if event.time != other.time:
            fields.append(f"time of event {number}")
        elif not _is_same_event(event, other, numbers_may_differ):
            fields.append(f"event {number}")
        else:
            continue
        break  # one missing event makes all later events differ
    return f"different: {', '.join(fields)}" if fields else ""


def is_same_state(state: bytes, other: bytes, *, numbers_may_differ: bool = False) -> bool:
    values = map(json_text.load_state, (state, other))
    return state == other or json_text.same_json(*values, numbers_may_differ=numbers_may_differ)


def _is_same_event(event: EncodedEvent, other: EncodedEvent, numbers_may_differ: bool) -> bool:
    if event.plaintext == other.plaintext:
        return True
    _, fields = json_text.read_event(event.plaintext)
    _, others = json_text.read_event(other.plaintext)
    return json_text.same_json(fields, others, numbers_may_differ=numbers_may_differ)
