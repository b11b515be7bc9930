"""Functions that maintain a database of encrypted sessions while services use the database.

Several functions have these arguments:

- `db` is the `Database`, with every backend and root key that its rows may need.
- With `dry_run`, a function reads, decrypts and checks as usual, but writes nothing.  Its result is
  the expected one.
- `progress` is called again and again with two numbers: how many rows are done, and how many rows
  there are.  Some functions count other things than rows, and say so.
- `rows_per_second` is the maximum number of these rows per second.

Every function raises `ConfigurationError` if the database cannot be used, or holds no encrypted
sessions yet.  If a function needs the root keys, it raises `WrongKeyError` if they do not decrypt
the keyring, `PlaintextRefusedError` if a master key is stored as plaintext and `NoOpBackend` is not
given, and `KeyServiceError` if the key provider fails.
"""

from adk_secure_sessions.maintenance.audit import (
    AuditExport,
    AuditPurge,
    AuditVerification,
    export_audit,
    purge_audit,
    verify_audit,
)
from adk_secure_sessions.maintenance.counts import DataKeyCount, RecordCount
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.debug import (
    TABLES,
    Location,
    RecordHeader,
    lookup,
    record_headers,
)
from adk_secure_sessions.maintenance.erase import Erasure, erase_user
from adk_secure_sessions.maintenance.init import Check, Initialisation, check, init
from adk_secure_sessions.maintenance.move_keys import KeyMove, move_keys
from adk_secure_sessions.maintenance.problems import Problem
from adk_secure_sessions.maintenance.progress import Progress
from adk_secure_sessions.maintenance.purge import Purge, purge
from adk_secure_sessions.maintenance.retire import KeptKey, Retirement, retire
from adk_secure_sessions.maintenance.rotate_data import DataRotation, rotate_data
from adk_secure_sessions.maintenance.rotate_master import MasterRotation, rotate_master
from adk_secure_sessions.maintenance.rotate_root import RootRotation, rotate_root
from adk_secure_sessions.maintenance.rotation import UnfinishedRotation
from adk_secure_sessions.maintenance.search_index import (
    IndexChange,
    drop_index,
    fill_index,
)
from adk_secure_sessions.maintenance.separate import Separated, separate
from adk_secure_sessions.maintenance.status import (
    IndexStatus,
    MasterKey,
    MigrationStatus,
    Status,
    TrailStatus,
    status,
    unfinished_rotations,
)
from adk_secure_sessions.maintenance.vacuum import Vacuum, vacuum
from adk_secure_sessions.maintenance.verify import Verification, verify

__all__ = [
    "TABLES",
    "AuditExport",
    "AuditPurge",
    "AuditVerification",
    "Check",
    "DataKeyCount",
    "DataRotation",
    "Database",
    "Erasure",
    "IndexChange",
    "IndexStatus",
    "Initialisation",
    "KeptKey",
    "KeyMove",
    "Location",
    "MasterKey",
    "MasterRotation",
    "MigrationStatus",
    "Problem",
    "Progress",
    "Purge",
    "RecordCount",
    "RecordHeader",
    "Retirement",
    "RootRotation",
    "Separated",
    "Status",
    "TrailStatus",
    "UnfinishedRotation",
    "Vacuum",
    "Verification",
    "check",
    "drop_index",
    "erase_user",
    "export_audit",
    "fill_index",
    "init",
    "lookup",
    "move_keys",
    "purge",
    "purge_audit",
    "record_headers",
    "retire",
    "rotate_data",
    "rotate_master",
    "rotate_root",
    "separate",
    "status",
    "unfinished_rotations",
    "vacuum",
    "verify",
    "verify_audit",
]
