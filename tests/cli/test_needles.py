"""The commands print no plaintext and no key, whatever the log level and the tampering."""

import asyncio
import io
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adk_secure_sessions import AesGcmBackend, EncryptedSessionService, FileKey, generate_key
from tests.attacks.needles import (
    APP,
    SESSION,
    USER,
    all_logged,
    found_in,
    large_state,
    new_event,
    state,
)
from tests.cli.support import run
from tests.sqlite_files import execute

KEY, OTHER = generate_key(), generate_key()
WHO: dict[str, Any] = {"app_name": APP, "user_id": USER, "session_id": SESSION}
TAMPERED = [  # after some of these, no command opens the database
    "UPDATE secure_events SET event = CAST('{\"text\": 1}' AS BLOB)",
    "UPDATE secure_events SET event = substr(event, 1, length(event) - 1)",
    "UPDATE secure_sessions SET state = x'414b53010300000000000000007b7d', revision = 'x'",
    "UPDATE secure_users SET state = 'text', version = 'text'",
    "UPDATE secure_apps SET app_name = x'ff'",
    "UPDATE secure_data_keys SET wrapped = 'text'",
    "UPDATE secure_witnesses SET number = 'text'",
    "DELETE FROM secure_users",
    "UPDATE secure_keyring SET wrapped = x'00'",
    "UPDATE secure_keyring SET created_at = 9223372036854775807",
    "UPDATE secure_keyring SET created_at = 'text', purpose = x'00'",
    "UPDATE secure_keyring SET root_key_id = char(27) || '[2J' || root_key_id",
    "UPDATE secure_data_keys SET backend_id = 'text', generation = 'text'",
    "UPDATE secure_meta SET value = x'ff' WHERE name = 'database_id'",
    "DROP TABLE secure_events",
]


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """The text of all loggers."""
    with all_logged() as text, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield text


async def fill(path: Path) -> None:
    url = f"sqlite+aiosqlite:///{path}"
    async with EncryptedSessionService(url, AesGcmBackend(KEY)) as service:
        session = await service.create_session(**WHO, state=state() | large_state())
        await service.append_event(session, new_event(state()))
        await service.append_event(session, new_event(state() | large_state()))


# By default, every fourth database.  The commands with and without --json say the same: of those
# databases, every second one with --json.
CASES = [
    pytest.param(tampered, form, marks=[] if number % 8 == use else [pytest.mark.soak])
    for number, tampered in enumerate(["", *TAMPERED])
    for use, form in {0: "text", 4: "--json"}.items()
]


@pytest.mark.parametrize(("tampered", "form"), CASES)
def test_commands_print_no_plaintext_and_no_key(
    tampered: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: io.StringIO
) -> None:
    path = tmp_path / "sessions.db"
    asyncio.run(fill(path))
    if tampered:
        execute(path, tampered)
    for name, key in (("root", KEY), ("other", OTHER)):
        (tmp_path / f"{name}.key").write_text(key)
        (tmp_path / f"{name}.key").chmod(0o600)
    monkeypatch.chdir(tmp_path)
    db = ["--db", f"sqlite:///{path}"]
    right, wrong = [*db, "--key", "file:root.key"], [*db, "--key", "file:other.key"]
    attempts = [
        ["status", *db],
        ["status", *right],
        ["verify", *right],
        ["verify", *wrong],
        ["verify", *right, "--backend", "fernet", "--also-backend", "no-op"],
        ["debug", "lookup", *right, "--app", APP, "--user", USER, "--session", SESSION],
        *(["debug", "inspect", f"secure_{name}", *db] for name in ("events", "users", "data_keys")),
        ["purge", "sessions", *right, "--older-than", "1d", "--dry-run"],
        ["erase-user", *wrong, "--app", APP, "--user", USER, "--confirm", str(path)],
        ["erase-user", *right, "--app", APP, "--user", USER],
        ["erase-user", *right, "--app", APP, "--user", USER, "--dry-run"],
        ["rotate", "root", *wrong],
        ["rotate", "root", *right, "--dry-run"],
        *(["rotate", which, *right, "--dry-run"] for which in ("master", "data")),
        ["rotate", "data", *wrong],
        ["rotate", "master", *right],
        ["rotate", "data", *right],
        ["rotate", "data", *right, "--backend", "fernet", "--also-backend", "aesgcm", "--restart"],
        ["retire", *right],
        ["status", *right],
        ["init", *wrong],
        ["verify", *db, "--key", KEY],
        ["purge", "sessions", *right, "--older-than", "1d"],
        ["erase-user", *right, "--app", APP, "--user", USER, "--rewrite", "--confirm", str(path)],
    ]
    printed = []
    for attempt in attempts:
        said = run(*attempt, *([form] if form == "--json" else []))
        assert "Traceback" not in said.stderr
        assert said.code in (0, 1, 2)
        assert "\x1b" not in said.stdout + said.stderr
        printed += [said.stdout, said.stderr]
    text = "".join([*printed, log.getvalue()])
    assert found_in(text) == set()
    for key in (KEY, OTHER):
        assert key.strip("=") not in text
    assert FileKey("root.key").key_id in text
