"""The worked example of docs/format.md: one owner's tag and data key, in hex."""

import textwrap

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hmac import HMAC

from adk_secure_sessions.formats import records
from adk_secure_sessions.keys.data_keys import DataKeyRow
from examples.vectors.contexts import DATABASE_ID
from examples.vectors.fixed import MICROSECONDS, FixedAesGcm, counting

START = "<!-- example: made by examples/make_vectors.py; do not edit by hand -->"
END = "<!-- /example -->"

_INDEX_MASTER, _DATA_MASTER, _DATA_KEY = (counting(first, 32) for first in (0x00, 0x20, 0x40))
_WRAP_NONCE = counting(0xA0, 12)


def worked_example() -> str:
    """Return the lines between the markers."""
    tag_context = records.build_context(("user", "clinic", "ada"))
    mac = HMAC(_INDEX_MASTER, SHA256())
    mac.update(tag_context)
    digest = mac.finalize()
    row = DataKeyRow(21, digest[:16], 0, 1, MICROSECONDS, b"")
    cipher, plaintext = FixedAesGcm(_DATA_MASTER, _WRAP_NONCE), records.NO_FLAGS + _DATA_KEY
    wrapped = records.seal(cipher, records.build_header(1, 11), row.context(DATABASE_ID), plaintext)
    return "\n\n".join(
        [
            "User `ada` of app `clinic` has the tag",
            _block(
                ("index master", _INDEX_MASTER),
                ('context("user", "clinic", "ada"), no integers', tag_context),
                ("HMAC-SHA-256", digest),
                ("tag: its first 16 bytes", digest[:16]),
            ),
            "Her data key, `id` 21, generation 0, is wrapped by data master 11:",
            _block(
                ("data master 11", _DATA_MASTER),
                ("database_id", DATABASE_ID),
                ('context("data-key", database_id, owner = tag, id = 21, generation = 0, '
                 f"backend_id = 1, created_at = {MICROSECONDS})", row.context(DATABASE_ID)),
                ("the data key", _DATA_KEY),
                *_sealed(wrapped, row.context(DATABASE_ID), _DATA_KEY,
                         "plaintext: flags ‖ data key"),
            ),
        ]
    )  # fmt: skip


def _sealed(record: bytes, where: bytes, plaintext: bytes, what: str) -> list[tuple[str, bytes]]:
    header, body = record[: records.HEADER_LENGTH], record[records.HEADER_LENGTH :]
    return [
        (what, records.NO_FLAGS + plaintext),
        ("header", header),
        ("associated data: header ‖ context", header + where),
        ("nonce", body[:12]),
        ("ciphertext", body[12:-16]),
        ("tag of AES-256-GCM", body[-16:]),
        ("the record: header ‖ nonce ‖ ciphertext ‖ tag", record),
    ]


def _block(*values: tuple[str, bytes]) -> str:
    lines = ["```text"]
    for name, value in values:
        lines += textwrap.wrap(name, 94, subsequent_indent="  ")
        lines += textwrap.wrap(
            value.hex(" ", -4), 71, initial_indent="    ", subsequent_indent="    "
        )
    return "\n".join([*lines, "```"])


def with_example(page: str) -> str:
    """Return *page* with a regenerated example between its markers."""
    before, start, rest = page.partition(START)
    _, end, after = rest.partition(END)
    assert start, "docs/format.md has lost the first marker of its example"
    assert end, "docs/format.md has lost the second marker of its example"
    return f"{before}{START}\n\n{worked_example()}\n\n{END}{after}"
