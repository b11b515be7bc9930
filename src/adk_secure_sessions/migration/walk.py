"""One walk over the sessions and states of a source, each with its status in the target.

`migrate`, `compare` and the exports visit the pairs that a `Walk` yields.  `Workers` visits several
pairs at the same time, and `Findings` lists those that need attention.
"""

import asyncio
import secrets
from array import array
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, NamedTuple

from adk_secure_sessions.formats import states
from adk_secure_sessions.formats.records import encode_text
from adk_secure_sessions.maintenance.problems import Listed
from adk_secure_sessions.migration.encrypted_sessions import (
    EncryptedSessions,
    Located,
    Pair,
    SessionPair,
    StatePair,
)
from adk_secure_sessions.migration.sources import (
    Ids,
    Selection,
    SessionContent,
    Source,
    SourceSession,
    States,
    Unreadable,
)
from adk_secure_sessions.storage.features.imports import ImportStatus

TOO_LARGE = "its state exceeds a limit of this package (see limits.md)"
CONFLICTS = {
    ImportStatus.CONFLICT: "both sides have changed or deleted it since it was copied",
    ImportStatus.SAME_ID: "the target has one with the same ids that was not copied",
}
GONE = "it was copied before, and the source no longer has it"

_EVENT_OVERHEAD = 200  # an estimate of the memory that an event takes in addition to its bytes


class Stop(Exception):
    """A session or state cannot be copied or exported, and `skip_bad` is False."""


class Walk:
    """Yields the sessions of a source, its states, and what has changed in it during the walk.

    If *target* is None, everything is new.  Only sessions and states with a status in *wanted*
    are read.  With *user_id*, other users' sessions are left out.
    """

    def __init__(
        self,
        source: Source,
        target: EncryptedSessions | None,
        selection: Selection,
        wanted: Collection[ImportStatus] = tuple(ImportStatus),
        user_id: str | None = None,
    ) -> None:
        self.versions: Fingerprints = Fingerprints()
        self._source = source
        self._target = target
        self._selection = selection
        self._wanted = wanted
        self._user_id = user_id
        self._tags = Fingerprints()  # of the sessions that were listed first
        # Versions that were listed, and were gone when their contents were read.  If one is there
        # again later, for example from a replica that lagged behind, nobody has visited it.
        self._unread: set[bytes] = set()
        self._missing: dict[bytes, int] = {}

    async def sessions(self) -> AsyncIterator[Sequence[SessionPair]]:
        """Yield the sessions in batches, without those that the source deleted meanwhile."""
        async for listed in self._source.sessions(self._selection):
            if self._user_id is not None:
                listed = [one for one in listed if one.user_id == self._user_id or not one.has_ids]
            for one in listed:
                self.versions.add(packed(*one))
            pairs = await self._pairs(listed)
            for pair in pairs:
                self._tags.add(pair.tag)
            if left := [one for one in pairs if one.status not in self._wanted]:
                yield left
            if read := await self._with_contents([p for p in pairs if p.status in self._wanted]):
                yield read

    async def again(self, pair: SessionPair) -> SessionPair | None:
        """Return *pair* with its present status and content; None if the source deleted it."""
        assert pair.session is not None
        found = await self._with_contents(await self._pairs([pair.session]))
        return found[0] if found else None

    async def states(self) -> AsyncIterator[Sequence[StatePair]]:
        """Yield the states of users, and then those of apps, in batches."""
        async for batch in self._source.states(self._selection):
            encoded = encode_states(batch)
            if self._target:
                yield await self._target.states(encoded)
            else:
                yield [Pair(ids, content=state) for ids, state in encoded.items()]

    async def state_again(self, pair: StatePair) -> StatePair:
        """Return *pair* with its present status in the target."""
        assert self._target is not None
        assert isinstance(pair.content, bytes)
        return (await self._target.states({pair.ids: pair.content}))[0]

    def has_visited(self, session: SourceSession) -> bool:
        """Return whether the walk has yielded this version of a session."""
        version = packed(*session)
        return version in self.versions and version not in self._unread

    async def changed(self) -> AsyncIterator[SourceSession]:
        """Yield the sessions that were created or changed in the source since they were listed."""
        await self._find_missing()
        async for listed in self._source.sessions(self._selection):
            for one in listed:
                if self._missing and self._target is not None:
                    self._missing.pop(self._target.tag(*one.ids), None)
                if not self.has_visited(one):
                    yield one

    async def gone(self) -> AsyncIterator[Located]:
        """Yield the copied sessions that the source no longer has.

        Expired and continued ones are left out.  With `since`, or after a comparison has
        ended the migration, no session is gone.
        """
        assert self._target is not None or not self._missing
        for tag, row in self._missing.items():
            found = self._target and await self._target.located(tag, row)
            if found:
                yield found

    async def _find_missing(self) -> None:
        target = self._target
        if target is None or self._selection.since is not None:
            return
        if await target.imports.migration_end():
            return
        async for copies in target.copies(self._selection.app_name):
            self._missing |= {tag: row for tag, row in copies.items() if tag not in self._tags}

    async def _pairs(self, listed: Sequence[SourceSession]) -> list[SessionPair]:
        if self._target:
            return await self._target.sessions(listed)
        return [Pair(one.ids, session=one) for one in listed]

    async def _with_contents(self, pairs: Sequence[SessionPair]) -> list[SessionPair]:
        contents = await self._source.read([one.session for one in pairs if one.session])
        found = []
        for one in pairs:
            content = one.session and contents.get(one.session)
            if content is not None:
                found.append(replace(one, content=content))
            elif one.session is not None:
                self._unread.add(packed(*one.session))
        return found


