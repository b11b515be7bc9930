"""The command line: parses options, calls functions of `maintenance`, and prints results."""

from adk_secure_sessions.cli import adk, commands, erase, rotate  # noqa: F401 - importing adds commands
from adk_secure_sessions.cli.program import main

__all__ = ["main"]
