"""The scripts of examples/ that a reader may run."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
QUICKSTART = str(ROOT / "examples" / "quickstart.py")
OFFLINE = {k: v for k, v in os.environ.items() if k not in ("GOOGLE_API_KEY", "GEMINI_API_KEY")}


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=OFFLINE,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_quickstart_remembers_and_leaves_nothing_in_clear(tmp_path: Path) -> None:
    done = run(QUICKSTART, "--db", "kept.db", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "You are Ada Lovelace." in done.stdout.split("A new service", 1)[1]
    assert "found          nothing" in done.stdout
    assert done.stderr == ""
    assert (tmp_path / "kept.db").stat().st_size > 0


def test_quickstart_leaves_another_runs_database_alone(tmp_path: Path) -> None:
    (tmp_path / "kept.db").touch()
    assert run(QUICKSTART, "--db", "kept.db", cwd=tmp_path).returncode == 2
