"""Events of every kind that the installed ADK can build.

`CORPUS` is written by hand, and has what agents really produce.  `of_every_field` builds the rest
from the models' own field types, so that a field which a newer ADK adds gets a sample as well.
"""

import datetime
import enum
import types as python_types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Literal, Union

import pydantic
from google.adk.auth.auth_credential import AuthCredential, AuthCredentialTypes, OAuth2Auth
from google.adk.auth.auth_schemes import OpenIdConnectWithConfig
from google.adk.auth.auth_tool import AuthConfig
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions, EventCompaction
from google.adk.tools.tool_confirmation import ToolConfirmation
from google.genai import types

from tests.conformance.support import event

BINARY = bytes(range(256))
TEXT = 'Grüße, 世界 🎉 \n " \\ \0 \u2028 </script>'
JSON: dict[str, Any] = {
    "text": TEXT,
    "list": [1, 2.5, -0.0, 10**20, True, None, {}, []],
    "": {"nested": {"a": 1, "none": None}},
    "none": None,
}


def parts(*given: types.Part, role: str = "model") -> Event:
    return event(content=types.Content(role=role, parts=list(given)))


def actions(**fields: Any) -> Event:
    return event(actions=EventActions(**fields))


def oauth2() -> AuthConfig:
    return AuthConfig(
        auth_scheme=OpenIdConnectWithConfig(
            authorization_endpoint="https://login.example.com/auth",
            token_endpoint="https://login.example.com/token",
            scopes=["openid", "profile"],
        ),
        raw_auth_credential=AuthCredential(
            auth_type=AuthCredentialTypes.OPEN_ID_CONNECT,
            oauth2=OAuth2Auth(client_id="client", client_secret="not so secret"),
        ),
        exchanged_auth_credential=AuthCredential(
            auth_type=AuthCredentialTypes.OPEN_ID_CONNECT,
            oauth2=OAuth2Auth(
                client_id="client",
                client_secret="not so secret",
                auth_uri="https://login.example.com/auth?state=xyz",
                state="xyz",
                access_token="access",
                refresh_token="refresh",
                expires_at=1_700_003_600,
            ),
        ),
    )


def call(name: str = "weather", **args: Any) -> types.Part:
    return types.Part(function_call=types.FunctionCall(id=f"id-{name}", name=name, args=args))


CORPUS: dict[str, Callable[[], Event]] = {
    "bare": lambda: event(),
    "user-text": lambda: parts(types.Part(text="What is the weather?"), role="user"),
    "odd-text": lambda: parts(types.Part(text=TEXT)),
    "empty-text": lambda: parts(types.Part(text="")),
    "empty-content": lambda: event(content=types.Content(role="model", parts=[])),
    "content-without-parts": lambda: event(content=types.Content(role="model")),
    "content-without-role": lambda: event(content=types.Content(parts=[types.Part(text="x")])),
    "thought": lambda: parts(
        types.Part(text="Let me think.", thought=True, thought_signature=BINARY),
        types.Part(text="The answer."),
    ),
    "function-call": lambda: parts(call(city="Zürich", deep=JSON)),
    "signed-function-call": lambda: parts(
        types.Part(
            function_call=types.FunctionCall(id="1", name="f", args={}), thought_signature=BINARY
        )
    ),
    "parallel-function-calls": lambda: parts(call("one", n=1), call("two", n=None)),
    "function-response": lambda: parts(
        types.Part(function_response=types.FunctionResponse(id="1", name="f", response=JSON)),
        role="user",
    ),
    "inline-data": lambda: parts(
        types.Part(inline_data=types.Blob(data=BINARY, mime_type="image/png", display_name="a.png"))
    ),
    "empty-inline-data": lambda: parts(
        types.Part(inline_data=types.Blob(data=b"", mime_type="audio/pcm"))
    ),
    "large-inline-data": lambda: parts(
        types.Part(inline_data=types.Blob(data=BINARY * 1000, mime_type="audio/pcm"))
    ),
    "file-data": lambda: parts(
        types.Part(
            file_data=types.FileData(file_uri="gs://bucket/object", mime_type="video/mp4"),
            video_metadata=types.VideoMetadata(start_offset="1.5s", end_offset="10s", fps=2.0),
        )
    ),
    "code": lambda: parts(
        types.Part(
            executable_code=types.ExecutableCode(code="print(1)", language=types.Language.PYTHON)
        ),
        types.Part(
            code_execution_result=types.CodeExecutionResult(
                outcome=types.Outcome.OUTCOME_OK, output="1\n"
            )
        ),
    ),
    "many-parts": lambda: parts(
        *(types.Part(text=str(n)) for n in range(50)), types.Part(text=TEXT)
    ),
    "long-running": lambda: event(
        content=types.Content(role="model", parts=[call("one"), call("two")]),
        long_running_tool_ids={"id-one", "id-two", "id-ünï"},
    ),
    "no-long-running": lambda: event(long_running_tool_ids=set()),
    "branch": lambda: event("text", branch="root.left.leaf"),
    "error": lambda: event(error_code="SAFETY", error_message=f"blocked: {TEXT}"),
    "interrupted": lambda: event(interrupted=True, turn_complete=True),
    "falsehoods": lambda: event(interrupted=False, turn_complete=False, partial=False),
    "finished": lambda: event("text", finish_reason=types.FinishReason.MAX_TOKENS),
    "custom-metadata": lambda: event(custom_metadata=JSON),
    "usage": lambda: event(
        usage_metadata=types.GenerateContentResponseUsageMetadata(
            prompt_token_count=10,
            candidates_token_count=0,
            total_token_count=10,
            prompt_tokens_details=[
                types.ModalityTokenCount(modality=types.MediaModality.AUDIO, token_count=10)
            ],
        ),
        model_version="model-1",
    ),
    "grounding": lambda: event(
        "text",
        grounding_metadata=types.GroundingMetadata(
            web_search_queries=["weather Zürich"],
            grounding_chunks=[
                types.GroundingChunk(
                    web=types.GroundingChunkWeb(uri="https://example.com", title="Example")
                )
            ],
            grounding_supports=[
                types.GroundingSupport(
                    segment=types.Segment(start_index=0, end_index=4, text="text"),
                    grounding_chunk_indices=[0],
                    confidence_scores=[0.75],
                )
            ],
            search_entry_point=types.SearchEntryPoint(rendered_content="<b>x</b>", sdk_blob=BINARY),
        ),
    ),
    "citation": lambda: event(
        "text",
        citation_metadata=types.CitationMetadata(
            citations=[
                types.Citation(start_index=0, end_index=4, uri="https://example.com", title="E")
            ]
        ),
    ),
    "transcription": lambda: event(
        input_transcription=types.Transcription(text="hello", finished=False),
        output_transcription=types.Transcription(text="goodbye", finished=True),
    ),
    "log-probabilities": lambda: event(
        "text",
        avg_logprobs=-0.1,
        logprobs_result=types.LogprobsResult(
            chosen_candidates=[
                types.LogprobsResultCandidate(token="te", token_id=7, log_probability=-1e-9)
            ]
        ),
    ),
    "artifacts": lambda: actions(artifact_delta={"report.pdf": 0, "ü/b c.txt": 12}),
    "transfer": lambda: actions(transfer_to_agent="billing"),
    "escalate": lambda: actions(escalate=True, skip_summarization=True),
    "oauth2": lambda: actions(requested_auth_configs={"call-1": oauth2()}),
    "tool-confirmation": lambda: actions(
        requested_tool_confirmations={
            "call-1": ToolConfirmation(hint="Sure?", confirmed=False, payload=JSON),
            "call-2": ToolConfirmation(confirmed=True),
        }
    ),
    "compaction": lambda: actions(
        compaction=EventCompaction(
            start_timestamp=1.5,
            end_timestamp=1_700_000_000.123456,
            compacted_content=types.Content(role="model", parts=[types.Part(text="In short: …")]),
        )
    ),
    "rewind": lambda: actions(
        rewind_before_invocation_id="invocation", state_delta={"k": None}, artifact_delta={"a": 1}
    ),
    "agent-state": lambda: actions(agent_state=JSON, end_of_agent=True),
    "state": lambda: actions(state_delta={"k": JSON, "user:k": [], "app:k": None, "": 0}),
}

