"""Each fuzz target accepts every input of its corpus; no fuzzer is needed for that."""

import pytest

from tests.fuzz import corpus
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("target", TARGETS)
def test_no_input_of_the_corpus_breaks_the_target(target: str) -> None:
    files = corpus.inputs(target)
    assert len(files) >= 3
    for path in files:
        try:
            TARGETS[target](path.read_bytes())
        except BaseException as error:
            error.add_note(f"the input is {path.name}")
            raise


def test_each_folder_of_the_corpus_has_a_target() -> None:
    assert {path.name for path in corpus.ROOT.iterdir()} == set(TARGETS)
