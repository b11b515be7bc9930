"""Claims: how transactions wait for each other on a cluster whose nodes lock rows separately.

On a cluster such as MariaDB Galera, a row lock is known to one node only.  But two transactions
that *write* the same row cannot both commit.  So a transaction that relies on a row also updates
it.  A second update restores the value.  A node checks this at the commit, so the order of claims
and other statements does not matter.  On every other database, nobody makes claims.
"""

import functools
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from adk_secure_sessions.db.dialects import dialect_of
from adk_secure_sessions.db.protocol import Change, Parameters
from adk_secure_sessions.storage.schema import data_keys, meta_table, sessions, witnesses

# What a statement has in its execution option `claim`: see `db.protocol.with_claims`.
Claim = Callable[[Parameters], list[Change]]

# The names of rows that claims insert into `secure_meta` and delete again.  A transaction that
# stores a data key claims one of them, and one that deletes master keys claims all.  If there were
# only one, users whom several nodes create at the same time would conflict.
KEYRING_CLAIMS: tuple[str, ...] = tuple(f"claim.{number:02}" for number in range(64))

_MINUS_ONE: sa.ColumnElement[int] = sa.literal_column("-1", sa.Integer)


def _claim_row(column: sa.Column[int], key: sa.Column[Any], name: str) -> Claim:
    """Return the claim of the row whose *key* is the parameter *name*.

    It updates *column* twice; there is no overflow: -1 - (-1 - n) is n.
    """

    @functools.cache
    def update() -> sa.Update:
        at: sa.BindParameter[Any] = sa.bindparam(name)
        return sa.update(column.table).where(key == at).values({column: _MINUS_ONE - column})

    return lambda parameters: [Change(update(), {name: parameters[name]})] * 2


# Every change of a user's row also writes the user's version witness.
CLAIM_USER = _claim_row(witnesses.c.number, witnesses.c.tag, "user_tag")
CLAIM_SESSION = _claim_row(sessions.c.updated_at, sessions.c.tag, "session_tag")
CLAIM_DATA_KEY = _claim_row(data_keys.c.created_at, data_keys.c.id, "at_id")
_INSERT_NAME = sa.insert(meta_table)
_DELETE_NAME = sa.delete(meta_table).where(meta_table.c.name == sa.bindparam("at_name"))


def claim_keyring(new_key: Parameters) -> list[Change]:
    """Return the claim of a transaction that stores *new_key*, and so relies on its master key.

    Transactions whose keys have different ids rarely conflict.
    """
    key_id: Any = new_key["id"]
    return _claim_name(KEYRING_CLAIMS[key_id % len(KEYRING_CLAIMS)])


def _claim_name(name: str) -> list[Change]:
    insert, at = Change(_INSERT_NAME, {"name": name, "value": ""}), {"at_name": name}
    # An attacker may have stored such a row.
    return [Change(_DELETE_NAME, at, must_match_one_row=False), insert, Change(_DELETE_NAME, at)]


def claim(connection: sa.Connection, *names: str) -> None:
    """Let only one of the transactions that claim the same name commit; others raise Conflict.

    Call this before the transaction reads the rows that it relies on.
    """
    if dialect_of(connection).locks_per_node(connection):
        for name in names:
            for change in _claim_name(name):
                connection.execute(change.statement, change.parameters)


def claim_missing_user(connection: sa.Connection, tag: bytes) -> None:
    """Make this transaction conflict with any that stores the user for the first time.

    Only one of the two commits.  The user must have no version witness.
    """
    if dialect_of(connection).locks_per_node(connection):
        row = {"tag": tag, "number": 0, "seal": b""}
        connection.execute(sa.insert(witnesses).values(row))
        connection.execute(sa.delete(witnesses).where(witnesses.c.tag == tag))
