"""ADK's artifact contract: the same tests on our service and on ADK's own in-memory service."""

from collections.abc import AsyncIterator
from mimetypes import guess_type
from pathlib import Path
from typing import Any

import pytest
from google.adk.artifacts import BaseArtifactService, InMemoryArtifactService
from google.adk.errors.input_validation_error import InputValidationError
from google.genai import types

from adk_secure_sessions import AesGcmBackend, ConfigurationError, EncryptedSessionService
from adk_secure_sessions.integrations.artifacts import EncryptedArtifactService
from tests.conformance.support import ADK

BACKEND = AesGcmBackend(bytes(range(32)))
WHO: dict[str, Any] = {"app_name": "clinic", "user_id": "ada"}
HERE = WHO | {"session_id": "s1", "filename": "scan.png"}


def blob(data: bytes, mime_type: str = "image/png") -> types.Part:
    return types.Part(inline_data=types.Blob(mime_type=mime_type, data=data))


@pytest.fixture
async def sessions(tmp_path: Path) -> AsyncIterator[EncryptedSessionService]:
    async with EncryptedSessionService(f"sqlite:///{tmp_path}/s.db", BACKEND) as sessions:
        yield sessions


@pytest.fixture(params=["ours", "adk"])
def service(
    request: pytest.FixtureRequest, sessions: EncryptedSessionService, tmp_path: Path
) -> BaseArtifactService:
    if request.param == "adk":
        if ADK < (2, 0):
            pytest.skip("artifacts of older releases of google-adk are the objects that were saved")
        return InMemoryArtifactService()
    return EncryptedArtifactService(sessions, tmp_path / "blobs")


PARTS = {
    "bytes": blob(b"\x00\xff" * 100),
    "bytes with a name": types.Part(
        inline_data=types.Blob(mime_type="a/b", data=b"x", display_name="Grüße")
    ),
    "no bytes": blob(b""),
    "long": blob(bytes(300_000)),
    "text": types.Part(text="Grüße \N{WAVING HAND SIGN}"),
    "empty text": types.Part(text=""),
    "file": types.Part(file_data=types.FileData(file_uri="https://example.org/x", mime_type="a/b")),
    "thought": types.Part(text="hm", thought=True, thought_signature=b"\x01\xfe"),
    "video": types.Part(
        inline_data=types.Blob(mime_type="video/mp4", data=b"v"),
        video_metadata=types.VideoMetadata(fps=1.5),
    ),
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS.keys())
async def test_part_is_loaded_as_it_was_saved(
    service: BaseArtifactService, part: types.Part
) -> None:
    assert await service.save_artifact(**HERE, artifact=part) == 0
    loaded = await service.load_artifact(**HERE)
    assert loaded == part
    assert loaded is not part
    found = await service.get_artifact_version(**HERE)
    assert found is not None
    kind = part.inline_data or part.file_data
    assert found.mime_type == (kind.mime_type if kind else "text/plain")


@pytest.mark.parametrize(
    "part",
    [
        {"inlineData": {"mimeType": "a/b", "data": "aGk="}},
        {"inline_data": {"mime_type": "a/b", "data": "aGk="}},
    ],
)
async def test_dictionaries_are_accepted(service: BaseArtifactService, part: Any) -> None:
    await service.save_artifact(**HERE, artifact=part)
    assert await service.load_artifact(**HERE) == blob(b"hi", "a/b")


@pytest.mark.parametrize(
    "part",
    [
        types.Part(),
        types.Part(function_call=types.FunctionCall(name="f", args={})),
        types.Part(executable_code=types.ExecutableCode(code="1", language=types.Language.PYTHON)),
    ],
)
async def test_other_parts_are_rejected(service: BaseArtifactService, part: types.Part) -> None:
    with pytest.raises(InputValidationError):
        await service.save_artifact(**HERE, artifact=part)
    assert await service.list_artifact_keys(**WHO, session_id="s1") == []


async def test_versions_are_counted_and_kept(service: BaseArtifactService) -> None:
    for number in range(3):
        saved = await service.save_artifact(
            **HERE, artifact=blob(b"%d" % number), custom_metadata={"n": number} if number else None
        )
        assert saved == number
    assert await service.list_versions(**HERE) == [0, 1, 2]
    for version, data in ((None, b"2"), (0, b"0"), (1, b"1"), (2, b"2")):
        assert await service.load_artifact(**HERE, version=version) == blob(data)
    for version in (3, -1):
        assert await service.load_artifact(**HERE, version=version) is None
        assert await service.get_artifact_version(**HERE, version=version) is None
    listed = await service.list_artifact_versions(**HERE)
    assert [one.version for one in listed] == [0, 1, 2]
    assert [one.custom_metadata for one in listed] == [{}, {"n": 1}, {"n": 2}]
    assert listed[0].create_time <= listed[2].create_time
    assert len({one.canonical_uri for one in listed}) == 3
    assert await service.get_artifact_version(**HERE, version=1) == listed[1]


