"""One walk over the sessions and states of a source, each with its status in the target.

`migrate`, `compare` and the exports visit the pairs that a `Walk` yields.  `Workers` visits several
pairs at the same time, and `Findings` lists those that need attention.
"""

import asyncio
import secrets
from array import array
from bisect import bisect_left
from collections.abc import AsyncIterator, Collection, Coroutine, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Generic, NamedTuple, TypeVar

from adk_secure_sessions.formats import states
from adk_secure_sessions.formats.records import encode_text
from adk_secure_sessions.maintenance.problems import Listed
from adk_secure_sessions.migration.sources import (
    Ids,
    Scope,
    SessionContent,
    Source,
    SourceSession,
    States,
    Unreadable,
)
from adk_secure_sessions.migration.target import Copy, InTarget, Located, Target
from adk_secure_sessions.storage.features.imports import ImportStatus

C = TypeVar("C")

TOO_LARGE = "its state exceeds a limit of this package (see limits.md)"
CONFLICT = "both sides have changed or deleted it since it was copied"
SAME_ID = "the target has one with the same ids that was not copied"
GONE = "it was copied before, and the source no longer has it"

_EVENT_OVERHEAD = 200  # an estimate of the memory that an event takes in addition to its bytes


@dataclass(frozen=True, slots=True)
class Pair(Generic[C]):
    """A session of the source, or the state of a user or an app, and its status in the target.

    Attributes:
        ids: The app name, the user id and the session id; fewer for a state.
        tag: The blind index in the target; empty if the target has no keys yet.
        status: The status.
        content: The content in the source (a state as JSON), or why it cannot be read; None if the
            visitor does not need it.
        session: The session in the source; None for a state.
        copied_events: The number of events that were copied before.
    """

    ids: Ids
    tag: bytes
    status: ImportStatus
    content: C | Unreadable | None = None
    session: SourceSession | None = None
    copied_events: int = 0


SessionPair = Pair[SessionContent]
StatePair = Pair[bytes]

_NOTHING_STORED = InTarget(b"", ImportStatus.NEW)


class Walk:
    """Yields the sessions of a source, its states, and what has changed in it during the walk.

    Args:
        source: The source.
        target: The target; None if it does not exist yet, so that everything is new.
        scope: Which sessions and states to yield.
        wanted: The statuses with which a session or state is read; others have no content.
        user_id: Yield only sessions of users with this id, and sessions without readable ids.

    Attributes:
        versions: The ids and versions of the sessions that were listed.
    """

    def __init__(
        self,
        source: Source,
        target: Target | None,
        scope: Scope,
        wanted: Collection[ImportStatus] = tuple(ImportStatus),
        user_id: str | None = None,
    ) -> None:
        self.versions: Fingerprints = Fingerprints()
        self._source = source
        self._target = target
        self._scope = scope
        self._wanted = wanted
        self._user_id = user_id
        self._tags = Fingerprints()  # of the sessions that were listed first
        # Versions that were listed, and were gone when their contents were read.  If one is there
        # again later, for example from a replica that lagged behind, nobody has visited it.
        self._unread: set[bytes] = set()
        self._missing: dict[bytes, Copy] = {}

    async def sessions(self) -> AsyncIterator[Sequence[SessionPair]]:
        """Yield the sessions in batches, without those that were deleted in the source meanwhile.

        First come those of a batch that are not read.
        """
        async for listed in self._source.sessions(self._scope):
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
        async for batch in self._source.states(self._scope):
            encoded, bad = encode_states(batch)
            found = await self._target.states(encoded) if self._target else {}
            yield [
                _state(ids, found.get(ids, _NOTHING_STORED), bad.get(ids) or data)
                for ids, data in encoded.items()
            ]

    async def state_again(self, pair: StatePair) -> StatePair:
        """Return *pair* with its present status in the target."""
        assert self._target is not None
        assert isinstance(pair.content, bytes)
        found = (await self._target.states({pair.ids: pair.content}))[pair.ids]
        return replace(pair, status=found.status)

    def has_visited(self, session: SourceSession) -> bool:
        """Return whether the walk has yielded this version of a session."""
        version = packed(*session)
        return version in self.versions and version not in self._unread

    async def changed(self) -> AsyncIterator[SourceSession]:
        """Yield the sessions that were created or changed in the source since they were listed.

        Afterwards, `gone` returns the copied sessions that neither of the two listings has.
        """
        await self._find_missing()
        async for listed in self._source.sessions(self._scope):
            for one in listed:
                if self._missing and self._target is not None:
                    self._missing.pop(self._target.tag(*one.ids), None)
                if not self.has_visited(one):
                    yield one

    async def gone(self) -> AsyncIterator[Located]:
        """Yield the copied sessions that the source no longer has.

        Sessions that have expired, or that services continued, are left out.  If only recent
        sessions are read, or a comparison has ended the migration, no session is gone.
        """
        assert self._target is not None or not self._missing
        for copy in self._missing.values():
            found = self._target and await self._target.located(copy)
            if found:
                yield found

    async def _find_missing(self) -> None:
        """Find the copied sessions that the first listing did not have.

        Another run may copy a session that was created after the first listing.  Such a session is
        in the second listing, so it is not reported as gone.
        """
        target = self._target
        if target is None or self._scope.since is not None:
            return
        if await target.imports.migration_end():
            return
        async for copies in target.copies(self._scope.app_name):
            self._missing |= {one.tag: one for one in copies if one.tag not in self._tags}

    async def _pairs(self, listed: Sequence[SourceSession]) -> list[SessionPair]:
        found = await self._target.sessions(listed) if self._target else {}
        pairs: list[SessionPair] = []
        for one in listed:
            tag, status, number = found.get(one, _NOTHING_STORED)
            pairs.append(Pair(one.ids, tag, status, None, one, number))
        return pairs

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


