"""docs/format.md says what the code does, wherever that is cheap to tell."""

import re
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import mysql

from adk_secure_sessions import AesGcmBackend, FernetBackend, NoOpBackend, Reason
from adk_secure_sessions.backends import THIRD_PARTY_IDS
from adk_secure_sessions.crypto import aead
from adk_secure_sessions.formats import records
from adk_secure_sessions.keys import blind_index, data_keys, keyring, passphrase
from adk_secure_sessions.storage import schema as tables
from adk_secure_sessions.storage import survey
from adk_secure_sessions.storage import writes as transactions
from adk_secure_sessions.storage.features.collections import MAX_NAME_BYTES
from examples import make_vectors

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """The text under a heading, up to the next one."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"the page has no section {title!r}"
    return found[1]


def rows(text: str) -> list[list[str]]:
    """The cells of a table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) > 2, "no table found: an empty one must not pass as success"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def listed_columns() -> dict[str, list[list[str]]]:
    """The rows of the page's first table of tables, by table: column, type, value."""
    text = section("Tables").partition("\n\nNo column")[0]
    found: dict[str, list[list[str]]] = {}
    name = ""
    for cells in rows(text):
        name = cells[0].strip("`") or name
        found.setdefault(name, []).append([cells[1].strip("`"), *cells[2:]])
    return found


TABLES = listed_columns()


def type_on_page(column: sa.Column[object]) -> str:
    if isinstance(column.type, sa.String):
        return f"text ({column.type.length})"
    if isinstance(column.type, sa.LargeBinary):
        found = re.search(r"\((\d+)\)", column.type.compile(mysql.dialect()))
        return f"binary ({found[1]})" if found else "binary"
    return "integer"


def test_page_lists_the_tables_that_there_are() -> None:
    assert TABLES.keys() == tables.metadata.tables.keys()


@pytest.mark.parametrize("name", tables.metadata.tables)
def test_page_lists_the_columns_of_the_table_in_their_order_with_type_and_keys(name: str) -> None:
    table = tables.metadata.tables[name]
    unique = [of.columns.keys() for of in table.constraints if isinstance(of, sa.UniqueConstraint)]
    assert [(column, kind) for column, kind, _ in TABLES[name]] == [
        (
            column.name,
            type_on_page(column)
            + ", primary key" * column.primary_key
            + ", unique" * ([column.name] in unique),
        )
        for column in table.columns
    ]


def test_page_lists_the_columns_of_the_table_of_imports() -> None:
    text = section("Migration").partition("\n\nA *tombstone*")[0]
    listed = [(name.strip("`"), kind.split(",")[0]) for name, kind, _ in rows(text)]
    columns = tables.migrated.columns
    assert listed == [(column.name, type_on_page(column)) for column in columns]


def test_no_column_may_be_null() -> None:
    columns = [column for table in tables.metadata.tables.values() for column in table.columns]
    assert [column for column in columns if column.nullable] == []
    assert "No column may be null" in section("Tables")


