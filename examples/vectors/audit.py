"""tests/vectors/audit.json: chains of the audit trail to accept and to reject."""

from datetime import UTC, datetime
from unittest import mock

from adk_secure_sessions.formats.audit_records import (
    NO_AUDIT_LINK,
    link_of,
    record_context,
    seal_entry,
)
from adk_secure_sessions.keys.blind_index import IndexMaster
from examples.vectors.fixed import MICROSECONDS, Json, counting, flipped, made

ABOUT = (
    "Chains of the audit trail that a reader must accept or reject. examples/make_vectors.py "
    "generates them as docs/format.md says, with the index master 'index_master' and the "
    "'database_id' (hex). A chain is a list of rows, in the order of their numbers: 'chain' (hex), "
    "'number', 'time' and 'record' (hex). In 'accepted', 'links' are the links of the records "
    "(hex), and 'fields' are the JSON objects in them. In 'rejected', a reader must reject the "
    "chain."
)
_INDEX_MASTER = counting(0, 32)
_DATABASE_ID = made("database id", 16)
_FIELDS: list[Json] = [
    {"event": "database.opened", "actor": None, "account": "app", "outcome": "success"},
    {"event": "session.create", "actor": "dr. house", "app": "clinic", "change": "create"},
    {"event": "session.read", "actor": "Zoë 🩺", "app": "clinic", "outcome": "missing"},
    {"event": "audit.purged", "chains": [{"chain": "00" * 16, "number": 7, "head": "11" * 32}]},
]


def _chain(label: str, number: int = 0) -> list[Json]:
    """Return the rows of a chain, with their links and their fields."""
    start = MICROSECONDS + number
    chain = start.to_bytes(8, "big") + made(f"chain {label}", 8)
    cipher = IndexMaster(_INDEX_MASTER).audit_cipher(_DATABASE_ID, chain)
    link, rows = NO_AUDIT_LINK, []
    for number, more in enumerate(_FIELDS):
        time = start + 1_500_000 * number
        moment = datetime.fromtimestamp(time / 1_000_000, UTC)
        fields: Json = {"time": moment.isoformat(timespec="microseconds"), **more}
        context = record_context(_DATABASE_ID, chain, number, time)
        with mock.patch("os.urandom", return_value=made(f"nonce {label} {number}", 12)):
            record = seal_entry(cipher, context, link, fields)
        link = link_of(context, record)
        row: Json = {"chain": chain.hex(), "number": number, "time": time, "record": record.hex()}
        rows.append(row | {"link": link.hex(), "fields": fields})
    return rows


def _row(row: Json, **changes: object) -> Json:
    return {name: row[name] for name in ("chain", "number", "time", "record")} | changes


def audit_vectors() -> Json:
    one, two = _chain("one"), _chain("two", 1)
    rows, others = [_row(row) for row in one], [_row(row) for row in two]
    record = bytes.fromhex(rows[1]["record"])
    changed = {
        "a record is missing": [rows[0], *rows[2:]],
        "the first record is missing": rows[1:],
        "two records are exchanged": [
            rows[0],
            _row(rows[1], record=rows[2]["record"]),
            _row(rows[2], record=rows[1]["record"]),
            rows[3],
        ],
        "a record of another chain": [rows[0], _row(others[1], chain=rows[1]["chain"]), *rows[2:]],
        "another time": [rows[0], _row(rows[1], time=rows[1]["time"] + 1), *rows[2:]],
        "another version": [rows[0], _row(rows[1], record="02" + record.hex()[2:]), *rows[2:]],
        "a modified ciphertext": [
            rows[0],
            _row(rows[1], record=flipped(record, 20).hex()),
            *rows[2:],
        ],
        "an empty record": [rows[0], _row(rows[1], record=""), *rows[2:]],
        "a record of another copy": [rows[0], *_other_copy(one)],
    }
    return {
        "about": ABOUT,
        "index_master": _INDEX_MASTER.hex(),
        "database_id": _DATABASE_ID.hex(),
        "accepted": [
            {
                "rows": [_row(row) for row in chain],
                "links": [row["link"] for row in chain],
                "fields": [row["fields"] for row in chain],
            }
            for chain in (one, two)
        ],
        "rejected": [{"name": name, "rows": chain} for name, chain in changed.items()],
    }


def _other_copy(rows: list[Json]) -> list[Json]:
    """Return the rows after the first, of which the first was encrypted again with another nonce.

    Each record is authentic, but the second one does not follow the first.
    """
    row = rows[1]
    chain = bytes.fromhex(row["chain"])
    cipher = IndexMaster(_INDEX_MASTER).audit_cipher(_DATABASE_ID, chain)
    context = record_context(_DATABASE_ID, chain, row["number"], row["time"])
    with mock.patch("os.urandom", return_value=made("nonce of another copy", 12)):
        record = seal_entry(cipher, context, bytes.fromhex(rows[0]["link"]), row["fields"])
    return [_row(row, record=record.hex()), *(_row(other) for other in rows[2:])]