def encode_states(batch: States) -> dict[Ids, bytes | Unreadable]:
    """Return the states in *batch* as JSON, or why they cannot be stored."""
    encoded: dict[Ids, bytes | Unreadable] = {}
    for ids, state in batch.items():
        try:
            encoded[ids] = state if isinstance(state, Unreadable) else states.encode(state)
        except ValueError:  # the message of this error names keys of the state
            encoded[ids] = Unreadable(TOO_LARGE)
    return encoded


def size_of(content: SessionContent | Unreadable | None) -> int:
    """Return about how many bytes of memory *content* takes, without its state."""
    if not isinstance(content, SessionContent):
        return 0
    return sum(len(one.plaintext) + _EVENT_OVERHEAD for one in content.events) + _EVENT_OVERHEAD


class Workers:
    """Runs coroutines at the same time: at most *number*, which together take at most *size* bytes.

    The end of the `async with` block waits for them.  If one fails, the next call, or the end
    of the block, raises its error.  If the block ends with an error, all others are cancelled.
    """

    def __init__(self, number: int, size: int) -> None:
        self._number = number
        self._size = size
        self._running: dict[asyncio.Task[None], int] = {}
        self._bytes = 0

    async def start(self, work: Callable[[], Coroutine[Any, Any, None]], size: int) -> None:
        """Wait until the limits allow *work* of *size* bytes, alone if need be, and start it."""
        while self._running and (
            len(self._running) >= self._number or self._bytes + size > self._size
        ):
            await self._wait(asyncio.FIRST_COMPLETED)
        self._running[asyncio.create_task(work())] = size
        self._bytes += size

    async def finish(self) -> None:
        while self._running:
            await self._wait(asyncio.FIRST_EXCEPTION)

    async def __aenter__(self) -> "Workers":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                await self.finish()
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            self._running.clear()

    async def _wait(self, until: str) -> None:
        done, _ = await asyncio.wait(self._running, return_when=until)
        for task in done:
            self._bytes -= self._running.pop(task)
        # Ask each task: asyncio logs an error that nobody has asked for, with its frames.
        failures = [error for task in done if (error := task.exception()) is not None]
        if failures:
            raise failures[0]


class Fingerprints:
    """A set of byte strings that needs 8 bytes of memory for each: a hash with a random key.

    Another string is wrongly found in it with a probability of 2^-64 for each element.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)
        self._numbers = array("Q")
        self._is_sorted = True

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, data: bytes) -> None:
        self._numbers.append(self._number(data))
        self._is_sorted = False

    def __contains__(self, data: bytes) -> bool:
        if not self._is_sorted:
            self._numbers = array("Q", sorted(self._numbers))
            self._is_sorted = True
        number = self._number(data)
        at = bisect_left(self._numbers, number)
        return at < len(self._numbers) and self._numbers[at] == number

    def _number(self, data: bytes) -> int:
        return int.from_bytes(blake2b(data, key=self._key, digest_size=8).digest(), "big")


def packed(*texts: str) -> bytes:
    """Encode *texts* as bytes.  Different lists of texts have different encodings."""
    encoded = [encode_text(text) for text in texts]
    return b"".join(len(data).to_bytes(8, "big") + data for data in encoded)


class Finding(NamedTuple):
    """A session, the state of a user or an app, or an artifact, that needs attention.

    Attributes:
        kind: `session`, `user`, `app` or `artifact`.
        tag: The blind index, in hexadecimal, in the target or, of an export, in the database that
            is read; empty if the target has no keys yet, or if the ids cannot be decrypted.
        reason: What was found, without content.
        app_name: The app; None unless readable ids were requested.
        user_id: The user; None for an app, or unless readable ids were requested.
        session_id: The session; None for a user, an app or an artifact of a user, or unless
            readable ids were requested.
        filename: The name of an artifact; None otherwise, or unless readable ids were requested.
    """

    kind: str
    tag: str
    reason: str
    app_name: str | None = None
    user_id: str | None = None
    session_id: str | None = None
    filename: str | None = None

    def __repr__(self) -> str:  # without the ids
        return f"<{self.kind} {self.tag}: {self.reason}>"

    @property
    def line(self) -> str:
        ids = ", ".join(repr(name) for name in self[3:] if name is not None)
        return f"{self.kind} {self.tag or '(unknown)'}{ids and f' ({ids})'}: {self.reason}"


class Findings(Listed[Finding]):
    """Counts the findings of a run, and keeps the first 1000; *with_ids* keeps readable ids."""

    def __init__(self, *, with_ids: bool) -> None:
        super().__init__()
        self._with_ids = with_ids

    def add(self, tag: bytes, reason: str, *ids: str | None) -> None:
        """Add a finding; *ids* are the app, the user, the session and the name, or fewer."""
        kind = ("app", "user", "session", "artifact")[len(ids) - 1]
        self.append(Finding(kind, tag.hex(), reason, *(ids if self._with_ids else ())))
