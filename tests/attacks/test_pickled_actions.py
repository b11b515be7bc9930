"""Pickles of google-adk's schema v0: those that google-adk writes are read, hostile ones rejected.

Each hostile pickle names only types that google-adk's own unpickler allows.
"""

import os
import pickle
import signal
import struct
import sys
import tracemalloc
import uuid
import warnings
from collections import OrderedDict, defaultdict
from contextlib import closing, suppress
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from google.adk.auth.auth_credential import AuthCredentialTypes
from google.adk.events import EventActions

from adk_secure_sessions.formats import events
from adk_secure_sessions.migration import pickled_actions
from adk_secure_sessions.migration.pickled_actions import PickleReader
from adk_secure_sessions.migration.sources import ConversionError, SessionContent, Unreadable
from tests.migration.adk_sources import Adk, adk, contents, decoded, each_kind, fill, said

__all__ = ["adk"]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
kind = each_kind("v0-sqlite")


def pickled(value: Any, protocol: int = 5) -> bytes:
    return pickle.dumps(EventActions(state_delta={"k": value}), protocol=protocol)


SHARED = ["shared", {"list": [1, 2.5]}]
WRITTEN: dict[str, Any] = {
    "json": {"list": [1, 2.5, None, True, {}, []], "text": "Grüße 🌱", "negative": -5},
    "bytes": [b"x" * 300, bytearray(b"abc"), bytearray()],
    "sets and tuples": [{1}, frozenset({"a"}), (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
    "times": [
        date(2020, 1, 1),
        datetime(2020, 1, 1),
        datetime(2020, 1, 1, tzinfo=UTC),
        datetime(2020, 1, 1, tzinfo=timezone(timedelta(hours=-5), "New York")),
        time(1, 2),
        timedelta(1, 2, 3),
    ],
    "numbers": [Decimal("1.50E+3"), Decimal("-0"), 10**4299],
    "other types": [uuid.UUID(int=5), AuthCredentialTypes.HTTP],
    "dictionaries": [OrderedDict(a=1), defaultdict(list, a=[1]), defaultdict(None, a=1)],
    "keys": {1: 2, None: 3, 1.5: 2, (1, 2): 3, date(2020, 1, 1): 4},
    "shared values": [SHARED, SHARED, {"again": SHARED}],
    "many rows": [{"id": n, "a name that is repeated": "a value"} for n in range(2000)],
    "long text": "x" * 70_000,
    "one text many times": ["v" * 100] * 2000,
}


async def test_types_that_google_adk_writes_are_read(
    adk: Adk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickled_actions, "_SECONDS", 60.0)  # a machine under load needs more than 5
    written = {name: pickled(value) for name, value in WRITTEN.items()}
    # On MySQL, google-adk used Python's default protocol, which was 4.
    written |= {name + " (4)": pickled(WRITTEN[name], 4) for name in ("bytes", "json")}
    for name in written:
        await fill(adk.service, [said()], session_id=name)
    adk.run(
        "UPDATE events SET actions = :pickled WHERE session_id = :name",
        *({"name": name, "pickled": value} for name, value in written.items()),
    )
    async with adk.source() as source:
        found = {one.session_id: content for one, content in (await contents(source)).items()}
    for name in written:
        session = await adk.service.get_session(app_name="app", user_id="user", session_id=name)
        assert session is not None
        (event,) = session.events
        assert decoded(found[name]) == [events.decode(events.encode(event), 0, 0)], name


def program(*parts: bytes) -> bytes:
    """A pickle: *parts* put one value on the stack."""
    return b"\x80\x04" + b"".join(parts) + b"."


def text(value: str) -> bytes:
    encoded = value.encode()
    return b"\x8c" + bytes([len(encoded)]) + encoded


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def called(module: str, name: str, argument: bytes) -> bytes:
    return named(module, name) + argument + b"\x85R"


def number(value: int) -> bytes:
    encoded = value.to_bytes(9, "little", signed=True)
    return b"\x8a" + bytes([len(encoded)]) + encoded


def nested(depth: int, width: int) -> Any:
    value: Any = "A"
    for _ in range(depth):
        value = [value] * width
    return value


def tuples(depth: int) -> bytes:
    """A tuple that contains a tuple twice, and so on; as a key, its hash takes 2**depth steps."""
    return b")\x94" + b"".join(b"h%c\x86\x94" % n for n in range(depth))


# Integers with one hash, because Python's hash of an integer is its remainder by this number.
EQUAL_HASHES = b"".join(number(n * (2**61 - 1)) + b"N" for n in range(1, 200))
LIST_OF_ITSELF: list[Any] = []
LIST_OF_ITSELF.append(LIST_OF_ITSELF)
ENUM_MEMBER = called("google.adk.auth.auth_credential", "AuthCredentialTypes", text("http"))


class Evil:
    """Pickled, it runs code when it is loaded."""

    def __reduce__(self) -> Any:
        return (exec, ("import sys; sys.modules['loaded_evil'] = sys",))


HOSTILE = {
    "an array of 300 MB": program(
        called("builtins", "list", called("builtins", "bytearray", b"J" + struct.pack("<i", 3**18)))
    ),
    "one array that is copied many times": program(
        b"B" + struct.pack("<i", 100_000) + bytes(100_000) + b"\x94](",
        called("builtins", "bytearray", b"h\x00") * 1000,
        b"e",
    ),
    "a memo of 2**31 entries": program(b"Nr" + struct.pack("<I", 2**31 - 1)),
    "bytes that are missing": program(b"\x8e" + struct.pack("<Q", 2**40)),
    "a key that takes long to hash": program(b"}", tuples(40), b"Ns"),
    "a set of values with equal hashes": program(b"\x8f(", EQUAL_HASHES, b"\x90"),
    "10,000 levels": program(b"]" * 10_000 + b"a" * 9_999),
    "a list that contains itself": pickled(LIST_OF_ITSELF),
    "a list that grows after it was used": program(b"]\x94]h\x00ah\x00Na0"),
    "a change of an enum": program(ENUM_MEMBER, b"}", text("_value_"), text("evil"), b"sb"),
    "a change of a class": program(named("uuid", "UUID"), b"N}", text("a"), b"Ns\x86b"),
    "an object with arguments": program(named("builtins", "bytes"), b"K\x05\x85\x81"),
    "an opcode of protocol 0": b"cbuiltins\nlist\n(tR.",
    "something that is called, and no global": program(b"N)R"),
    "too few values": program(b"a"),
    "a mark without end": program(b"N(N"),
    "no end": b"\x80\x04N",
    "code": pickle.dumps(Evil()),
    "no pickle": b"no pickle",
    "no actions": pickle.dumps({"a": 1}),
    "a class in a state": pickle.dumps(EventActions(state_delta={"a": Evil})),
    "a value of another type": pickle.dumps(
        EventActions.model_construct(transfer_to_agent=["penicillin"])
    ),
}


# These take seconds until a limit stops them.
SLOW = {
    "a list of lists of lists": pickled(nested(7, 12)),
    "keys with equal hashes": program(b"}(", EQUAL_HASHES, b"u"),
    "an integer of a million digits": pickled(10**1_000_000),
}


@pytest.mark.parametrize("hostile", [HOSTILE, pytest.param(SLOW, marks=pytest.mark.soak)])
async def test_hostile_pickle_makes_only_its_session_unreadable(
    adk: Adk,
    hostile: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:
    monkeypatch.setattr(pickled_actions, "_SECONDS", 1.0)  # how long one pickle may take
    warnings.simplefilter("always")  # otherwise, pytest would ignore those that quote a value
    await fill(adk.service, [said()], session_id="good")
    for name in hostile:
        await fill(adk.service, [said()], session_id=name)
    adk.run(
        "UPDATE events SET actions = :pickled WHERE session_id = :name",
        *({"name": name, "pickled": value} for name, value in hostile.items()),
    )
    async with adk.source() as source:
        found = {one.session_id: content for one, content in (await contents(source)).items()}
    assert isinstance(found.pop("good"), SessionContent)
    assert found.keys() == hostile.keys()
    for name, content in found.items():
        assert isinstance(content, Unreadable), name
        assert "event 1 of 1: it has actions that are not loaded: " in content.reason, name
        assert "penicillin" not in content.reason
    assert not [str(one.message) for one in recwarn if "penicillin" in str(one.message)]
    assert AuthCredentialTypes.HTTP.value == "http"
    assert not hasattr(uuid.UUID, "a")
    assert "loaded_evil" not in sys.modules


def test_pickle_that_exceeds_a_limit_is_tried_twice_and_not_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bytes] = []

    def end_without_an_answer(pickled: bytes) -> bytes:
        asked.append(pickled)
        return b""

    with closing(PickleReader()) as reader:
        monkeypatch.setattr(reader, "_ask", end_without_an_answer)
        for _ in range(2):
            with pytest.raises(ConversionError):
                reader.read(b"slow")
    assert asked == [b"slow", b"slow"]


def children() -> set[Path]:
    """The directories in /proc of the processes that this process has started."""
    files = Path("/proc/self/task").glob("*/children")
    found = set()
    for file in files:
        with suppress(OSError):  # the thread has just ended
            found |= {Path("/proc", pid) for pid in file.read_text().split()}
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_process_that_loads_pickles_has_no_keys_and_is_started_again_if_it_was_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ADK_SESSIONS_KEY", "a root key")
    others = children()
    with closing(PickleReader()) as reader:
        for number in range(2):
            assert reader.read(pickled(number)).state_delta == {"k": number}
            (child,) = children() - others
            variables = (child / "environ").read_bytes().split(b"\0")
            names = {one.partition(b"=")[0] for one in variables}
            assert names <= {b"LD_LIBRARY_PATH", b"PYTHONHOME", b"LC_CTYPE", b""}
            os.kill(int(child.name), signal.SIGKILL)
    with pytest.raises(ConversionError):  # as in a thread that is still reading
        reader.read(pickled(2))
    assert children() == others


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_process_starts_a_child_of_its_own() -> None:
    """With one child, two processes would read the answers to each other's pickles."""
    with closing(PickleReader()) as reader:
        reader.read(pickled(0))
        first = reader._child.pid
        if (forked := os.fork()) == 0:
            status = 1
            with suppress(Exception), closing(reader):
                status = reader.read(pickled(1)).state_delta["k"] - int(reader._child.pid != first)
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
        assert reader.read(pickled(2)).state_delta == {"k": 2}
        assert reader._child.pid == first


def test_answers_that_are_cached_take_little_memory() -> None:
    pickles = [pickled(f"{number}" * 2**20) for number in range(10)]
    with closing(PickleReader()) as reader:
        reader.read(pickled(1))
        tracemalloc.start()
        try:
            for one in pickles:
                reader.read(one)
            size, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert size < 6 * 2**20, "10 answers take 13 MiB"


async def test_number_in_a_column_of_text_or_bytes_allocates_nothing(adk: Adk) -> None:
    adk.run("ALTER TABLE events DROP COLUMN branch")
    adk.run("ALTER TABLE events ADD COLUMN branch")  # without a type, SQLite converts no number
    for column in ("actions", "branch"):
        await fill(adk.service, [said()], session_id=column)
        adk.run(f"UPDATE events SET {column} = 10000000000000 WHERE session_id = '{column}'")
    async with adk.source() as source:
        found = (await contents(source)).values()
    assert [type(content) for content in found] == [Unreadable] * 2
