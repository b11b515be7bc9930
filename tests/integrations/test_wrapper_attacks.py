"""An attacker with write access to the store behind `EncryptedSessionWrapper`.

The store is ADK's service in memory: a test changes its session objects directly.
"""

import base64
import copy
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.events import Event, EventActions
from google.adk.sessions import InMemorySessionService, Session
from google.genai import types

from adk_secure_sessions import (
    AesGcmBackend,
    DecryptionError,
    EncryptedSessionWrapper,
    PlaintextRefusedError,
    TamperedError,
    UnknownKeyError,
)
from tests.attacks.needles import locals_of
from tests.conformance.support import create, event, ids, listed, reload

KEY = os.urandom(32)
BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


class World:
    """Two users with two sessions each, which have two events each."""

    def __init__(self, directory: Path) -> None:
        self.inner = InMemorySessionService()
        self.service = EncryptedSessionWrapper(
            self.inner,
            AesGcmBackend(KEY),
            key_db_url=f"sqlite+aiosqlite:///{directory / 'keys.db'}",
        )

    async def fill(self) -> None:
        for user in ("ann", "bob"):
            for name in ("one", "two"):
                state = {"app:a": 1, "user:u": user, "user:w": 2, "s": name, "t": 3}
                session = await create(self.service, name, user_id=user, state=state)
                for turn in range(2):
                    text = f"{user} {name} {turn}" + turn * "x"  # of other lengths in base64
                    await self.service.append_event(session, event(text))

    def stored(self, user: str = "ann", name: str = "one") -> Session:
        return self.inner.sessions["app"][user][name]

    @property
    def users(self) -> dict[str, dict[str, Any]]:
        return self.inner.user_state["app"]

    async def read(self) -> Session:
        return await reload(self.service, Session(id="one", app_name="app", user_id="ann"))


@pytest.fixture
async def world(tmp_path: Path) -> Any:
    world = World(tmp_path)
    await world.fill()
    yield world
    await world.service.close()


def text_of(one: Event) -> str:
    return one.content.parts[0].text  # type: ignore[union-attr,index,return-value]


def set_text(one: Event, text: str) -> None:
    one.content.parts[0].text = text  # type: ignore[union-attr,index]


Attack = Callable[[World], object]


def fields(**values: object) -> Attack:
    """Change fields of the first event."""

    def attack(world: World) -> None:
        for name, value in values.items():
            setattr(world.stored().events[0], name, value)

    return attack


def text(change: Callable[[str], str]) -> Attack:
    """Change the text of the first event, which is its record in base64."""

    def attack(world: World) -> None:
        first = world.stored().events[0]
        set_text(first, change(text_of(first)))

    return attack


def header(start: bytes, body: bytes = b"") -> Attack:
    """Change the beginning of the first event's record, or all of it."""

    def change(text: str) -> str:
        record = start + (body or base64.b64decode(text)[len(start) :])
        return base64.b64encode(record).decode()

    return lambda world: text(change)(world)


def append(one: Event) -> Attack:
    return lambda world: world.stored().events.append(one)


def take_first(world: World, other: Session) -> None:
    world.stored().events[0] = other.events[0]


def exchange_contents(world: World) -> None:
    first, second = world.stored().events
    texts = text_of(first), text_of(second)
    set_text(first, texts[1])
    set_text(second, texts[0])


def store_twice_with_other_unused_bits(world: World) -> None:
    """Base64 of 1 or 2 bytes more than a multiple of 3 has 4 or 2 bits that mean nothing."""
    for one in world.stored().events:
        if (text := text_of(one)).endswith("="):
            last = len(text.rstrip("=")) - 1
            other = BASE64[BASE64.index(text[last]) + 1]
            world.stored().events.append(copy.deepcopy(one))
            set_text(world.stored().events[-1], text[:last] + other + text[last + 1 :])
            return


