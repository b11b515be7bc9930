"""The layouts of plaintexts: fields are split as they were joined; other bytes are rejected."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adk_secure_sessions import Reason, TamperedError
from adk_secure_sessions.formats.records import (
    EVENT_LINK,
    EVENT_PREVIOUS,
    EVENT_REST,
    LINK_LENGTH,
    NO_FLAGS,
    NO_LINK,
    join_id,
    join_owner,
    join_session,
    new_link,
    split_id,
    split_link,
    split_owner,
    split_session,
)

TEXTS = st.text(st.characters(codec=None), max_size=12)  # lone surrogates among them
LINKS = st.binary(min_size=LINK_LENGTH, max_size=LINK_LENGTH)
KEY_IDS = st.lists(st.integers(0, 2**63 - 1), max_size=255).map(tuple)
LINK = bytes(range(16))


@given(TEXTS, st.binary())
def test_id_and_rest_are_split_again(identifier: str, rest: bytes) -> None:
    assert split_id(join_id(identifier, rest)) == (identifier, rest)


@given(LINKS, KEY_IDS, st.binary())
def test_fields_of_an_owner_are_split_again(
    link: bytes, key_ids: tuple[int, ...], state: bytes
) -> None:
    assert split_owner(join_owner(link, key_ids, state)) == (link, key_ids, state)


@given(LINKS, LINKS, st.binary())
def test_fields_of_a_session_are_split_again(head: bytes, snapshot: bytes, overlay: bytes) -> None:
    assert split_session(join_session(head, snapshot, overlay)) == (head, snapshot, overlay)


@given(LINKS, st.binary())
def test_link_and_rest_are_split_again(link: bytes, rest: bytes) -> None:
    assert split_link(link + rest) == (link, rest)


def test_slices_of_an_event_are_its_link_the_link_before_and_the_rest() -> None:
    link, previous, rest = bytes(range(16)), bytes(range(16, 32)), bytes(range(32, 48))
    plaintext = NO_FLAGS + link + previous + rest
    assert plaintext[EVENT_LINK] == link
    assert plaintext[EVENT_PREVIOUS] == previous
    assert EVENT_PREVIOUS.start == 17
    assert plaintext[EVENT_REST] == rest


@pytest.mark.parametrize(
    ("split", "data"),
    [
        (split_id, b""),
        (split_id, bytes(3)),
        (split_id, b"\x00\x00\x00\x02a"),
        (split_id, b"\xff\xff\xff\xff" + b"a" * 99),
        (split_id, b"\x00\x00\x00\x01\xff"),
        (split_owner, b""),
        (split_owner, LINK),
        (split_owner, LINK + b"\x01" + bytes(7)),
        (split_owner, LINK + b"\xff" + bytes(8 * 254)),
        (split_session, b""),
        (split_session, LINK + LINK[:15]),
        (split_link, b""),
        (split_link, LINK[:15]),
    ],
)
def test_plaintext_that_no_writer_makes_is_malformed(
    split: Callable[[bytes], object], data: bytes
) -> None:
    with pytest.raises(TamperedError, match=r"malformed|UTF-8") as info:
        split(data)
    assert info.value.reason is Reason.MALFORMED


def test_new_links_differ() -> None:
    links = {new_link() for _ in range(100)}
    assert len(links) == 100
    assert {len(link) for link in links} == {LINK_LENGTH}
    assert NO_LINK not in links
