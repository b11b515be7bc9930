"""Copies of cached events equal the original, and share nothing that can be changed."""

import gc
import logging
import tracemalloc
from collections import deque
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from google.adk.events import Event
from pydantic import BaseModel, Field

from adk_secure_sessions.formats import event_copies, events
from adk_secure_sessions.formats.event_copies import EventKeeper
from adk_secure_sessions.formats.event_parser import same
from adk_secure_sessions.formats.events import decode, encode
from tests.benchmarks.workload import turn
from tests.conformance.samples import CORPUS, of_every_field

# ADK's AuthConfig calls a deprecated method of its own.
pytestmark = pytest.mark.filterwarnings("ignore:This method is deprecated:DeprecationWarning")


def mutable(value: Any) -> Iterator[object]:
    """Yield each object in *value* that somebody could change."""
    if isinstance(value, BaseModel):
        yield value
        yield vars(value)
        yield value.__pydantic_fields_set__
        for part in (vars(value), value.__pydantic_extra__, value.__pydantic_private__):
            yield from mutable(part)
    elif isinstance(value, dict):
        yield value
        for one in value.values():
            yield from mutable(one)
    elif isinstance(value, list | set | deque):
        yield value
        for one in value:
            yield from mutable(one)


def reencode(keeper: EventKeeper, plaintext: bytes) -> list[Event]:
    """Return the event as it was decoded when it was converted, and two copies."""
    event, kept, _ = keeper.convert(plaintext)
    return [event, *keeper.restore([kept]), *keeper.restore([kept])]


def samples() -> dict[str, bytes]:
    """The plaintext of each sample, by its name."""
    made = {name: make() for name, make in CORPUS.items()} | dict(of_every_field())
    return {name: encode(event) for name, event in made.items()}


def test_copies_equal_the_event_and_share_nothing_mutable() -> None:
    keeper = EventKeeper(shares=False)
    differing, sharing = [], []
    for name, plaintext in samples().items():
        events = reencode(keeper, plaintext)
        expected = decode(plaintext, 1, 2)
        if not all(same(one, expected) for one in events):
            differing.append(name)
        owned = [{id(one) for one in mutable(event)} for event in events]
        if owned[0] & owned[1] or owned[0] & owned[2] or owned[1] & owned[2]:
            sharing.append(name)
    assert (differing, sharing) == ([], [])


def test_nearly_all_samples_are_copied_and_not_parsed_again() -> None:
    keeper = EventKeeper(shares=False)
    plaintexts = samples()
    parsed = [
        name
        for name, plaintext in plaintexts.items()
        if keeper.convert(plaintext)[1][0] is event_copies._parsed
    ]
    assert len(parsed) <= len(plaintexts) / 50, parsed


def test_changes_of_a_copy_are_not_in_the_next_one() -> None:
    keeper = EventKeeper(shares=False)
    event = turn(1)[2]
    plaintext = encode(event)
    _, kept, _ = keeper.convert(plaintext)
    (copy,) = keeper.restore([kept])
    assert copy.content
    assert copy.content.parts
    copy.content.parts[0].text = "changed"
    copy.content.parts.append(copy.content.parts[0])
    copy.actions.state_delta["offered:1"].append("changed")
    copy.actions.state_delta.clear()
    copy.author = "changed"
    assert same(keeper.restore([kept])[0], decode(plaintext, 1, 2))


def test_copy_can_be_changed_copied_and_serialized_like_any_event() -> None:
    keeper = EventKeeper(shares=False)
    event, copy, _ = reencode(keeper, encode(turn(1)[1]))
    assert copy.model_dump_json() == event.model_dump_json()
    assert same(copy.model_copy(deep=True), event)
    assert copy == event
    copy.branch = "b"
    assert "branch" in copy.model_fields_set
    assert "branch" not in event.model_fields_set


