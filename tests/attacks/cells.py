"""The cells of the database that hold an encrypted value, one of each kind.

How it works.  A `Cell` is a column of one row.  It names the session through which an application
reads it, and the impact (`support.Impact`) of tampering with it.  `cell.stored(db)` reads the value
and `cell.store(db, value)` replaces it.  An attack on any encrypted value is parametrised over
`EVERY_CELL`, or over `RECORDS` if keys are something else.
"""

from typing import Any, NamedTuple

from tests.attacks import support
from tests.attacks.support import (
    APP,
    DATABASE,
    HISTORY,
    SESSION,
    SESSION_BY_ID,
    USER,
    Database,
    Impact,
)
from tests.attacks.world import ARCHIVE, VISIT, SessionIds

_USER_TAG = "(SELECT tag FROM secure_users WHERE id = :alice)"
_APP_TAG = "(SELECT tag FROM secure_apps WHERE id = :clinic)"
_SESSION_TAG = "(SELECT tag FROM secure_sessions WHERE id = :visit)"


class Cell(NamedTuple):
    """A column of a row, the impact of tampering with it, and the session that reads it."""

    name: str
    table: str
    column: str
    where: str
    impact: Impact
    who: SessionIds = VISIT

    def stored(self, db: Database) -> Any:
        return db.value(f"SELECT {self.column} FROM {self.table} WHERE {self.where}")

    def store(self, db: Database, value: object) -> None:
        db.run(f"UPDATE {self.table} SET {self.column} = :value WHERE {self.where}", value=value)


APP_STATE = Cell("app state", "secure_apps", "state", "id = :clinic", APP)
USER_STATE = Cell("user state", "secure_users", "state", "id = :alice", USER)
SESSION_STATE = Cell("session state", "secure_sessions", "state", "id = :visit", SESSION)
SNAPSHOT = Cell(
    "snapshot", "secure_bases", "state", "session_row = :archive", support.SNAPSHOT, ARCHIVE
)
EVENT = Cell("event", "secure_events", "event", "session_row = :visit AND seq = 1", HISTORY)
APP_WITNESS = Cell("app witness", "secure_witnesses", "seal", f"tag = {_APP_TAG}", APP)
USER_WITNESS = Cell("user witness", "secure_witnesses", "seal", f"tag = {_USER_TAG}", USER)
SESSION_WITNESS = Cell(
    "session witness", "secure_witnesses", "seal", f"tag = {_SESSION_TAG}", SESSION_BY_ID
)
APP_KEY = Cell("app's data key", "secure_data_keys", "wrapped", f"owner = {_APP_TAG}", APP)
USER_KEY = Cell("user's data key", "secure_data_keys", "wrapped", f"owner = {_USER_TAG}", USER)
DATA_MASTER = Cell("data master", "secure_keyring", "wrapped", "purpose = 'data'", DATABASE)
INDEX_MASTER = Cell("index master", "secure_keyring", "wrapped", "purpose = 'index'", DATABASE)

RECORDS = (
    APP_STATE,
    USER_STATE,
    SESSION_STATE,
    SNAPSHOT,
    EVENT,
    APP_WITNESS,
    USER_WITNESS,
    SESSION_WITNESS,
)
DATA_KEYS = (APP_KEY, USER_KEY)
MASTER_KEYS = (DATA_MASTER, INDEX_MASTER)
EVERY_CELL = (*RECORDS, *DATA_KEYS, *MASTER_KEYS)

# The cells on which sweeps over all of them also run on other databases (see databases.py).
SAMPLE = [cell.name for cell in (APP_STATE, EVENT, USER_KEY, DATA_MASTER)]


def by_name(cell: Cell) -> str:
    return cell.name
