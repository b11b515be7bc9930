"""Copy sessions into a database of this package, and out of it."""

from adk_secure_sessions.migration.adk_target import AdkTarget
from adk_secure_sessions.migration.export import export_to_adk
from adk_secure_sessions.migration.export_reader import Export, ExportProblem
from adk_secure_sessions.migration.json_lines import export_lines

__all__ = ["AdkTarget", "Export", "ExportProblem", "export_lines", "export_to_adk"]
