"""Keys and plaintext are not in tracebacks of errors, and not in a pickle, a copy or a `repr`."""

import asyncio
import copy
import inspect
import pickle
import re
import traceback
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from google.adk.errors.already_exists_error import AlreadyExistsError

from adk_secure_sessions import SecureSessionError
from adk_secure_sessions.hiding import HoldsSecrets, hides_locals, strip_traceback

KEY = b"needle"


class Failed(BaseException):
    """Not an Exception, as CancelledError is not."""


def chained(key: bytes) -> None:
    try:
        raise ValueError(key)
    except ValueError as error:
        raise Failed from error


def failure() -> Failed:
    """An error whose cause, context and traceback hold a key."""
    with pytest.raises(Failed) as info:
        chained(KEY)
    return info.value


def attached(error: BaseException) -> list[object]:
    return [error.__cause__, error.__context__, error.__traceback__]


def test_error_loses_its_frames_its_cause_and_its_context() -> None:
    error = failure()
    assert None not in attached(error)
    assert strip_traceback(error) is error
    assert attached(error) == [None, None, None]


@hides_locals
def takes(key: bytes, *, fails: bool = False) -> tuple[bytes, bool]:
    """Documented."""
    if fails:
        raise failure()
    return key, fails


@hides_locals
async def takes_async(key: bytes, *, fails: bool = False) -> tuple[bytes, bool]:
    """Documented."""
    await asyncio.sleep(0)
    if fails:
        raise failure()
    return key, fails


async def of(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


both = pytest.mark.parametrize("function", [takes, takes_async])


@hides_locals
class Documented:
    """Its constructor, a method, a generator and a class method fail if they are told to."""

    def __init__(self, key: bytes, *, fails: bool = False) -> None:
        takes(key, fails=fails)
        if fails:
            raise failure()

    async def method(self, key: bytes) -> None:
        raise failure()

    async def generator(self, key: bytes) -> AsyncIterator[bytes]:
        yield key
        raise failure()

    @classmethod
    def of(cls, key: bytes) -> "Documented":
        return cls(key, fails=True)


async def exhausted(values: AsyncIterator[bytes]) -> None:
    assert [value async for value in values]


@both
async def test_decorated_function_is_otherwise_unchanged(function: Callable[..., Any]) -> None:
    assert await of(function(KEY)) == await of(function(key=KEY, fails=False)) == (KEY, False)
    assert function.__name__ in ("takes", "takes_async")
    assert function.__doc__ == "Documented."
    assert inspect.iscoroutinefunction(function) == (function.__name__ == "takes_async")


FAILING: dict[str, Callable[[], Any]] = {
    "function": lambda: takes(KEY, fails=True),
    "function by name": lambda: takes(key=KEY, fails=True),
    "coroutine": lambda: takes_async(KEY, fails=True),
    "coroutine by name": lambda: takes_async(key=KEY, fails=True),
    "constructor": lambda: Documented(KEY, fails=True),
    "class method": lambda: Documented.of(KEY),
    "method": lambda: Documented(KEY).method(KEY),
    "generator": lambda: exhausted(Documented(KEY).generator(KEY)),
    "wrong arguments": lambda: takes(KEY, unknown=KEY),  # type: ignore[call-arg]
    "wrong arguments of a coroutine": lambda: takes_async(KEY, unknown=KEY),  # type: ignore[call-arg]
    "wrong arguments of a generator": lambda: exhausted(
        Documented(KEY).generator(KEY, unknown=KEY)  # type: ignore[call-arg]
    ),
}


@pytest.mark.parametrize("call", FAILING.values(), ids=FAILING)
async def test_error_has_no_frame_with_a_key_no_cause_and_no_context(
    call: Callable[[], Any],
) -> None:
    with pytest.raises((Failed, TypeError)) as info:
        await of(call())
    frames = [frame for frame, _ in traceback.walk_tb(info.value.__traceback__)]
    inner = [one for one in frames if one.f_code.co_filename != __file__]
    assert inner, "the frame of the decorator"
    names = {"takes", "takes_async", "chained", "__init__", "generator"}
    assert names.isdisjoint(one.f_code.co_name for one in frames)
    assert not any("needle" in repr(one.f_locals) for one in inner)
    assert attached(info.value)[:2] == [None, None]


async def test_generator_of_a_decorated_class_is_closed_with_its_wrapper() -> None:
    values = Documented(KEY).generator(KEY)
    assert await anext(aiter(values)) == KEY
    await values.aclose()  # type: ignore[attr-defined]


def test_errors_in_a_group_lose_theirs_too() -> None:
    inner = failure()
    strip_traceback(BaseExceptionGroup("outer", [BaseExceptionGroup("inner", [inner])]))
    assert attached(inner) == [None, None, None]


async def test_note_of_the_application_stays() -> None:
    error = RuntimeError()
    error.add_note("mine")
    with pytest.raises(RuntimeError):
        await reads_indirectly(KEY, error)
    assert [note.partition(":")[0] for note in error.__notes__] == [
        "mine",
        "Lines of code, without their local variables, which may contain plaintext",
    ]


class Notes(Exception):
    """An error that accepts no notes."""

    __notes__: Any = None


@dataclass(frozen=True)
class Frozen(Exception):
    text: str


@pytest.mark.parametrize("kept", [Notes(), Frozen("text")])
async def test_error_that_accepts_no_attributes_loses_its_frames(kept: Exception) -> None:
    with pytest.raises(type(kept)) as info:
        await reads(KEY, kept)
    assert info.value is kept
    assert attached(kept)[:2] == [None, None]
    frames = [frame for frame, _ in traceback.walk_tb(kept.__traceback__)]
    assert not {one.f_code.co_name for one in frames} & {"reads", "chained"}


@hides_locals
async def reads(text: bytes, error: BaseException | None = None) -> bytes:
    """Documented."""
    await asyncio.sleep(0)
    if error is not None:
        raise error from failure()
    return text


@hides_locals
async def reads_indirectly(text: bytes, error: BaseException) -> bytes:
    return await reads(text, error)


@pytest.mark.parametrize("function", [reads, reads_indirectly])
@pytest.mark.parametrize(
    "kind", [RuntimeError, SecureSessionError, AlreadyExistsError, asyncio.CancelledError]
)
async def test_error_names_its_lines_and_shows_no_locals(
    function: Callable[..., Any], kind: type[BaseException]
) -> None:
    with pytest.raises(kind) as info:
        await function(KEY, kind())
    frames = [frame for frame, _ in traceback.walk_tb(info.value.__traceback__)]
    assert {one.f_code.co_name for one in frames[1:]} == {"hidden"}
    assert not any("needle" in repr(one.f_locals) for one in frames[1:])
    assert [info.value.__cause__, info.value.__context__] == [None, None]
    notes = getattr(info.value, "__notes__", [])
    if kind is RuntimeError:
        (note,) = notes  # one, even if several public functions called each other
        assert re.fullmatch(
            "Lines of code, without their local variables, which may contain plaintext:"
            rf"\n  {re.escape(__name__)}, line \d+, in reads",
            note,
        )
    else:
        assert notes == []


class Held(HoldsSecrets):
    __slots__ = ("key",)

    def __init__(self) -> None:
        self.key = KEY


@pytest.mark.parametrize(
    "take", [pickle.dumps, copy.copy, copy.deepcopy, lambda held: pickle.dumps(held, 0)]
)
def test_object_with_a_key_is_neither_pickled_nor_copied(take: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError, match="Held holds secrets"):
        take(Held())


def test_object_with_a_key_shows_its_class_alone() -> None:
    assert repr(Held()) == str(Held()) == "<Held>"
