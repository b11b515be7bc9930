"""Runs the command `adk-secure-sessions` as `python -m adk_secure_sessions`."""

from adk_secure_sessions.cli import main

if __name__ == "__main__":
    main()
