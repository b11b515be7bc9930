"""Looking after a database of encrypted sessions, while services use it."""

from adk_secure_sessions.maintenance.coverage import DataKeyCount, RecordCount
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.problems import Problem
from adk_secure_sessions.maintenance.root_keys import RootRotation, rotate_root
from adk_secure_sessions.maintenance.status import MasterKey, Status, status
from adk_secure_sessions.maintenance.verification import Verification, verify
from adk_secure_sessions.maintenance.walking import Progress

__all__ = [
    "DataKeyCount",
    "Database",
    "MasterKey",
    "Problem",
    "Progress",
    "RecordCount",
    "RootRotation",
    "Status",
    "Verification",
    "rotate_root",
    "status",
    "verify",
]
