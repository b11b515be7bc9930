"""Distinctive texts (canaries) to plant, and a search that finds them however they are written.

How it works.  `needle("user id")` is a text that comes up nowhere by chance.  `state`,
`large_state` and `new_event` put one into every place where users' data can be: each id, key and
value of a state, each field of an event.  A test stores them, provokes errors and logs, and calls
`found_in` with the bytes of every file, log and error: it returns the needles that it finds, as
they are or in hexadecimal, base64, JSON or UTF-16.  The set must be empty.  So that an empty set
proves something, each such test also finds the name of the app, which is stored as plaintext, and
a control finds every needle under `NoOpBackend`.
"""

import base64
import copy
import io
import json
import logging
import pickle
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.genai import types

from tests.attacks.support import texts_of
from tests.attacks.world import START

LOGGERS = [
    "",
    "adk_secure_sessions",
    "sqlalchemy",
    "sqlalchemy.engine",
    "sqlalchemy.engine.Engine",
    "sqlalchemy.pool",
    "aiosqlite",
    "asyncio",
    "google_adk",
    "google.adk",
]
COPIES: dict[str, Callable[[Any], object]] = {
    "pickle": pickle.dumps,
    "oldest pickle": lambda one: pickle.dumps(one, 0),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}
APP = "app-name-as-plaintext"  # not secret: finding it shows that the search works


def needle(name: str) -> str:
    return f"NdlWq83{name.title().replace(' ', '')}Wq83Zk"


# In ids
USER, SESSION = needle("user id"), needle("session id")
# Planted by `state`, `large_state`, `new_event` and `Awkward`
NAMES = [
    "session key",
    "session value",
    "user key",
    "user value",
    "app key",
    "app value",
    "temporary key",
    "temporary value",
    "nested key",
    "nested value",
    "large value",
    "text",
    "thought",
    "argument",
    "response",
    "metadata",
    "bytes",
    "author",
    "invocation",
    "branch",
    "error message",
    "object",
]
NEEDLES = [USER, SESSION, *map(needle, NAMES)]
# Planted by tests/integrations, in artifacts
OF_FILES = [*map(needle, ["file name", "file type", "file content", "file metadata"])]


def state() -> dict[str, Any]:
    return {
        needle("session key"): needle("session value"),
        "user:" + needle("user key"): needle("user value"),
        "app:" + needle("app key"): needle("app value"),
        "temp:" + needle("temporary key"): needle("temporary value"),
        "nested": {needle("nested key"): [1, {"a": needle("nested value")}]},
    }


def large_state() -> dict[str, Any]:
    return {"large": needle("large value") * 600}


class Awkward:
    """Has no JSON form, and shows a needle wherever it is printed."""

    def __repr__(self) -> str:
        return needle("object")


def new_event(delta: dict[str, Any], *, with_bytes: bool = True, **metadata: Any) -> Event:
    blob = types.Blob(data=needle("bytes").encode(), mime_type="text/plain")
    parts = [
        types.Part(text=needle("text")),
        types.Part(text=needle("thought"), thought=True),
        types.Part(function_call=types.FunctionCall(name="f", args={"a": needle("argument")})),
        types.Part(
            function_response=types.FunctionResponse(name="f", response={"r": needle("response")})
        ),
        *([types.Part(inline_data=blob)] if with_bytes else []),
    ]
    return Event(
        author=needle("author"),
        invocation_id=needle("invocation"),
        branch=needle("branch"),
        error_message=needle("error message"),
        timestamp=START,
        custom_metadata={"m": needle("metadata"), **metadata},
        content=types.Content(role="model", parts=parts),
        actions=EventActions(state_delta=delta),
    )


def encodings(text: str) -> list[bytes]:
    """The bytes that *text* may have in a file or a log."""
    data = text.encode()
    forms = [data, data.hex().encode(), data.hex().upper().encode()]
    forms += [text.encode("utf-16-le"), text.encode("utf-16-be"), json.dumps(text)[1:-1].encode()]
    for shift, start in ((0, 0), (1, 2), (2, 3)):  # base64 depends on the offset, modulo 3
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            forms.append(encode(b"\0" * shift + data)[start:-4])
    return forms


FORMS = {text: encodings(text) for text in (*NEEDLES, *OF_FILES)}
# All needles begin alike, and so do their encodings.  Most data contains none of these beginnings.
BEGINNINGS = {form[:6] for forms in FORMS.values() for form in forms}


def found_in(data: bytes | str) -> set[str]:
    """Return the needles that are in *data*, in any of their encodings."""
    data = data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass")
    if not any(beginning in data for beginning in BEGINNINGS):
        return set()
    return {text for text, forms in FORMS.items() if any(form in data for form in forms)}


def files_of(path: Path) -> dict[str, bytes]:
    """The contents of a SQLite database, its write-ahead log and its other files, by name."""
    return {
        file.name: file.read_bytes() for file in path.parent.iterdir() if path.name in file.name
    }


def present(path: Path, values: list[bytes]) -> int:
    """How many of *values* are somewhere in the database or beside it."""
    content = b"".join(files_of(path).values())
    return sum(value in content for value in values)


def all_of(error: BaseException) -> str:
    """An error as a log shows it, with its chain, and the attributes that it carries."""
    return "".join([*traceback.format_exception(error), *texts_of(error)])


def locals_of(error: BaseException) -> str:
    """What an error reporter records: the variables of every frame, of the whole chain of errors.

    Frames of pytest and of test modules are left out: a test knows the keys that it searches for.
    """
    texts: list[str] = []
    left: list[object] = [error]
    seen: set[int] = set()
    while left:
        one = left.pop()
        if not isinstance(one, BaseException) or id(one) in seen:
            continue
        seen.add(id(one))
        texts.append(all_of(one))
        for frame, _ in traceback.walk_tb(one.__traceback__):
            if "/test_" in frame.f_code.co_filename:
                continue
            for name, value in frame.f_locals.items():
                texts.append(f"{frame.f_code.co_qualname} {name}={value!r}")
                if isinstance(value, list | tuple):  # errors that asyncio.gather returned
                    left += value
        left += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            left += one.exceptions
    return "\n".join(texts)


def forms_of(key: bytes) -> list[str]:
    """The texts that show *key*, in a log or in a variable: also a part of it, as reprlib does."""
    forms = [key.hex(), repr(key[:9])[2:-1], repr(key[-9:])[2:-1], repr(list(key))[1:-1]]
    for shift, start in ((0, 0), (1, 2), (2, 3)):  # base64 depends on the offset, modulo 3
        encoded = base64.b64encode(b"\0" * shift + key)[start:-4].decode()
        forms += [encoded, encoded.replace("+", "-").replace("/", "_")]
    return forms


@contextmanager
def all_logged() -> Iterator[io.StringIO]:
    """Collect what every logger writes, from DEBUG on; restore the loggers afterwards."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s %(args)r"))
    loggers = [logging.getLogger(name) for name in LOGGERS]
    # SQLAlchemy's echo leaves a handler behind, which writes to a stream that pytest closes.
    before = [(logger, logger.level, list(logger.handlers)) for logger in loggers]
    logging.getLogger().addHandler(handler)
    for logger in loggers:
        logger.setLevel(logging.DEBUG)
    try:
        yield text
    finally:
        for logger, level, handlers in before:
            logger.setLevel(level)
            logger.handlers[:] = handlers
