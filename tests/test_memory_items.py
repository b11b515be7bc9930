"""The items of a memory: their JSON, what is rejected, and which replays are found."""

from typing import Any

import pytest

from adk_secure_sessions import DecryptionError, Reason, TamperedError
from adk_secure_sessions.formats.memory_items import (
    COLLECTION_NAME,
    EVENTS_SCOPE,
    EXPLICIT_SCOPE,
    Dropped,
    MemoryItem,
    check_replaced,
    parse_item,
    session_scope,
)

VALUE, OTHER = "0123456789abcdef" * 2, "f" * 32
ENTRY: dict[str, Any] = {"id": "e", "content": {"parts": []}}


def test_stored_names_stay_as_they_are() -> None:
    assert COLLECTION_NAME == '["memory"]'
    assert EVENTS_SCOPE == ("events",)
    assert EXPLICIT_SCOPE == ("memory",)
    assert session_scope("s 1") == ("session", "s 1")


# --- JSON ----------------------------------------------------------------------------------------

FULL = MemoryItem(
    scope=("session", "s"),
    add=[ENTRY, None, {**ENTRY, "author": "a", "timestamp": 1.5, "metadata": {"k": 1}}],
    drop={0: Dropped([0, 2], VALUE), 12: Dropped([], OTHER)},
    deleted=["x", "y"],
    replacement=OTHER,
)
STORED = {
    "scope": ["session", "s"],
    "add": [ENTRY, None, {**ENTRY, "author": "a", "timestamp": 1.5, "metadata": {"k": 1}}],
    "drop": {
        "0": {"places": [0, 2], "replacement": VALUE},
        "12": {"places": [], "replacement": OTHER},
    },
    "deleted": ["x", "y"],
    "replacement": OTHER,
}


def test_item_has_the_documented_json() -> None:
    assert FULL.values() == STORED
    assert parse_item(STORED, 13) == FULL


def test_empty_fields_are_not_stored() -> None:
    assert MemoryItem().values() == {}
    assert parse_item({}, 0) == MemoryItem(None, [], {}, [], None)
    assert MemoryItem(EVENTS_SCOPE).values() == {"scope": ["events"]}


def test_dropped_entries_at_the_end_are_not_stored() -> None:
    assert MemoryItem(EVENTS_SCOPE, [None, ENTRY, None, None]).values()["add"] == [None, ENTRY]
    assert MemoryItem(EVENTS_SCOPE, [None, None]).values() == {"scope": ["events"]}


def test_item_does_not_change_the_entries_that_it_was_given() -> None:
    add = [ENTRY, None]
    MemoryItem(EVENTS_SCOPE, add).values()
    assert add == [ENTRY, None]


def with_entry(**fields: Any) -> dict[str, Any]:
    return {"scope": ["events"], "add": [{**ENTRY, **fields}]}


def with_drop(key: str = "0", **fields: Any) -> dict[str, Any]:
    return {"drop": {key: {"places": [0], "replacement": VALUE, **fields}}}


NUMBER = 3  # of the items below
ACCEPTED: list[dict[str, Any]] = [
    {"scope": ["events"], "add": [None]},
    {"add": []},
    with_entry(author=None, timestamp=None, metadata=None),
    with_entry(author="a", timestamp=1, metadata={}),
    with_entry(timestamp="2024-01-01"),
    with_drop("2"),
    with_drop("0" * 17 + "1"),
    with_drop(places=[0, 1, 10**6]),
]
MALFORMED: dict[str, dict[str, Any]] = {
    "scope of text": {"scope": "events"},
    "empty scope": {"scope": []},
    "scope of numbers": {"scope": [1]},
    "add without scope": {"add": [ENTRY]},
    "dropped entry without scope": {"add": [None]},
    "add of another type": {"scope": ["events"], "add": {"0": ENTRY}},
    "add is null": {"scope": ["events"], "add": None},
    "entry of another type": {"scope": ["events"], "add": [[]]},
    "second entry of another type": {"scope": ["events"], "add": [ENTRY, 1]},
    "entry without id": {"scope": ["events"], "add": [{"content": {}}]},
    "entry without content": {"scope": ["events"], "add": [{"id": "e"}]},
    "id of another type": with_entry(id=1),
    "content of another type": with_entry(content=[]),
    "author of another type": with_entry(author=1),
    "timestamp of another type": with_entry(timestamp=[]),
    "metadata of another type": with_entry(metadata=[]),
    "deleted of another type": {"deleted": "x"},
    "deleted is null": {"deleted": None},
    "deleted number": {"deleted": ["x", 1]},
    "replacement of another type": {"replacement": 1},
    "replacement of zero": {"replacement": 0},
    "short replacement": {"replacement": VALUE[1:]},
    "long replacement": {"replacement": VALUE + "0"},
    "replacement in capitals": {"replacement": VALUE.upper()},
    "replacement with a line break": {"replacement": VALUE + "\n"},
    "drop of another type": {"drop": [["0", {"places": [0], "replacement": VALUE}]]},
    "drop is null": {"drop": None},
    "drop of no number": with_drop("x"),
    "drop of a negative number": with_drop("-1"),
    "drop of an empty key": with_drop(""),
    "drop of the item itself": with_drop("3"),
    "drop of a later item": with_drop("4"),
    "drop of a long number": with_drop("0" * 18 + "1"),
    "drop of too many digits": with_drop("0" * 5000),
    "dropped of another type": {"drop": {"0": [0]}},
    "dropped without places": {"drop": {"0": {"replacement": VALUE}}},
    "places of another type": with_drop(places="0"),
    "place of another type": with_drop(places=[0, True]),
    "negative place": with_drop(places=[-1]),
    "dropped without replacement": {"drop": {"0": {"places": [0]}}},
    "dropped with a wrong replacement": with_drop(replacement="f"),
    "second drop is malformed": {"drop": {**with_drop()["drop"], "1": {}}},
    "second key is malformed": {"drop": {**with_drop()["drop"], **with_drop("x")["drop"]}},
}


