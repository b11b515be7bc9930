"""Compare every session and state of a source with its copy in an encrypted database."""

import time
from typing import Any, NamedTuple

from adk_secure_sessions.audit import command
from adk_secure_sessions.errors import DecryptionError
from adk_secure_sessions.formats import json_text, states
from adk_secure_sessions.maintenance import Database, Progress
from adk_secure_sessions.maintenance.problems import UNREADABLE
from adk_secure_sessions.maintenance.progress import Meter
from adk_secure_sessions.migration.pipeline import (
    Chunks,
    Finding,
    Findings,
    Fingerprints,
    States,
    Workers,
    by_owner,
    encode_states,
    packed,
    size_of,
)
from adk_secure_sessions.migration.sources import (
    Scope,
    SessionContent,
    Source,
    UnreadableSession,
)
from adk_secure_sessions.migration.target import Copy, Entry, Target
from adk_secure_sessions.storage.features.imports import ImportStatus, SourceEvent

_EVERYTHING = Scope()
# The maximum number of sessions of the target that are read at the same time, and of bytes that
# their contents, and those of the same sessions in the source, take in memory.
_READS = 4
_READ_BYTES = 16 * 2**20

_MISSING = "it was not copied"
_CONFLICT = "both sides have changed or deleted it since it was copied"
_NOT_COPIED = "the target has a session with the same ids that was not copied"
_BEHIND = "it has changed in the source since it was copied"
_GONE = "the source no longer has it"


class Comparison(NamedTuple):
    """The result of `compare`.

    Each session of the source is counted once: as `equal`, `moved_on`, `deleted`, `missing`,
    `different`, `conflicts` or `bad`.

    Attributes:
        sessions: How many sessions of the source were examined.
        equal: How many sessions are equal in every field.
        moved_on: How many sessions have more events in the target, because services continued them
            there.  The copied events are equal.
        deleted: How many sessions of the source were deleted in the target.
        missing: How many sessions were not copied.
        different: How many sessions differ, or cannot be decrypted in the target.
        conflicts: How many sessions have changed on both sides, or have the ids of a session in
            the target that was not copied.
        bad: How many sessions of the source cannot be read.
        gone: How many copied sessions the source no longer has, without those that have expired;
            0 if only recent sessions were compared, or after an earlier comparison has ended the
            migration.
        behind: How many sessions were created or changed in the source during the comparison.
        new: How many sessions of the target were not copied: services created them.
        events: How many events were compared.
        states: How many states of users and apps are equal, or were changed or deleted in the
            target after they were copied.
        different_states: How many states of users and apps differ, or were not copied.
        clean: Whether no session and no state is missing, different, bad, gone, behind or in
            conflict.
        completed: Whether this run has stored the mark that ends the migration, because the
            comparison was clean, included everything, and found a session or a state.
        withdrawn: Whether this run has removed the mark of an earlier comparison, because this
            comparison was not clean.
        findings: The first 1000 sessions and states that prevented a clean comparison.
        seconds: How long the comparison took.
    """

    sessions: int
    equal: int
    moved_on: int
    deleted: int
    missing: int
    different: int
    conflicts: int
    bad: int
    gone: int
    behind: int
    new: int
    events: int
    states: int
    different_states: int
    clean: bool
    completed: bool
    withdrawn: bool
    findings: tuple[Finding, ...]
    seconds: float


