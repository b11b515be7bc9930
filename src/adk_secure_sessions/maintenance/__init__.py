"""Looking after a database of encrypted sessions, while services use it."""

from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.problems import Problem
from adk_secure_sessions.maintenance.verification import Verification, verify
from adk_secure_sessions.maintenance.walking import Progress

__all__ = ["Database", "Problem", "Progress", "Verification", "verify"]
