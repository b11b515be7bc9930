"""Blind indexes and MACs: each is the one that docs/format.md describes, and has its own name."""

import hashlib
import hmac
import inspect
from typing import Any

import pytest

from adk_secure_sessions.formats.records import build_context
from adk_secure_sessions.keys.blind_index import IndexMaster
from tests import format_reader

KEY = bytes(range(32))
ID, TAG, SOURCE = bytes(range(16)), bytes(range(16, 32)), bytes(range(32, 48))
# The method, its arguments, and the parts of the context that the page names.
CASES: list[tuple[str, tuple[Any, ...], tuple[Any, ...]]] = [
    ("tag_of", ("a",), ("app", "a")),
    ("tag_of", ("a", "u"), ("user", "a", "u")),
    ("tag_of", ("a", "u", "s"), ("session", "a", "u", "s")),
    ("state_key_tag", ("a", "user:k"), ("state index key", "a", "user:k")),
    ("state_value_tag", ("a", "k", b"1"), ("state index value", "a", "k", b"1")),
    ("mac_of_context", (build_context(("app", "a")),), ("app", "a")),
    ("mac", ("purpose", ID, "text"), ("purpose", ID, "text")),
]


@pytest.mark.parametrize(("name", "arguments", "parts"), CASES)
def test_tag_is_the_truncated_hmac_of_its_context(
    name: str, arguments: tuple[Any, ...], parts: tuple[Any, ...]
) -> None:
    mac = hmac.new(KEY, format_reader.context(*parts), hashlib.sha256).digest()[:16]
    assert getattr(IndexMaster(KEY), name)(*arguments) == mac


def test_every_tag_has_a_case() -> None:
    methods = inspect.getmembers(IndexMaster, inspect.isfunction)
    public = {name for name, _ in methods if not name.startswith("_")}
    # tests/test_audit_vectors.py tests the key of the audit trail.
    assert public - {"audit_cipher"} == {name for name, *_ in CASES}


def test_integers_of_a_mac_are_those_of_its_context() -> None:
    parts = ("migrated", ID, TAG, SOURCE)
    mac = hmac.new(KEY, format_reader.context(*parts, 3, 4), hashlib.sha256).digest()[:16]
    assert IndexMaster(KEY).mac(*parts, numbers=(3, 4)) == mac
