"""A value of a wrong type, which a callback left in an object, is quoted in no log or error.

How it works.  pydantic does not check the type of a value that is assigned to a field.  The tests
assign a value of each type in `WRONG` to each field of an event and of the models in it, and pass
the object to each method that serializes it.  The methods may store or reject the object.  Nothing
that the process logs or warns of may contain the needle, and no error and no variable of its
frames.  By default, each value is assigned to every third field of an event: the first value to the
first, fourth, ... field, the second value to the second, fifth, ... field, and so on; and to
those in `READ`, which the package reads itself.
"""

import logging
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from google.adk.events import Event, EventActions
from google.adk.memory.memory_entry import MemoryEntry
from google.adk.sessions import InMemorySessionService, Session
from google.genai import types
from pydantic import BaseModel, SerializerFunctionWrapHandler, field_serializer, model_serializer

from adk_secure_sessions import (
    AesGcmBackend,
    EncryptedArtifactService,
    EncryptedMemoryService,
    EncryptedSessionService,
    EncryptedSessionWrapper,
    SecureSessionError,
)
from adk_secure_sessions.maintenance import Database
from adk_secure_sessions.migration import ServiceSource, migrate
from tests.attacks.needles import locals_of

NEEDLE = "Wq83ZkNdl"
BACKEND = AesGcmBackend(bytes(range(32)))
WHO: dict[str, Any] = {"app_name": "app", "user_id": "user"}


class Shown:
    """Has no JSON form, and shows the needle."""

    def __repr__(self) -> str:
        return NEEDLE


class Faulty(BaseModel):
    """A model whose serializer fails."""

    text: str = NEEDLE

    @model_serializer
    def fail(self) -> Any:
        raise RuntimeError(NEEDLE)


class Wrapped(BaseModel):
    """A model in whose own serializer pydantic warns about the value."""

    number: int = 0

    @field_serializer("number", mode="wrap")
    def serialize(self, value: Any, handler: SerializerFunctionWrapHandler) -> Any:
        return handler(value)


circular: list[Any] = [NEEDLE]
circular.append(circular)
WRONG: dict[str, Any] = {
    "text": NEEDLE,
    "text of several lines": f"first\n{NEEDLE}\nlast",
    "bytes": NEEDLE.encode() + b"\xff",
    "list": [NEEDLE],
    "set": {NEEDLE},
    "dict": {NEEDLE: NEEDLE},
    "nested dict": {"k": {"x": [NEEDLE]}},
    "model": types.Part(text=NEEDLE),
    "models": {NEEDLE: types.Part(text=NEEDLE)},
    "number": 5,
    "object": Shown(),
    "objects": {"k": Shown()},
    "circular": {"k": circular},
    "model whose serializer fails": {"k": Faulty()},
    "model whose serializer warns": {"k": Wrapped.model_construct(number=NEEDLE)},
    "lone surrogate": {"k": NEEDLE + "\ud800", "null": None},
}


def new_event() -> Event:
    """An event whose fields and models are set, each with the needle where it may hold a text."""
    parts = [
        types.Part(text=NEEDLE),
        types.Part(function_call=types.FunctionCall(name="f", args={"a": NEEDLE})),
        types.Part(inline_data=types.Blob(mime_type="a/b", data=NEEDLE.encode())),
        types.Part(executable_code=types.ExecutableCode(code=NEEDLE)),
    ]
    return Event(
        author="user",
        invocation_id="i",
        error_message=NEEDLE,
        usage_metadata=types.GenerateContentResponseUsageMetadata(total_token_count=1),
        content=types.Content(role="user", parts=parts),
        actions=EventActions(state_delta={"k": NEEDLE}, agent_state={"k": NEEDLE}),
    )


def paths(value: object) -> Iterator[tuple[str | int, ...]]:
    """Yield the way to each field of a model, and of the models in it: names and positions."""
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield (name,)
            yield from ((name, *rest) for rest in paths(getattr(value, name)))
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from ((number, *rest) for rest in paths(one))


READ = ("actions", "state_delta")


def malformed(
    make: Callable[[], Any], wrong: object, *, every: int = 1
) -> Iterator[tuple[str, Any]]:
    """Yield the objects with a value of a wrong type, and the names of its field."""
    first = [*map(id, WRONG.values())].index(id(wrong)) % every
    for number, (*way, last) in enumerate(paths(make())):
        if number % every != first and last not in READ:
            continue
        at = made = make()
        for step in way:
            at = at[step] if isinstance(step, int) else getattr(at, step)
        setattr(at, str(last), wrong)
        yield ".".join(map(str, [*way, last])), made


@contextmanager
def everything_shown() -> Iterator[list[str]]:
    """Collect what is logged and warned of, with the variables of errors that are logged."""
    texts: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(f"{record.getMessage()} {record.args!r}")
            if record.exc_info and record.exc_info[1]:
                texts.append(locals_of(record.exc_info[1]))

    root, collector = logging.getLogger(), Collector()
    loggers = [root, logging.getLogger("google_adk"), logging.getLogger("adk_secure_sessions")]
    before = [logger.level for logger in loggers]
    root.addHandler(collector)
    try:
        for logger in loggers:
            logger.setLevel(logging.DEBUG)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield texts
        texts += [str(warning.message) for warning in caught]
    finally:
        root.removeHandler(collector)
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


async def quoted_by(call: Callable[[Any], Awaitable[object]], values: Any) -> list[str]:
    """Return the names of the *values* whose needle is shown while *call* is given them."""
    quoted = []
    for name, value in values:
        with everything_shown() as texts:
            try:
                await call(value)
            except (SecureSessionError, ValueError, TypeError, AttributeError) as error:
                texts.append(locals_of(error))
        if any(NEEDLE in text for text in texts):
            quoted.append(name)
    return quoted


