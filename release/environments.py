"""Clean virtual environments, created with uv, or without it with pip."""

import os
import subprocess
import sys
from pathlib import Path


def run(*command: str | Path, cwd: Path | None = None, python: Path | None = None) -> str:
    """Run *command* without this repository's modules, and return its output.

    Args:
        command: A program and its arguments.
        cwd: The folder in which it runs.
        python: The Python that it finds first.

    Raises:
        RuntimeError: The command failed; the text has its output.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if python is not None:
        env["PATH"] = f"{python.parent}{os.pathsep}{env['PATH']}"
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{command} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def clean_environment(folder: Path, *requirements: str) -> Path:
    """Create an environment that has only *requirements*, and return its Python."""
    python = folder / "bin" / "python"
    uv = Path(sys.executable).parent / "uv"
    if uv.exists():
        run(uv, "venv", "--quiet", "--python", sys.executable, folder)
        run(uv, "pip", "install", "--quiet", "--python", python, *requirements, cwd=folder)
    else:
        run(sys.executable, "-m", "venv", folder)
        run(python, "-m", "pip", "install", "--quiet", *requirements, cwd=folder)
    return python
