"""Check a pickle of google-adk's schema v0 before it is loaded.

google-adk's unpickler decides which classes a pickle may name.  With only these classes, a pickle
of 60 bytes could still allocate 3 GB (`bytearray(n)`).  A pickle of 300 bytes could become 10**7
values, because the memo lets a list contain one list many times.  `check` prevents such attacks: it
follows the opcodes without creating any object.  It rejects a pickle that google-adk does not
write, and a pickle whose content would be much larger than the pickle itself.  So the time that
`check`, the unpickler and the encoding of the event take is proportional to the number of stored
bytes.
"""

import pickletools
import re
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import NamedTuple

from adk_secure_sessions.formats import json_text
from adk_secure_sessions.lru import Lru

# The content of a pickle may have at most _FACTOR times as many bytes as the pickle, plus
# _ALLOWANCE bytes.  A value that occurs several times is counted several times.  For pickles that
# google-adk 1.0 to 1.21 wrote, the factor was 1 to 7.  The factor is larger if one long text occurs
# many times.
_FACTOR = 64
_ALLOWANCE = 64 * 1024
_PER_VALUE = 16  # bytes that are added to the size of each value
# An object of pydantic takes three levels: the object, its pickled state, and its fields.
_MAX_LEVELS = 3 * json_text.MAX_LEVELS
_MAX_BITS = 14_285  # the number of bits of an integer with json_text.MAX_DIGITS digits
_HASHED_BITS = 64  # few integers of at most this many bits have equal hashes, so they are allowed
# The maximum number of keys of dictionaries, and elements of sets, whose hashes an attacker can
# choose.  If all hashes in a dictionary are equal, n keys take n**2 comparisons.
_MAX_CHOSEN_HASHES = 100
# With a larger exponent, the conversion of a Decimal to an integer takes too long.
_DECIMAL = re.compile(r"[^eE]*(?:[eE][+-]?(\d{1,4}))?", re.ASCII)
_accepted: Lru[bytes, bool] = Lru(1000)  # the SHA-256 hashes of the pickles accepted last


class UnsafePickle(ValueError):
    """A pickle is not one that google-adk writes, or its content is too large."""


class _Value:
    """A value that the unpickler would create.

    Attributes:
        kind: The type, as far as it matters here.
        size: How large the content is, in bytes, with every value counted as often as it occurs.
        levels: How many levels of values the value contains; 0 for a text or a number.
        detail: The text of a string; `module.name` of a global; the items of a tuple.
        is_shared: Whether an opcode has read the value from the memo.  A shared value must not
            change any more.  Otherwise, the `size` of the values that contain it would be wrong,
            and it could contain itself.
    """

    __slots__ = ("detail", "is_shared", "kind", "levels", "size")

    def __init__(self, kind: str, size: int, levels: int = 0, detail: object = None) -> None:
        self.kind = kind
        self.size = size + _PER_VALUE
        self.levels = levels
        self.detail = detail
        self.is_shared = False

    def text(self) -> str:
        if self.kind != "str":
            raise UnsafePickle("a name is not text")
        return str(self.detail)

    def items(self) -> Sequence["_Value"]:
        if self.kind != "tuple":
            raise UnsafePickle("arguments are not a tuple")
        assert isinstance(self.detail, tuple)
        return self.detail


class _Call(NamedTuple):
    """The kinds (`_Value.kind`) of the arguments and of the result of a global that is called."""

    arguments: tuple[str, ...]
    result: str = "object"


_SCALARS = ("str", "bytes", "int", "float", "constant")
_NUMBERS = ("int", "float")
_CALLS: dict[str, _Call] = {
    # Do not allow an integer as the argument: `bytearray(10**9)` allocates 10**9 bytes.
    "builtins.bytearray": _Call(("bytes",)),
    "builtins.complex": _Call(_NUMBERS),
    "collections.OrderedDict": _Call((), "dict"),
    "collections.defaultdict": _Call(("global",), "dict"),
    "datetime.date": _Call(("bytes",)),
    "datetime.datetime": _Call(("bytes", "object")),
    "datetime.time": _Call(("bytes", "object")),
    "datetime.timedelta": _Call(_NUMBERS),
    "datetime.timezone": _Call(("object", "str")),
    "decimal.Decimal": _Call(("str",)),
}
_BUILTINS = ("builtins", "collections", "datetime", "decimal")


