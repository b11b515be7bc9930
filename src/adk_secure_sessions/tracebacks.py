"""Removing keys and plaintext from errors: from their tracebacks, causes and contexts."""

import inspect
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

_LINES = "Lines of code, without their local variables, which may contain plaintext:"


def without_frames(error: E) -> E:
    """Remove the traceback, the cause and the context of *error*, and return *error*.

    Error reporters record the local variables of all frames in a traceback.  The local variables
    of a key provider, and of the libraries that it calls, contain keys.

    The same is done for the errors in a group.  A class of errors may define these attributes and
    methods differently, so those of BaseException are used.
    """
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            without_frames(one)
    for name in ("__cause__", "__context__"):
        vars(BaseException)[name].__set__(error, None)
    BaseException.with_traceback(error, None)
    return error


def without_locals(error: E) -> E:
    """Do the same as `without_frames`, but first add a note that names the lines of the traceback.

    The first line is omitted, because it is the line that raises *error* again.  The texts of
    errors of this package and of ADK say enough, so these errors get no note.
    """
    is_ours = type(error).__module__.startswith(("adk_secure_sessions.", "google.adk."))
    if isinstance(error, Exception) and not is_ours:
        with suppress(Exception):  # some errors, such as frozen data classes, accept no note
            _add_note(error)
    return without_frames(error)


def _add_note(error: Exception) -> None:
    if any(note.startswith(_LINES) for note in getattr(error, "__notes__", [])):
        return
    lines = [
        f"  {frame.f_globals.get('__name__')}, line {number}, in {frame.f_code.co_name}"
        for frame, number in list(traceback.walk_tb(error.__traceback__))[1:]
    ]
    error.add_note("\n".join([_LINES, *lines]))


def hides_locals(
    method: Callable[P, Awaitable[T]],
    clean: Callable[[BaseException], BaseException] = without_locals,
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorate a public coroutine function that works with plaintext.

    If *method* raises an error, the traceback of the error includes no frame of *method* or of the
    functions that *method* calls.  A note of the error names their lines.  Error reporters would
    otherwise record the plaintext in local variables.  *clean* removes the frames.
    """

    @wraps(method)
    async def hidden(*args: P.args, **kwargs: P.kwargs) -> T:
        call = method(*args, **kwargs)
        # The arguments may be secret, and the traceback of an error includes this frame.
        del args, kwargs
        try:
            return await call
        # Also catch CancelledError.  `asyncio.timeout` makes the CancelledError the cause of a
        # TimeoutError, so error reporters would record its frames.
        except BaseException as error:
            raise clean(error) from None

    return hidden


def hides_frames(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate *function*, whose arguments or local variables contain keys.

    If *function* raises an error, the traceback of the error includes no frame of *function* or of
    the functions that *function* calls.  See `without_frames` for the reason.
    """
    if inspect.iscoroutinefunction(function):
        return cast("Callable[P, T]", hides_locals(function, without_frames))

    @wraps(function)
    def hidden(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            del args, kwargs
            raise without_frames(error) from None

    return hidden
