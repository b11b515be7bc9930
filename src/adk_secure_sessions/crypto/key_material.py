"""The base class of objects that contain keys, and functions that remove keys from errors."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, Never, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound=BaseException)


class KeyMaterial:
    """Base class of objects that contain keys.

    These objects cannot be pickled or copied, and their `repr` shows no key.
    """

    __slots__ = ()

    def __reduce_ex__(self, protocol: object) -> Never:
        raise TypeError(f"{type(self).__name__} holds key material and cannot be pickled or copied")

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


def without_frames(error: E) -> E:
    """Remove the traceback, the cause and the context of *error*, and return *error*.

    Error reporters record the local variables of all frames in a traceback.  The local variables
    of a key provider, and of the libraries that it calls, contain keys.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def hides_frames(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate *function*, whose arguments or local variables contain keys.

    If *function* raises an error, the traceback of the error includes no frame of *function* or of
    the functions that *function* calls.  See `without_frames` for the reason.
    """
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def hidden_coroutine(*args: P.args, **kwargs: P.kwargs) -> Any:
            call = function(*args, **kwargs)
            # The arguments may contain keys, and the traceback of an error includes this frame.
            del args, kwargs
            try:
                return await call
            # Also catch CancelledError.  `asyncio.timeout` makes the CancelledError the cause of a
            # TimeoutError, so error reporters would record its frames.
            except BaseException as error:
                raise without_frames(error) from None

        return cast("Callable[P, T]", hidden_coroutine)

    @wraps(function)
    def hidden(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            del args, kwargs
            raise without_frames(error) from None

    return hidden
