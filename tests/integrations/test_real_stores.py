"""The tests of artifacts and blobs in a bucket, on real servers: S3, Azurite and fake-gcs-server.

They are the tests that also run on moto.  By default, `BY_DEFAULT` runs on the servers that start
quickly; `make soak` runs all tests on all servers.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from adk_secure_sessions.integrations.artifact_store import ArtifactStore
from adk_secure_sessions.integrations.blob_store import BlobStore
from tests.integrations import real_stores, test_artifact_stores, test_object_store
from tests.integrations.object_server import ObjectServer
from tests.integrations.test_artifact_stores import sessions  # noqa: F401 - a fixture
from tests.integrations.test_object_store import PREFIX, small_objects  # noqa: F401

BY_DEFAULT = "test_artifacts_are_saved_loaded_and_deleted"
SLOW = {"azurite"}  # it starts in two seconds
# These tests are about moto, or about no server.
OF_MOTO = {
    "test_foreign_objects_are_not_listed",
    "test_foreign_objects_are_no_marks",
    "test_marked_blobs_of_a_bucket_are_deleted_when_their_mark_is_old",
    "test_plain_http_of_the_environment_is_rejected_unless_allowed",
    "test_environment_names_the_store_and_its_credentials",
    "test_store_of_obstore_can_be_given",
    "test_store_that_cannot_be_opened_is_named",
}


SKIPPED = {
    ("s3", "test_missing_bucket_is_named"): "s3s-fs creates a missing bucket",
    ("google", "test_missing_bucket_is_named"): "fake-gcs-server lists it with the status 500",
}


def _uses_a_bucket(test: Any) -> bool:
    arguments = test.__code__.co_varnames[: test.__code__.co_argcount]
    return bool({"server", "store"} & set(arguments))


for _module in (test_artifact_stores, test_object_store):
    for _name, _test in list(vars(_module).items()):
        if _name.startswith("test_") and _name not in OF_MOTO and _uses_a_bucket(_test):
            assert _name not in globals(), f"two tests have the name {_name}"
            globals()[_name] = _test

pytestmark = pytest.mark.no_cover


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    test = metafunc.function.__name__
    servers = []
    for name in real_stores.PROGRAMS:
        marks = [] if test == BY_DEFAULT and name not in SLOW else [pytest.mark.soak]
        why = SKIPPED.get((name, test))
        skip = [pytest.mark.skip(why)] if why else []
        servers.append(pytest.param(name, marks=[*marks, *skip]))
    metafunc.parametrize("running", servers, indirect=True, scope="module")


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest) -> Iterator[ObjectServer]:
    real_stores.skip_unless_installed(request.param)
    with real_stores.running(request.param) as server:
        yield server


@pytest.fixture
def server(running: ObjectServer, no_settings_of_stores: None) -> ObjectServer:
    """The server, empty."""
    running.clear()
    return running


@pytest.fixture
def store(server: ObjectServer) -> BlobStore:
    return ArtifactStore(server.url("team"), options=server.options).blobs(PREFIX)


@pytest.fixture
def url(file_url: str) -> str:
    """The rows are on SQLite: the kind of database makes no difference to a store."""
    return file_url
