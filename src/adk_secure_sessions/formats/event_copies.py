"""Copies of events for the cache of histories: faster than parsing an event again.

Events are mutable, and callers change them: ADK itself writes to the events of a session object.
So a cache must not return an object that it has returned before.  `copy.deepcopy` takes several
times as long as parsing.  `EventKeeper` therefore keeps a *mould* of each event: its dictionaries,
lists and sets, with a list of the places that hold another mutable object.  To restore the event, it
copies each of them with one call of its `copy` method, and sets the attributes of pydantic's models
directly.

This is correct for values that JSON can hold and for pydantic's models of them.  An event with any
other value is kept as its plaintext, and is parsed again each time.
"""

import datetime
import logging
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from typing import Any, cast

from google.adk.events import Event
from pydantic import BaseModel

from adk_secure_sessions.formats import events
from adk_secure_sessions.formats.event_parser import same

logger: logging.Logger = logging.getLogger(__name__)

# A mould is a tuple that begins with the function that restores the value.
Mould = tuple[Any, ...]


def _setter(name: str) -> Callable[[BaseModel, Any], None]:
    """Return the function that sets the attribute *name* of a model, without `__setattr__`.

    If a later pydantic has no such attribute, return None; `_is_proven` then returns False.
    """
    setter: Any = getattr(vars(BaseModel).get(name), "__set__", None)
    return cast("Callable[[BaseModel, Any], None]", setter)


_new = object.__new__
_set_fields = _setter("__dict__")
_set_names = _setter("__pydantic_fields_set__")
_set_extra = _setter("__pydantic_extra__")
_set_private = _setter("__pydantic_private__")
# Values of these types, and of subclasses of the types in `_IMMUTABLE`, are shared by all copies.
_SIMPLE = frozenset((str, int, float, bool, bytes, type(None)))
_IMMUTABLE = (Enum, datetime.date, datetime.time, datetime.timedelta)
_COPYABLE = frozenset((dict, list, set))
_FREE = frozenset((bool, type(None)))  # these values exist once
_SAMPLE = b"""{"author": "a", "id": "i", "timestamp": 1.5, "invocation_id": "n",
"content": {"role": "user", "parts": [{"text": "t"}, {"function_call": {"args": {"a": [{}, 1]}}}]},
"actions": {"state_delta": {"k": {"l": [1, [2]]}}}, "long_running_tool_ids": ["1"]}"""


class _Unsupported(Exception):
    """A value has a type that moulds do not support."""


class EventKeeper:
    """Keeps decoded events, and restores them as objects that nobody else has.

    If *shares* is True, it keeps the events themselves: every reader gets the same `Event` objects.

    Attributes:
        at_once: The number of events that are restored before other tasks may run: about 1 ms.
    """

    def __init__(self, *, shares: bool) -> None:
        self._shares = shares
        self._makes_moulds = _is_proven()
        self.at_once: int = sys.maxsize if shares else 256

    def keep(self, event: Event, plaintext: bytes) -> tuple[Any, int]:
        """Return the value to keep for *event*, and its size in bytes.

        *plaintext* is the plaintext that *event* was decoded from.
        """
        sizes: list[int] = []
        if self._makes_moulds:
            try:
                mould = _mould(event, sizes)
                return (event if self._shares else mould), sum(sizes)
            except (_Unsupported, RecursionError):
                pass
        return plaintext, sys.getsizeof(plaintext)

    def restore(self, kept: Sequence[Any]) -> list[Event]:
        """Return the events of the values *kept*, in a new list."""
        if self._shares:
            return [events.decode(one, 0, 0) if type(one) is bytes else one for one in kept]
        return [events.decode(one, 0, 0) if type(one) is bytes else one[0](one) for one in kept]


@cache
def _is_proven() -> bool:
    """Whether moulds work with the installed pydantic; log a warning if they do not."""
    try:
        event = Event.model_validate_json(_SAMPLE)
        mould = _mould(event, [])
        if same(mould[0](mould), event):
            return True
    except Exception:  # after any error, events are parsed instead
        logger.debug("copying an event failed", exc_info=True)
    logger.warning(
        "cached events are parsed at each read: their copies do not fit the installed google-adk "
        "and pydantic"
    )
    return False


