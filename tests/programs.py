"""Find the programs of servers that a user installed, which need not be in PATH."""

import os
import shutil

_DIRECTORIES = ("~/.cargo/bin", "~/go/bin", "~/.local/bin")


def find(program: str) -> str | None:
    """Return the path of a program; None if it is not installed."""
    more = [os.path.expanduser(directory) for directory in _DIRECTORIES]
    return shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", ""), *more]))
