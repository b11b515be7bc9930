"""The items of the collection that stores a user's memory, as JSON (docs/format.md, "Memory").

An *entry* is one memory of the user.  An item adds entries to one scope, drops earlier entries, or
does both.  A *scope* is a session, or one of two constants, `EVENTS_SCOPE` and `EXPLICIT_SCOPE`.
The transaction that stores an item with dropped entries also replaces the earlier items that have
added them, and stores a random value, `replacement`, in both items.

A replaced item keeps its links.  So if an attacker stores the item's old record again, or the
item's record from another copy of the database, the check of the links does not detect the attack.
`check_replaced` detects both attacks: only the latest record contains the value in the latest
`drop`.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from adk_secure_sessions.errors import DecryptionError, Reason, TamperedError
from adk_secure_sessions.formats.json_text import JsonObject

COLLECTION_NAME = '["memory"]'

Scope = tuple[str, ...]
EVENTS_SCOPE: Scope = ("events",)  # events that were added without a session
EXPLICIT_SCOPE: Scope = ("memory",)  # memories that are not events, from `add_memory`

_REPLACEMENT = re.compile("[0-9a-f]{32}")


def session_scope(session_id: str) -> Scope:
    return ("session", session_id)


class Dropped(NamedTuple):
    """The dropped entries of an earlier item, and the random value in that item's new record."""

    places: Sequence[int]
    replacement: str


class MemoryItem(NamedTuple):
    """One item of a memory collection; in the field `add`, None stands for a dropped entry."""

    scope: Scope | None = None
    add: Sequence[JsonObject | None] = ()
    drop: dict[int, Dropped] = {}  # noqa: RUF012 - never changed
    deleted: Sequence[str] = ()
    replacement: str | None = None

    def values(self) -> JsonObject:
        """Return the JSON values to store, without empty fields.

        A dropped entry becomes null, so that later entries keep their positions, except at the end.
        """
        add = list(self.add)
        while add and add[-1] is None:
            add.pop()
        drop = {
            str(number): {"places": list(dropped.places), "replacement": dropped.replacement}
            for number, dropped in self.drop.items()
        }
        values: JsonObject = {
            "scope": list(self.scope or ()),
            "add": add,
            "drop": drop,
            "deleted": list(self.deleted),
            "replacement": self.replacement,
        }
        return {name: value for name, value in values.items() if value}


def parse_item(values: JsonObject, number: int) -> MemoryItem:
    scope, add, deleted = values.get("scope"), values.get("add", []), values.get("deleted", [])
    drop, replacement = values.get("drop", {}), values.get("replacement")
    if (
        (scope is None or (_is_list_of_texts(scope) and scope))
        and type(add) is list
        and all(one is None or _is_entry(one) for one in add)
        and (scope is not None or not add)
        and _is_list_of_texts(deleted)
        and (replacement is None or _is_replacement(replacement))
        and type(drop) is dict
        and all(key.isdecimal() and len(key) < 19 and int(key) < number for key in drop)
        and all(_is_dropped(one) for one in drop.values())
    ):
        dropped = {
            int(key): Dropped(one["places"], one["replacement"]) for key, one in drop.items()
        }
        return MemoryItem(scope and tuple(scope), add, dropped, deleted, replacement)
    raise DecryptionError(
        "the plaintext is not an item of a memory: its writer is faulty", Reason.MALFORMED
    )


def _is_entry(value: Any) -> bool:
    return (
        type(value) is dict
        and type(value.get("id")) is str
        and type(value.get("content")) is dict
        and isinstance(value.get("author"), str | None)
        and isinstance(value.get("timestamp"), int | float | str | None)
        and isinstance(value.get("metadata"), dict | None)
    )


def _is_dropped(value: Any) -> bool:
    return (
        type(value) is dict
        and type(value.get("places")) is list
        and all(type(place) is int and place >= 0 for place in value["places"])
        and _is_replacement(value.get("replacement"))
    )


def _is_replacement(value: Any) -> bool:
    return type(value) is str and _REPLACEMENT.fullmatch(value) is not None


def _is_list_of_texts(value: Any) -> bool:
    return type(value) is list and all(isinstance(one, str) for one in value)


def check_replaced(items: Iterable[MemoryItem], first: int, table: str, session_row: int) -> None:
    """Check that no item was replaced by an older record or by a record of another copy.

    *items* are the last items of a collection: all items from the number *first* on.  If an item
    drops entries of earlier items, the transaction that stores the item also stores a new record of
    each of these earlier items.  *table* and *session_row* are for the error.
    """
    numbered = list(enumerate(items, first))
    replacements: dict[int, str] = {}
    for _, item in numbered:
        for earlier, dropped in item.drop.items():
            replacements[earlier] = dropped.replacement
            if earlier >= first:
                add = numbered[earlier - first][1].add
                if any(place < len(add) and add[place] is not None for place in dropped.places):
                    raise _replayed_error(table, session_row, earlier)
    for number, item in numbered:
        if item.replacement != replacements.get(number):
            raise _replayed_error(table, session_row, number)


def _replayed_error(table: str, session_row: int, number: int) -> TamperedError:
    return TamperedError(
        "entries were deleted from it, and an older record, or a record of another copy of the "
        "database, was stored in its place",
        Reason.MISMATCH,
        table,
        f"{session_row}, {number}",
    )