# A value for each type of a field.
_VALUES: dict[Any, Any] = {
    str: TEXT,
    bytes: BINARY,
    int: 7,
    float: 0.1 + 0.2,
    bool: True,
    object: JSON,
    Any: JSON,
    datetime.datetime: datetime.datetime(2024, 5, 6, 7, 8, 9, 123456, tzinfo=datetime.UTC),
    datetime.date: datetime.date(2024, 5, 6),
}
_UNIONS = (Union, python_types.UnionType)
_DEPTH = 7


class CannotBuildError(Exception):
    """There is no sample for this type."""


def of_every_field() -> Iterator[tuple[str, Event]]:
    """One event for each field of an event, of its actions and of a part, deeply filled in."""
    for name, field in Event.model_fields.items():
        if name == "timestamp":
            yield "Event.timestamp", event()  # at a time that every release stores exactly
        elif name not in ("actions", "partial"):  # the latter is never stored
            yield f"Event.{name}", event(**{name: build(field.annotation)})
    for name, field in EventActions.model_fields.items():
        # Typed `Any` in some releases, so that importing events need not import all of auth.
        value = {"call": oauth2()} if name == "requested_auth_configs" else None
        yield f"EventActions.{name}", actions(**{name: value or build(field.annotation)})
    for name, field in types.Part.model_fields.items():
        yield f"Part.{name}", parts(types.Part(**{name: build(field.annotation)}))


def build(annotation: Any, depth: int = _DEPTH) -> Any:
    """A value of this type with all that it may contain."""
    if annotation in _VALUES:
        return _VALUES[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return build(arguments[0], depth)
    if origin is Literal:
        return arguments[0]
    if origin in _UNIONS:
        return _first([a for a in arguments if a is not type(None)], depth)
    if origin in (list, set, frozenset, tuple):
        return origin([build(arguments[0], depth)])
    if origin is dict:
        return {"key": build(arguments[1], depth), "ключ": build(arguments[1], depth)}
    if annotation in (list, dict):
        return annotation()
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return list(annotation)[-1]
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return _build_model(annotation, depth - 1)
    raise CannotBuildError(repr(annotation))


def _first(alternatives: list[Any], depth: int) -> Any:
    for alternative in alternatives:
        try:
            return build(alternative, depth)
        except CannotBuildError:
            continue
    raise CannotBuildError(repr(alternatives))


def _build_model(model: type[pydantic.BaseModel], depth: int) -> pydantic.BaseModel:
    filled: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if depth > 0 or field.is_required():
            try:
                filled[field.alias or name] = build(field.annotation, depth)
            except CannotBuildError:
                if field.is_required():
                    raise
    return model.model_validate(filled)
