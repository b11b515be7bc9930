"""Read and write the encrypted tables.  Other packages import only the names below.

Modules, lowest first: `schema` (tables), `queries` (statements and typed rows), `bindings` (the
context of each record), `unit_of_work` (keys and retries), `writes`, `reads`, `opening` (checks a
database and creates what is missing), `store` (the operations of the service).
"""

from adk_secure_sessions.storage.bindings import (
    Identity,
    StoredSession,
    app_context,
    event_context,
    identify,
    naming,
    session_context,
    snapshot_context,
    user_context,
    witness_context,
)
from adk_secure_sessions.storage.opening import (
    MASTER_KEYS,
    Survey,
    look,
    mark_plaintext,
    open_database,
    open_existing,
    survey_existing,
)
from adk_secure_sessions.storage.queries import (
    DATA_KEYS,
    INSERT_KEY,
    UserRow,
    chunks,
    is_one_of,
    numbered,
)
from adk_secure_sessions.storage.reads import CheckApp, CheckUser, View
from adk_secure_sessions.storage.schema import (
    apps,
    bases,
    data_keys,
    events,
    keyring,
    meta,
    metadata,
    sessions,
    users,
    witnesses,
)
from adk_secure_sessions.storage.store import Store
from adk_secure_sessions.storage.unit_of_work import UnitOfWork, read_data_keys, repeated
from adk_secure_sessions.storage.writes import (
    DuplicateSession,
    Expected,
    MissingSession,
    NewEvent,
    StaleRevision,
)

__all__ = [
    "DATA_KEYS",
    "INSERT_KEY",
    "MASTER_KEYS",
    "CheckApp",
    "CheckUser",
    "DuplicateSession",
    "Expected",
    "Identity",
    "MissingSession",
    "NewEvent",
    "StaleRevision",
    "Store",
    "StoredSession",
    "Survey",
    "UnitOfWork",
    "UserRow",
    "View",
    "app_context",
    "apps",
    "bases",
    "chunks",
    "data_keys",
    "event_context",
    "events",
    "identify",
    "is_one_of",
    "keyring",
    "look",
    "mark_plaintext",
    "meta",
    "metadata",
    "naming",
    "numbered",
    "open_database",
    "open_existing",
    "read_data_keys",
    "repeated",
    "session_context",
    "sessions",
    "snapshot_context",
    "survey_existing",
    "user_context",
    "users",
    "witness_context",
    "witnesses",
]
