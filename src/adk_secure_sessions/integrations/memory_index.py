"""A user's memory in this process: the decrypted entries, and an index of their words.

`UserMemory` is built from the items of the stored collection (`formats.memory_items`).  Its search
returns the same entries as the search of google-adk's `InMemoryMemoryService` (2.13).  The search
looks words up in an index instead of splitting every text into words again.
"""

import heapq
import itertools
import re
import threading
import time
import unicodedata
from asyncio import sleep
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias, TypeVar

from google.adk.memory.memory_entry import MemoryEntry
from google.genai import types

from adk_secure_sessions.formats import json_text
from adk_secure_sessions.formats.event_parser import validate_model
from adk_secure_sessions.formats.events import unreadable_error
from adk_secure_sessions.formats.json_text import JsonObject
from adk_secure_sessions.formats.memory_items import Dropped, MemoryItem, Scope
from adk_secure_sessions.storage.schema import SessionRevision, events

T = TypeVar("T")

_MAX_RESULTS = 10  # as in google-adk
_WORD = re.compile(r"\w+")
# Combining marks are neither letters, digits nor white space.  So each run of more than 30 marks
# contains such a run.  It may also contain other characters, such as punctuation.
_RUN = re.compile(r"[^\w\s]{30}")
# COMBINING GRAPHEME JOINER, which is invisible.  `normalized` inserts it into long runs of marks,
# because normalization does not move marks across it.
_JOINER = "\u034f"
# If more items are stored than this number plus two for each entry and scope, the memory is
# rewritten.
SPARE_ITEMS = 1000
# The size of the entries of one item after a rewrite, in bytes of JSON.  Dropping an entry later
# writes all other entries of its item again.
_PACKED_BYTES = 8 * 1024
_TEXTS_AT_ONCE = 1000  # texts to search for a word before other tasks may run
_WORK_SECONDS = 0.005  # of work before other tasks may run
# The key of an entry is `(scope number << _SCOPE_SHIFT) | entry number`.  The scope of an entry is
# a session or a constant of `formats.memory_items`.  Scopes and entries are numbered in order of
# insertion.
_SCOPE_SHIFT = 40


