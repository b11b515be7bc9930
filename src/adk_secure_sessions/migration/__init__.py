"""Copy sessions into a database of this package, and out of it."""

from adk_secure_sessions.migration.adk_tables import AdkTables as AdkTables
from adk_secure_sessions.migration.adk_target import AdkTarget as AdkTarget
from adk_secure_sessions.migration.compare import Comparison as Comparison
from adk_secure_sessions.migration.compare import compare as compare
from adk_secure_sessions.migration.encrypted import EncryptedSource as EncryptedSource
from adk_secure_sessions.migration.erase_source import SourceErasure as SourceErasure
from adk_secure_sessions.migration.erase_source import erase_source as erase_source
from adk_secure_sessions.migration.export import Export as Export
from adk_secure_sessions.migration.export import export_lines as export_lines
from adk_secure_sessions.migration.export import export_to_adk as export_to_adk
from adk_secure_sessions.migration.fallback import (
    PlaintextFallbackService as PlaintextFallbackService,
)
from adk_secure_sessions.migration.migrate import Migration as Migration
from adk_secure_sessions.migration.migrate import migrate as migrate
from adk_secure_sessions.migration.opening import open_source as open_source
from adk_secure_sessions.migration.package_1x import Package1x as Package1x
from adk_secure_sessions.migration.services import ServiceSource as ServiceSource
from adk_secure_sessions.migration.sources import Selection as Selection
from adk_secure_sessions.migration.sources import Source as Source
from adk_secure_sessions.migration.walk import Finding as Finding
