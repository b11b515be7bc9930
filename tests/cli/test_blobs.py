"""`verify --store`, `purge blobs`, `rotate data --store`: what they print, delete and exit with."""

import asyncio
import shutil
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from google.genai import types

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService
from adk_secure_sessions.integrations.artifacts import EncryptedArtifactService
from adk_secure_sessions.maintenance import Database, erase_user
from tests.cli.support import Said, on, run
from tests.cli.test_json import check
from tests.cli.test_running import imported
from tests.integrations.blob_files import contents, make_older, marks, unmarked
from tests.maintenance.support import OLD

BACKEND = AesGcmBackend(OLD)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "artifacts"


@pytest.fixture
def filled(file_url: str, store: Path) -> str:
    """A database with two artifacts of one version each."""

    async def fill() -> None:
        async with EncryptedSessionService(file_url, BACKEND) as sessions:
            artifacts = EncryptedArtifactService(sessions, store)
            for user_id in ("ada", "bob"):
                await artifacts.save_artifact(
                    app_name="clinic",
                    user_id=user_id,
                    filename="user:needle",
                    artifact=types.Part(text="needle"),
                )

    asyncio.run(fill())
    return file_url


def blobs(command: str, db: str, store: Path, *more: str) -> Said:
    words = {"verify": ["verify", "--only", "blobs"], "purge": ["purge", "blobs"]}[command]
    said = run(*words, *on(db), "--store", str(store), *more)
    assert "needle" not in said.stdout + said.stderr
    return said


def erase(url: str) -> None:
    async def work() -> None:
        async with Database(url, BACKEND) as db:
            await erase_user(db, "clinic", "ada")

    asyncio.run(work())


def test_intact_store(filled: str, store: Path) -> None:
    assert blobs("verify", filled, store) == (
        0,
        "checked: 2 artifacts, 2 blobs\nno blob is missing\n",
        "",
    )
    said = blobs("purge", filled, store)
    assert said == (
        0,
        "deleted: 0 blobs\nmarked, and deleted later: 0 blobs\nnamed by artifacts: 2 blobs\n",
        "",
    )
    said = run("verify", *on(filled), "--only", "rows", "--store", str(store))
    assert "omit --store" in said.stderr
    said = run("verify", *on(filled), "--allow-http")
    assert (said.code, "--allow-http is for a store: add --store" in said.stderr) == (2, True)


def test_missing_blob_is_named(filled: str, store: Path) -> None:
    contents(store)[0].unlink()
    said = blobs("verify", filled, store)
    assert said.code == 1
    problem, *rest = said.stdout.splitlines()
    assert problem.startswith("secure_events row ")
    assert ", 0: its blob " in problem
    assert problem.endswith(": it is missing")
    assert rest == [
        "checked: 2 artifacts, 2 blobs",
        "missing, or of another length: 1 blob",
        "bad: 1 row",
    ]
    found = check(blobs("verify", filled, store, "--json"), "verify")["blobs"]
    assert (found["missing"], found["bad"], found["problems"][0]["reason"]) == (1, 1, "missing")


def test_rows_are_reported_even_if_the_store_cannot_be_read(filled: str, store: Path) -> None:
    shutil.rmtree(store)
    store.write_text("a file")
    said = run("verify", *on(filled), "--store", str(store))
    assert (said.code, said.stdout.splitlines()[-1]) == (2, "all rows are intact")


def test_blobs_of_an_erased_user_are_marked_and_deleted_later(filled: str, store: Path) -> None:
    erase(filled)
    said = blobs("verify", filled, store)
    assert said.code == 0
    assert "named by no artifact: 1 blob; `purge blobs` marks" in said.stdout
    make_older(store, timedelta(days=2))
    said = blobs("purge", filled, store, "--dry-run")
    assert said.stdout.startswith(
        "would be deleted: 0 blobs\nwould be marked, and deleted later: 1 blob\n"
    )
    assert marks(store) == []
    assert "\nmarked, and deleted later: 1 blob\n" in blobs("purge", filled, store).stdout
    assert (len(contents(store)), len(marks(store))) == (2, 1)
    make_older(store, timedelta(days=3))
    found = check(blobs("purge", filled, store, "--json"), "purge blobs")
    assert (found["deleted"], found["marked"]) == (0, 1)
    found = check(blobs("purge", filled, store, "--older-than", "3d", "--json"), "purge blobs")
    assert (found["dry_run"], found["deleted"], found["kept"]) == (False, 1, 1)
    assert (len(contents(store)), marks(store)) == (1, [])
    assert blobs("verify", filled, store).code == 0


