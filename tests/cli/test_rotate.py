"""`rotate` and `retire`, on each kind of database: what they print, and their exit status."""

import asyncio
import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from adk_secure_sessions import AesGcmBackend, FernetBackend
from adk_secure_sessions.cli import output, rotate
from adk_secure_sessions.maintenance import KeptKey, Retirement, rotate_data, rotate_master
from tests.cli.support import Said, confirmed, on, run
from tests.key_database.support import make_ada_with_spare_keys, pair_in
from tests.maintenance.support import (
    OLD,
    all_rows,
    fill,
    interrupt,
    plaintext_backend,
    query,
    run_sql,
)

WITH_FERNET = ["--also-backend", "fernet"]
ROTATIONS: dict[str, Any] = {"master": rotate_master, "data": rotate_data}
BEGUN = r"begun \d{4}-\d\d-\d\d \d\d:\d\d UTC"


def break_events(place: sa.URL) -> int:
    """Overwrite event 1 of each session; return the number of these records."""
    return run_sql(place, "UPDATE secure_events SET event = :bad WHERE seq = 1", bad=b"junk")


# --- whole rotations -----------------------------------------------------------------------------


def test_every_key_and_the_backend_are_replaced_in_turn(url: str, place: sa.URL) -> None:
    asyncio.run(fill(url, FernetBackend(OLD)))
    assert run("status", "--db", url).stdout.count("fernet") == 6
    both = [*on(url, "env:NEW_KEY"), "--also-key", "env:OLD_KEY", *WITH_FERNET]
    assert run("rotate", "root", *both).code == 0

    new = [*on(url, "env:NEW_KEY"), *WITH_FERNET]
    master = run("rotate", "master", *new, "--rows-per-second", "100000")
    assert (master.code, master.stderr) == (0, "")
    assert master.stdout == (
        "wrapped by the new data master: 3 data keys\n"
        "next: `retire` deletes the keys that were replaced\n"
    )
    data = run("rotate", "data", *new, "--rows-per-second", "100000")
    assert data == (
        0,
        "re-encrypted: 26 records\ncreated: 3 data keys\n"
        "next: `retire` deletes the keys that were replaced\n",
        "",
    )
    told = run("status", "--db", url).stdout
    assert re.findall(r"(\w+) +aesgcm +(\d+) +(\d+) under current key +100%\n", told) == [
        ("secure_apps", "1", "1"),
        ("secure_users", "2", "2"),
        ("secure_sessions", "4", "4"),
        ("secure_events", "12", "12"),
        ("secure_witnesses", "7", "7"),
    ]
    assert "unfinished" not in told
    retired = run("retire", *new, "--rows-per-second", "100000")
    assert retired == (0, "deleted: 3 data keys, 1 data master\n", "")
    assert run("retire", *new).stdout == "deleted: 0 data keys, 0 data masters\n"
    assert "fernet" not in run("status", "--db", url).stdout
    checked = run("verify", *on(url, "env:NEW_KEY"))  # with neither the old key nor the old backend
    assert (checked.code, "4 sessions, 12 events" in checked.stdout) == (0, True)


@pytest.mark.parametrize("name", ["rotate master", "rotate data", "retire"])
def test_dry_run_says_what_would_be_done_and_writes_nothing(
    name: str, filled: str, place: sa.URL
) -> None:
    if name == "retire":
        run("rotate", "data", *on(filled))
    before = all_rows(place)
    said = run(*name.split(), *on(filled), "--dry-run")
    assert all_rows(place) == before
    assert said == (
        0,
        {
            "rotate master": "would be wrapped by the new data master: 3 data keys\n",
            "rotate data": "would be re-encrypted: 26 records\n",
            "retire": "would be deleted: 3 data keys, 0 data masters\n",
        }[name],
        "",
    )


@pytest.mark.parametrize(("name", "retired"), [("data", (3, 0)), ("master", (0, 1))])
def test_rotation_with_retire_removes_the_replaced_keys(name: str, retired: Any, file: str) -> None:
    rejected = run("rotate", name, *on(file), "--retire", "--dry-run")
    assert "omit one of them" in rejected.stderr
    said = run("rotate", name, *on(file), "--retire", "--json")
    assert said.code == 0
    found = said.json["retirement"]
    assert (found["deleted_data_keys"], len(found["deleted_master_ids"]), found["kept"]) == (
        *retired,
        0,
    )