async def paced(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield *items*; let other tasks run when the work on them has taken 5 ms."""
    until = time.monotonic() + _WORK_SECONDS
    for item in items:
        yield item
        if time.monotonic() > until:
            await sleep(0)
            until = time.monotonic() + _WORK_SECONDS


@dataclass(slots=True, eq=False, repr=False)
class Entry:
    """An entry of a user's memory.  Its representation shows no content."""

    id: str
    author: str | None
    # Seconds since 1970 for an event; for a memory, the text that `add_memory` was given.
    timestamp: float | str | None
    content: bytes  # JSON of google-adk's `Content`
    metadata: bytes | None  # JSON
    # The last three fields are set once the entry is stored.
    item_number: int = -1  # of the item that added the entry
    position: int = -1  # in the field `add` of that item
    written_with: str = ""  # the version of google-adk that wrote the item

    @classmethod
    def from_stored(
        cls, values: JsonObject, item_number: int, position: int, written_with: str
    ) -> "Entry":
        content, metadata = json_text.dumps(values["content"]), values.get("metadata")
        author, timestamp = values.get("author"), values.get("timestamp")
        dumped = json_text.dumps(metadata) if metadata else None
        return cls(
            values["id"], author, timestamp, content, dumped, item_number, position, written_with
        )

    def values(self) -> JsonObject:
        """Return the JSON object that stores the entry."""
        values: JsonObject = {
            "id": self.id,
            "content": json_text.loads(self.content),
            "author": self.author,
            "timestamp": self.timestamp,
            "metadata": json_text.loads(self.metadata) if self.metadata else None,
        }
        return {name: value for name, value in values.items() if value is not None}

    def equals_except_metadata(self, stored: "Entry") -> bool:
        """Return whether *stored* is equal to this entry, whatever their metadata."""
        if (self.id, self.timestamp, self.author) != (stored.id, stored.timestamp, stored.author):
            return False
        if self.content == stored.content:
            return True
        # JSON changes its format when it is stored and read.
        return json_text.dumps(json_text.loads(self.content)) == stored.content

    def text(self) -> str:
        return text_of(json_text.loads(self.content))

    def to_memory_entry(self, session_row: int) -> MemoryEntry:
        try:
            content = validate_model(types.Content, json_text.loads(self.content))
        except ValueError:
            row = f"{session_row}, {self.item_number}"
            raise unreadable_error(events.name, row, self.written_with) from None
        timestamp = self.timestamp
        if not isinstance(timestamp, str | None):
            timestamp = datetime.fromtimestamp(timestamp).isoformat()  # google-adk's format
        return MemoryEntry(
            id=self.id,
            content=content,
            author=self.author,
            timestamp=timestamp,
            custom_metadata=json_text.loads(self.metadata) if self.metadata else {},
        )


def text_of(content: JsonObject) -> str:
    """Return the texts of *content*, the JSON of a `Content`, separated by spaces."""
    texts = [part.get("text") for part in content.get("parts") or () if type(part) is dict]
    return " ".join(text for text in texts if text)


# An item to store, and the list for its field `add`, in which None is a dropped entry.
NewItem: TypeAlias = tuple[MemoryItem, list[Entry | None]]


class UserMemory:
    """The memory of one user, built from the items 0 to `version.revision - 1`.

    Several threads may use this object.  They hold `lock` while they change or search it.
    """

    def __init__(self, version: SessionRevision) -> None:
        self.lock: threading.Lock = threading.Lock()
        # The row id of the collection, and the number of applied items.
        self.version: SessionRevision = version
        # By key.  Of two entries with the same count of words, the one with the lower key comes
        # first, as in google-adk.
        self.entries: dict[int, Entry] = {}
        self.deleted: set[str] = set()  # ids that must not be added again
        self._items: list[MemoryItem] = []  # with an empty field `add`: `entries` has the entries
        self._entry_keys: list[list[int | None]] = []  # of each item; None for a dropped entry
        self._scopes: dict[Scope, dict[int, Entry]] = {}
        self._scope_numbers: dict[Scope, int] = {}
        # For each word, the keys of the entries that contain the word.
        self._words: dict[str, set[int]] = {}
        # The texts of the entries by key, in NFC and lower case.  Texts in ASCII are omitted: a
        # search looks into the texts only for words that are not ASCII.
        self._texts: dict[int, str] = {}
        self._entry_numbers = itertools.count()

    def has_scope(self, scope: Scope) -> bool:
        return scope in self._scopes

    def of_scope(self, scope: Scope) -> Sequence[Entry]:
        """Return the entries of *scope*, in order of insertion."""
        return list(self._scopes.get(scope, {}).values())

    def apply(self, item: MemoryItem, written_with: str) -> None:
        """Apply the next item; *written_with* is the version of google-adk that wrote it."""
        number = self.version.revision
        for earlier, dropped in item.drop.items():
            self._drop(earlier, dropped.places)
            self._items[earlier] = self._items[earlier]._replace(replacement=dropped.replacement)
        self.deleted.update(item.deleted)
        keys: list[int | None] = []
        if item.scope is not None:
            scope = self._scopes.setdefault(item.scope, {})
            numbers = self._scope_numbers
            first = numbers.setdefault(item.scope, len(numbers)) << _SCOPE_SHIFT
            for position, values in enumerate(item.add):
                if values is None:
                    keys.append(None)
                    continue
                key = first | next(self._entry_numbers)
                entry = Entry.from_stored(values, number, position, written_with)
                scope[key] = self.entries[key] = entry
                keys.append(key)
                self._index(key, text_of(values["content"]))
        self._items.append(item._replace(add=()))
        self._entry_keys.append(keys)
        self.version = self.version._replace(revision=number + 1)

    def replaced(self, drop: dict[int, Dropped]) -> dict[int, NewItem]:
        """Return the new content of each item that has entries in *drop*, by item number."""
        found = {}
        for number, (places, replacement) in drop.items():
            dropped = set(places)
            entries = [
                None if key is None or place in dropped else self.entries[key]
                for place, key in enumerate(self._entry_keys[number])
            ]
            found[number] = self._items[number]._replace(replacement=replacement), entries
        return found

    def is_sparse(self) -> bool:
        """Return whether far more items are stored than the entries and scopes need."""
        return len(self._items) > SPARE_ITEMS + 2 * (len(self.entries) + len(self._scopes))

    def rewritten(self, pending: MemoryItem) -> list[NewItem]:
        """Return new items for all entries that *pending*, which is not stored yet, does not drop.

        The entries of one item have about `_PACKED_BYTES` at most.
        """
        dropped_keys = {
            self._entry_keys[number][place]
            for number, dropped in pending.drop.items()
            for place in dropped.places
        }
        items: list[NewItem] = []
        for scope, kept in self._scopes.items():
            entries: list[Entry | None] = []
            items.append((MemoryItem(scope), entries))
            size = 0
            for key, entry in kept.items():
                if key in dropped_keys:
                    continue
                if size > _PACKED_BYTES:
                    entries, size = [], 0
                    items.append((MemoryItem(scope), entries))
                entries.append(entry)
                size += len(entry.content) + len(entry.metadata or b"")
        deleted = sorted(self.deleted | set(pending.deleted))
        return [(MemoryItem(deleted=deleted), []), *items]

    # --- search ----------------------------------------------------------------------------------

    async def search(self, query: str) -> list[Entry]:
        """Return up to ten entries: those that contain the most words of *query*, best first."""
        words = query_words(query)
        with self.lock:
            texts = list(self._texts.items()) if not query.isascii() else []
        counts: Counter[int] = Counter()
        async for word in paced(words):
            inside: list[int] = []
            if not word.isascii():
                async for first in paced(range(0, len(texts), _TEXTS_AT_ONCE)):
                    some = texts[first : first + _TEXTS_AT_ONCE]
                    inside += [key for key, text in some if word in text]
            with self.lock:
                found = self._words.get(word, ())
                counts.update({*found, *inside} if inside else found)
        with self.lock:
            # An entry may have been dropped during the search.
            ranked = [(-count, key) for key, count in counts.items() if key in self.entries]
            return [self.entries[key] for _, key in heapq.nsmallest(_MAX_RESULTS, ranked)]

    def _index(self, key: int, text: str) -> None:
        words, lower = words_and_text(text)
        for word in words:
            self._words.setdefault(word, set()).add(key)
        if words and not lower.isascii():
            self._texts[key] = lower

    def _drop(self, item: int, places: Iterable[int]) -> None:
        keys = self._entry_keys[item]
        for place in places:
            # If the earlier item was replaced before this process read the item, the item no longer
            # contains the entry.
            key = keys[place] if 0 <= place < len(keys) else None
            if key is None:
                continue
            keys[place] = None
            entry = self.entries.pop(key)
            scope = self._items[item].scope
            assert scope is not None
            del self._scopes[scope][key]
            self._texts.pop(key, None)
            for word in words_and_text(entry.text())[0]:
                self._words[word].discard(key)
                if not self._words[word]:
                    del self._words[word]


# --- words, as google-adk splits them ------------------------------------------------------------


def normalized(text: str) -> str:
    """Return *text* in NFC, with a joiner after each 30 marks and other characters between words.

    Without joiners, `unicodedata.normalize` takes quadratic time: 15 s for 60,000 marks.  The
    Stream-Safe Text Process of UAX #15 inserts similar joiners.
    """
    if text.isascii():
        return text
    return unicodedata.normalize("NFC", _RUN.sub(rf"\g<0>{_JOINER}", text))


def query_words(text: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(normalized(text))}


def words_and_text(text: str) -> tuple[set[str], str]:
    """Return the words by which a search finds *text*, and the text in NFC and in lower case.

    Japanese and Chinese have no spaces between words.  So if a word mixes Latin and other letters,
    a search also finds each Latin part and each other part of the word.
    """
    text = normalized(text)
    words = {word.lower() for word in _WORD.findall(text)}
    if not text.isascii():
        for word in [word for word in words if not word.isascii()]:
            words.update("".join(group) for _, group in itertools.groupby(word, _is_latin))
    return words, text.lower()


def _is_latin(character: str) -> bool:
    if character.isascii():
        return character.isalnum() or character == "_"
    return unicodedata.name(character, "").startswith("LATIN")
