"""An example of each kind of context, with the names of its parts, as docs/format.md lists them.

A context is the part of the associated data that says where a record belongs.
"""

from typing import NamedTuple

from adk_secure_sessions.formats import records
from examples.vectors.fixed import LARGEST, MICROSECONDS, Json, made

APP_TAG = made("tag of the app", 16)
ADA = made("tag of ada", 16)
BOB = made("tag of bob", 16)
SESSION_TAG = made("tag of the session", 16)
DATABASE_ID = made("database id", 16)


class Context(NamedTuple):
    """The parts of a context in order: texts and bytes, then integers."""

    names: tuple[str, ...]
    parts: tuple[str | bytes, ...]
    numbers: tuple[int, ...]

    def joined(self) -> bytes:
        """Return the encoded context."""
        return records.build_context(self.parts, *self.numbers)

    def as_json(self) -> list[Json]:
        return [typed(part) for part in (*self.parts, *self.numbers)]

    def replacing(self, **changes: str | bytes | int) -> "Context":
        """Return a copy with the named parts changed."""
        assert changes.keys() <= set(self.names)
        values = [
            changes.get(name, value)
            for name, value in zip(self.names, (*self.parts, *self.numbers), strict=True)
        ]
        parts = tuple(value for value in values if not isinstance(value, int))
        return Context(self.names, parts, tuple(v for v in values if isinstance(v, int)))


def typed(part: str | bytes | int) -> Json:
    if isinstance(part, int):
        return {"int": part}
    return {"bytes": part.hex()} if isinstance(part, bytes) else {"text": part}


def _context(names: str, parts: tuple[str | bytes, ...], *numbers: int) -> Context:
    return Context(("purpose", *names.split()), parts, numbers)


CONTEXTS = {
    "app": _context("app_name tag id version", ("app", "clinic", APP_TAG), 101, 4),
    "user": _context("app_name tag id app_row version", ("user", "clinic", ADA), 201, 101, 2),
    "session": _context(
        "app_name user_id tag id user_row revision base_revision created_at updated_at expires_at",
        ("session", "clinic", "ada", SESSION_TAG),
        301, 201, 2, 1, MICROSECONDS, MICROSECONDS + 5_250_000, LARGEST,
    ),
    "base": _context(
        "app_name user_id session_id session_row revision",
        ("base", "clinic", "ada", "first visit"), 301, 1,
    ),
    "event": _context(
        "app_name user_id session_id session_row seq time",
        ("event", "clinic", "ada", "first visit"), 301, 1, MICROSECONDS + 5_250_000,
    ),
    "witness": _context("app_name tag number", ("witness", "clinic", ADA), 2),
}  # fmt: skip
EVENT = CONTEXTS["event"]