@command
async def compare(
    source: Source,
    db: Database,
    *,
    scope: Scope = _EVERYTHING,
    show_ids: bool = False,
    progress: Progress | None = None,
) -> Comparison:
    """Compare every session and state of *source* with its copy in *db*, field by field.

    The fields of a session are its ids, its state, its times, and the content, the time and the
    order of its events.  If a service continued a session in the target, only the time of its
    creation and the copied events are compared.

    If *scope* is everything, *source* is not empty and the comparison is clean, this function
    stores an authenticated mark in the target.  The mark ends the migration:
    `PlaintextFallbackService` no longer reads the source.  The mark says nothing about another
    source, for example if *source* is an old backup of a database that is still in use.  If a later
    comparison is not clean, that comparison removes the mark, unless `erase_source` may have
    deleted rows of the source meanwhile.  This function changes nothing else.

    Args:
        source: The source.
        db: The target, with every backend whose records it may contain.
        scope: Which sessions to compare.
        show_ids: Put readable ids into the findings, not only blind indexes.
        progress: Called with the number of sessions and events done, and the number of all.

    Raises:
        ConfigurationError: The source or the target cannot be used.
        WrongKeyError: The root keys do not decrypt the keyring.
        TamperedError: A row of `secure_migrated` was modified.
        DatabaseError: The source or the target raised an error.
    """
    run = await Comparing.begin(source, db, scope, show_ids=show_ids, progress=progress)
    return await run.run()


