"""The command line: parse, call what `maintenance` has, print."""

from adk_secure_sessions.cli import erasing  # noqa: F401 - adds its command to `main`
from adk_secure_sessions.cli.commands import main

__all__ = ["main"]
