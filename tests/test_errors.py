"""Copies of errors: the facts are kept, and nothing of a third party's is."""

import pickle

from adk_secure_sessions import DecryptionError, Reason, TamperedError, UnknownKeyError


class Careless(DecryptionError):
    """A third party's, which does not call `__init__` of ours."""

    def __init__(self, text: str, secret: str) -> None:
        Exception.__init__(self, text)
        self.secret = secret


def test_copy_names_the_row_and_keeps_the_reason() -> None:
    error = TamperedError("gone", reason=Reason.MISSING).located("secure_users", 7)
    assert (str(error), error.detail) == ("secure_users row 7: gone", "gone")
    assert (error.table, error.row, error.reason) == ("secure_users", "7", Reason.MISSING)


def test_first_row_that_is_named_stays_the_rejected_one() -> None:
    error = UnknownKeyError("no key").located("secure_data_keys", 1).located("secure_users", 2)
    assert str(error) == "secure_users row 2: secure_data_keys row 1: no key"
    assert (error.table, error.row, error.reason) == ("secure_data_keys", "1", Reason.UNKNOWN_KEY)


def test_copy_of_a_third_partys_error_has_none_of_its_attributes_and_notes() -> None:
    original = Careless("no", "needle")
    original.add_note("needle")
    error = original.about("its seal").located("secure_apps", 3)
    assert str(error) == "secure_apps row 3: its seal: no"
    assert (error.table, error.row, error.retryable) == ("secure_apps", "3", False)
    assert "needle" not in repr(vars(error))
    assert not hasattr(error, "__notes__")


def test_errors_survive_pickling() -> None:
    error = TamperedError("gone", reason=Reason.MISSING).located("secure_users", 7)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.table, copy.row, copy.reason) == (
        str(error),
        "secure_users",
        "7",
        Reason.MISSING,
    )