class Comparing:
    """One run of `compare`.

    Attributes:
        equal_sessions: After the run, the ids and the version of each session that the attributes
            `equal`, `moved_on` and `deleted` of the `Comparison` count.
        equal_states: After the run, the ids of each owner whose state is counted in
            `Comparison.states`, with the state in the source as JSON.
    """

    def __init__(
        self, source: Source, target: Target, scope: Scope, findings: Findings, meter: Meter
    ) -> None:
        self.equal_sessions: Fingerprints = Fingerprints()
        self.equal_states: Fingerprints = Fingerprints()
        self._source = source
        self._target = target
        self._scope = scope
        self._findings = findings
        self._meter = meter
        self._seen = Fingerprints()
        self._versions = Fingerprints()
        self._counts = _Counts()

    @classmethod
    async def begin(
        cls,
        source: Source,
        db: Database,
        scope: Scope,
        *,
        show_ids: bool,
        progress: Progress | None,
    ) -> "Comparing":
        """Open the target, and count the sessions and events of the source for *progress*.

        The arguments are those of `compare`.
        """
        target = await Target.of(db)
        total = await source.size(scope)
        meter = Meter(progress, total.sessions + total.events, None)
        return cls(source, target, scope, Findings(with_ids=show_ids), meter)

    async def run(self, *, completes: bool = True) -> Comparison:
        """Compare everything in the scope, and store the mark that ends the migration.

        The mark is stored only if *completes* is True, the scope is everything, the source is not
        empty, and the comparison is clean.  If the comparison is not clean and *completes* is True,
        the mark of an earlier comparison is removed.
        """
        began, counts = time.monotonic(), self._counts
        await self._compare_sessions()
        await self._compare_states()
        await self._compare_listings()
        counts.new = await self._target.count_others(self._scope.app_name)
        clean = counts.is_clean
        is_everything = self._scope == _EVERYTHING and counts.sessions + counts.states > 0
        completed = completes and clean and is_everything
        if completed:
            await self._target.store.complete_migration()
        withdrawn = completes and not clean and await self._target.store.withdraw_migration()
        self._meter.finish()
        return Comparison(
            **vars(counts),
            clean=clean,
            completed=completed,
            withdrawn=withdrawn,
            findings=tuple(self._findings.kept),
            seconds=time.monotonic() - began,
        )

    # --- sessions --------------------------------------------------------------------------------

    async def _compare_sessions(self) -> None:
        async with Workers(_READS, _READ_BYTES) as workers:
            to_read = Chunks()
            async for listed in self._source.sessions(self._scope):
                for one in listed:
                    self._seen.add(self._target.tag(*one[:3]))
                    self._versions.add(packed(*one))
                for part in to_read.of(listed):
                    contents = await self._source.read(part)
                    sizes = []
                    for entry in await self._target.entries(part):
                        content = contents.get(entry.session)
                        if content is None:
                            continue  # it was deleted in the source meanwhile
                        size = size_of(content) if isinstance(content, SessionContent) else 0
                        sizes.append(size)
                        await workers.start(self._compare(entry, content), 2 * size)
                    to_read.learn(sizes)

    async def _compare(self, entry: Entry, content: SessionContent | UnreadableSession) -> None:
        """Compare one session, and count it."""
        counts = self._counts
        counts.sessions += 1
        if isinstance(content, UnreadableSession):
            self._report("bad", entry, content.reason)
            await self._meter.advance()
            return
        outcome, reason = await self._outcome(entry, content)
        if reason:
            # A service or another run may have written meanwhile: compare the session once more.
            (entry,) = await self._target.entries([entry.session])
            latest = (await self._source.read([entry.session])).get(entry.session)
            if latest is None:
                counts.sessions -= 1
                return
            if isinstance(latest, SessionContent):
                content = latest
            outcome, reason = await self._outcome(entry, content)
        if reason:
            self._report(outcome, entry, reason)
        else:
            counts.add(outcome)
            self.equal_sessions.add(packed(*entry.session))
        counts.events += len(content.events)
        await self._meter.advance(1 + len(content.events))

    def _report(self, outcome: str, entry: Entry, reason: str) -> None:
        self._counts.add(outcome)
        self._findings.add(entry.tag, reason, *entry.session[:3])

    async def _outcome(self, entry: Entry, content: SessionContent) -> tuple[str, str]:
        """Return which attribute of `Comparison` counts the session, and why it is not equal.

        The second text is empty if the session is equal, moved on or deleted.
        """
        if entry.found in _OUTCOMES:
            return _OUTCOMES[entry.found]
        # Try to read the session even if its row is not stored.  If an attacker has removed only
        # this row, the read raises an error.
        try:
            copy = await self._target.content(entry)
        except UNREADABLE as error:
            said = str(error) if isinstance(error, DecryptionError) else "it is malformed"
            return "different", f"the target cannot decrypt it: {said}"
        if copy is None or entry.found is ImportStatus.DELETED:
            return "deleted", ""
        moved_on = entry.found is ImportStatus.MOVED_ON
        fields = differences(content, copy, copied=entry.copied_events if moved_on else None)
        if not fields:
            return "moved_on" if moved_on else "equal", ""
        reason = f"different: {', '.join(fields)}"
        return "different", f"{_BEHIND}; {reason}" if entry.found is ImportStatus.OLDER else reason

    # --- states ----------------------------------------------------------------------------------

    async def _compare_states(self) -> None:
        async for batch in by_owner(self._source.user_states(self._scope)):
            await self._compare_batch(batch)
        async for batch in by_owner(self._source.app_states(self._scope)):
            await self._compare_batch(batch)

    async def _compare_batch(self, batch: States) -> None:
        encoded, bad = encode_states(batch)
        found = await self._target.states(encoded)
        for owner, (tag, kind) in found.items():
            reason = bad.get(owner) or await self._state_reason(owner, encoded[owner], kind)
            if reason and owner not in bad:
                (again,) = (await self._target.states({owner: encoded[owner]})).values()
                reason = await self._state_reason(owner, encoded[owner], again[1])
            if reason:
                self._counts.different_states += 1
                self._findings.add(tag, reason, *owner)
            else:
                self._counts.states += 1
                self.equal_states.add(packed(*owner) + encoded[owner])

    async def _state_reason(self, owner: tuple[str, ...], data: bytes, kind: ImportStatus) -> str:
        """Return why the state of *owner* is not equal.

        *data* is the state in the source as JSON, and *kind* is its status in the target.  The
        result is empty if the state is equal, or was changed or deleted in the target after the
        state was copied.
        """
        try:
            stored = await self._target.state(*owner)
        except UNREADABLE as error:
            said = str(error) if isinstance(error, DecryptionError) else "it is malformed"
            return f"the target cannot decrypt it: {said}"
        if kind in (ImportStatus.MOVED_ON, ImportStatus.DELETED) or is_same(
            states.loads(data), states.loads(stored)
        ):
            return ""
        return _STATES[kind]

    # --- both listings ---------------------------------------------------------------------------

    async def _compare_listings(self) -> None:
        """Count and report the sessions that are `gone` or `behind`.

        These are copied sessions that the source no longer has, and sessions that were created or
        changed in the source during the comparison.
        """
        target = self._target
        missing: dict[bytes, Copy] = {}
        if self._scope.since is None and not await target.store.migration_is_complete():
            async for copies in target.copies(self._scope.app_name):
                missing |= {one.tag: one for one in copies if one.tag not in self._seen}
        async for listed in self._source.sessions(self._scope):
            for one in listed:
                tag = target.tag(*one[:3])
                missing.pop(tag, None)
                if packed(*one) not in self._versions:
                    self._counts.behind += 1
                    self._findings.add(tag, _BEHIND, *one[:3])
        for tag, copy in missing.items():
            found = await target.located(copy)
            if found is not None and found.copy.is_untouched:
                self._counts.gone += 1
                self._findings.add(tag, _GONE, *found.ids)


