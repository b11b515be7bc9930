"""Parts that `migrate`, `compare` and `erase_source` share.

- `Workers` runs imports at the same time, and limits their number and their memory.
- `Fingerprints` is a set of byte strings that needs 8 bytes of memory for each.
- `Chunks` divides sessions into parts that fit into memory.
- `Findings` counts and lists sessions and states that need attention.
"""

import asyncio
import secrets
from array import array
from bisect import bisect_left
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar

from adk_secure_sessions.formats import states
from adk_secure_sessions.formats.records import encode_text
from adk_secure_sessions.formats.states import JsonObject
from adk_secure_sessions.migration.sources import SessionContent, UnreadableState

S = TypeVar("S")

TOO_LARGE = "its state exceeds a limit of this package (see limits.md)"

_MAX_LISTED = 1000
# An estimate of the memory that an event takes in addition to its bytes.
_EVENT_OVERHEAD = 200
# About how many bytes the contents in one part of `Chunks` take, and the maximum number of sessions
# in one part.
_CHUNK_BYTES = 4 * 2**20
_MAX_CHUNK = 256


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
        failed = None
        for task in done:
            self._bytes -= self._running.pop(task)
            failed = failed or task.exception()
        if failed is not None:
            raise failed


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
        """Add *data*."""
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


class Chunks:
    """Divides sessions into parts whose contents take about 4 MiB.

    The size of a content is not known before the content is read.  So the number of sessions in a
    part is calculated from the average size of previous contents.
    """

    def __init__(self) -> None:
        self._average = _CHUNK_BYTES / 16

    def of(self, sessions: Sequence[S]) -> Iterator[Sequence[S]]:
        """Yield the parts of *sessions*.  Call `learn` before the next part is taken."""
        start = 0
        while start < len(sessions):
            number = int(min(max(_CHUNK_BYTES / self._average, 1), _MAX_CHUNK))
            yield sessions[start : start + number]
            start += number

    def learn(self, sizes: Sequence[int]) -> None:
        """Take the *sizes* of the contents of a part into account."""
        for size in sizes:
            # The average rises at once and falls slowly, because large sessions often follow each
            # other.
            self._average += (size - self._average) * (0.5 if size > self._average else 0.05)


def size_of(content: SessionContent) -> int:
    """Return about how many bytes of memory *content* takes, without its state."""
    return sum(len(one.plaintext) + _EVENT_OVERHEAD for one in content.events) + _EVENT_OVERHEAD


States = Mapping[tuple[str, ...], JsonObject | UnreadableState]


async def by_owner(
    batches: AsyncIterator[Mapping[Any, JsonObject | UnreadableState]],
) -> AsyncIterator[States]:
    """Yield the batches of states that a source yields, with tuples of ids as keys."""
    async for batch in batches:
        yield {(key,) if isinstance(key, str) else key: batch[key] for key in batch}


def encode_states(
    batch: States,
) -> tuple[dict[tuple[str, ...], bytes], dict[tuple[str, ...], str]]:
    """Return the states in *batch* as JSON, and reasons for those that cannot be stored.

    A state that cannot be stored has empty JSON.
    """
    encoded: dict[tuple[str, ...], bytes] = {}
    bad = {}
    for owner, state in batch.items():
        encoded[owner] = b""
        if isinstance(state, UnreadableState):
            bad[owner] = state.reason
            continue
        try:
            encoded[owner] = states.encode(state)
        except ValueError:  # do not chain this error: its message names keys of the state
            bad[owner] = TOO_LARGE
    return encoded, bad


class Finding(NamedTuple):
    """A session, or the state of a user or an app, that needs attention.

    Attributes:
        kind: `session`, `user` or `app`.
        tag: The blind index in the target, in hexadecimal; empty if the target has no keys yet.
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


class Findings:
    """Counts the findings of a run, and keeps the first 1000 of them in `kept`.

    Args:
        with_ids: Whether to keep readable ids.
    """

    def __init__(self, *, with_ids: bool) -> None:
        self._with_ids = with_ids
        self.count: int = 0
        self.kept: list[Finding] = []

    def add(self, tag: bytes, reason: str, *ids: str) -> None:
        """Add a finding; *ids* are the app name, the user id and the session id, or fewer."""
        self.count += 1
        if len(self.kept) < _MAX_LISTED:
            kind = ("app", "user", "session")[len(ids) - 1]
            self.kept.append(Finding(kind, tag.hex(), reason, *(ids if self._with_ids else ())))