def test_rotation_is_reported_even_if_the_keys_cannot_be_retired(
    filled: str, place: sa.URL
) -> None:
    run_sql(place, "UPDATE secure_users SET app_row = -7")
    said = run("rotate", "master", *on(filled), "--retire")
    rotated, advice = said.stdout.splitlines()
    assert (said.code, rotated) == (2, "wrapped by the new data master: 3 data keys")
    assert advice == "next: `retire` deletes the keys that were replaced"
    assert said.stderr.startswith("Error: secure_users row ")
    failure = run("rotate", "master", *on(filled), "--retire", "--json").json
    assert (failure["error"], failure["result"]["rotated"]) == ("TamperedError", 3)


def test_rotation_with_retire_says_how_to_remove_the_keys_that_it_kept(file: str) -> None:
    fernet = FernetBackend(OLD)
    asyncio.run(fill(file, fernet, others=[AesGcmBackend(OLD)], users=["ada"], name="f"))
    said = run("rotate", "master", *on(file), *WITH_FERNET, "--retire")
    assert said.code == 1
    next_step = "next: `rotate data` re-encrypts the records under them; then run `retire` again\n"
    assert f"kept: 1 replaced key\n{next_step}" in said.stdout


# --- rows that are left --------------------------------------------------------------------------


def test_records_that_cannot_be_decrypted_are_named_and_counted_by_table(
    filled: str, place: sa.URL
) -> None:
    assert break_events(place) == 4
    said = run("rotate", "data", *on(filled))
    named = re.findall(
        r"^secure_events row \d+, 1: not an encrypted record$", said.stdout, re.MULTILINE
    )
    assert (said.code, len(named)) == (1, 4)
    assert said.stdout.partition("re-encrypted")[2] == (
        ": 22 records\ncreated: 3 data keys\n"
        "cannot be decrypted, and left unchanged: 4 rows\n"
        "left under older keys: 4 rows\n"
        "  secure_events  4\n"
        "next: repeat an `erase-user` that was interrupted, or run `verify` and restore the "
        "whole database from a backup (an older copy of a single row may be rejected); then run "
        "this again\n"
    )
    as_json = run("rotate", "data", *on(filled), "--json")
    assert as_json.code == 1
    assert (as_json.json["left"], as_json.json["left_in"]) == (4, [["secure_events", 4]])
    assert (as_json.json["resumed"], as_json.json["reencrypted"]) == (True, 0)
    assert run("rotate", "data", *on(filled), "--dry-run").code == 1


def test_status_shows_what_services_with_another_backend_wrote_since(file: str) -> None:
    run("rotate", "data", *on(file))
    fernet = fill(file, FernetBackend(OLD), others=[AesGcmBackend(OLD)], users=["ada"], name="f")
    asyncio.run(fernet)
    told = run("status", "--db", file).stdout
    assert re.search(r"secure_events +aesgcm +12 +6 under current key +50%", told)
    assert re.search(r"secure_events +fernet +6 +6 under current key +100%", told)
    again = run("rotate", "data", *on(file), *WITH_FERNET)
    assert (again.code, "left" in again.stdout) == (0, False)
    assert "fernet" not in run("status", "--db", file).stdout.partition("rows")[2]


def rotate_while_another_backend_writes(file: str, monkeypatch: pytest.MonkeyPatch) -> Said:
    reports = itertools.count()

    def write_meanwhile(done: int, total: int) -> None:
        if (number := next(reports)) % 4 == 0:  # at least once while it counts what is left
            name = f"meanwhile {number}"
            fernet, others = FernetBackend(OLD), [AesGcmBackend(OLD)]
            writing = fill(file, fernet, others=others, users=["ada"], sessions=1, name=name)
            with ThreadPoolExecutor(1) as thread:
                thread.submit(asyncio.run, writing).result()

    with monkeypatch.context() as patch:
        patch.setattr(rotate, "progress", lambda *_: nullcontext(write_meanwhile))
        return run("rotate", "data", *on(file), *WITH_FERNET)


