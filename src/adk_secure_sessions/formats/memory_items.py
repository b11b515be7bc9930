"""The items of the collection that holds a user's memory, as JSON.

An item adds entries to one scope, drops entries, or both.  A scope is a session, or one of the two
`EVENTS` and `EXPLICIT`.  The fields, all optional:

- `scope`: the scope, a list of texts.
- `add`: the entries, in order.  An entry that was dropped later is null.  The others have `id` and
  `content`, and may have `author`, `timestamp` (a number, or the text of a memory) and `metadata`.
- `drop`: what this item drops: `{number of an earlier item: [positions in its "add"]}`.  The
  transaction that stores this item also replaces those earlier items.
- `deleted`: event ids that are not to be added again.
- `replaced_by`: the number of the item that has last replaced this one.

A replaced item keeps its place in the chain of links, so its old record would be accepted if an
attacker stored it again.  `check_replaced` rejects it: all items together say which of them were
replaced, and by which item.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from adk_secure_sessions.errors import DecryptionError, Reason, TamperedError
from adk_secure_sessions.formats.json_text import JsonObject

COLLECTION_NAME = '["memory"]'

Scope = tuple[str, ...]
EVENTS: Scope = ("events",)  # events that were added without a session
EXPLICIT: Scope = ("memory",)  # added as memories, not as events


def session_scope(session_id: str) -> Scope:
    """Return the scope of a session's events."""
    return ("session", session_id)


class MemoryItem(NamedTuple):
    """An item.  *add* holds the entries as JSON objects, and None for each dropped one."""

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
    """Return the item *number*, whose JSON values are authenticated.

    Raises:
        DecryptionError: They are not those of an item: its writer is faulty.
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
    """Reject *items*, the last ones of a collection, if the old record of one was stored again.

    Args:
        items: All items from the number *first* on.
        first: The number of the first item.
        table: The table, for the error.
        session_row: The first half of the rows' primary key, for the error.

    Raises:
        TamperedError: An item was replaced, but its record is an older one.
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
