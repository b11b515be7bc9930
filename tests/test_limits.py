"""Whatever the service accepts, another process reads back; no stored bytes break a reader.

How it works.  Hypothesis makes states and events at the limits and beyond.  A process that is
started once reads each accepted one: deep in the stack, with the lowest limit of digits that Python
has, and in a thread.  So does the reader that was written from the page alone.  In the other
direction, plaintexts are damaged: reading them gives a value or
one of the service's own errors.
"""

import math
import multiprocessing
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pydantic
import pytest
from google.adk.events import Event, EventActions
from google.genai import types
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from adk_secure_sessions import (
    AesGcmBackend,
    ConfigurationError,
    DecryptionError,
    EncryptedSessionService,
)
from adk_secure_sessions.formats import events, json_text
from adk_secure_sessions.formats.json_text import encode_state, load_state
from tests import format_reader
from tests.processes import FORKS

Read = Callable[[bytes], Any]


def few(examples: int) -> settings:
    return settings(
        max_examples=examples,
        deadline=None,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


EXAMPLES = [pytest.param(30, id="few"), pytest.param(2000, id="many", marks=pytest.mark.soak)]


# --- the other process ---------------------------------------------------------------------------


def _read_all(connection: Connection) -> None:
    """Answer each plaintext with its value, or with the name of an exception."""
    sys.set_int_max_str_digits(640)

    def read(plaintext: bytes) -> Any:
        try:
            if plaintext.startswith(b"{"):
                return load_state(plaintext)
            return events.decode(plaintext, 1, 0).model_dump()
        except Exception as error:
            return type(error).__name__

    def descend(frames: int, plaintext: bytes) -> Any:
        return descend(frames - 1, plaintext) if frames else read(plaintext)

    def serve() -> None:
        while plaintext := connection.recv_bytes():
            connection.send((descend(0, plaintext), descend(850, plaintext)))

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Read]:
    """Reads a plaintext in another process."""
    # tests.processes has its server import google-adk, which would take seconds here.
    context: Any = multiprocessing.get_context("forkserver" if FORKS else "spawn")
    ours, its = context.Pipe()
    process = context.Process(target=_read_all, args=(its,))
    process.start()
    its.close()

    def read(plaintext: bytes) -> Any:
        ours.send_bytes(plaintext)
        shallow, deep = ours.recv()
        assert type(shallow) is type(deep)
        assert shallow == deep
        return shallow

    yield read
    ours.send_bytes(b"")
    process.join(60)
    assert process.exitcode == 0


def by_the_page(plaintext: bytes) -> Any:
    """Read *plaintext* as docs/format.md says; the reader raises `Refused` beyond a limit."""
    fields = format_reader.Fields(plaintext)
    if plaintext.startswith(b"{"):
        return fields.state()
    fields.adk_version()
    return fields.json()


# --- values --------------------------------------------------------------------------------------


def nested(levels: int, bottom: Any) -> Any:
    for level in range(levels):
        bottom = {"k": bottom} if level % 3 else [bottom]
    return bottom


TEXTS = st.text(st.characters(codec=None), max_size=6) | st.sampled_from(
    ["null", '"', "\\ud800", "\ud800", "[{" * 120, "9" * 4400, "app:k", "user:"]
)
LARGE = st.builds(
    lambda digits, sign, less: sign * (10**digits - less),
    st.integers(4290, 4310) | st.integers(600, 700),
    st.sampled_from([1, -1]),
    st.integers(0, 2),
)
NUMBERS = st.integers() | LARGE | st.floats(allow_nan=False)
LEAVES = st.none() | st.booleans() | NUMBERS | TEXTS


def containing(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(TEXTS, inner, max_size=3)
            | st.builds(nested, st.integers(1, 210), inner)
        ),
        max_leaves=6,
    )


DEEPEST = st.builds(nested, st.integers(187, 196), st.sampled_from([[], {}, 1]))
JSON = containing(LEAVES) | DEEPEST
STATES = st.dictionaries(TEXTS, JSON, max_size=4)


class Model(pydantic.BaseModel):
    """A value of another type than JSON's."""

    empty: int | None = None
    any: Any = None


circular: list[Any] = [1]
circular.append(circular)
OTHERS = st.sampled_from([print, object(), circular, b"\xff", {1, 2}, (1, (2,)), 1j]) | st.builds(
    lambda: nested(3000, 1)
)
ANY = DEEPEST | containing(LEAVES | OTHERS | st.builds(Model, any=LEAVES | OTHERS))