def test_records_that_services_go_on_writing_with_another_backend_are_left(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = rotate_while_another_backend_writes(file, monkeypatch)
    assert said.code == 1
    assert re.search(r"^left under older keys: \d+ rows\n  secure_", said.stdout, re.MULTILINE)
    assert "cannot be decrypted" not in said.stdout
    assert said.stdout.endswith(
        "next: once all services write with the same backend and root key, run this again\n"
    )


def test_data_keys_that_cannot_be_unwrapped_are_named_and_counted(
    filled: str, place: sa.URL
) -> None:
    ((first,),) = query(place, "SELECT min(id) FROM secure_data_keys")
    run_sql(place, "UPDATE secure_data_keys SET wrapped = :bad WHERE id = :id", bad=b"x", id=first)
    said = run("rotate", "master", *on(filled))
    assert said.code == 1
    assert said.stdout.startswith(f"secure_data_keys row {first}: ")
    assert said.stdout.partition(": 2 data keys\n")[2] == (
        "cannot be decrypted, and left unchanged: 1 row\n"
        "left under older keys: 1 row\n"
        "next: repeat an `erase-user` that was interrupted, or run `verify` and restore the "
        "whole database from a backup (an older copy of a single row may be rejected); then run "
        "this again\n"
    )
    assert run("rotate", "master", *on(filled), "--dry-run").code == 1


def test_keys_that_are_still_needed_are_kept_with_the_reason(filled: str, place: sa.URL) -> None:
    break_events(place)
    run("rotate", "data", *on(filled))
    said = run("retire", *on(filled))
    assert said.code == 1
    # The headers of a bad row are not believed, so nothing is said about the rows under a key.
    kept = re.findall(
        r"^secure_data_keys row \d+ is kept: an older key is needed, or the rows that need it are "
        r"unknown: see `verify`$",
        said.stdout,
        re.MULTILINE,
    )
    assert len(kept) == 2
    assert said.stdout.partition("deleted")[2] == (
        ": 1 data key, 0 data masters\nkept: 2 replaced keys\n"
    )
    as_json = run("retire", *on(filled), "--dry-run", "--json")
    assert (as_json.code, as_json.json["kept"]) == (1, 2)
    assert as_json.json["kept_keys"][0]["references"] == []


def test_spare_keys_are_shown_and_are_no_reason_for_exit_status_1(tmp_path: Path) -> None:
    pair = pair_in(tmp_path)
    asyncio.run(make_ada_with_spare_keys(pair))
    options = [*on(pair.urls["db_url"]), "--key-db", pair.urls["key_db_url"]]
    spare = "spare: 2 data keys; no row names them, and they encrypt nothing"
    said = run("retire", *options)
    assert (said.code, said.stdout) == (0, f"deleted: 0 data keys, 0 data masters\n{spare}\n")
    said = run("status", *options)
    assert (said.code, spare in said.stdout) == (0, True)


def test_keys_beyond_the_first_are_counted() -> None:
    key = KeptKey("secure_keyring", 7, (("secure_data_keys", 2),))
    lines = list(Retirement(0, (), 3, (key,)).lines())
    assert lines[:2] == ["secure_keyring row 7 is kept: 2 rows of secure_data_keys", "and 2 more"]


# --- interrupted ---------------------------------------------------------------------------------


PROGRESS = {
    "master": r"\d+%, \d of 3 data keys",
    "data": r"\d+%, \d+ of 26 records",
}


@pytest.mark.parametrize("name", ROTATIONS)
def test_unfinished_rotation_is_shown_and_continued(name: str, filled: str) -> None:
    asyncio.run(interrupt(filled, ROTATIONS[name]))
    shown = rf"  {name}: {PROGRESS[name]}; {BEGUN.replace('begun', 'began')}"
    hint = "; it runs or was stopped; running the same command again is safe and continues it"
    told = run("status", "--db", filled)
    heading, line = told.stdout.splitlines()[-2:]
    assert (told.code, heading) == (0, "unfinished rotations")
    assert re.fullmatch(rf"{shown}; not verified: that needs --key{hint}", line)
    checked = run("status", *on(filled))
    assert checked.code == 0
    assert re.fullmatch(f"{shown}{hint}", checked.stdout.splitlines()[-1])
    (unfinished,) = run("status", *on(filled), "--json").json["unfinished"]
    assert (unfinished["name"], unfinished["is_authentic"]) == (name, True)
    other = run("status", *on(filled, "env:NEW_KEY"), "--json")
    assert other.json["unfinished"][0]["is_authentic"] is None

    would = run("rotate", name, *on(filled), "--dry-run")
    assert re.match(
        rf"would continue the rotation {BEGUN}; --restart begins a new one\n", would.stderr
    )
    done = run("rotate", name, *on(filled))
    assert done.code == 0
    assert re.match(rf"continues the rotation {BEGUN}; --restart begins a new one\n", done.stderr)
    assert "unfinished" not in run("status", "--db", filled).stdout
    again = run("rotate", name, *on(filled), "--json").json
    assert again["resumed"] is False
    assert again["since"] > unfinished["since"]


@pytest.mark.parametrize("name", ROTATIONS)
def test_rotation_whose_checkpoint_was_tampered_with_is_rejected(name: str, file: str) -> None:
    asyncio.run(interrupt(file, ROTATIONS[name]))
    tampered = "value = substr(value, 1, length(value) - 1) || 'x'"
    run_sql(file, f"UPDATE secure_meta SET {tampered} WHERE name LIKE 'rotation.%'")
    told = run("status", *on(file))
    assert (told.code, told.stdout.splitlines()[-1]) == (
        1,
        f"  {name}: its checkpoint was tampered with; --restart begins a new rotation",
    )
    before = all_rows(file)
    for more in ([], ["--dry-run"]):
        rejected = run("rotate", name, *on(file), *more)
        assert (rejected.code, rejected.stdout) == (2, "")
        assert f"secure_meta row rotation.{name}: " in rejected.stderr
        assert "--restart" in rejected.stderr
    assert all_rows(file) == before
    begun = run("rotate", name, *on(file), "--restart", "--json")
    assert (begun.code, begun.json["resumed"]) == (0, False)
    assert run("verify", *on(file)).code == 0


@pytest.mark.parametrize("key", [None, "env:OLD_KEY"])
@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("data", "its checkpoint was tampered with; --restart begins a new rotation"),
        ("foo", "there is no such rotation; delete secure_meta row rotation.foo"),
    ],
)
def test_status_fails_if_a_checkpoint_is_malformed_or_of_no_rotation(
    name: str, hint: str, key: str | None, file: str
) -> None:
    text = f"7 {'0' * 32}" if name == "foo" else "x"
    run_sql(
        file, "INSERT INTO secure_meta VALUES (:name, :text)", name=f"rotation.{name}", text=text
    )
    told = run("status", *on(file, key))
    assert (told.code, told.stdout.splitlines()[-1]) == (1, f"  {name}: {hint}")


