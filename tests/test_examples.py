"""What the README and the docs show works as shown."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = {
    f"{page.name}-{number}": code
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for number, code in enumerate(
        re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL), start=1
    )
}
assert EXAMPLES, "no examples found: an empty search must not pass as success"

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


QUICKSTART = str(ROOT / "examples" / "quickstart.py")


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


@pytest.mark.parametrize("code", EXAMPLES.values(), ids=EXAMPLES)
def test_example_in_a_page_runs(code: str, tmp_path: Path) -> None:
    done = run("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
