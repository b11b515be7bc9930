"""The scripts of examples/."""

import runpy
import sys
from pathlib import Path

import pytest

from tests import pages

ROOT = Path(__file__).parent.parent
QUICKSTART = str(ROOT / "examples" / "quickstart.py")


# google-adk warns of its own experimental and deprecated parts.
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_quickstart_remembers_and_stores_no_plaintext(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, since importing google-adk takes seconds; `make demo` runs it in its own."""
    for name in ("GOOGLE_API_KEY", "GEMINI_API_KEY"):  # offline
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [QUICKSTART, "--db", "kept.db"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(QUICKSTART, run_name="__main__")
    shown = capsys.readouterr()
    assert ended.value.code == 0, shown
    assert "You are Ada Lovelace." in shown.out.split("A new service", 1)[1]
    assert "found          nothing" in shown.out
    assert shown.err == ""
    assert (tmp_path / "kept.db").stat().st_size > 0


def test_first_example_of_the_readme_works_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user copies it into a file, and runs this file twice."""
    regions = [region for _, region in pages.blocks(ROOT / "README.md").regions]
    source, *_ = (str(one.parsed["source"]) for one in regions if pages.language(one) == "python")
    script = tmp_path / "first.py"
    script.write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for _ in range(3):
        runpy.run_path(str(script), run_name="__main__")
        assert capsys.readouterr().out == "{'user:allergies': ['penicillin']}\n"
    assert (tmp_path / "root.key").stat().st_mode & 0o777 == 0o600


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