def check(data: bytes) -> None:
    """Raise `UnsafePickle` if *data* must not be loaded.

    The reason is that google-adk does not write such a pickle, or that its content would be much
    larger than *data*.

    Following the opcodes takes about as long as all the rest of reading an event.  Most events of a
    database have the same empty actions, so the last accepted pickles are remembered by their hash.
    """
    digest = sha256(data).digest()
    if _accepted.get(digest) is None:
        _Checker(_ALLOWANCE + _FACTOR * len(data)).check(data)
        _accepted.put(digest, True)


class _Checker:
    """Follows the opcodes of one pickle, of the protocols 4 and 5.

    google-adk used the highest protocol of Python, which is 5, and on MySQL the default, which was
    4.  Opcodes that Python does not write for `EventActions` are rejected.  One of them,
    `LONG_BINPUT`, would allocate a memo of any size.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._stack: list[_Value] = []
        self._outer: list[list[_Value]] = []  # the stacks below each mark
        self._memo: list[_Value] = []
        self._chosen_hashes = 0

    def check(self, data: bytes) -> None:
        malformed = False
        try:
            for opcode, argument, _ in pickletools.genops(data):
                leaf = _LEAVES.get(opcode.name)
                if leaf is not None:
                    self._stack.append(leaf(argument))
                    continue
                _STEPS[opcode.name](self, argument)
        except UnsafePickle:
            raise
        except KeyError:
            malformed = True  # an opcode that google-adk does not write
        except (IndexError, ValueError):
            malformed = True  # not a pickle; the text of the error may contain content
        if malformed or self._outer or len(self._stack) != 1:
            raise UnsafePickle("it is not a pickle as google-adk writes it")

    # --- Steps ------------------------------------------------------------------------------------

    def skip(self, _: object) -> None:
        pass

    def mark(self, _: object) -> None:
        self._outer.append(self._stack)
        self._stack = []

    def memoize(self, _: object) -> None:
        self._memo.append(self._stack[-1])

    def get(self, index: int) -> None:
        value = self._memo[index]
        value.is_shared = True
        self._stack.append(value)

    def empty_list(self, _: object) -> None:
        self._stack.append(_Value("list", 0))

    def empty_dict(self, _: object) -> None:
        self._stack.append(_Value("dict", 0))

    def empty_set(self, _: object) -> None:
        self._stack.append(_Value("set", 0))

    def append(self, _: object) -> None:
        item = self._stack.pop()
        self._add("list", (item,))

    def appends(self, _: object) -> None:
        self._add("list", self._since_mark())

    def setitem(self, _: object) -> None:
        item, key = self._stack.pop(), self._stack.pop()
        self._hash(key)
        self._add("dict", (key, item))

    def setitems(self, _: object) -> None:
        items = self._since_mark()
        for key in items[::2]:
            self._hash(key)
        self._add("dict", items)

    def additems(self, _: object) -> None:
        items = self._since_mark()
        for item in items:
            self._hash(item)
        self._add("set", items)

    def frozenset(self, _: object) -> None:
        items = self._since_mark()
        for item in items:
            self._hash(item)
        self._push("frozenset", items)

    def tuple(self, _: object) -> None:
        items = self._since_mark()
        self._push("tuple", items, tuple(items))

    def tuple_of(self, number: int) -> None:
        items = [self._stack.pop() for _ in range(number)]
        self._push("tuple", items, tuple(items[::-1]))

    def global_(self, _: object) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._stack.append(_Value("global", 0, 0, f"{module.text()}.{name.text()}"))

    def new(self, _: object) -> None:
        """Create an empty object; `build` then sets its fields."""
        arguments, kind = self._stack.pop(), self._stack.pop()
        if kind.kind != "global" or arguments.items():
            raise UnsafePickle("an object is created with arguments")
        self._stack.append(_Value("instance", 0))

    def build(self, _: object) -> None:
        """Set the fields of an object that `new` has created.

        Other objects are rejected: for example, a member of an enum would change for the whole
        process.
        """
        state = self._stack.pop()
        if state.kind != "dict":
            raise UnsafePickle("the state of an object is not a dictionary")
        self._add("instance", (state,))

    def reduce(self, _: object) -> None:
        """Call a global, after a check of its arguments.

        `_CALLS` has the arguments of types of the standard library.  Other classes, such as enums,
        UUIDs and paths, may get any scalars.
        """
        arguments, function = self._stack.pop(), self._stack.pop()
        if function.kind != "global":
            raise UnsafePickle("something is called that is not a global")
        name = str(function.detail)
        call = _CALLS.get(name)
        if call is None:
            if name.partition(".")[0] in _BUILTINS:
                raise UnsafePickle("a type is called that google-adk does not call")
            call = _Call(_SCALARS)
        items = arguments.items()
        for item in items:
            if item.kind not in call.arguments:
                raise UnsafePickle("a call has an argument of another type")
        self._push(call.result, items)
        if name == "decimal.Decimal":
            for one in items:
                number = _DECIMAL.fullmatch(one.text())
                if number is None:
                    raise UnsafePickle("the exponent of a Decimal is too large")
                # In a field for integers, `1E4000` becomes 4001 digits.
                self._stack[-1].size += int(number[1] or 0)

    # --- Values -----------------------------------------------------------------------------------

    def _since_mark(self) -> list[_Value]:
        items, self._stack = self._stack, self._outer.pop()
        return items

    def _push(self, kind: str, items: Sequence[_Value], detail: object = None) -> None:
        """Push a new value that contains *items*."""
        value = _Value(kind, 0, 0, detail)
        self._fill(value, items)
        self._stack.append(value)

    def _add(self, kind: str, items: Sequence[_Value]) -> None:
        """Add *items* to the value on top of the stack.

        Raises:
            UnsafePickle: The value is not of *kind*, or was read from the memo and so must not
                change any more, or becomes too large.
        """
        value = self._stack[-1]
        if value.kind != kind or value.is_shared:
            raise UnsafePickle("a value changes after it was used")
        self._fill(value, items)

    def _fill(self, value: _Value, items: Sequence[_Value]) -> None:
        for item in items:
            value.size += item.size
            if item.levels >= value.levels:
                value.levels = item.levels + 1
        if value.size > self._limit or value.levels > _MAX_LEVELS:
            raise UnsafePickle("its content is too large, or too deeply nested")

    def _hash(self, key: _Value) -> None:
        if key.kind not in _HASHED and not (key.kind == "int" and key.size <= _SMALL_INT):
            self._chosen_hashes += 1
            if self._chosen_hashes > _MAX_CHOSEN_HASHES:
                raise UnsafePickle("it has too many keys that are neither text nor small numbers")


def _text(argument: str) -> _Value:
    return _Value("str", len(argument), 0, argument)


def _bytes(argument: bytes | bytearray) -> _Value:
    return _Value("bytes", len(argument))


def _int(argument: int) -> _Value:
    bits = argument.bit_length()
    if bits > _MAX_BITS:
        raise UnsafePickle("an integer is too large")
    return _Value("int", (bits + 7) // 8)


def _float(_: object) -> _Value:
    return _Value("float", 8)


def _constant(_: object) -> _Value:
    return _Value("constant", 0)


_SMALL_INT = _PER_VALUE + _HASHED_BITS // 8
# Python chooses the hashes of texts and bytes at random, and few numbers have equal hashes.
_HASHED = ("str", "bytes", "float", "constant")
_LEAVES: dict[str, Callable[..., _Value]] = {
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), _text),
    **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"), _bytes),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "LONG4"), _int),
    "BINFLOAT": _float,
    **dict.fromkeys(("NONE", "NEWTRUE", "NEWFALSE"), _constant),
}
_STEPS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), _Checker.skip),
    "MARK": _Checker.mark,
    "MEMOIZE": _Checker.memoize,
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Checker.get),
    "EMPTY_LIST": _Checker.empty_list,
    "EMPTY_DICT": _Checker.empty_dict,
    "EMPTY_SET": _Checker.empty_set,
    "APPEND": _Checker.append,
    "APPENDS": _Checker.appends,
    "SETITEM": _Checker.setitem,
    "SETITEMS": _Checker.setitems,
    "ADDITEMS": _Checker.additems,
    "FROZENSET": _Checker.frozenset,
    "EMPTY_TUPLE": lambda checker, _: checker.tuple_of(0),
    "TUPLE1": lambda checker, _: checker.tuple_of(1),
    "TUPLE2": lambda checker, _: checker.tuple_of(2),
    "TUPLE3": lambda checker, _: checker.tuple_of(3),
    "TUPLE": _Checker.tuple,
    "STACK_GLOBAL": _Checker.global_,
    "NEWOBJ": _Checker.new,
    "BUILD": _Checker.build,
    "REDUCE": _Checker.reduce,
}
