"""Objects that contain keys are neither copied nor shown."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from adk_secure_sessions.crypto.key_material import KeyMaterial

KEY = b"needle"


class Held(KeyMaterial):
    __slots__ = ("key",)

    def __init__(self) -> None:
        self.key = KEY


@pytest.mark.parametrize(
    "take", [pickle.dumps, copy.copy, copy.deepcopy, lambda held: pickle.dumps(held, 0)]
)
def test_object_with_a_key_is_neither_pickled_nor_copied(take: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError, match="Held holds key material"):
        take(Held())


def test_object_with_a_key_shows_its_class_alone() -> None:
    assert repr(Held()) == str(Held()) == "<Held>"
