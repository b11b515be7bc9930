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


def event_of_another_session(world: World) -> None:
    world.stored().events[0] = world.stored(name="two").events[0]


def event_of_another_user(world: World) -> None:
    world.stored().events[0] = world.stored(user="bob").events[0]


def contents_exchanged_between_events(world: World) -> None:
    first, second = world.stored().events
    texts = text_of(first), text_of(second)
    set_text(first, texts[1])
    set_text(second, texts[0])


def event_with_another_id(world: World) -> None:
    world.stored().events[0].id = "another"


def author_modified(world: World) -> None:
    world.stored().events[0].author = "user"


def invocation_id_modified(world: World) -> None:
    world.stored().events[0].invocation_id = "another"


def turn_complete_modified(world: World) -> None:
    world.stored().events[0].turn_complete = True


def time_modified(world: World) -> None:
    world.stored().events[0].timestamp += 0.01


def time_that_is_no_number(world: World) -> None:
    world.stored().events[0].timestamp = float("nan")


def event_stored_twice(world: World) -> None:
    world.stored().events.append(copy.deepcopy(world.stored().events[0]))


def event_stored_twice_with_other_unused_bits(world: World) -> None:
    """Base64 of 1 or 2 bytes more than a multiple of 3 has 4 or 2 bits that mean nothing."""
    for one in world.stored().events:
        if (text := text_of(one)).endswith("="):
            last = len(text.rstrip("=")) - 1
            other = BASE64[BASE64.index(text[last]) + 1]
            world.stored().events.append(copy.deepcopy(one))
            set_text(world.stored().events[-1], text[:last] + other + text[last + 1 :])
            return


def with_header(world: World, header: bytes, body: bytes = b"") -> None:
    record = base64.b64decode(text_of(world.stored().events[0]))
    record = header + record[len(header) :] if not body else header + body
    set_text(world.stored().events[0], base64.b64encode(record).decode())


def record_of_a_later_version(world: World) -> None:
    with_header(world, b"AKS\x03")


def record_of_an_unknown_backend(world: World) -> None:
    with_header(world, b"AKS\x02\x99")


def record_of_the_noop_backend(world: World) -> None:
    event = b'{"author":"user","id":"planted"}'
    with_header(world, b"AKS\x02\x03" + bytes(8), b"\x00\x061.28.0" + event)


def record_of_an_unknown_key(world: World) -> None:
    with_header(world, b"AKS\x02\x01" + bytes(8))


def record_of_the_apps_state(world: World) -> None:
    set_text(world.stored().events[0], next(iter(world.inner.app_state["app"].values())))


def id_with_a_new_line(world: World) -> None:
    world.stored().events[0].id = "x\nERROR ann was here" + 1000 * "x"


def record_modified(world: World) -> None:
    text = text_of(world.stored().events[0])
    set_text(world.stored().events[0], text[:40] + ("A" if text[40] != "A" else "B") + text[41:])


def record_cut(world: World) -> None:
    set_text(world.stored().events[0], text_of(world.stored().events[0])[:64])


def record_emptied(world: World) -> None:
    set_text(world.stored().events[0], "")


def plaintext_event(world: World) -> None:
    content = types.Content(role="user", parts=[types.Part(text="planted")])
    world.stored().events.append(Event(author="user", content=content))


def event_without_content(world: World) -> None:
    world.stored().events.append(Event(author="user", actions=EventActions(escalate=True)))


def part_added(world: World) -> None:
    world.stored().events[0].content.parts.append(types.Part(text="planted"))  # type: ignore[union-attr]


EVENT_ATTACKS = [
    event_of_another_session, event_of_another_user, contents_exchanged_between_events,
    event_with_another_id, author_modified, invocation_id_modified, turn_complete_modified,
    time_modified, time_that_is_no_number, event_stored_twice,
    event_stored_twice_with_other_unused_bits, record_of_a_later_version,
    record_of_an_unknown_backend, record_of_the_noop_backend, record_of_an_unknown_key,
    record_of_the_apps_state, id_with_a_new_line, record_modified, record_cut, record_emptied,
    plaintext_event, event_without_content, part_added,
]  # fmt: skip


@pytest.mark.parametrize("attack", EVENT_ATTACKS)
async def test_event_is_rejected(world: World, attack: Callable[[World], None]) -> None:
    attack(world)
    with pytest.raises(DecryptionError) as rejection:
        await world.read()
    assert rejection.value.table == "inner events"
    assert "ann" not in str(rejection.value)
    assert not re.search(r"ann (one|two) \d", locals_of(rejection.value))
    assert "\n" not in str(rejection.value)


def value_modified(world: World) -> None:
    state = world.stored().state
    name = next(iter(state))
    state[name] = state[name][:-8] + "AAAAAAA="


def values_exchanged(world: World) -> None:
    state = world.stored().state
    (one, two) = state
    state[one], state[two] = state[two], state[one]


def values_exchanged_between_scopes(world: World) -> None:
    state, user = world.stored().state, world.inner.user_state["app"]["ann"]
    state[next(iter(state))] = user[next(iter(user))]


def entry_moved_to_another_scope(world: World) -> None:
    world.stored().state |= world.inner.user_state["app"]["ann"]


def entry_of_another_session(world: World) -> None:
    world.stored().state |= world.stored(name="two").state


def value_of_another_session(world: World) -> None:
    mine, other = world.stored().state, world.stored(name="two").state
    mine[next(iter(mine))] = other[next(iter(other))]


def entries_of_another_user(world: World) -> None:
    world.inner.user_state["app"]["ann"] = world.inner.user_state["app"]["bob"]


def app_entry_as_the_users(world: World) -> None:
    world.inner.user_state["app"]["ann"] |= world.inner.app_state["app"]


def plaintext_entry(world: World) -> None:
    world.stored().state["is_admin"] = True


def plaintext_value(world: World) -> None:
    state = world.stored().state
    state[next(iter(state))] = {"is_admin": True}


def plaintext_in_the_users_state(world: World) -> None:
    world.inner.user_state["app"]["ann"]["0" * 32] = "aXNfYWRtaW4="


def temporary_entry(world: World) -> None:
    world.stored().state["app:temp:x"] = "x"


STATE_ATTACKS = [
    value_modified, values_exchanged, values_exchanged_between_scopes, entry_moved_to_another_scope,
    entry_of_another_session, value_of_another_session, entries_of_another_user,
    app_entry_as_the_users, plaintext_entry, plaintext_value, plaintext_in_the_users_state,
    temporary_entry,
]  # fmt: skip


@pytest.mark.parametrize("attack", STATE_ATTACKS)
async def test_state_is_rejected(world: World, attack: Callable[[World], None]) -> None:
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
    before = dict(world.inner.user_state["app"]["ann"])
    names_an_unknown_key(world.inner.user_state["app"]["ann"])
    state = (await world.read()).state
    assert sum(key.startswith("user:") for key in state) == len(before) - 1
    assert "an entry of a user's state is left out" in caplog.text
    world.inner.user_state["app"]["ann"] = before
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
    plaintext_event(world)
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
        *world.inner.user_state["app"]["ann"],
        *world.inner.user_state["app"]["bob"],
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