# The others serialize events and contents as the service does.  So, by default, they get one value
# that each step of the serialization rejects; `migrate`, which takes longest, only the last.
FEW = ("dict", "circular", "model whose serializer fails")


def wrongs(*default: str) -> pytest.MarkDecorator:
    marks = {name: [] if name in default else [pytest.mark.soak] for name in WRONG}
    params = [pytest.param(value, id=name, marks=marks[name]) for name, value in WRONG.items()]
    return pytest.mark.parametrize("wrong", params)


each_field = pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.soak)])


@each_field
@wrongs(*WRONG)
async def test_wrong_type_in_an_event_is_not_quoted(wrong: object, every: int) -> None:
    await append_wrong(EncryptedSessionService(":memory:", BACKEND), wrong, every)


@each_field
@wrongs(*FEW)
async def test_wrong_type_in_an_event_of_the_wrapper_is_not_quoted(
    wrong: object, every: int
) -> None:
    inner = InMemorySessionService()
    service = EncryptedSessionWrapper(inner, BACKEND, key_db_url=":memory:")
    await append_wrong(service, wrong, every)


async def append_wrong(
    service: EncryptedSessionService | EncryptedSessionWrapper, wrong: object, every: int
) -> None:
    async with service:
        session = await service.create_session(**WHO, session_id="s")

        async def append(event: Event) -> None:
            nonlocal session
            try:
                await service.append_event(session, event)
            finally:
                await service.delete_session(**WHO, session_id="s")
                session = await service.create_session(**WHO, session_id="s")

        assert await quoted_by(append, malformed(new_event, wrong, every=every)) == []


@pytest.mark.parametrize("value", [NEEDLE, f"{NEEDLE}\nlast"])
@pytest.mark.parametrize("null", [None, 1])
async def test_unknown_value_of_an_enumeration_is_not_quoted_when_it_is_read(
    null: object, value: str
) -> None:
    """A later release of the model may send it.  JSON with a null is parsed in another way."""
    async with EncryptedSessionService(":memory:", BACKEND) as service:
        session = await service.create_session(**WHO, session_id="s")
        event = new_event()
        event.finish_reason = value  # type: ignore[assignment]
        event.custom_metadata = {"k": null}
        await service.append_event(session, event)
        with everything_shown() as texts:
            found = await service.get_session(**WHO, session_id="s")
    assert found is not None
    assert found.events[0].finish_reason == value
    assert NEEDLE not in "".join(texts)


async def test_reading_events_shows_no_warning_of_the_application_again() -> None:
    async with EncryptedSessionService(":memory:", BACKEND) as service:
        session = await service.create_session(**WHO, session_id="s")
        event = new_event()
        event.custom_metadata = {"k": None}
        await service.append_event(session, event)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(3):
                await service.get_session(**WHO, session_id="s")
                warnings.warn("of the application", stacklevel=1)
    assert len(caught) <= 2  # the filter is set once more, as the application has set its own


@each_field
@wrongs(*FEW)
async def test_wrong_type_in_what_memory_is_given_is_not_quoted(wrong: object, every: int) -> None:
    async with EncryptedSessionService(":memory:", BACKEND) as sessions:
        memory = EncryptedMemoryService(sessions)

        async def add_session(event: Event) -> None:
            session = Session(id="s", app_name="app", user_id="user")
            session.events = [event]
            await memory.add_session_to_memory(session)

        async def add(entry: MemoryEntry) -> None:
            await memory.add_memory(**WHO, memories=[entry])

        def entry() -> MemoryEntry:
            content = new_event().content
            assert content is not None
            return MemoryEntry(content=content, author="user")

        assert await quoted_by(add_session, malformed(new_event, wrong, every=every)) == []
        assert await quoted_by(add, malformed(entry, wrong)) == []
        with everything_shown() as texts:
            await memory.search_memory(**WHO, query="a")
        assert NEEDLE not in "".join(texts)


@wrongs(*FEW)
async def test_wrong_type_in_an_artifact_is_not_quoted(wrong: object, tmp_path: Path) -> None:
    async with EncryptedSessionService(":memory:", BACKEND) as sessions:
        artifacts = EncryptedArtifactService(sessions, tmp_path)

        async def save(artifact: Any) -> None:
            name: dict[str, Any] = {"filename": "user:f"}
            await artifacts.save_artifact(**WHO, **name, artifact=artifact)
            await artifacts.load_artifact(**WHO, **name)

        for number in range(4):

            def part(number: int = number) -> types.Part:
                content = new_event().content
                assert content is not None
                assert content.parts is not None
                return content.parts[number]

            assert await quoted_by(save, malformed(part, wrong)) == []
        bad = [{"text": wrong}, {"inlineData": wrong}, {"inlineData": {"data": wrong}}, wrong]
        assert await quoted_by(save, [(str(number), one) for number, one in enumerate(bad)]) == []


@each_field
@wrongs(FEW[-1])
async def test_wrong_type_in_a_session_that_is_migrated_is_not_quoted(
    wrong: object, every: int
) -> None:
    class Service(InMemorySessionService):
        """Returns events as callbacks left them."""

        event: Event

        async def get_session(self, **arguments: Any) -> Session | None:
            session = await super().get_session(**arguments)
            if session is not None:
                session.events = [self.event]
            return session

    service = Service()
    await service.create_session(**WHO, session_id="s")
    async with Database(":memory:", BACKEND) as db:

        async def copy(event: Event) -> None:
            service.event = event
            await migrate(ServiceSource(service, ["app"]), db, skip_bad=True)

        assert await quoted_by(copy, malformed(new_event, wrong, every=every)) == []