async def test_unknown_and_deleted_artifacts(service: BaseArtifactService) -> None:
    for _ in range(2):  # not saved yet, and deleted
        assert await service.load_artifact(**HERE) is None
        assert await service.list_versions(**HERE) == []
        assert await service.list_artifact_versions(**HERE) == []
        assert await service.get_artifact_version(**HERE) is None
        assert await service.list_artifact_keys(**WHO, session_id="s1") == []
        for version in range(2):
            assert await service.save_artifact(**HERE, artifact=types.Part(text="x")) == version
        await service.delete_artifact(**HERE)
    await service.delete_artifact(**HERE)


async def test_names_belong_to_a_session_or_to_the_user(service: BaseArtifactService) -> None:
    async def save(filename: str, session_id: str | None, user_id: str = "ada") -> None:
        await service.save_artifact(
            app_name="clinic",
            user_id=user_id,
            filename=filename,
            session_id=session_id,
            artifact=types.Part(text=f"{user_id} {session_id} {filename}"),
        )

    await save("b.txt", "s1")
    await save("a.txt", "s1")
    await save("b.txt", "s2")
    await save("user:z", "s1")
    await save("user:b.txt", None)
    await save("b.txt", "s1", "bob")
    for_sessions = {"s1": ["a.txt", "b.txt"], "s2": ["b.txt"], "s3": [], None: []}
    for session_id, names in for_sessions.items():
        listed = await service.list_artifact_keys(**WHO, session_id=session_id)
        assert listed == [*names, "user:b.txt", "user:z"]
        loaded = await service.load_artifact(**WHO, session_id=session_id, filename="user:z")
        assert loaded == types.Part(text="ada s1 user:z")
    await service.delete_artifact(**WHO, session_id="s1", filename="b.txt")
    assert "b.txt" not in await service.list_artifact_keys(**WHO, session_id="s1")
    assert "b.txt" in await service.list_artifact_keys(**WHO, session_id="s2")
    bobs = HERE | {"user_id": "bob", "filename": "b.txt"}
    assert await service.load_artifact(**bobs) == types.Part(text="bob s1 b.txt")
    with pytest.raises(InputValidationError):
        await save("b.txt", None)
    with pytest.raises(InputValidationError):
        await service.load_artifact(**WHO, filename="b.txt")


def reference(session_id: str | None, filename: str, version: int = 0) -> types.Part:
    where = f"/sessions/{session_id}" if session_id else ""
    return types.Part(
        file_data=types.FileData(
            file_uri=f"artifact://apps/clinic/users/ada{where}/artifacts/{filename}"
            f"/versions/{version}"
        )
    )


async def test_references_are_followed(service: BaseArtifactService) -> None:
    target = types.Part(text="target")
    await service.save_artifact(**HERE, artifact=target)
    for name, target_name in (("link", "scan.png"), ("link2", "link")):
        link = HERE | {"filename": name}
        await service.save_artifact(**link, artifact=reference("s1", target_name))
        assert await service.load_artifact(**link) == target
        found = await service.get_artifact_version(**link)
        assert found is not None
        assert found.mime_type is None


async def test_reference_that_leaves_the_scope_or_runs_in_circles(
    service: BaseArtifactService,
) -> None:
    for part in (
        reference("s2", "scan.png"),
        types.Part(file_data=types.FileData(file_uri="artifact://nonsense")),
        types.Part(
            file_data=types.FileData(
                file_uri="artifact://apps/clinic/users/bob/artifacts/x/versions/0"
            )
        ),
    ):
        with pytest.raises(InputValidationError):
            await service.save_artifact(**HERE, artifact=part)
    await service.save_artifact(**HERE, artifact=reference("s1", "scan.png"))
    with pytest.raises(InputValidationError):
        await service.load_artifact(**HERE)


async def test_what_a_rewind_saves_is_loaded_as_absent(service: BaseArtifactService) -> None:
    await service.save_artifact(**HERE, artifact=types.Part(text="old"))
    await service.save_artifact(**HERE, artifact=blob(b"", "application/octet-stream"))
    assert await service.load_artifact(**HERE) is None
    assert await service.load_artifact(**HERE, version=0) == types.Part(text="old")
    assert await service.list_versions(**HERE) == [0, 1]


async def test_loaded_parts_share_nothing(service: BaseArtifactService) -> None:
    part, metadata = types.Part(text="text"), {"list": [1]}
    await service.save_artifact(**HERE, artifact=part, custom_metadata=metadata)
    part.text = "changed"
    metadata["list"].append(2)
    loaded = await service.load_artifact(**HERE)
    assert loaded is not None
    loaded.text = "changed, too"
    assert await service.load_artifact(**HERE) == types.Part(text="text")
    found = await service.get_artifact_version(**HERE)
    assert found is not None
    assert found.custom_metadata == {"list": [1]}