# --- keys and options ----------------------------------------------------------------------------


def test_backend_that_is_not_listed_is_named_as_the_next_step(file_url: str) -> None:
    asyncio.run(fill(file_url))
    said = run("rotate", "data", *on(file_url), "--backend", "fernet")
    assert said.code == 1
    assert said.stdout.splitlines()[-1] == (
        "next: run this again with --also-backend, for the backend that encrypted these rows"
    )


def test_progress_of_retire_counts_owners(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    monkeypatch.setattr(output, "LINE_EVERY", 0.0)
    run("rotate", "data", *on(file))
    said = run("retire", *on(file))
    assert said.stderr.splitlines()[-1].startswith("retire: 3 of 3 owners, ")


def test_rotation_from_plaintext_without_a_data_master_key_says_what_to_do(
    file_url: str,
) -> None:
    asyncio.run(fill(file_url, plaintext_backend()))
    rejected = run("rotate", "data", *on(file_url), "--also-backend", "no-op")
    assert (rejected.code, "rotate master" in rejected.stderr) == (2, True)


def test_keys_are_moved_into_a_key_database_and_back(file: str) -> None:
    keys = ["--key-db", file.replace(".db", "-keys.db")]
    said = run("move-keys", *on(file), *keys, "--to", "key-db", *confirmed(file))
    text = "moved: 2 master keys, 3 data keys\nthe key database has the keys: start services with "
    assert said == (0, f"{text}key_db_url\n", "")
    assert run("verify", *on(file), *keys).code == 0
    alone = run("verify", *on(file))
    assert (alone.code, "pass that as key_db_url (--key-db" in alone.stderr) == (2, True)
    said = run("move-keys", *on(file), *keys, "--to", "db", *confirmed(file))
    text = "moved: 2 master keys, 3 data keys\nthe database has its keys: start services without "
    assert said == (0, f"{text}key_db_url\n", "")
    assert run("verify", *on(file)).code == 0
    nowhere = run("move-keys", *on(file), "--to", "key-db", *confirmed(file))
    assert (nowhere.code, "pass it as key_db_url (--key-db" in nowhere.stderr) == (2, True)
