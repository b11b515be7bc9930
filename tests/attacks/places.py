"""The places that hold a sealed value, one of each kind."""

from typing import Any, NamedTuple

from tests.attacks.support import (
    APP,
    DATABASE,
    HISTORY,
    SESSION,
    SESSION_BY_ID,
    USER,
    Database,
    Level,
)
from tests.attacks.world import ARCHIVE, VISIT, Who

_USER_TAG = "(SELECT tag FROM secure_users WHERE id = :alice)"
_APP_TAG = "(SELECT tag FROM secure_apps WHERE id = :clinic)"
_SESSION_TAG = "(SELECT tag FROM secure_sessions WHERE id = :visit)"


class Place(NamedTuple):
    """A column of a row, who reads it, and what is refused once it is not to be trusted."""

    name: str
    table: str
    column: str
    where: str
    level: Level
    who: Who = VISIT

    def stored(self, db: Database) -> Any:
        return db.value(f"SELECT {self.column} FROM {self.table} WHERE {self.where}")

    def store(self, db: Database, value: object) -> None:
        db.run(f"UPDATE {self.table} SET {self.column} = :value WHERE {self.where}", value=value)


APP_STATE = Place("app state", "secure_apps", "state", "id = :clinic", APP)
USER_STATE = Place("user state", "secure_users", "state", "id = :alice", USER)
SESSION_STATE = Place("session state", "secure_sessions", "state", "id = :visit", SESSION)
BASE = Place("base", "secure_bases", "state", "session_row = :archive", SESSION, ARCHIVE)
EVENT = Place("event", "secure_events", "event", "session_row = :visit AND seq = 1", HISTORY)
APP_WITNESS = Place("app witness", "secure_witnesses", "seal", f"tag = {_APP_TAG}", APP)
USER_WITNESS = Place("user witness", "secure_witnesses", "seal", f"tag = {_USER_TAG}", USER)
SESSION_WITNESS = Place(
    "session witness", "secure_witnesses", "seal", f"tag = {_SESSION_TAG}", SESSION_BY_ID
)
APP_KEY = Place("app's data key", "secure_data_keys", "wrapped", f"owner = {_APP_TAG}", APP)
USER_KEY = Place("user's data key", "secure_data_keys", "wrapped", f"owner = {_USER_TAG}", USER)
DATA_MASTER = Place("data master", "secure_keyring", "wrapped", "purpose = 'data'", DATABASE)
INDEX_MASTER = Place("index master", "secure_keyring", "wrapped", "purpose = 'index'", DATABASE)

RECORDS = (
    APP_STATE,
    USER_STATE,
    SESSION_STATE,
    BASE,
    EVENT,
    APP_WITNESS,
    USER_WITNESS,
    SESSION_WITNESS,
)
DATA_KEYS = (APP_KEY, USER_KEY)
MASTER_KEYS = (DATA_MASTER, INDEX_MASTER)
EVERYWHERE = (*RECORDS, *DATA_KEYS, *MASTER_KEYS)


def by_name(place: Place) -> str:
    return place.name
