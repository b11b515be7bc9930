"""The items of the collection that stores a user's memory, as JSON.

An *entry* is one memory of the user.  An item adds entries to one scope, drops earlier entries, or
does both.  A *scope* is a session, or one of the two constants `EVENTS` and `EXPLICIT`.  All fields
of an item are optional:

- `scope`: The scope, a list of texts.
- `add`: The added entries, in order.  An entry that was dropped later is null.  Every other entry
  has `id` and `content`, and may have `author`, `timestamp` and `metadata`.  The timestamp of an
  event is a number, and that of a memory is a text.
- `drop`: The entries that this item drops: `{number of an earlier item: [positions in its "add"]}`.
  The transaction that stores this item also replaces those earlier items.
- `deleted`: Ids that must not be added again.
- `replaced_by`: The number of the latest item that dropped entries of this item.

A replaced item keeps its links, so if an attacker replays its old record, the check of the links
does not detect it.  `check_replaced` detects it: the field `drop` of later items tells which items
were replaced, and by which item.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from adk_secure_sessions.errors import DecryptionError, Reason, TamperedError
from adk_secure_sessions.formats.json_text import JsonObject

COLLECTION_NAME = '["memory"]'

Scope = tuple[str, ...]
EVENTS: Scope = ("events",)  # events that were added without a session
EXPLICIT: Scope = ("memory",)  # memories that are not events, from `add_memory`


def session_scope(session_id: str) -> Scope:
    """Return the scope of a session's events."""
    return ("session", session_id)


class MemoryItem(NamedTuple):
    """An item; the module describes its fields.  In *add*, a dropped entry is None."""

    scope: Scope | None = None
    add: Sequence[JsonObject | None] = ()
    drop: dict[int, list[int]] = {}  # noqa: RUF012 - never changed
    deleted: Sequence[str] = ()
    replaced_by: int | None = None

    def values(self) -> JsonObject:
        """Return the JSON values to store."""
        add = list(self.add)
        while add and add[-1] is None:
            add.pop()
        values: JsonObject = {}
        if self.scope is not None:
            values["scope"] = list(self.scope)
        if add:
            values["add"] = add
        if self.drop:
            values["drop"] = {str(number): places for number, places in self.drop.items()}
        if self.deleted:
            values["deleted"] = list(self.deleted)
        if self.replaced_by is not None:
            values["replaced_by"] = self.replaced_by
        return values


def parse_item(values: JsonObject, number: int) -> MemoryItem:
    """Return the item with the number *number* from its authenticated JSON *values*.

    Raises:
        DecryptionError: *values* are not those of an item: the program that wrote them is faulty.
    """
    scope, add, deleted = values.get("scope"), values.get("add", []), values.get("deleted", [])
    drop, replaced_by = values.get("drop", {}), values.get("replaced_by")
    if (
        (scope is None or (_is_list(scope, str) and scope))
        and type(add) is list
        and all(one is None or _is_entry(one) for one in add)
        and (scope is not None or not add)
        and _is_list(deleted, str)
        and (replaced_by is None or (type(replaced_by) is int and replaced_by > number))
        and type(drop) is dict
        and all(key.isdecimal() and len(key) < 19 and int(key) < number for key in drop)
        and all(_is_list(places, int) for places in drop.values())
    ):
        dropped = {int(key): places for key, places in drop.items()}
        return MemoryItem(scope and tuple(scope), add, dropped, deleted, replaced_by)
    raise DecryptionError(
        "the plaintext is not an item of a memory: its writer is faulty", reason=Reason.MALFORMED
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


def _is_list(value: Any, kind: type) -> bool:
    return type(value) is list and all(isinstance(one, kind) for one in value)


def check_replaced(items: Iterable[MemoryItem], first: int, table: str, session_row: int) -> None:
    """Check that no old record of a replaced item was replayed.

    Args:
        items: The last items of a collection: all items from the number *first* on.
        first: The number of the first of these items.
        table: The table of the items, for the error.
        session_row: The row id of the collection, for the error.

    Raises:
        TamperedError: A later item has replaced an item, but the stored record is an older one.
    """
    numbered = list(enumerate(items, first))
    replaced_by = {earlier: number for number, item in numbered for earlier in item.drop}
    for number, item in numbered:
        if item.replaced_by != replaced_by.get(number):
            raise TamperedError(
                "entries were deleted from it, and an older record was stored again",
                reason=Reason.MISMATCH,
                table=table,
                row=f"{session_row}, {number}",
            )