def _model(mould: Mould) -> BaseModel:
    _, cls, fields, names, plain, nested = mould
    fields = fields.copy()
    for key in plain:
        fields[key] = fields[key].copy()
    for key in nested:
        inner = fields[key]
        fields[key] = inner[0](inner)
    model: BaseModel = _new(cls)
    _set_fields(model, fields)
    _set_names(model, names.copy())
    _set_extra(model, None)
    _set_private(model, None)
    return model


def _model_with_more(mould: Mould) -> BaseModel:
    """Restore a model that has extra fields or private attributes."""
    _, inner, extra, private = mould
    model = _model(inner)
    _set_extra(model, extra and extra[0](extra))
    _set_private(model, private and private[0](private))
    return model


def _container(mould: Mould) -> Any:
    _, container, plain, nested = mould
    container = container.copy()
    for key in plain:
        container[key] = container[key].copy()
    for key in nested:
        inner = container[key]
        container[key] = inner[0](inner)
    return container


def _mould(value: Any, sizes: list[int]) -> Any:
    """Return the mould of a model, a dict or a list, or *value* itself if it is immutable.

    A dict, list or set that holds no other mutable object is returned as a copy.  Add the sizes of
    all new objects to *sizes*.

    Raises:
        _Unsupported: *value* is, or contains, a value of another type.
    """
    kind = type(value)
    if kind in _SIMPLE:
        if kind not in _FREE:
            sizes.append(sys.getsizeof(value))
        return value
    if kind is dict:
        return _places(value, value.items(), sizes)
    if kind is list:
        return _places(value, enumerate(value), sizes)
    if isinstance(value, BaseModel):
        return _model_mould(value, kind, sizes)
    if kind is set or kind is frozenset or kind is tuple:
        if all(type(item) in _SIMPLE for item in value):
            sizes.append(sys.getsizeof(value) + sum(map(sys.getsizeof, value)))
            return value.copy() if kind is set else value
    elif isinstance(value, _IMMUTABLE):
        return value
    raise _Unsupported


def _places(value: Any, items: Any, sizes: list[int]) -> Any:
    container, plain, nested = _inner(value, items, sizes)
    if isinstance(value, dict):
        for key in value:
            if type(key) is not str:
                raise _Unsupported
            sizes.append(sys.getsizeof(key))
    if not plain and not nested:
        return container
    mould = _container, container, plain, nested
    sizes.append(sys.getsizeof(mould))
    return mould


def _inner(value: Any, items: Any, sizes: list[int]) -> tuple[Any, Any, Any]:
    """Return a copy of *value* with moulds in it, and the keys of mutable values.

    *items* are the keys or indexes of *value* with their values.  The first list of keys is that of
    values that have a method `copy`, and the second one that of moulds.
    """
    container = value.copy()
    plain, nested = [], []
    for key, one in items:
        if type(one) in _SIMPLE:
            if type(one) not in _FREE:
                sizes.append(sys.getsizeof(one))
            continue
        container[key] = inner = _mould(one, sizes)
        if inner is one:
            continue  # it is immutable
        (plain if type(inner) in _COPYABLE else nested).append(key)
    sizes.append(sys.getsizeof(container))
    for keys in (plain, nested):
        if keys:
            sizes.append(40 + 8 * len(keys))
    return container, tuple(plain), tuple(nested)


def _model_mould(model: BaseModel, kind: type[BaseModel], sizes: list[int]) -> Mould:
    if not _is_plain(kind):
        raise _Unsupported
    fields, plain, nested = _inner(vars(model), vars(model).items(), sizes)
    names = model.__pydantic_fields_set__.copy()
    mould: Mould = (_model, kind, fields, names, plain, nested)
    sizes.append(sys.getsizeof(mould) + sys.getsizeof(names))
    extra, private = model.__pydantic_extra__, model.__pydantic_private__
    if extra is not None or private is not None:
        more = [None if one is None else _whole(one, sizes) for one in (extra, private)]
        mould = (_model_with_more, mould, *more)
        sizes.append(sys.getsizeof(mould))
    return mould


def _whole(value: dict[str, Any], sizes: list[int]) -> Mould:
    """Return the mould of a dictionary, even if it holds no mutable object."""
    mould = _mould(value, sizes)
    return mould if type(mould) is tuple else (_container, mould, (), ())


@cache
def _is_plain(kind: type[BaseModel]) -> bool:
    """Whether the attributes that `_model` sets are all that an instance of *kind* has."""
    return not any(vars(base).get("__slots__") for base in kind.__mro__ if base is not BaseModel)
