"""The base class of all objects that hold keys, and errors that show none."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, Never, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound=BaseException)


class KeyMaterial:
    """An object that cannot be pickled or copied, and whose `repr` shows no key."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: object) -> Never:
        raise TypeError(f"{type(self).__name__} holds key material and cannot be pickled or copied")

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


def without_frames(error: E) -> E:
    """Return *error* after removing its traceback, cause and context.

    Error reporters record the local variables of all frames in a traceback.  The frames inside a
    key provider, and inside the libraries that it calls, have keys in their variables.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def hides_frames(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate *function*, whose arguments or variables hold keys: see `without_frames`.

    An error of *function* has a traceback that does not include the frames of *function* and of
    what it calls.
    """
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def hidden_coroutine(*args: P.args, **kwargs: P.kwargs) -> Any:
            call = function(*args, **kwargs)
            del args, kwargs  # this frame stays in the traceback
            try:
                return await call
            except BaseException as error:  # CancelledError can be the cause of TimeoutError
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