def _state(ids: Ids, found: InTarget, content: bytes | Unreadable) -> StatePair:
    return Pair(ids, found.tag, found.status, content)


def encode_states(batch: States) -> tuple[dict[Ids, bytes], dict[Ids, Unreadable]]:
    """Return the states in *batch* as JSON, and reasons for those that cannot be stored.

    A state that cannot be stored has empty JSON.
    """
    encoded: dict[Ids, bytes] = {}
    bad = {}
    for ids, state in batch.items():
        encoded[ids] = b""
        if isinstance(state, Unreadable):
            bad[ids] = state
            continue
        try:
            encoded[ids] = states.encode(state)
        except ValueError:  # the message of this error names keys of the state
            bad[ids] = Unreadable(TOO_LARGE)
    return encoded, bad


def size_of(content: SessionContent | Unreadable | None) -> int:
    """Return about how many bytes of memory *content* takes, without its state."""
    if not isinstance(content, SessionContent):
        return 0
    return sum(len(one.plaintext) + _EVENT_OVERHEAD for one in content.events) + _EVENT_OVERHEAD


class Workers:
    """Runs coroutines at the same time: at most *number*, which together take at most *size* bytes.

    Use it with `async with`.  The end of the block waits for all coroutines.  If a coroutine fails,
    the next call of `start` or `finish`, or the end of the block, raises its error.  If the block
    ends with an error, all other coroutines are cancelled.
    """

    def __init__(self, number: int, size: int) -> None:
        self._number = number
        self._size = size
        self._running: dict[asyncio.Task[None], int] = {}
        self._bytes = 0

    async def start(self, coroutine: Coroutine[Any, Any, None], size: int) -> None:
        """Wait until the limits allow another coroutine of *size* bytes, then start *coroutine*.

        If *size* alone exceeds the limit, the coroutine runs alone.
        """
        try:
            while self._running and (
                len(self._running) >= self._number or self._bytes + size > self._size
            ):
                await self._wait(asyncio.FIRST_COMPLETED)
        except BaseException:
            coroutine.close()
            raise
        self._running[asyncio.create_task(coroutine)] = size
        self._bytes += size

    async def finish(self) -> None:
        """Wait for all coroutines."""
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
    """A set of byte strings that needs 8 bytes of memory for each.

    The set contains only hashes.  So for each string that was added, another string is wrongly
    found in the set with a probability of 2^-64.  The hashes have a random key, so nobody can
    choose strings with equal hashes.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)
        # The set is divided into 256 parts, and one part is sorted at a time: sorting creates a
        # Python object for each number, which takes more than 8 bytes.
        self._parts = [array("Q") for _ in range(256)]
        self._is_sorted = [True] * 256

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def add(self, data: bytes) -> None:
        number = self._number(data)
        self._parts[number & 255].append(number)
        self._is_sorted[number & 255] = False

    def __contains__(self, data: bytes) -> bool:
        number = self._number(data)
        index = number & 255
        if not self._is_sorted[index]:
            self._parts[index] = array("Q", sorted(self._parts[index]))
            self._is_sorted[index] = True
        part = self._parts[index]
        at = bisect_left(part, number)
        return at < len(part) and part[at] == number

    def _number(self, data: bytes) -> int:
        return int.from_bytes(blake2b(data, key=self._key, digest_size=8).digest(), "big")


def packed(*texts: str) -> bytes:
    """Encode *texts* as bytes.  Different lists of texts have different encodings."""
    encoded = [encode_text(text) for text in texts]
    return b"".join(len(data).to_bytes(8, "big") + data for data in encoded)


class Finding(NamedTuple):
    """A session, or the state of a user or an app, that needs attention.

    Attributes:
        kind: `session`, `user` or `app`.
        tag: The blind index, in hexadecimal, in the target or, of an export, in the database that
            is read; empty if the target has no keys yet, or if the ids cannot be decrypted.
        reason: What was found, without content.
        app_name: The app; None unless readable ids were requested.
        user_id: The user; None for an app, or unless readable ids were requested.
        session_id: The session; None for a user or an app, or unless readable ids were requested.
    """

    kind: str
    tag: str
    reason: str
    app_name: str | None = None
    user_id: str | None = None
    session_id: str | None = None

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

    def add(self, tag: bytes, reason: str, *ids: str) -> None:
        """Add a finding; *ids* are the app name, the user id and the session id, or fewer."""
        kind = ("app", "user", "session")[len(ids) - 1]
        self.append(Finding(kind, tag.hex(), reason, *(ids if self._with_ids else ())))