@pytest.mark.parametrize("values", ACCEPTED, ids=str)
def test_item_within_the_format_is_accepted(values: dict[str, Any]) -> None:
    item = parse_item(values, NUMBER)
    assert (item.scope is None) == ("scope" not in values)
    assert list(item.add) == values.get("add", [])
    assert [list(one.places) for one in item.drop.values()] == [
        one["places"] for one in values.get("drop", {}).values()
    ]


@pytest.mark.parametrize("values", MALFORMED.values(), ids=MALFORMED)
def test_item_that_no_writer_makes_is_malformed(values: dict[str, Any]) -> None:
    with pytest.raises(DecryptionError, match="not an item of a memory") as info:
        parse_item(values, NUMBER)
    assert info.value.reason is Reason.MALFORMED


# --- replays -------------------------------------------------------------------------------------


def dropping(number: int, *places: int, replacement: str = VALUE) -> MemoryItem:
    return MemoryItem(drop={number: Dropped(places, replacement)})


def replaced(*add: Any, replacement: str | None = VALUE) -> MemoryItem:
    return MemoryItem(EVENTS_SCOPE, add, replacement=replacement)


WHOLE = MemoryItem(EVENTS_SCOPE, [ENTRY, ENTRY])
NOTHING = MemoryItem()


@pytest.mark.parametrize(
    ("items", "first"),
    [
        ([], 0),
        ([WHOLE, WHOLE], 0),
        ([replaced(ENTRY), dropping(0, 1)], 0),
        ([replaced(None, ENTRY), dropping(0, 0)], 0),
        ([replaced(), dropping(0, 0, 1)], 0),
        ([NOTHING, replaced(None, ENTRY), WHOLE, dropping(1, 0)], 0),
        ([replaced(None, ENTRY), WHOLE, dropping(5, 0)], 5),
        ([WHOLE, replaced(None, ENTRY), dropping(6, 0)], 5),
        ([dropping(4, 0), dropping(0, 1)], 5),
        # The latest item that drops entries names the value.
        ([replaced(replacement=OTHER), dropping(0, 0), dropping(0, 1, replacement=OTHER)], 0),
    ],
)
def test_replaced_items_fit_to_what_later_items_drop(items: list[MemoryItem], first: int) -> None:
    check_replaced(items, first, "secure_events", 9)


@pytest.mark.parametrize(
    ("items", "first", "number"),
    [
        ([WHOLE, dropping(0, 0)], 0, 0),
        ([replaced(ENTRY, replacement=None), dropping(0, 1)], 0, 0),
        ([replaced(ENTRY, replacement=OTHER), dropping(0, 1)], 0, 0),
        ([replaced(ENTRY, ENTRY), dropping(0, 1)], 0, 0),
        ([replaced(ENTRY, ENTRY), dropping(0, 0)], 0, 0),
        ([replaced(ENTRY, None), dropping(0, 1, 0)], 0, 0),
        ([replaced(ENTRY, None), dropping(0, 7, 1, 0)], 0, 0),
        ([WHOLE, replaced(ENTRY)], 0, 1),
        ([WHOLE, replaced(ENTRY), dropping(0, 1)], 0, 0),
        ([replaced(ENTRY, ENTRY), dropping(5, 0)], 5, 5),
        ([WHOLE, replaced(ENTRY, ENTRY), WHOLE, dropping(6, 1)], 5, 6),
        ([WHOLE, replaced(ENTRY, replacement=OTHER), WHOLE, dropping(6, 1)], 5, 6),
        ([replaced(), dropping(0, 0), dropping(0, 1, replacement=OTHER)], 0, 0),
    ],
)
def test_replay_of_a_replaced_item_is_found(
    items: list[MemoryItem], first: int, number: int
) -> None:
    with pytest.raises(TamperedError, match="entries were deleted from it") as info:
        check_replaced(items, first, "secure_events", 9)
    assert info.value.reason is Reason.MISMATCH
    assert (info.value.table, info.value.row) == ("secure_events", f"9, {number}")