def made(text: str, values: list[Any], delta: dict[str, Any]) -> Event:
    parts = [types.Part(text=text), types.Part(inline_data=types.Blob(data=b"\xff\x00"))]
    parts.append(types.Part.from_function_response(name="tool", response={"result": values[0]}))
    return Event(
        author="agent",
        content=types.Content(parts=parts),
        custom_metadata={"value": values[1]},
        actions=EventActions(state_delta=delta, agent_state={"value": values[2]}),
    )


# --- from writing to reading ---------------------------------------------------------------------


@pytest.mark.parametrize("states", [STATES, st.dictionaries(TEXTS, ANY, max_size=4)])
@pytest.mark.parametrize("examples", EXAMPLES)
def test_accepted_state_is_read_by_another_process(
    elsewhere: Read, states: st.SearchStrategy[dict[str, Any]], examples: int
) -> None:
    accepted = 0

    @few(examples)
    @given(states)
    def check(state: dict[str, Any]) -> None:
        nonlocal accepted
        try:
            plaintext = encode_state(state)
        except ValueError:
            return
        accepted += 1
        found = elsewhere(plaintext)
        assert found == by_the_page(plaintext) == load_state(plaintext)
        assert found == state or states is not STATES

    check()
    assert accepted > examples / 10 or states is not STATES


@pytest.mark.parametrize("examples", EXAMPLES)
def test_every_event_is_stored_and_read_by_another_process(elsewhere: Read, examples: int) -> None:
    @few(examples)
    @given(TEXTS, st.lists(ANY, min_size=3, max_size=3), st.dictionaries(TEXTS, ANY, max_size=2))
    def check(text: str, values: list[Any], delta: dict[str, Any]) -> None:
        plaintext = events.encode(made(text, values, delta))
        found = elsewhere(plaintext)
        assert found == events.decode(plaintext, 1, 0).model_dump()
        assert by_the_page(plaintext)["content"]["parts"][0]["text"] == text
        assert found["content"]["parts"][0]["text"] == text

    check()


@pytest.mark.parametrize("examples", EXAMPLES)
def test_event_within_the_limits_is_read_equal_by_another_process(
    elsewhere: Read, examples: int
) -> None:
    @few(examples)
    @given(st.lists(JSON, min_size=3, max_size=3), STATES)
    def check(values: list[Any], delta: dict[str, Any]) -> None:
        try:
            encode_state({"values": values, "delta": delta})
        except ValueError:
            return
        event = made("text", values, delta)
        assert elsewhere(events.encode(event)) == event.model_dump()

    check()


# --- from storage to reading ---------------------------------------------------------------------


def damaged(plaintext: bytes, at: float, inserted: bytes, removed: int) -> bytes:
    start = int(at * len(plaintext))
    return plaintext[:start] + inserted + plaintext[start + removed :]


PIECES = st.binary(max_size=4) | st.sampled_from(
    [b"[" * 300, b"{", b"}", b'"', b"9" * 5000, b"\\ud800", b"\xed\xa0\x80", b"null", b"1e999"]
)
DAMAGE = (st.floats(0, 1, exclude_max=True), PIECES, st.integers(0, 10) | st.just(10**6))


@pytest.mark.parametrize("examples", EXAMPLES)
def test_reading_a_damaged_plaintext_ends_in_a_value_or_in_an_error_of_ours(examples: int) -> None:
    event = made("\ud800 text", [1, {"a": [math.inf, None]}, 3], {"k": [10**4000]})
    state = encode_state({"a": {"b": [1, 2.5, None, "\ud800"]}, "c": "text"})

    @few(5 * examples)
    @given(*DAMAGE, st.booleans())
    def check(at: float, inserted: bytes, removed: int, is_state: bool) -> None:
        try:
            if is_state:
                assert type(load_state(damaged(state, at, inserted, removed))) is dict
            else:
                events.decode(damaged(events.encode(event), at, inserted, removed), 1, 0)
        except (DecryptionError, ConfigurationError):
            pass

    check()


# --- the size of a record ------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "user:", "app:"])
async def test_state_that_outgrows_a_record_is_rejected_and_stays_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    monkeypatch.setattr(json_text, "MAX_BYTES", 20_000)
    url = f"sqlite+aiosqlite:///{tmp_path / 'sessions.db'}"

    def delta(name: str, size: int) -> Event:
        return Event(author="a", actions=EventActions(state_delta={prefix + name: "x" * size}))

    async with EncryptedSessionService(url, AesGcmBackend(bytes(32))) as service:
        session = await service.create_session(app_name="app", user_id="user")
        await service.append_event(session, delta("one", 12_000))
        before = session.model_copy(deep=True)
        with pytest.raises(ValueError, match="are too large: the limit is 20000"):
            await service.append_event(session, delta("two", 12_000))
        assert session == before
        await service.append_event(session, delta("one", 11_000))
        found = await service.get_session(app_name="app", user_id="user", session_id=session.id)
        assert found == session
