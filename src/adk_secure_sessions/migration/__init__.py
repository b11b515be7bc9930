"""Copy sessions into a database of this package, and out of it."""

from adk_secure_sessions.migration.adk_tables import AdkTables
from adk_secure_sessions.migration.adk_target import AdkTarget
from adk_secure_sessions.migration.compare import Comparison, compare
from adk_secure_sessions.migration.encrypted import EncryptedSource
from adk_secure_sessions.migration.erase_source import SourceErasure, erase_source
from adk_secure_sessions.migration.export import Export, export_lines, export_to_adk
from adk_secure_sessions.migration.fallback import PlaintextFallbackService
from adk_secure_sessions.migration.migrate import Migration, migrate
from adk_secure_sessions.migration.opening import open_source
from adk_secure_sessions.migration.package_1x import Package1x
from adk_secure_sessions.migration.services import ServiceSource
from adk_secure_sessions.migration.sources import LookupSource, Scope, Source
from adk_secure_sessions.migration.walk import Finding

__all__ = [
    "AdkTables",
    "AdkTarget",
    "Comparison",
    "EncryptedSource",
    "Export",
    "Finding",
    "LookupSource",
    "Migration",
    "Package1x",
    "PlaintextFallbackService",
    "Scope",
    "ServiceSource",
    "Source",
    "SourceErasure",
    "compare",
    "erase_source",
    "export_lines",
    "export_to_adk",
    "migrate",
    "open_source",
]
