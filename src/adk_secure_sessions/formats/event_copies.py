"""Copies of events for the cache of histories: faster than parsing an event again.

Events are mutable, and callers change them: ADK itself writes to the events of a session object.
So a cache must not return an object that it has returned before.  `copy.deepcopy` takes several
times as long as parsing.  `EventKeeper` therefore keeps a *mould* of each event: its dictionaries,
lists and sets, with a list of the places that hold another mutable object.  To restore the event,
it copies each of them with one call of its `copy` method, and sets the attributes of pydantic's
models directly.

This is correct for values that JSON can hold and for pydantic's models of them.  An event with any
other value is kept as its plaintext, and is parsed again each time.

Copying 1000 events of a conversation takes 5.5 ms, parsing them 9.8 ms, and making their moulds
17 ms (medians of process CPU time over 40 interleaved rounds; Python 3.11, google-adk 2.13).  With
one call of `map` for each step of all events, copying took 4.3 ms; the code was twice as long.
"""

import datetime
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import cache, lru_cache
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
# Sizes in bytes: of a mould, and of a text or another value besides its content.
_OF_MOULD, _OF_VALUE = 150, 50
_SAMPLE = b"""{"author": "a", "id": "i", "timestamp": 1.5, "invocation_id": "n",
"content": {"role": "user", "parts": [{"text": "t"}, {"function_call": {"args": {"a": [{}, 1]}}}]},
"actions": {"state_delta": {"k": {"l": [1, [2]]}}}, "long_running_tool_ids": ["1"]}"""


class _Unsupported(Exception):
    """A value has a type that moulds do not support."""


class EventKeeper:
    """Keeps decoded events, and restores them as objects that nobody else has.

    If *shares* is True, it keeps the events themselves: every reader gets the same `Event` objects.

    Attributes:
        shares: Whether the values that it keeps are the events.
        at_once: The number of events that are restored before other tasks may run.  This takes
            0.3 ms, or 2 ms if they are taken from the cache for the first time.
    """

    def __init__(self, *, shares: bool) -> None:
        self.shares: bool = shares
        self._makes_moulds = _is_proven()
        self.at_once: int = 128 if shares else 64

    def convert(self, plaintext: bytes) -> tuple[Event, Any, int]:
        """Return the event in *plaintext*, the value to keep, and its approximate size in bytes.

        *plaintext* was decoded before.
        """
        event = events.decode(plaintext, 0, 0)
        sizes = [len(plaintext)]  # the texts and numbers have about this size
        mould: Mould = (_parsed, plaintext)
        if self._makes_moulds:
            try:
                mould = _mould(event, sizes)
            except (_Unsupported, RecursionError):
                pass
        return event, event if self.shares else mould, sum(sizes) + _OF_MOULD

    def restore(self, kept: Sequence[Any]) -> list[Event]:
        """Return the events of the values or plaintexts *kept*, in a new list."""
        if self.shares:
            return [events.decode(one, 0, 0) if type(one) is bytes else one for one in kept]
        return [one[0](one) if type(one) is tuple else events.decode(one, 0, 0) for one in kept]


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


def _parsed(mould: Mould) -> Event:
    return events.decode(mould[1], 0, 0)


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
    all new objects to *sizes*, without those of texts.

    Raises:
        _Unsupported: *value* is, or contains, a value of another type.
    """
    kind: Any = type(value)
    if kind in _SIMPLE:
        return value
    if kind is dict:
        if any(type(key) is not str for key in value):
            raise _Unsupported
        return _container_mould(value, value.items(), sizes)
    if kind is list:
        return _container_mould(value, enumerate(value), sizes)
    if _is_model(kind):  # faster than isinstance
        return _model_mould(value, kind, sizes)
    if kind is set or kind is frozenset or kind is tuple:
        if all(type(item) in _SIMPLE for item in value):
            sizes.append(sys.getsizeof(value) + _OF_VALUE * len(value))
            return value.copy() if kind is set else value
    elif isinstance(value, _IMMUTABLE):
        return value
    raise _Unsupported


def _container_mould(value: Any, items: Iterable[tuple[Any, Any]], sizes: list[int]) -> Any:
    container, plain, nested = _inner(value, items, sizes)
    sizes.append(_OF_VALUE * len(value) * (2 if type(value) is dict else 1))
    if not plain and not nested:
        return container
    sizes.append(_OF_MOULD)
    return _container, container, plain, nested


def _model_mould(model: BaseModel, kind: type[BaseModel], sizes: list[int]) -> Mould:
    before = len(sizes)
    fields, plain, nested = _inner(vars(model), vars(model).items(), sizes)
    sizes.append(_OF_MOULD)
    names = model.__pydantic_fields_set__
    extra, private = model.__pydantic_extra__, model.__pydantic_private__
    if extra is None and private is None:
        mould: Mould = (_model, kind, fields, _shared_names(frozenset(names)), plain, nested)
        if not names:
            shared = _defaults.setdefault(kind, mould)
            if shared is not mould and shared[2:] == mould[2:]:
                del sizes[before:]
                return shared
        return mould
    # The names may include those of extra fields, which users choose.
    sizes.append(sys.getsizeof(names) + _OF_VALUE * len(names) + _OF_MOULD)
    more = [None if one is None else _whole(one, sizes) for one in (extra, private)]
    return (_model_with_more, (_model, kind, fields, names.copy(), plain, nested), *more)


def _inner(value: Any, items: Iterable[tuple[Any, Any]], sizes: list[int]) -> tuple[Any, Any, Any]:
    """Return a copy of *value* with moulds in it, and the keys of mutable values.

    *items* are the keys or indexes of *value* with their values.  The first tuple of keys is that
    of values that have a method `copy`, and the second one that of moulds.
    """
    container = value.copy()
    sizes.append(sys.getsizeof(container))
    plain: list[Any] = []
    nested: list[Any] = []
    for key, one in items:
        if one is None or type(one) in _SIMPLE:  # most fields are None
            continue
        container[key] = inner = _mould(one, sizes)
        if inner is not one:  # otherwise, it is immutable
            (plain if type(inner) in _COPYABLE else nested).append(key)
    sizes.append(_OF_VALUE * (len(plain) + len(nested)))
    return container, tuple(plain), tuple(nested)


def _whole(value: dict[str, Any], sizes: list[int]) -> Mould:
    """Return the mould of a dictionary, even if it holds no mutable object."""
    mould = _mould(value, sizes)
    return mould if type(mould) is tuple else (_container, mould, (), ())


# All moulds share the sets of field names, of which there are few, and the moulds of models without
# any field that was set.  They were a quarter of the memory, and reading less memory is faster.
_defaults: dict[type[BaseModel], Mould] = {}


@lru_cache(maxsize=4096)
def _shared_names(names: frozenset[str]) -> set[str]:
    return set(names)


@cache
def _is_model(kind: type[Any]) -> bool:
    """Whether *kind* is a model with no other attributes than those that `_model` sets."""
    return issubclass(kind, BaseModel) and not any(
        vars(base).get("__slots__") for base in kind.__mro__ if base is not BaseModel
    )
