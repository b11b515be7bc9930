"""The rows of `secure_state_index`, which find sessions by a value of their state.

A row contains a keyed hash of the value of one key of the state of one session or user.  A *mark*
is a row that says that a key is indexed, and whether each session has its row: see docs/format.md,
"State index".  `Keyring.indexed_key_tags` has the tags of the indexed keys that this process knows.
"""

import hmac
from collections.abc import Container, Iterable
from enum import Enum
from typing import NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.db.protocol import Change, Reader
from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.formats import json_text
from adk_secure_sessions.formats.json_text import (
    APP_PREFIX,
    TEMP_PREFIX,
    USER_PREFIX,
    JsonObject,
    canonical_json,
)
from adk_secure_sessions.formats.records import encode_text
from adk_secure_sessions.keys.blind_index import IndexMaster
from adk_secure_sessions.keys.keyring import Keyring
from adk_secure_sessions.storage import queries as sql
from adk_secure_sessions.storage.operation_runner import Attempt, insertion_changes
from adk_secure_sessions.storage.schema import INDEX_MARK, StateIndexRow, apps, state_index

Entries = dict[bytes, bytes]  # the tags of values, by the tags of their keys


class IndexState(Enum):
    """What the mark of a key says."""

    DECLARED = "writers store the rows of the key; rows of older sessions may be missing"
    COMPLETE = "each session, or each user, that has the key has its row"


def check_state_key(key: object) -> None:
    """Raise ConfigurationError if *key* cannot be an indexed key of the state."""
    if not isinstance(key, str) or key in ("", USER_PREFIX):
        raise ConfigurationError(
            f"an indexed state key must be a text that is neither empty nor {USER_PREFIX!r}"
        )
    if key.startswith((APP_PREFIX, TEMP_PREFIX)):
        raise ConfigurationError(
            f"the state key {key!r} cannot be indexed: only keys of sessions, and keys that begin "
            f"with {USER_PREFIX!r}, can"
        )
    if len(encode_text(key)) > json_text.MAX_KEY_BYTES:
        raise ConfigurationError(
            f"an indexed state key has at most {json_text.MAX_KEY_BYTES} bytes in UTF-8"
        )


def index_row_id(user_row_id: int) -> int:
    """Return `row_id` in the rows of a user."""
    return -1 - user_row_id


# --- Marks ----------------------------------------------------------------------------------------


def mark_of(master: IndexMaster, key_tag: bytes, state: IndexState) -> StateIndexRow:
    return StateIndexRow(
        INDEX_MARK, key_tag, master.mac(f"state index {state.name.lower()}", key_tag)
    )


def state_of_mark(master: IndexMaster, key_tag: object, mac: object) -> IndexState | None:
    """Return what a mark says; None if it is not authentic."""
    if type(key_tag) is not bytes or type(mac) is not bytes:  # a modified row
        return None
    for state in IndexState:
        if hmac.compare_digest(mark_of(master, key_tag, state).value_tag, mac):
            return state
    return None


# How many marks are read.  An attacker may have inserted any number.
MAX_MARKS = 1000


async def read_marks(
    read: Reader, master: IndexMaster | None
) -> list[tuple[object, IndexState | None]]:
    """Return the tags of the first 1001 marks, and the states that *master* authenticates."""
    return [
        (tag, None if master is None else state_of_mark(master, tag, mac))
        for tag, mac in await read(sql.INDEX_MARKS, {"limit": MAX_MARKS + 1})
    ]


def declare(
    keyring: Keyring, app_name: str, key_tags: Iterable[bytes], connection: sa.Connection
) -> None:
    """Store the mark that writers maintain the rows of these keys, if they have no authentic mark.

    If the app is not stored, it has no sessions, so the mark says that the rows are complete.
    """
    master = keyring.index_master
    of_app = sa.select(apps.c.id).where(apps.c.tag == master.tag_of(app_name))
    is_new = connection.scalar(of_app) is None
    state = IndexState.COMPLETE if is_new else IndexState.DECLARED
    for tag in sorted(key_tags):
        if _locked_state(master, tag, connection) is None:
            _put_mark(mark_of(master, tag, state), connection)


def complete(keyring: Keyring, key_tags: Iterable[bytes], connection: sa.Connection) -> None:
    """Store the mark that each session or user has its rows of these keys."""
    master = keyring.index_master
    for tag in sorted(key_tags):
        if _locked_state(master, tag, connection) is None:
            raise ConfigurationError(
                "the mark of an indexed key was removed while the index was filled, for example by "
                "`index drop`: fill the index again"
            )
        _put_mark(mark_of(master, tag, IndexState.COMPLETE), connection)


def withdraw(key_tags: Iterable[bytes], connection: sa.Connection) -> None:
    """Delete the marks of these keys: they are not indexed any more."""
    for tag in sorted(key_tags):
        connection.execute(sa.delete(state_index).where(*_is_mark_of(tag)))


def _is_mark_of(key_tag: bytes) -> tuple[sa.ColumnElement[bool], ...]:
    return state_index.c.row_id == INDEX_MARK, state_index.c.key_tag == key_tag


