"""Copy sessions into a database of this package, and out of it.

Several functions have these arguments:

- `source` is the source, and `db` is the `Database` that is written or, by an export, read, with
  every backend whose records it may contain.
- `selection` says which sessions to copy or to compare.  `app_name` and `user_id` do the same for
  an export: only sessions of this app, and only of the users with this id.
- With `skip_bad`, a function continues after a session or state that cannot be read or stored.
  Otherwise it stops; sessions that were written before stay.
- With `show_ids`, findings contain readable ids, not only blind indexes.
- `progress` is called with the number of sessions done, and the number of all.

Every function raises `ConfigurationError` if one of the databases cannot be used, `WrongKeyError`
if the root keys do not decrypt the keyring, and `DatabaseError` if one of the databases raises an
error.  `migrate`, `compare` and `erase_source` also raise `TamperedError` if a row of
`secure_migrated` was modified.
"""

from adk_secure_sessions.migration.adk_tables import AdkTables as AdkTables
from adk_secure_sessions.migration.adk_target import AdkTarget as AdkTarget
from adk_secure_sessions.migration.compare import Comparison as Comparison
from adk_secure_sessions.migration.compare import compare as compare
from adk_secure_sessions.migration.encrypted_source import EncryptedSource as EncryptedSource
from adk_secure_sessions.migration.erase_source import SourceErasure as SourceErasure
from adk_secure_sessions.migration.erase_source import erase_source as erase_source
from adk_secure_sessions.migration.export import Export as Export
from adk_secure_sessions.migration.export import export_lines as export_lines
from adk_secure_sessions.migration.export import export_to_adk as export_to_adk
from adk_secure_sessions.migration.fallback import (
    PlaintextFallbackService as PlaintextFallbackService,
)
from adk_secure_sessions.migration.findings import Finding as Finding
from adk_secure_sessions.migration.migrate import Migration as Migration
from adk_secure_sessions.migration.migrate import migrate as migrate
from adk_secure_sessions.migration.package_1x import Package1xTables as Package1xTables
from adk_secure_sessions.migration.service_source import ServiceSource as ServiceSource
from adk_secure_sessions.migration.source_detection import open_source as open_source
from adk_secure_sessions.migration.sources import Selection as Selection
from adk_secure_sessions.migration.sources import Source as Source
