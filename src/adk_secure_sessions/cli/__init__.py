"""The command line: parses options, calls functions of other packages, and prints results.

Most of these functions are in `maintenance` and `migration`.
"""

from adk_secure_sessions.cli import (  # noqa: F401 - importing adds commands
    adk_commands,
    adk_doctor,
    database_commands,
    debug,
    export,
    index,
    migrate,
    purge,
    rotate,
)
from adk_secure_sessions.cli.program import main

__all__ = ["main"]
