"""The command `migrate`: what it prints, when it asks, and its exit status."""

import asyncio
from pathlib import Path

import pytest
from google.adk.sessions import DatabaseSessionService

from tests.cli.support import Said, run
from tests.cli.test_metrics import read
from tests.maintenance.support import event, fill
from tests.migration.support import append, delete
from tests.sqlite_files import execute

NEEDLE = "Zanzibar"
ADK = Path("adk.db")


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asyncio.run(write("s0", "s1"))


async def write(*session_ids: str, user: str = "ada") -> None:
    """Have google-adk's own service create sessions, or append to them."""
    adk = DatabaseSessionService("sqlite+aiosqlite:///adk.db")
    for number, session_id in enumerate(session_ids):
        session = await adk.get_session(app_name="clinic", user_id=user, session_id=session_id)
        if session is None:
            session = await adk.create_session(
                app_name="clinic", user_id=user, session_id=session_id
            )
        await adk.append_event(session, event(number, text=NEEDLE))
    await adk.db_engine.dispose()


def migrate(command: str = "copy", *options: str) -> Said:
    said = run(
        *("migrate", command),
        *("--from", "sqlite:///adk.db", "--to", "sqlite:///sessions.db", "--key", "env:OLD_KEY"),
        *options,
    )
    assert NEEDLE not in said.stdout + said.stderr
    return said


def lines(said: Said) -> list[str]:
    return [line for line in said.stdout.splitlines() if not line.endswith("events/s)")]


def test_dry_run_copy_comparison_and_erasure_say_what_they_did() -> None:
    said = migrate("copy", "--dry-run")
    assert said.code == 0
    assert said.stdout == ("would be copied: 2 sessions, 2 events, 2 states\n")
    assert not Path("sessions.db").exists()
    said = migrate()
    assert said.code == 0
    assert lines(said) == [
        "copied: 2 sessions, 2 events, 2 states",
        "the copy is up to date; next: `migrate compare` compares both sides",
    ]
    said = migrate("erase-source", "--dry-run")
    assert (said.code, said.stdout.splitlines()[-1]) == (
        0,
        "would be deleted in the source: 2 sessions, 2 events, 2 states",
    )
    said = migrate("compare")
    assert said.code == 0
    assert said.stdout.splitlines()[:2] == [
        "compared: 2 sessions, 2 events, 2 states",
        "equal in every field that was copied: 2 sessions",
    ]
    assert "the mark that ends the migration" in said.stdout
    said = migrate("compare", "--app", "clinic")
    assert "compare without --app and --since" in said.stdout
    said = migrate("erase-source", "--confirm", "adk.db")
    assert said.code == 0
    assert "deleted in the source: 2 sessions, 2 events, 2 states\n" in said.stdout
    assert "not erased, because no command can reach them: backups" in said.stdout
    assert not [file for file in Path().iterdir() if NEEDLE.encode() in file.read_bytes()]
    said = migrate("compare")
    assert (said.code, said.stdout.splitlines()[-1]) == (
        0,
        "the source has nothing to compare: check --from and, if you gave it, --app",
    )


def test_app_that_the_source_does_not_have_is_noticed() -> None:
    for options in ([], ["--dry-run"]):
        said = migrate("copy", "--app", "typo", *options)
        assert said.code == 0
        assert lines(said)[1:] == [
            "the source has no such session: check --from and, if given, --app and --since"
        ]


def test_copies_get_an_expiry() -> None:
    for age in ("90", "0d"):
        said = migrate("copy", "--expires-after", age)
        assert said.code != 0
        assert "90d" in said.stderr.replace("timedelta(days=90)", "90d")
    said = migrate("copy", "--expires-after", "1s")  # the events are old
    assert (said.code, lines(said)[1]) == (
        0,
        "of them have expired already, so no service returns them: 2 sessions",
    )
    said = run("purge", "sessions", "--db", "sqlite:///sessions.db", "--key", "env:OLD_KEY")
    assert (said.code, said.stdout.splitlines()[0]) == (0, "deleted: 2 sessions")


def test_metrics_of_an_erasure_count_what_cannot_be_read() -> None:
    migrate()
    execute(ADK, "UPDATE sessions SET state = 'x'")
    said = migrate("erase-source", "--confirm", "adk.db", "--metrics-file", "run.prom")
    assert (said.code, "cannot be read in the source: 2 items" in said.stdout) == (1, True)
    assert read(Path("run.prom"))["problems"] == 2


