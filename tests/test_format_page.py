"""docs/format.md says what the code does, wherever that is cheap to tell."""

import re
from pathlib import Path

import pytest

from adk_secure_sessions import AesGcmBackend, FernetBackend, NoOpBackend
from adk_secure_sessions.backends import THIRD_PARTY_IDS
from adk_secure_sessions.crypto import aead
from adk_secure_sessions.formats import records
from adk_secure_sessions.keys import blind_index, passphrase
from adk_secure_sessions.storage import schema as tables
from adk_secure_sessions.storage import writes as transactions
from examples import make_vectors

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """The text under a heading, up to the next one."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"docs/format.md has no section {title!r}"
    return found[1]


def rows(text: str) -> list[list[str]]:
    """The cells of a table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) > 2, "no table found: an empty one must not pass as success"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


TABLES = {cells[0].strip("`"): cells[1] for cells in rows(section("Tables"))}


def test_page_lists_the_tables_that_there_are() -> None:
    assert TABLES.keys() == tables.metadata.tables.keys()


@pytest.mark.parametrize("name", tables.metadata.tables)
def test_page_lists_the_columns_of_the_table_in_their_order(name: str) -> None:
    cell = re.sub(r"\*\*| unique| \(.*?\)", "", TABLES[name].split(";")[0])
    listed = cell.split(", ")
    assert listed == list(tables.metadata.tables[name].columns.keys())


@pytest.mark.parametrize("name", tables.metadata.tables)
def test_page_marks_the_primary_key_of_the_table(name: str) -> None:
    marked = re.search(r"\*\*(.*?)\*\*", TABLES[name])
    assert marked
    keys = list(tables.metadata.tables[name].primary_key.columns.keys())
    assert marked[1].split(", ") == keys


@pytest.mark.parametrize("name", tables.metadata.tables)
def test_page_marks_the_unique_columns_of_the_table(name: str) -> None:
    marked = re.findall(r"(\w+) unique", TABLES[name])
    columns = tables.metadata.tables[name].columns
    assert marked == [column.name for column in columns if column.unique]


def test_page_lists_every_sealed_column_with_its_purpose() -> None:
    listed = {
        cells[0].strip("`"): cells[2].strip("`").split(",")[0].strip('"')
        for cells in rows(section("What each record holds, and its place"))
    }
    assert listed == {
        "secure_apps.state": "app",
        "secure_users.state": "user",
        "secure_sessions.state": "session",
        "secure_bases.state": "base",
        "secure_events.event": "event",
        "secure_witnesses.seal": "witness",
    }
    for column in listed:
        table, name = column.split(".")
        assert name in tables.metadata.tables[table].columns


def test_page_gives_the_backend_ids() -> None:
    (cell,) = (cells[2] for cells in rows(section("Records")) if cells[1] == "backend id")
    assert f"{AesGcmBackend.backend_id} AES-256-GCM" in cell
    assert f"{FernetBackend.backend_id} Fernet" in cell
    assert f"{NoOpBackend.backend_id} no-op" in cell
    assert f"{THIRD_PARTY_IDS[0]:#x}-{THIRD_PARTY_IDS[-1]:#x} third parties" in cell


def test_page_gives_the_header_as_it_is_written() -> None:
    fields = {cells[1]: cells for cells in rows(section("Records"))}
    assert fields["magic"][2] == f"`{records.MAGIC.decode()}` ({records.MAGIC.hex(' ')})"
    assert fields["version"][2] == f"{records.VERSION:02x}"
    assert fields["body"][0] == f"{records.HEADER_LENGTH}-"
    assert f"{records.HEADER_LENGTH} header bytes" in PAGE


def test_page_gives_the_lengths_of_nonce_tag_and_key() -> None:
    assert f"`nonce ({aead.NONCE_LENGTH}) ‖ ciphertext ‖ tag (16)`" in PAGE
    assert f"key {aead.KEY_LENGTH} bytes" in PAGE
    assert f"the first {blind_index.TAG_LENGTH} bytes" in section("Tags")


def test_page_gives_the_cost_of_passphrases_and_its_limits() -> None:
    text = section("Key providers")
    cost = (passphrase._ITERATIONS, passphrase._LANES, passphrase._MEMORY_KIB)
    assert "iterations {}, lanes {}, {} KiB".format(*cost) in text
    assert f"more than {passphrase._MAX_ITERATIONS} iterations" in text
    assert f"{passphrase._MAX_LANES} lanes" in text
    assert f"{passphrase._MAX_MEMORY_KIB // 1024**2} GiB" in text


def test_page_gives_the_size_from_which_an_overlay_is_folded() -> None:
    assert f"more than\n{transactions.OVERLAY_LIMIT} bytes" in PAGE


def test_page_gives_the_format_version() -> None:
    assert f"`format` = `{tables.FORMAT_VERSION}`" in PAGE
    assert PAGE.startswith(f"# The stored format, version {records.VERSION}\n")


def test_example_in_the_page_and_vectors_are_those_that_the_script_makes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    outcome = make_vectors.main(["--check"])
    assert outcome == 0, f"run examples/make_vectors.py: {capsys.readouterr().out}"
