"""Functions that maintain a database of encrypted sessions while services use the database.

Several functions have these arguments:

- `db` is the `Database`, with every backend and root key that its rows may need.
- With `dry_run`, a function reads, decrypts and checks as usual, but writes nothing.  Its result is
  the expected one.
- `progress` is called again and again with two numbers: how many rows are done, and how many rows
  there are.  Some functions count other things than rows, and say so.
- `rows_per_second` is the maximum number of these rows per second.

Every function raises `ConfigurationError` if the database cannot be used and, except `init`, if it
holds no encrypted sessions yet.  If a function needs the root keys, it raises `WrongKeyError` if
they do not decrypt the keyring, `PlaintextRefusedError` if a master key is stored as plaintext and
`NoOpBackend` is not given, and `KeyServiceError` if the key provider fails.
"""

from adk_secure_sessions.maintenance.audit_commands import AuditExport as AuditExport
from adk_secure_sessions.maintenance.audit_commands import AuditPurge as AuditPurge
from adk_secure_sessions.maintenance.audit_commands import AuditVerification as AuditVerification
from adk_secure_sessions.maintenance.audit_commands import export_audit as export_audit
from adk_secure_sessions.maintenance.audit_commands import purge_audit as purge_audit
from adk_secure_sessions.maintenance.audit_commands import verify_audit as verify_audit
from adk_secure_sessions.maintenance.counts import DataKeyCount as DataKeyCount
from adk_secure_sessions.maintenance.counts import RecordCount as RecordCount
from adk_secure_sessions.maintenance.database import Database as Database
from adk_secure_sessions.maintenance.debug import TABLE_NAMES as TABLE_NAMES
from adk_secure_sessions.maintenance.debug import Location as Location
from adk_secure_sessions.maintenance.debug import RecordHeader as RecordHeader
from adk_secure_sessions.maintenance.debug import inspect_records as inspect_records
from adk_secure_sessions.maintenance.debug import lookup as lookup
from adk_secure_sessions.maintenance.erase import Erasure as Erasure
from adk_secure_sessions.maintenance.erase import erase_user as erase_user
from adk_secure_sessions.maintenance.init import Check as Check
from adk_secure_sessions.maintenance.init import Initialization as Initialization
from adk_secure_sessions.maintenance.init import check as check
from adk_secure_sessions.maintenance.init import init as init
from adk_secure_sessions.maintenance.move_keys import KeyMove as KeyMove
from adk_secure_sessions.maintenance.move_keys import move_keys as move_keys
from adk_secure_sessions.maintenance.problems import Problem as Problem
from adk_secure_sessions.maintenance.progress import Progress as Progress
from adk_secure_sessions.maintenance.purge_sessions import SessionPurge as SessionPurge
from adk_secure_sessions.maintenance.purge_sessions import purge_sessions as purge_sessions
from adk_secure_sessions.maintenance.retire import KeptKey as KeptKey
from adk_secure_sessions.maintenance.retire import Retirement as Retirement
from adk_secure_sessions.maintenance.retire import retire as retire
from adk_secure_sessions.maintenance.rotate_data import DataRotation as DataRotation
from adk_secure_sessions.maintenance.rotate_data import rotate_data as rotate_data
from adk_secure_sessions.maintenance.rotate_master import MasterRotation as MasterRotation
from adk_secure_sessions.maintenance.rotate_master import rotate_master as rotate_master
from adk_secure_sessions.maintenance.rotate_root import RootRotation as RootRotation
from adk_secure_sessions.maintenance.rotate_root import rotate_root as rotate_root
from adk_secure_sessions.maintenance.rotation import Rotation as Rotation
from adk_secure_sessions.maintenance.rotation import UnfinishedRotation as UnfinishedRotation
from adk_secure_sessions.maintenance.search_index import IndexChange as IndexChange
from adk_secure_sessions.maintenance.search_index import drop_index as drop_index
from adk_secure_sessions.maintenance.search_index import fill_index as fill_index
from adk_secure_sessions.maintenance.separate import Separation as Separation
from adk_secure_sessions.maintenance.separate import separate as separate
from adk_secure_sessions.maintenance.status import IndexStatus as IndexStatus
from adk_secure_sessions.maintenance.status import MasterKey as MasterKey
from adk_secure_sessions.maintenance.status import MigrationStatus as MigrationStatus
from adk_secure_sessions.maintenance.status import Status as Status
from adk_secure_sessions.maintenance.status import TrailStatus as TrailStatus
from adk_secure_sessions.maintenance.status import status as status
from adk_secure_sessions.maintenance.status import unfinished_rotations as unfinished_rotations
from adk_secure_sessions.maintenance.vacuum import Vacuum as Vacuum
from adk_secure_sessions.maintenance.vacuum import vacuum as vacuum
from adk_secure_sessions.maintenance.verify import Verification as Verification
from adk_secure_sessions.maintenance.verify import verify as verify