@pytest.mark.parametrize("value", [deque([1]), object(), {1: 2}, {"a": [deque()]}, [bytearray()]])
def test_event_with_a_value_that_json_cannot_hold_is_parsed_again(
    value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No release of google-adk is known to parse JSON to such a value; a later one might."""
    plaintext = encode(turn(1)[0])
    odd = decode(plaintext, 1, 2)
    odd.actions.state_delta["odd"] = value
    keeper = EventKeeper(shares=False)
    with monkeypatch.context() as patched:
        patched.setattr(events, "decode", lambda *_: odd)
        _, kept, size = keeper.convert(plaintext)
    assert size >= len(plaintext)
    first, second = keeper.restore([kept, kept])
    assert same(first, decode(plaintext, 1, 2))
    assert same(second, first)
    assert first is not second


class Open(BaseModel, extra="allow"):
    """A model with extra fields and a private attribute."""

    value: Any = None
    _private: Any = None


class WithSlots(BaseModel):
    __slots__ = ("more",)


def restored(value: Any) -> Any:
    mould = event_copies._mould(value, [])
    return mould[0](mould)


def test_extra_fields_and_private_attributes_are_copied() -> None:
    model = Open.model_validate({"value": [1], "more": {"a": [{"b": []}]}, "plain": [1]})
    model._private = {"c": [{}]}
    first, second = restored(model), restored(model)
    assert same(first, model)
    assert same(second, model)
    own = [set(map(id, mutable(one))) for one in (model, first, second)]
    assert len(set.union(*own)) == sum(map(len, own))


class Fresh(BaseModel):
    """A model whose default is another one each time."""

    value: str = Field(default_factory=lambda: uuid4().hex)


class Plain(BaseModel):
    value: int = 1


class LikePlain(BaseModel):
    value: int = 1


def test_models_without_set_fields_share_a_mould_only_if_they_are_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_copies, "_defaults", {})
    for model in (Plain(), LikePlain(), Plain(), Fresh(), Fresh()):
        assert same(restored(model), model)


@pytest.mark.parametrize("value", [WithSlots(), ([1],), {(1, (2,))}, frozenset({(1,)})])
def test_value_that_a_copy_could_share_or_lack_has_no_mould(value: Any) -> None:
    with pytest.raises(event_copies._Unsupported):
        event_copies._mould(value, [])


def test_immutable_values_are_shared() -> None:
    value = {"tuple": (1, "a", None), "frozen": frozenset({1}), "set": {1}}
    copy = restored(value)
    assert copy == value
    assert copy["set"] is not value["set"]
    assert copy["tuple"] is value["tuple"]
    assert copy["frozen"] is value["frozen"]


def test_plaintexts_that_were_not_converted_are_parsed() -> None:
    plaintexts = [encode(event) for event in turn(1)]
    for shares in (False, True):
        keeper = EventKeeper(shares=shares)
        _, kept, _ = keeper.convert(plaintexts[1])
        found = keeper.restore([plaintexts[0], kept, *plaintexts[2:]])
        assert same(found, [decode(plaintext, 1, 2) for plaintext in plaintexts])


def test_events_that_are_shared_are_the_same_objects() -> None:
    keeper = EventKeeper(shares=True)
    event, first, second = reencode(keeper, encode(turn(1)[1]))
    assert event is first is second


@pytest.mark.parametrize("shares", [False, True])
def test_size_is_right_within_a_factor_of_two(shares: bool) -> None:
    """Measured as what the process frees when the values are dropped."""
    keeper = EventKeeper(shares=shares)
    plaintexts = [encode(event) for number in range(100) for event in turn(number)]
    keeper.convert(plaintexts[0])
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        kept = [keeper.convert(plaintext)[1:] for plaintext in plaintexts]
        gc.collect()
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    said = sum(size for _, size in kept)
    assert used / 2 < said < used * 2, (said, used, said / used)


def test_events_are_parsed_if_copies_do_not_fit_the_installed_pydantic(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_copies, "_set_fields", None)  # as if pydantic had no such attribute
    event_copies._is_proven.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            keeper = EventKeeper(shares=False)
        assert "cached events are parsed at each read" in caplog.text
        plaintext = encode(turn(1)[1])
        event, first, second = reencode(keeper, plaintext)
        assert same(first, event)
        assert same(second, event)
        assert first is not second
    finally:
        event_copies._is_proven.cache_clear()
