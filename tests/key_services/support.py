"""A key service under test, whatever its kind."""

from collections.abc import Callable
from dataclasses import dataclass

from adk_secure_sessions import KeyProvider


@dataclass
class Service:
    """A running key service, and the providers that ask it."""

    make: Callable[[], KeyProvider]
    other: Callable[[], KeyProvider]  # of another key
    hidden: list[str | bytes]  # what no provider of it may show
    calls: Callable[[], int]  # how often it was asked to encrypt or decrypt
    stop: Callable[[], None]  # it can be reached no more
    every: int = 1  # for check_key_provider