# --- ours only -----------------------------------------------------------------------------------


@pytest.fixture
def ours(sessions: EncryptedSessionService, tmp_path: Path) -> EncryptedArtifactService:
    return EncryptedArtifactService(sessions, tmp_path / "blobs")


@pytest.mark.parametrize("name", ["", "../x", "/etc/passwd", "a/b", "\x00", "C:\\x", "[", "."])
async def test_any_name_is_kept_apart_from_any_other(
    ours: EncryptedArtifactService, name: str
) -> None:
    await ours.save_artifact(**HERE, artifact=types.Part(text="other"))
    who: dict[str, Any] = {"app_name": name, "user_id": name, "session_id": name, "filename": name}
    await ours.save_artifact(**who, artifact=types.Part(text="this"))
    assert await ours.load_artifact(**who) == types.Part(text="this")
    del who["filename"]
    assert await ours.list_artifact_keys(**who) == [name]


async def test_bad_input_stores_nothing(
    ours: EncryptedArtifactService, sessions: EncryptedSessionService, tmp_path: Path
) -> None:
    text = types.Part(text="x")
    for metadata in ({"f": print}, {"n": 10**5000}):
        with pytest.raises(InputValidationError, match="custom_metadata"):
            await ours.save_artifact(**HERE, artifact=text, custom_metadata=metadata)
    for name, reason in (("x" * 1025, "more than 1024 bytes"), ("\ud800", "a lone surrogate")):
        with pytest.raises(InputValidationError, match=f"filename has {reason}"):
            await ours.save_artifact(**WHO, session_id="s", filename=name, artifact=text)
    mime_types: list[Any] = [guess_type("a.txt"), "SECRET\ud800"]
    for mime_type in mime_types:
        with pytest.raises(InputValidationError, match="artifact"):
            await ours.save_stream(**HERE, pieces=pieces(b"x"), mime_type=mime_type)
    with pytest.raises(InputValidationError, match="user_id has more than 1024 bytes"):
        await ours.list_artifact_keys(**WHO | {"user_id": "x" * 1025})
    with pytest.raises(ConfigurationError):
        EncryptedArtifactService(sessions, "ftp://x")
    with pytest.raises(ConfigurationError, match="not a str"):
        EncryptedArtifactService("sessions.db", tmp_path)  # type: ignore[arg-type]
    assert list((tmp_path / "blobs").iterdir()) == []


async def pieces(*data: bytes, then: Exception | None = None) -> AsyncIterator[bytes]:
    for one in data:
        yield one
    if then is not None:
        raise then


async def test_streams(ours: EncryptedArtifactService) -> None:
    data = bytes(range(256)) * 1000
    parts = pieces(data[:10], data[10:], b"")
    assert await ours.save_stream(**HERE, pieces=parts, mime_type="video/mp4") == 0
    assert await ours.load_artifact(**HERE) == blob(data, "video/mp4")
    for start, stop in ((0, None), (0, 0), (70_000, 70_001), (65_536, None), (255_999, 256_000)):
        stream = await ours.open_stream(**HERE, start=start, stop=stop)
        assert stream is not None
        assert (stream.size, stream.mime_type, stream.version) == (len(data), "video/mp4", 0)
        assert await stream.read() == data[start:stop]
    with pytest.raises(ValueError, match="not within"):
        await ours.open_stream(**HERE, start=len(data) + 1)
    assert await ours.open_stream(**WHO, session_id="s1", filename="unknown") is None


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


BAD_PARTS = {
    "nested too deeply": types.Part(text="SECRET", part_metadata=nested(250)),
    "an integer that is too large": types.Part(text="SECRET", part_metadata={"n": 10**5000}),
    "not a number": types.Part(text="SECRET", part_metadata={"n": float("nan")}),
    "bytes in metadata": types.Part(text="SECRET", part_metadata={"b": b"SECRET"}),
    "a lone surrogate": types.Part(
        inline_data=types.Blob(data=b"x", mime_type="a/b", display_name="SECRET\ud800")
    ),
}


@pytest.mark.parametrize("part", BAD_PARTS.values(), ids=BAD_PARTS.keys())
async def test_part_that_could_not_be_read_back_is_not_stored(
    ours: EncryptedArtifactService, part: types.Part, tmp_path: Path
) -> None:
    with pytest.raises(InputValidationError, match="artifact") as rejection:
        await ours.save_artifact(**HERE, artifact=part)
    assert "SECRET" not in str(rejection.value)
    assert await ours.list_artifact_keys(**WHO, session_id="s1") == []
    assert [path for path in (tmp_path / "blobs").rglob("*") if path.is_file()] == []
