"""The machine of a run, without its host name, and the versions of the software measured."""

import os
import platform
import sqlite3
from importlib.metadata import version
from pathlib import Path

from cryptography.hazmat.backends.openssl.backend import backend as openssl

_PACKAGES = (
    "adk-secure-sessions",
    "google-adk",
    "cryptography",
    "sqlalchemy",
    "aiosqlite",
    "asyncpg",
    "pydantic",
)


def machine() -> dict[str, str]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "memory": f"{memory / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """A server adds its own when it is measured."""
    found = {name: version(name) for name in _PACKAGES}
    return {
        "Python": platform.python_version(),
        **found,
        "OpenSSL": openssl.openssl_version_text().split()[1],
        "SQLite": sqlite3.sqlite_version,
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
