"""Records that an attacker makes who has keys of the database, as after a leak.

How it works.  `ForgedKey(keyring, owner, backend)` is a data key of the attacker for the user
alice, wrapped by the newest data master of *keyring*, which the attacker has.  `insert` inserts
it.  `insert_user_row` replaces alice's row and its version witness by records under that key: a row
that names the key.  `replace_session` does the same with the row of a session.
"""

import json
import secrets
import time

from adk_secure_sessions import EncryptionBackend
from adk_secure_sessions.formats import records
from adk_secure_sessions.formats.records import NO_LINK, join_id, join_owner, join_session, new_link
from adk_secure_sessions.keys.data_keys import DataKeyRow, wrap_data_key
from adk_secure_sessions.keys.keyring import Keyring, new_key_id
from adk_secure_sessions.storage.schema import (
    SESSIONS,
    USERS,
    WITNESSES,
    SessionRow,
    UserRow,
    WitnessRow,
    column_names,
)
from tests.attacks.support import Database
from tests.attacks.world import VISIT

FORGED_STATE = {"role": "administrator"}
_JSON = json.dumps(FORGED_STATE).encode()


class ForgedKey:
    """A data key of the attacker for the user with tag *owner*."""

    def __init__(
        self, keyring: Keyring, owner_tag: bytes, backend: EncryptionBackend, generation: int = 99
    ) -> None:
        assert keyring.wrapping_master_id is not None
        key = backend.new_key()
        now = time.time_ns() // 1000
        row = DataKeyRow(new_key_id(), owner_tag, generation, backend.backend_id, now, b"")
        self.row = wrap_data_key(row, keyring, keyring.wrapping_master_id, key)
        self._cipher = backend.cipher(key)

    def insert(self, db: Database) -> None:
        insert_rows(db, "secure_data_keys", [tuple(self.row)])

    def seal(self, context: bytes, plaintext: bytes) -> bytes:
        header = records.build_header(self.row.backend_id, self.row.id)
        return records.seal(self._cipher, header, context, records.NO_FLAGS + plaintext)

    def insert_user_row(self, db: Database) -> None:
        """Replace alice's row by one that names this key."""
        columns = "tag, id, app_row, version"
        ((tag, row, app_row, version),) = db.rows(
            f"SELECT {columns} FROM secure_users WHERE id = :alice"
        )
        link = new_link()
        user = UserRow(row, app_row, tag, version, b"")
        context = USERS.context((VISIT.app_name,), user)
        fields = join_owner(link, (self.row.id,), _JSON)
        state = self.seal(context, join_id(VISIT.user_id, fields))
        db.run("UPDATE secure_users SET state = :state WHERE id = :alice", state=state)
        context = WITNESSES.context((VISIT.app_name,), WitnessRow(tag, version, b""))
        seal = self.seal(context, link)
        db.run("UPDATE secure_witnesses SET seal = :seal WHERE tag = :tag", seal=seal, tag=tag)

    def replace_session(self, db: Database) -> None:
        """Replace the state of alice's session *VISIT*, but not its events."""
        columns = ", ".join(column_names(SessionRow))
        (row,) = db.rows(f"SELECT {columns} FROM secure_sessions WHERE id = :visit")
        context = SESSIONS.context((VISIT.app_name, VISIT.user_id), SessionRow(*row))
        fields = join_session(secrets.token_bytes(16), NO_LINK, _JSON)
        state = self.seal(context, join_id(VISIT.session_id, fields))
        db.run("UPDATE secure_sessions SET state = :state WHERE id = :visit", state=state)


def insert_rows(db: Database, table: str, rows: list[tuple[object, ...]]) -> None:
    with db.connect() as connection:
        for row in rows:
            slots = ", ".join("?" * len(row))
            connection.execute(f"REPLACE INTO {table} VALUES ({slots})", row)
