"""The scripts of examples/."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
QUICKSTART = str(ROOT / "examples" / "quickstart.py")
OFFLINE = {k: v for k, v in os.environ.items() if k not in ("GOOGLE_API_KEY", "GEMINI_API_KEY")}


def test_quickstart_remembers_and_stores_no_plaintext(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, QUICKSTART, "--db", "kept.db"],
        cwd=tmp_path,
        env=OFFLINE,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "You are Ada Lovelace." in done.stdout.split("A new service", 1)[1]
    assert "found          nothing" in done.stdout
    assert done.stderr == ""
    assert (tmp_path / "kept.db").stat().st_size > 0


def test_quickstart_leaves_another_runs_database_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kept.db").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [QUICKSTART, "--db", "kept.db"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(QUICKSTART, run_name="__main__")
    assert ended.value.code == 2
    assert "kept.db" in capsys.readouterr().err
    assert (tmp_path / "kept.db").stat().st_size == 0
