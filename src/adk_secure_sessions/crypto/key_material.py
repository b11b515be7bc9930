"""The base class of objects that contain keys."""

from typing import Never


class KeyMaterial:
    """Base class of objects that contain keys.

    These objects cannot be pickled or copied, and their `repr` shows no key.
    """

    __slots__ = ()

    def __reduce_ex__(self, protocol: object) -> Never:
        raise TypeError(f"{type(self).__name__} holds key material and cannot be pickled or copied")

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"