PLANTED = types.Part(text="planted")
PLAIN = append(Event(author="user", content=types.Content(role="user", parts=[PLANTED])))
EVENT_ATTACKS: dict[str, Attack] = {
    "event of another session": lambda world: take_first(world, world.stored(name="two")),
    "event of another user": lambda world: take_first(world, world.stored(user="bob")),
    "contents exchanged between events": exchange_contents,
    "another id": fields(id="another"),
    "id with a new line": fields(id="x\nERROR ann was here" + 1000 * "x"),
    "another author": fields(author="user"),
    "another invocation id": fields(invocation_id="another"),
    "another turn_complete": fields(turn_complete=True),
    "another time": fields(timestamp=1.5),
    "time that is no number": fields(timestamp=float("nan")),
    "event stored twice": lambda world: append(world.stored().events[0].model_copy(deep=True))(
        world
    ),
    "event stored twice with other unused bits": store_twice_with_other_unused_bits,
    "record of a later version": header(b"AKS\x03"),
    "record of an unknown backend": header(b"AKS\x02\x99"),
    "record of NoOpBackend": header(
        b"AKS\x02\x03" + bytes(8), b"\x00\x061.28.0" + b'{"author":"user","id":"planted"}'
    ),
    "record of an unknown key": header(b"AKS\x02\x01" + bytes(8)),
    "record of the app's state": lambda world: set_text(
        world.stored().events[0], next(iter(world.inner.app_state["app"].values()))
    ),
    "modified record": text(lambda old: old[:40] + ("A" if old[40] != "A" else "B") + old[41:]),
    "shortened record": text(lambda old: old[:64]),
    "empty record": text(lambda _: ""),
    "plaintext": PLAIN,
    "event without content": append(Event(author="user", actions=EventActions(escalate=True))),
    "added part": lambda world: world.stored().events[0].content.parts.append(PLANTED),  # type: ignore[union-attr]
}


@pytest.mark.parametrize("attack", EVENT_ATTACKS.values(), ids=EVENT_ATTACKS)
async def test_event_is_rejected(world: World, attack: Attack) -> None:
    attack(world)
    with pytest.raises(DecryptionError) as rejection:
        await world.read()
    assert rejection.value.table == "inner events"
    assert "ann" not in str(rejection.value)
    assert not re.search(r"ann (one|two) \d", locals_of(rejection.value))
    assert "\n" not in str(rejection.value)


def entries_of_another_user(world: World) -> None:
    world.users["ann"] = world.users["bob"]


def exchange_values(world: World) -> None:
    state = world.stored().state
    (one, two) = state
    state[one], state[two] = state[two], state[one]


def value(change: Callable[[World, str], object]) -> Attack:
    """Change the first value of the session's state."""

    def attack(world: World) -> None:
        state = world.stored().state
        name = next(iter(state))
        state[name] = change(world, state[name])

    return attack


def entries(find: Callable[[World], dict[str, Any]]) -> Attack:
    """Add entries to the session's state."""
    return lambda world: world.stored().state.update(find(world))


def entries_of_ann(find: Callable[[World], dict[str, Any]]) -> Attack:
    """Add entries to the user's state."""
    return lambda world: world.users["ann"].update(find(world))


STATE_ATTACKS: dict[str, Attack] = {
    "modified value": value(lambda _, old: old[:-8] + "AAAAAAA="),
    "exchanged values": exchange_values,
    "value of another scope": value(lambda world, _: next(iter(world.users["ann"].values()))),
    "value of another session": value(
        lambda world, _: next(iter(world.stored(name="two").state.values()))
    ),
    "plaintext value": value(lambda *_: {"is_admin": True}),
    "entries of another scope": entries(lambda world: world.users["ann"]),
    "entries of another session": entries(lambda world: world.stored(name="two").state),
    "plaintext entry": entries(lambda _: {"is_admin": True}),
    "temporary entry": entries(lambda _: {"app:temp:x": "x"}),
    "entries of another user": entries_of_another_user,
    "entries of the app": entries_of_ann(lambda world: world.inner.app_state["app"]),
    "plaintext entry of the user": entries_of_ann(lambda _: {"0" * 32: "aXNfYWRtaW4="}),
}


@pytest.mark.parametrize("attack", STATE_ATTACKS.values(), ids=STATE_ATTACKS)
async def test_state_is_rejected(world: World, attack: Attack) -> None:
    attack(world)
    for read in (world.read, lambda: listed(world.service, "ann")):
        with pytest.raises(DecryptionError) as rejection:
            await read()
        assert rejection.value.table == "inner states"
        assert "admin" not in str(rejection.value)


async def test_state_of_a_user_is_rejected(world: World) -> None:
    entries_of_another_user(world)
    with pytest.raises(DecryptionError):
        await world.service.get_user_state(app_name="app", user_id="ann")