def test_copy_that_deletes_in_the_store_is_named(
    filled: str, store: Path, tmp_path: Path, file_url: str
) -> None:
    original = sa.make_url(file_url).database
    assert original is not None
    shutil.copy(original, tmp_path / "copy.db")
    copy = f"sqlite:///{tmp_path}/copy.db"
    erase(copy)
    make_older(store, timedelta(days=40))
    assert blobs("purge", copy, store).code == 0
    advice = "another copy of this database has marked them: run `separate` on the copy"
    said = blobs("verify", filled, store)
    assert said.code == 1
    assert "its blob is marked as deleted, by another copy of this database" in said.stdout
    assert f"marked as deleted: 1 blob; {advice}" in said.stdout
    found = check(blobs("verify", filled, store, "--json"), "verify")["blobs"]
    assert (found["marked"], found["missing"], found["bad"]) == (1, 0, 1)
    said = blobs("purge", filled, store, "--dry-run")
    assert said.code == 1
    assert "would be withdrawn, because artifacts name the blobs: 1 mark" in said.stdout
    found = check(blobs("purge", filled, store, "--dry-run", "--json"), "purge blobs")
    assert (found["withdrawn"], found["deleted"], found["marked"]) == (1, 0, 0)
    said = blobs("purge", filled, store)
    assert said.code == 1
    assert f"withdrawn, because artifacts name the blobs: 1 mark; {advice}" in said.stdout
    assert (len(contents(store)), marks(store)) == (2, [])
    assert blobs("purge", filled, store).code == 0
    assert blobs("verify", filled, store).code == 0


@pytest.mark.parametrize("command", ["verify", "purge"])
def test_store_that_does_not_exist_is_an_error_and_is_not_created(
    filled: str, store: Path, command: str
) -> None:
    wrong = store.with_name("artefacts")
    said = blobs(command, filled, wrong)
    assert said.code == 2
    assert said.stderr == ("Error: the directory of artifacts does not exist: check its path\n")
    assert not wrong.exists()
    assert blobs(command, filled, Path("ftp:")).code == 2


def test_contents_are_reencrypted_with_the_records(filled: str, store: Path) -> None:
    arguments = ("rotate", "data", *on(filled), "--store", str(store))
    old = contents(store)
    said = run(*arguments, "--dry-run")
    assert (said.code, contents(store), marks(store)) == (0, old, [])
    assert "would be re-encrypted: 12 records, 2 blobs, 12 bytes\n" in said.stdout
    said = run(*arguments)
    assert (said.code, said.stderr) == (0, "")
    assert ", 2 blobs, 12 bytes\n" in said.stdout
    assert len(contents(store)) == 4
    missing, _ = unmarked(store)
    assert missing not in old
    missing.unlink()
    said = run(*arguments)
    assert said.code == 1
    problem, *_, lost, _, following = said.stdout.splitlines()
    assert f"its blob {missing.parent.name}: a blob is missing" in problem
    assert lost == "missing or tampered with: 1 blob"
    assert following.startswith("next: restore these blobs from a backup of the store")
    found = check(run(*arguments, "--json"), "rotate data")
    assert (found["resumed"], found["blobs"], found["bad_blobs"]) == (True, 0, 1)


def test_commands_do_not_import_adk(filled: str, store: Path) -> None:
    options = [*on(filled), "--store", str(store)]
    *_, names = imported(["verify", *options], ["rotate", "data", *options, "--dry-run"])
    assert {"google.adk", "pydantic"} & names == set()