class _Counts:
    """The numbers of a `Comparison`."""

    def __init__(self) -> None:
        self.sessions = self.equal = self.moved_on = self.deleted = self.missing = 0
        self.different = self.conflicts = self.bad = self.gone = self.behind = self.new = 0
        self.events = self.states = self.different_states = 0

    def add(self, name: str) -> None:
        setattr(self, name, getattr(self, name) + 1)

    @property
    def is_clean(self) -> bool:
        bad = self.missing + self.different + self.conflicts + self.bad + self.gone + self.behind
        return not bad + self.different_states


_OUTCOMES = {
    ImportStatus.NEW: ("missing", _MISSING),
    ImportStatus.CONFLICT: ("conflicts", _CONFLICT),
    ImportStatus.SAME_ID: ("conflicts", _NOT_COPIED),
}

_STATES = {
    ImportStatus.NEW: "the state was not copied",
    ImportStatus.UNCHANGED: "the state is different",
    ImportStatus.OLDER: "the state has changed in the source since it was copied",
    ImportStatus.CONFLICT: "the state has changed on both sides since it was copied",
}


# --- fields --------------------------------------------------------------------------------------


def differences(
    content: SessionContent, copy: SessionContent, *, copied: int | None = None
) -> list[str]:
    """Return the names of the fields in which a session and its copy differ.

    Args:
        content: The session in the source.
        copy: The session in the target.
        copied: If services have continued the copy, the number of copied events.  Then only these
            events and `created_at` are compared.  None to compare everything.
    """
    fields = []
    if copied is None:
        copied = len(copy.events)
        if not is_same(content.state, copy.state):
            fields.append("state")
        if content.updated_at != copy.updated_at:
            fields.append("updated_at")
        if content.expires_at != copy.expires_at:
            fields.append("expires_at")
    if content.created_at != copy.created_at:
        fields.append("created_at")
    if len(content.events) != copied:
        fields.append(f"number of events ({len(content.events)}, {copied})")
    for number, (event, other) in enumerate(
        zip(content.events, copy.events[:copied], strict=False)
    ):
        if event.time != other.time:
            fields.append(f"time of event {number}")
        elif event.plaintext != other.plaintext and not _is_same_event(event, other):
            fields.append(f"event {number}")
        else:
            continue
        break  # one missing event makes all later events differ
    return fields


def _is_same_event(event: SourceEvent, other: SourceEvent) -> bool:
    _, fields = json_text.read_event(event.plaintext)
    _, others = json_text.read_event(other.plaintext)
    return is_same(fields, others)


def is_same(value: Any, other: Any) -> bool:
    """Return whether two JSON values are the same: `1`, `1.0` and `True` differ, NaN equals NaN."""
    todo = [(value, other)]
    while todo:
        one, two = todo.pop()
        if type(one) is not type(two):
            return False
        if type(one) is dict:
            if one.keys() != two.keys():
                return False
            todo += [(item, two[key]) for key, item in one.items()]
        elif type(one) is list:
            if len(one) != len(two):
                return False
            todo += zip(one, two, strict=True)
        elif one != two and not (one != one and two != two):
            return False
    return True
