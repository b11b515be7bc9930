"""The tracebacks of errors contain no frame whose local variables hold a key or plaintext."""

import asyncio
import inspect
import re
import traceback
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from google.adk.errors.already_exists_error import AlreadyExistsError

from adk_secure_sessions import SecureSessionError
from adk_secure_sessions.tracebacks import hides_locals, without_frames

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
    assert without_frames(error) is error
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


@both
async def test_decorated_function_returns_its_result(function: Callable[..., Any]) -> None:
    assert await of(function(KEY)) == (KEY, False)
    assert await of(function(key=KEY, fails=False)) == (KEY, False)


@both
def test_decorated_function_keeps_its_name_and_kind(function: Callable[..., Any]) -> None:
    assert function.__name__ in ("takes", "takes_async")
    assert function.__doc__ == "Documented."
    assert inspect.iscoroutinefunction(function) == (function.__name__ == "takes_async")


@both
@pytest.mark.parametrize("named", [False, True])
async def test_error_of_a_decorated_function_has_no_frame_with_a_key(
    function: Callable[..., Any], named: bool
) -> None:
    arguments, options = ([], {"key": KEY}) if named else ([KEY], {})
    with pytest.raises(Failed) as info:
        await of(function(*arguments, **options, fails=True))
    frames = [frame for frame, _ in traceback.walk_tb(info.value.__traceback__)]
    inner = [one for one in frames if one.f_code.co_filename != __file__]
    assert inner, "the frame of the decorator"
    assert not {one.f_code.co_name for one in frames} & {"takes", "takes_async", "chained"}
    assert not any("needle" in repr(one.f_locals) for one in inner)
    assert info.value.__cause__ is None
    assert info.value.__context__ is None


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


@pytest.mark.parametrize(
    "call",
    [
        lambda: Documented(KEY, fails=True),
        lambda: Documented.of(KEY),
        lambda: Documented(KEY).method(KEY),
        lambda: exhausted(Documented(KEY).generator(KEY)),
    ],
    ids=["constructor", "class method", "method", "generator"],
)
async def test_error_of_a_decorated_class_has_no_frame_with_a_key(
    call: Callable[[], Any],
) -> None:
    with pytest.raises(Failed) as info:
        await of(call())
    frames = [frame for frame, _ in traceback.walk_tb(info.value.__traceback__)]
    inner = [one for one in frames if one.f_code.co_filename != __file__]
    assert inner, "the frame of the decorator"
    assert {one.f_code.co_name for one in frames}.isdisjoint({"__init__", "chained", "generator"})
    assert not any("needle" in repr(one.f_locals) for one in inner)


@pytest.mark.parametrize(
    "call",
    [
        lambda: takes(KEY, unknown=KEY),  # type: ignore[call-arg]
        lambda: takes_async(KEY, unknown=KEY),  # type: ignore[call-arg]
        lambda: exhausted(Documented(KEY).generator(KEY, unknown=KEY)),  # type: ignore[call-arg]
    ],
    ids=["function", "coroutine function", "generator"],
)
async def test_wrong_arguments_are_in_no_frame(call: Callable[[], Any]) -> None:
    with pytest.raises(TypeError) as info:
        await of(call())
    frames = [frame for frame, _ in traceback.walk_tb(info.value.__traceback__)]
    inner = [one for one in frames if one.f_code.co_filename != __file__]
    assert inner, "the frame of the decorator"
    assert not any("needle" in repr(one.f_locals) for one in inner)


async def test_generator_of_a_decorated_class_is_closed_with_its_wrapper() -> None:
    values = Documented(KEY).generator(KEY)
    assert await anext(aiter(values)) == KEY
    await values.aclose()  # type: ignore[attr-defined]


def test_errors_in_a_group_lose_theirs_too() -> None:
    inner = failure()
    without_frames(BaseExceptionGroup("outer", [BaseExceptionGroup("inner", [inner])]))
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


async def test_function_without_locals_in_errors_is_otherwise_unchanged() -> None:
    assert await reads(KEY) == await reads(text=KEY) == KEY
    assert (reads.__name__, reads.__doc__) == ("reads", "Documented.")
    assert inspect.iscoroutinefunction(reads)


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