async def test_entry_of_another_user_is_never_returned(world: World) -> None:
    entries_of_another_user(world)
    world.service._runner.empty_caches()  # this process then knows no key of the other user
    assert not any(key.startswith("user:") for key in (await world.read()).state)


def names_an_unknown_key(state: dict[str, str]) -> None:
    name = next(iter(state))
    record = base64.b64decode(state[name])
    key_id = slice(5, 13)
    unknown = record[: key_id.start] + bytes(7) + b"\x01" + record[key_id.stop :]
    state[name] = base64.b64encode(unknown).decode()


async def test_modified_state_that_names_an_unknown_key_is_rejected_or_omitted_with_a_warning(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """As docs/wrapper.md says: an entry of a user's state is omitted, as after an erasure."""
    before = dict(world.users["ann"])
    names_an_unknown_key(world.users["ann"])
    state = (await world.read()).state
    assert sum(key.startswith("user:") for key in state) == len(before) - 1
    assert "an entry of a user's state is left out" in caplog.text
    world.users["ann"] = before
    for entries in (world.stored().state, world.inner.app_state["app"]):
        kept = dict(entries)
        names_an_unknown_key(entries)
        with pytest.raises(UnknownKeyError):
            await world.read()
        entries |= kept
    assert len((await world.read()).state) == len(state) + 1


async def test_error_of_the_other_service_keeps_its_text(world: World) -> None:
    """As docs/troubleshooting.md says: it may contain an id."""
    with pytest.raises(AlreadyExistsError, match="one"):
        await create(world.service, "one", user_id="ann")


async def test_plaintext_is_named_as_such(world: World) -> None:
    PLAIN(world)
    with pytest.raises(PlaintextRefusedError):
        await world.read()


@pytest.mark.parametrize("changed", [{"user_id": "bob"}, {"id": "two"}, {"app_name": "other"}])
async def test_session_of_somebody_else_is_rejected(world: World, changed: dict[str, str]) -> None:
    world.inner.sessions["app"]["ann"]["one"] = world.stored().model_copy(update=changed)
    with pytest.raises(TamperedError, match="another app or user"):
        await world.read()


async def test_equal_keys_of_two_owners_have_different_blind_indexes(world: World) -> None:
    names = [
        *world.inner.app_state["app"],
        *world.users["ann"],
        *world.users["bob"],
        *world.stored().state,
        *world.stored(name="two").state,
    ]
    assert len(names) == len(set(names)) == 9


async def test_plaintext_fields_of_a_stored_event_are_ignored(world: World) -> None:
    stored, before = world.stored().events[0], (await world.read()).events
    stored.branch = stored.error_message = "planted"
    stored.actions = EventActions(escalate=True, transfer_to_agent="planted")
    stored.content.parts[0].thought = True  # type: ignore[union-attr,index]
    assert (await world.read()).events == before


async def test_rebuilt_session_is_not_continued_in_that_of_another_user(world: World) -> None:
    rebuilt = Session.model_validate_json((await world.read()).model_dump_json())
    rebuilt.events = []
    other = world.stored(user="bob")
    world.inner.sessions["app"]["ann"]["one"] = other
    rebuilt.last_update_time = other.last_update_time
    with pytest.raises(TamperedError, match="another app or user"):
        await world.service.append_event(rebuilt, event("text"))


# The page docs/wrapper.md says that these attacks are not noticed.


async def test_removed_and_reordered_events_are_not_noticed(world: World) -> None:
    first, second = world.stored().events
    world.stored().events[:] = [second, first]
    assert ids((await world.read()).events) == [second.id, first.id]
    world.stored().events[:] = [second]
    assert ids((await world.read()).events) == [second.id]


async def test_modified_update_time_is_not_noticed(world: World) -> None:
    world.stored().last_update_time = 1.0
    assert (await world.read()).last_update_time == 1.0


async def test_replayed_and_removed_state_is_not_noticed(world: World) -> None:
    old = dict(world.stored().state)
    session = await world.read()
    await world.service.append_event(session, event(delta={"s": "new"}))
    assert (await world.read()).state["s"] == "new"
    world.stored().state |= old
    assert (await world.read()).state["s"] == "one"
    world.stored().state.clear()
    assert "s" not in (await world.read()).state
