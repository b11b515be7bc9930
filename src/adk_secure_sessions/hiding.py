"""Keep keys and plaintext out of pickles and `repr`, and out of the tracebacks of errors."""

import inspect
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from functools import wraps
from typing import Any, Never, ParamSpec, TypeVar, cast

C = TypeVar("C")
P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

_LINES = "Lines of code, without their local variables, which may contain plaintext:"


class HoldsSecrets:
    """Base class of objects that contain keys or plaintext.

    They cannot be pickled or copied, and their `repr` shows only the class.
    """

    __slots__ = ()

    def __reduce_ex__(self, protocol: object) -> Never:
        raise TypeError(f"{type(self).__name__} holds secrets and cannot be pickled or copied")

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


def strip_traceback(error: E) -> E:
    """Remove the traceback, the cause and the context of *error*, and return *error*.

    Error reporters record the local variables of all frames in a traceback.  The local variables
    of a key provider, and of the libraries that it calls, contain keys.

    The same is done for the errors in a group.  A class of errors may define these attributes and
    methods differently, so those of BaseException are used.
    """
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            strip_traceback(one)
    for name in ("__cause__", "__context__"):
        vars(BaseException)[name].__set__(error, None)
    BaseException.with_traceback(error, None)
    return error


def replace_traceback_with_note(error: E) -> E:
    """Do the same as `strip_traceback`, but first add a note that names the lines of the traceback.

    The first line is omitted, because it is the line that raises *error* again.  The texts of
    errors of this package and of ADK say enough, so these errors get no note.
    """
    is_ours = type(error).__module__.startswith(("adk_secure_sessions.", "google.adk."))
    if isinstance(error, Exception) and not is_ours:
        with suppress(Exception):  # some errors, such as frozen data classes, accept no note
            _add_note(error)
    return strip_traceback(error)


def _add_note(error: Exception) -> None:
    if any(note.startswith(_LINES) for note in getattr(error, "__notes__", [])):
        return
    lines = [
        f"  {frame.f_globals.get('__name__')}, line {number}, in {frame.f_code.co_name}"
        for frame, number in list(traceback.walk_tb(error.__traceback__))[1:]
    ]
    error.add_note("\n".join([_LINES, *lines]))


def hides_locals(target: C) -> C:
    """Decorate a public function or class whose arguments or local variables may be secret.

    If the function raises an error, the traceback of the error includes no frame of the function or
    of the functions that it calls: see `replace_traceback_with_note`.  Error reporters would
    otherwise record the keys and the plaintext in local variables.  Of a class, the constructor and
    each public method are decorated.  The function may be a coroutine function or an asynchronous
    generator.
    """
    hidden: Any
    function: Any = target
    if isinstance(target, type):
        for name, member in list(vars(target).items()):
            is_public = name == "__init__" or not name.startswith("_")
            if is_public and inspect.isfunction(member) and not is_hidden(member):
                setattr(target, name, hides_locals(member))
            elif is_public and isinstance(member, classmethod):
                setattr(target, name, classmethod(hides_locals(member.__func__)))
        return target

    # Each wrapper deletes the arguments: they may be secret, and the traceback of an error includes
    # the frame of the wrapper.
    if inspect.isasyncgenfunction(function):

        @wraps(function)
        async def hidden(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            value = None
            try:
                values = function(*args, **kwargs)
                del args, kwargs
                async with aclosing(values):
                    async for value in values:
                        yield value
            except BaseException as error:
                args, kwargs, value = (), {}, None
                raise replace_traceback_with_note(error) from None

    elif inspect.iscoroutinefunction(function):
        hidden = coroutine_hiding_locals(function, function)
    else:

        @wraps(function)
        def hidden(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                del args, kwargs
                raise replace_traceback_with_note(error) from None

    return cast("C", hidden)


def coroutine_hiding_locals(
    function: Callable[P, object], start: Callable[P, Awaitable[T]]
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return the coroutine function that takes the place of *function*.

    It calls *start* with the same arguments, awaits the result, and raises errors as `hides_locals`
    says.  Measuring and recording belong in *start*, so a public method has one wrapper.
    """

    @wraps(function)
    async def hidden(*args: Any, **kwargs: Any) -> T:
        try:
            return await start(*args, **kwargs)
        # Also catch CancelledError.  `asyncio.timeout` makes the CancelledError the cause of a
        # TimeoutError, so error reporters would record its frames.
        except BaseException as error:
            del args, kwargs
            raise replace_traceback_with_note(error) from None

    return hidden


def is_hidden(function: object) -> bool:
    """Return whether `hides_locals` has decorated *function*."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_name == "hidden" and code.co_filename == __file__
