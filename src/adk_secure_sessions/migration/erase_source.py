"""Delete the plaintext rows of a source whose copy is equal."""

from typing import Any, NamedTuple


class Erased(NamedTuple):
    x: int


class SourceErasure(NamedTuple):
    x: int


async def erase_source(*a: Any, **k: Any) -> Any: ...