def test_differences_and_a_withdrawn_mark_are_named_and_nothing_is_deleted() -> None:
    migrate()
    assert migrate("compare").code == 0
    asyncio.run(write("s1", "s2"))
    for option in (["compare"], ["erase-source", "--confirm", "adk.db"]):
        said = migrate(*option)
        assert said.code == 1
        assert "it has changed in the source since it was copied; different: " in said.stdout
        assert "it was not copied" in said.stdout
        assert "the two sides are not equal" in said.stdout
        withdrawn = "was withdrawn: restart services with a fallback" in said.stdout
        assert withdrawn is (option == ["compare"])
    assert "nothing was deleted" in migrate("erase-source", "--confirm", "adk.db").stdout
    assert "'ada', 's1'" not in migrate("compare").stdout
    assert "'clinic', 'ada', 's1'" in migrate("compare", "--show-ids").stdout
    assert migrate().code == 0
    assert migrate("compare").code == 0


def test_conflicts_gone_and_bad_sessions_are_reported_with_exit_status_1() -> None:
    asyncio.run(write("s2", "s3", "s4", "s5"))
    url = "sqlite:///sessions.db"
    assert migrate().code == 0
    asyncio.run(append(url, "ada", "s0"))
    asyncio.run(append(url, "ada", "s1"))
    asyncio.run(delete(url, "ada", "s2"))
    asyncio.run(write("s1"))
    execute(ADK, "DELETE FROM sessions WHERE id = 's3'")
    execute(ADK, "UPDATE sessions SET state = '[]', update_time = '2030-01-01' WHERE id = 's4'")
    said = migrate()
    assert said.code == 1
    assert "its state is not a JSON object" in said.stdout
    assert "stopped: repair this row in the source, or give --skip-bad" in said.stdout
    said = migrate("copy", "--skip-bad")
    assert said.code == 1
    assert lines(said)[3:] == [
        "copied: 0 sessions, 0 events, 0 states",
        "not changed in the source since they were copied: 3 sessions",
        "copied before, and no longer in the source: 1 session",
        "in conflict, and left unchanged: 1 item",
        "cannot be read, and not copied: 1 item",
    ]
    said = migrate("copy", "--skip-bad", "--delete-gone", "--json")
    assert (said.json["gone"], said.json["deleted_gone"]) == (1, True)
    assert [one["user_id"] for one in said.json["findings"]] == [None] * 3


def test_database_with_another_key_is_copied() -> None:
    asyncio.run(fill("sqlite:///old.db"))
    arguments = ["--from", "sqlite:///old.db", "--to", "sqlite:///new.db", "--key", "env:NEW_KEY"]
    said = run("migrate", "copy", *arguments)
    assert (said.code, "the source with --from-key (keys)" in said.stderr) == (2, True)
    arguments += ["--from-key", "env:OLD_KEY"]
    said = run("migrate", "copy", *arguments)
    assert said.code == 0
    assert lines(said)[0] == "copied: 4 sessions, 12 events, 3 states"
    assert run("migrate", "compare", *arguments).code == 0
    said = run("migrate", "compare", *arguments, "--from-time-zone", "Europe/Berlin")
    assert (said.code, "omit --from-time-zone" in said.stderr) == (2, True)
    assert run("verify", "--db", "sqlite:///new.db", "--key", "env:NEW_KEY").code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--since", "yesterday"], "such as 2026-03-31"),
        (["--from-time-zone", "Mars/Base"], "such as Europe/Berlin"),
        (["--delete-gone", "--since", "2026-01-01"], "cannot be combined with --since"),
        (["--from-key", "env:OLD_KEY"], "the source is not encrypted"),
        (["--from-backend", "fernet"], "the source is not encrypted"),
        (["--from-key-db", "sqlite:///keys.db"], "omit the keys, backends and key database"),
    ],
)
def test_options_that_do_not_fit_are_rejected(options: list[str], message: str) -> None:
    said = migrate("copy", *options)
    assert said.code == 2
    assert message in " ".join(said.stderr.split())


def test_times_and_zones_are_taken() -> None:
    said = migrate("copy", "--since", "2020-01-01T00:00+02:00", "--from-time-zone", "Europe/Berlin")
    assert said.code == 0
    assert lines(said)[0] == "copied: 2 sessions, 2 events, 2 states"
    assert migrate("copy", "--since", "2999-01-01").stdout.startswith("copied: 0 sessions")