def _locked_state(
    master: IndexMaster, key_tag: bytes, connection: sa.Connection
) -> IndexState | None:
    """Lock the mark of the key, and return what it says; None if there is no authentic mark."""
    query = sa.select(state_index.c.value_tag).where(*_is_mark_of(key_tag)).with_for_update()
    return state_of_mark(master, key_tag, connection.scalar(query))


def _put_mark(mark: StateIndexRow, connection: sa.Connection) -> None:
    """Store *mark*, whatever mark of the key is stored.

    It is not deleted and inserted: to a transaction of PostgreSQL that waits in `_locked_state`, it
    would then be missing.
    """
    for change in update_changes(INDEX_MARK, {mark.key_tag: mark.value_tag}):
        connection.execute(change.statement, change.parameters)


# --- Rows -----------------------------------------------------------------------------------------


def value_tags_of(
    attempt: Attempt, prefix: str, state: JsonObject, key_tags: Container[bytes] | None = None
) -> Entries:
    """Return the tags of the indexed keys in *state*, and the tags of their values.

    *prefix* is `user:` for the state of a user, and empty for that of a session.  *key_tags*
    is None for all indexed keys that this process knows.
    """
    master, app_name = attempt.keys.keyring.index_master, attempt.identity.app_name
    key_tags = attempt.keys.keyring.indexed_key_tags if key_tags is None else key_tags
    value_tags: Entries = {}
    if key_tags and not attempt.identity.is_collection:
        for name, value in state.items():
            key = prefix + name
            if (tag := master.state_key_tag(app_name, key)) in key_tags:
                value_tags[tag] = master.state_value_tag(app_name, key, canonical_json(value))
    return value_tags


def new_row_changes(row_id: int, value_tags: Entries) -> list[Change]:
    """Return the changes that store the rows of a new session or user."""
    rows = [StateIndexRow(row_id, *entry)._asdict() for entry in value_tags.items()]
    return insertion_changes(sql.INSERT_INDEX_ROW, rows)


def update_changes(row_id: int, value_tags: Entries, removed: Iterable[bytes] = ()) -> list[Change]:
    """Return the changes that insert or update these rows, and delete those of the keys *removed*.

    A change of the same transaction must lock the row of the session or the user.
    """
    changes = []
    for key_tag, value_tag in value_tags.items():
        at = {"at_id": row_id, "at_key": key_tag, "value_tag": value_tag}
        changes.append(Change(sql.UPDATE_INDEX_ROW, at, must_match_one_row=False))
        row = StateIndexRow(row_id, key_tag, value_tag)._asdict()
        changes.append(Change(sql.INSERT_MISSING_INDEX_ROW, row, must_match_one_row=False))
    for tag in removed:
        at = {"at_id": row_id, "at_key": tag}
        changes.append(Change(sql.DELETE_INDEX_ROW, at, must_match_one_row=False))
    return changes


def removal_changes(attempt: Attempt, row_id: int) -> list[Change]:
    """Return the changes that delete all rows of a session that is deleted."""
    if not attempt.keys.keyring.indexed_key_tags or attempt.identity.is_collection:
        return []
    return [Change(sql.DELETE_INDEX_ROWS, {"at_id": row_id}, must_match_one_row=False)]


class Differences(NamedTuple):
    """The differences between the stored rows of a session or user and its state."""

    missing: Entries
    wrong: Entries  # with the expected values
    surplus: tuple[bytes, ...]  # the tags of the keys that the state does not contain

    @classmethod
    def between(
        cls, stored: Iterable[StateIndexRow], expected: Entries, key_tags: frozenset[bytes]
    ) -> "Differences":
        """Compare the *stored* rows with the *expected* entries of the keys with *key_tags*."""
        stored_tags = {row.key_tag: row.value_tag for row in stored if row.key_tag in key_tags}
        return cls(
            {tag: value for tag, value in expected.items() if tag not in stored_tags},
            {tag: value for tag, value in expected.items() if stored_tags.get(tag, value) != value},
            tuple(tag for tag in stored_tags if tag not in expected),
        )

    @property
    def total(self) -> int:
        """The number of rows that differ."""
        return len(self.missing) + len(self.wrong) + len(self.surplus)

    def changes(self, row_id: int) -> list[Change]:
        """Return the changes that correct the rows.

        The row of the session or user must be locked.
        """
        # Each change must match a row: PostgreSQL's executor requires that of the first one.
        changes = []
        for entry in self.missing.items():
            changes.append(Change(sql.INSERT_INDEX_ROW, StateIndexRow(row_id, *entry)._asdict()))
        for tag, value in self.wrong.items():
            where = {"at_id": row_id, "at_key": tag, "value_tag": value}
            changes.append(Change(sql.UPDATE_INDEX_ROW, where))
        for tag in self.surplus:
            changes.append(Change(sql.DELETE_INDEX_ROW, {"at_id": row_id, "at_key": tag}))
        return changes
