"""`migrate artifacts`: what it prints, when it asks, and its exit status."""

import asyncio
import sys
from pathlib import Path

import pytest
from google.adk.artifacts import FileArtifactService
from google.genai import types

from tests.cli.support import Said, on, run


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)

    async def save() -> None:
        service = FileArtifactService("adk")
        for text in ("needle", "needle2"):
            part = types.Part(text=text)
            await service.save_artifact(
                app_name="clinic", user_id="ada", filename="user:needle", artifact=part
            )

    asyncio.run(save())
    return tmp_path / "adk"


def migrate(action: str, *options: str, place: str = "adk", store: str = "artifacts") -> Said:
    source = ["--from", place, "--store", store]
    url = on("sqlite:///sessions.db", command="migrate")
    said = run("migrate", "artifacts", action, *source, *url, *options)
    if "--show-ids" not in options:
        assert "needle" not in said.stdout + said.stderr
    return said


def test_artifacts_are_copied_compared_and_erased(saved: Path) -> None:
    said = migrate("copy", "--dry-run")
    assert said.stdout.startswith("would be copied: 1 artifact, 2 versions, 13 bytes\n")
    said = migrate("copy")
    assert (said.code, said.stdout.splitlines()[0]) == (
        0,
        "copied: 1 artifact, 2 versions, 13 bytes",
    )
    assert migrate("compare") == (0, "equal on both sides: 1 artifact\n", "")
    for option in ([], ["--confirm", "other"]):
        said = migrate("erase-source", *option)
        assert said.code == 2
        assert f"the directory {saved} has 1 artifact" in said.stderr
    assert migrate("erase-source", "--dry-run").stdout.endswith("in the source: 1 artifact\n")
    said = migrate("erase-source", "--confirm", "adk")
    assert said.code == 0
    assert "deleted in the source: 1 artifact\nnot erased, because no command" in said.stdout
    assert [path for path in saved.rglob("*") if path.is_file()] == []


def test_nothing_is_erased_unless_both_sides_are_equal(saved: Path) -> None:
    migrate("copy")
    (saved / "apps/clinic/users/ada/artifacts/needle/versions/1/needle").write_text("needle3")
    said = migrate("erase-source", "--confirm", "adk")
    assert said.code == 1
    assert "different in the target, and kept there: 1 artifact\nnothing was deleted" in said.stdout
    assert "next: correct the artifacts named above, run `migrate artifacts copy`" in said.stdout
    said = migrate("compare", "--show-ids")
    assert (
        "('clinic', 'ada', 'user:needle'): version 1 differs in the target: delete" in said.stdout
    )
    Path("other").mkdir()
    said = migrate("compare", store="other")
    assert (said.code, "check --store" in said.stdout) == (1, True), said


def test_source_may_be_a_url_of_a_directory(saved: Path) -> None:
    assert migrate("copy", place=saved.as_uri()).stdout.startswith("copied: 1 artifact")


def test_bucket_needs_the_client_of_google(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "google.cloud.storage", None)
    source = ["--from", "gs://bucket", "--store", "artifacts"]
    url = on("sqlite:///sessions.db", command="migrate")
    said = run("migrate", "artifacts", "copy", *source, *url)
    assert (said.code, "google-cloud-storage: install it" in said.stderr) == (2, True)
