"""Looking after a database of encrypted sessions, while services use it."""

from adk_secure_sessions.maintenance.beginning import Initialisation, init
from adk_secure_sessions.maintenance.checkpoints import Unfinished
from adk_secure_sessions.maintenance.coverage import DataKeyCount, RecordCount
from adk_secure_sessions.maintenance.data_rotation import DataRotation, rotate_data
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.erasing import Erasure, erase_user
from adk_secure_sessions.maintenance.finding import TABLES, Location, Sealed, inspect, lookup
from adk_secure_sessions.maintenance.master_keys import MasterRotation, rotate_master
from adk_secure_sessions.maintenance.problems import Problem
from adk_secure_sessions.maintenance.purging import Purge, purge
from adk_secure_sessions.maintenance.retiring import KeptKey, Retirement, retire
from adk_secure_sessions.maintenance.root_keys import RootRotation, rotate_root
from adk_secure_sessions.maintenance.status import MasterKey, Status, status
from adk_secure_sessions.maintenance.verification import Verification, verify
from adk_secure_sessions.maintenance.walking import Progress

__all__ = [
    "TABLES",
    "DataKeyCount",
    "DataRotation",
    "Database",
    "Erasure",
    "Initialisation",
    "KeptKey",
    "Location",
    "MasterKey",
    "MasterRotation",
    "Problem",
    "Progress",
    "Purge",
    "RecordCount",
    "Retirement",
    "RootRotation",
    "Sealed",
    "Status",
    "Unfinished",
    "Verification",
    "erase_user",
    "init",
    "inspect",
    "lookup",
    "purge",
    "retire",
    "rotate_data",
    "rotate_master",
    "rotate_root",
    "status",
    "verify",
]
