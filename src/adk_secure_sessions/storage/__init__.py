"""Read and write the encrypted tables.  Other packages import only the names below.

The modules, each of which imports only those above it:

- `schema`: the tables.
- `queries`: the statements and the typed rows that they return.
- `bindings`: encrypts and decrypts rows, and checks that they belong together.
- `unit_of_work`: keys, caches and retries.
- `owner_changes`: changes of apps and users.
- `writes`, `reads`: the operations, each of which is one transaction or one query.
- `store`: the operations with ADK's ids as arguments.
- `opening`: checks a database and creates what is missing.
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
    COLLECTIONS,
    DATABASE_ID,
    FEATURES,
    SEPARATING,
    SEPARATION,
    Survey,
    check_features,
    feature_mark,
    half_separated,
    look,
    mark_plaintext,
    open_database,
    open_existing,
    separation_marks,
    stored_features,
    survey_existing,
)
from adk_secure_sessions.storage.queries import (
    DATA_KEYS,
    INSERT_KEY,
    MASTER_KEYS,
    UserRow,
    chunks,
    is_one_of,
    numbered,
)
from adk_secure_sessions.storage.reads import (
    CheckApp,
    CheckLocatedSession,
    CheckSession,
    CheckUser,
    Headers,
    View,
)
from adk_secure_sessions.storage.schema import (
    COLLECTION,
    DATA_TABLES,
    KEY_TABLES,
    TABLES,
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
from adk_secure_sessions.storage.store import Collection, Collections, Store
from adk_secure_sessions.storage.unit_of_work import (
    UnitOfWork,
    empty_caches,
    read_data_keys,
    repeated,
)
from adk_secure_sessions.storage.writes import (
    DuplicateSession,
    Expected,
    MissingSession,
    NewEvent,
    RenewKey,
    StaleRevision,
)

__all__ = [
    "COLLECTION",
    "COLLECTIONS",
    "DATABASE_ID",
    "DATA_KEYS",
    "DATA_TABLES",
    "FEATURES",
    "INSERT_KEY",
    "KEY_TABLES",
    "MASTER_KEYS",
    "SEPARATING",
    "SEPARATION",
    "TABLES",
    "CheckApp",
    "CheckLocatedSession",
    "CheckSession",
    "CheckUser",
    "Collection",
    "Collections",
    "DuplicateSession",
    "Expected",
    "Headers",
    "Identity",
    "MissingSession",
    "NewEvent",
    "RenewKey",
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
    "check_features",
    "chunks",
    "data_keys",
    "empty_caches",
    "event_context",
    "events",
    "feature_mark",
    "half_separated",
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
    "separation_marks",
    "session_context",
    "sessions",
    "snapshot_context",
    "stored_features",
    "survey_existing",
    "user_context",
    "users",
    "witness_context",
    "witnesses",
]
