"""The command line: parse, call what `maintenance` has, print."""

from adk_secure_sessions.cli import commands, erasing, rotating  # noqa: F401 - they add their commands
from adk_secure_sessions.cli.program import main

__all__ = ["main"]