def test_page_lists_every_sealed_column_with_its_purpose() -> None:
    listed = {
        cells[0].strip("`"): cells[2].strip("`").split(",")[0].strip('"')
        for cells in rows(section("What each record holds, and its context"))
    }
    assert listed == {
        "secure_apps.state": "app",
        "secure_users.state": "user",
        "secure_sessions.state": "session",
        "secure_bases.state": "base",
        "secure_events.event": "event",
        "secure_witnesses.seal": "witness",
        "secure_data_keys.wrapped": "data-key",
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
    assert f"a key of {aead.KEY_LENGTH} bytes, a nonce of {aead.NONCE_LENGTH} bytes" in PAGE
    assert f"the first {blind_index.TAG_LENGTH} bytes" in section("Tags")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_page_gives_the_length_of_data_keys_for_each_backend() -> None:
    listed = {cells[0].split(" ")[0]: cells[2] for cells in rows(section("Bodies"))}
    backends = (AesGcmBackend(bytes(32)), FernetBackend(bytes(32)), NoOpBackend())
    for backend in backends:
        assert listed[str(backend.backend_id)] == f"{len(backend.new_key())} bytes"


def test_page_gives_the_cost_of_passphrases() -> None:
    text = " ".join(section("Key providers").split())
    cost = (passphrase._ITERATIONS, passphrase._LANES, passphrase._MEMORY_KIB)
    assert "{} iterations, {} lanes and {} KiB".format(*cost) in text
    assert f"1 to {passphrase._ITERATIONS} iterations" in text
    assert f"1 to {passphrase._LANES} lanes" in text
    assert f"at most {passphrase._MEMORY_KIB} KiB of memory" in text


def test_page_gives_the_size_from_which_an_overlay_is_folded() -> None:
    assert f"more than {transactions.OVERLAY_LIMIT} bytes" in " ".join(section("States").split())


def test_page_gives_the_format_version() -> None:
    assert f"`format` = `{tables.FORMAT_VERSION}`" in PAGE
    assert f"\n# The stored format, version {records.VERSION}: " in PAGE


def test_page_gives_the_flags_byte() -> None:
    text = section("Flags")
    assert f"MUST write {records.NO_FLAGS.hex()}" in text
    assert f"`{Reason.UNKNOWN_FLAGS}`" in text
    listed = {int(cells[0], 16): cells[1] for cells in rows(text)}
    assert listed.keys() == {records.ZLIB, 2, records.PADDED}
    assert "zlib" in listed[records.ZLIB]
    assert "reserved" in listed[2]
    assert "padded" in listed[records.PADDED]


def test_page_gives_the_limits_of_compression() -> None:
    text = " ".join(section("Compression").split())
    assert f"contents of {records.COMPRESSED_FROM:,} bytes or more" in text
    assert f"at most {records.MAX_CONTENT:,} bytes" in text
    limits = {cells[0]: cells[1] for cells in rows(section("Limits of JSON"))}
    (limit,) = (value for name, value in limits.items() if "compressed" in name)
    assert limit.startswith(f"{records.MAX_CONTENT:,} bytes")


def test_page_gives_the_length_of_a_link() -> None:
    assert f"A *link* is {records.LINK_LENGTH} bytes" in PAGE
    assert bytes(records.LINK_LENGTH) == records.NO_LINK
    assert f"`NO_LINK` is {records.LINK_LENGTH} zero bytes" in PAGE


def test_page_gives_the_features_of_a_new_database() -> None:
    text = " ".join(section("Features").split())
    assert f"it MUST store the names `{survey.NO_FEATURES}`" in text
    table = section("Features").partition("defines these features")[2]
    listed = {cells[0].partition("`]")[0].strip("[`") for cells in rows(table)}
    assert listed == set(survey.KNOWN_FEATURES)


def test_page_gives_the_marks_and_the_limit_of_collections() -> None:
    minus = "\N{MINUS SIGN}"
    listed = {cells[0]: cells[-1] for cells in rows(section("Collections"))}
    assert listed["`base_revision`"] == f"{minus}{-tables.COLLECTION}"
    assert f"{minus}{-tables.NO_SNAPSHOT} if it has no such row" in section("Tables")
    assert listed["feature of the database"] == f"`{survey.FeatureName.COLLECTIONS}`"
    limits = {cells[0]: cells[1] for cells in rows(section("Limits of JSON"))}
    assert limits["name of a collection"] == f"{MAX_NAME_BYTES:,} bytes in UTF-8"


def test_page_gives_the_time_of_a_session_that_never_expires() -> None:
    assert f"{tables.NEVER} (2^63 \N{MINUS SIGN} 1): never" in section("Tables")


def test_page_gives_the_limits_of_keys() -> None:
    listed = {cells[0]: cells[1] for cells in rows(section("Limits"))}
    assert listed["master keys in the keyring"] == f"{keyring.MAX_MASTERS} rows"
    assert listed["generation of a data key"] == "2^62"
    assert data_keys._LAST_GENERATION == 2**62


def test_page_says_that_the_format_is_frozen() -> None:
    assert "Every later release of adk-secure-sessions reads" in section("The format is frozen")
    assert "Deviations" not in PAGE


def test_example_in_the_page_and_vectors_are_those_that_the_script_makes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    outcome = make_vectors.main(["--check"])
    assert outcome == 0, f"run examples/make_vectors.py: {capsys.readouterr().out}"
