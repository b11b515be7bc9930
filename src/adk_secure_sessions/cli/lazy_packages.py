"""Packages and modules that are imported when the program first uses a name of theirs.

Importing SQLAlchemy takes a second, and neither `--help` nor `keygen` needs SQLAlchemy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any


class _LazyPackage:
    def __init__(self, package: str) -> None:
        self._package = package

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._package), name)


if TYPE_CHECKING:
    from adk_secure_sessions import maintenance as maintenance
    from adk_secure_sessions import migration as migration
    from adk_secure_sessions.integrations import blob_maintenance as blob_maintenance
    from adk_secure_sessions.integrations.artifact_store import ArtifactStore as ArtifactStore
    from adk_secure_sessions.maintenance import Database as Database
else:
    ArtifactStore = Database = Any  # for annotations
    blob_maintenance = _LazyPackage("adk_secure_sessions.integrations.blob_maintenance")
    maintenance = _LazyPackage("adk_secure_sessions.maintenance")
    migration = _LazyPackage("adk_secure_sessions.migration")
