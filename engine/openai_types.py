"""Request bodies of the OpenAI-compatible API, shared by the server and the offline runner.

Unknown fields are refused by name. A field this engine has no use for is accepted only with the values that change
nothing, so that common clients work and nobody is told a feature works when it does not.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.errors import RequestRejected
from engine.sampling_params import (
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TEMPERATURE,
)

MAX_PROMPTS = 256
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_NAME_CHARS = 128
MAX_TOKEN_ID = 2**31 - 1

# Values of otherwise unsupported fields that ask for what happens anyway.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "detokenize": (True,),
    "spaces_between_special_tokens": (True,),
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "return_tokens_as_token_ids": (False,),
    "bad_words": ([],),
    "functions": ([],),
    "logits_processors": ([],),
}
INSTEAD = {
    "best_of": "use n",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "bad_words": "use logit_bias or stop",
    "reasoning_effort": "use chat_template_kwargs.thinking",
    "chat_template": "the operator sets it with --chat-template",
    "logits_processors": "code is not accepted over HTTP",
    "custom_logit_processor": "code is not accepted over HTTP",
    "max_new_tokens": "use max_tokens",
    "parallel_tool_calls": "only true; the model decides how many calls it makes",
}

FORMS = {
    "prompt": "a text, a list of texts, a list of token ids, or a list of such lists; token ids are not negative",
    "stop": f"a text or at most {MAX_STOP_STRINGS} texts, each of 1 to {MAX_STOP_STRING_CHARS} characters",
    "tool_choice": 'none, auto, required, or {"type": "function", "function": {"name": ...}}',
    "guided_json": "a JSON schema",
}

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_CHARS)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class _Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Schema):
    """include_usage: one last chunk with usage and no choices; continuous_usage_stats: usage in every chunk too."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchemaFormat(_Schema):
    name: Name = "schema"
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Schema):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(_Schema):
    """Exactly one of: a JSON schema, any JSON object, a regular expression, a list of texts, a Lark grammar."""

    json_schema: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class FunctionDefinition(_Schema):
    name: str = Field(pattern=r"^[\w.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Schema):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(_Schema):
    name: str


class NamedToolChoice(_Schema):
    type: Literal["function"]
    function: NamedFunction


class _Sampling(_Schema):
    """What every way to generate takes. None means the default: the model's recommendation where it has one."""

    model: str | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    temperature: float | None = Field(default=None, ge=0, le=MAX_TEMPERATURE)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=MAX_TOKEN_ID)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    max_tokens: int | None = Field(default=None, ge=0, le=MAX_TOKEN_ID)
    min_tokens: int | None = Field(default=None, ge=0, le=MAX_TOKEN_ID)
    stop: str | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, Bias] | None = Field(default=None, max_length=MAX_LOGIT_BIAS)
    allowed_token_ids: list[TokenId] | None = None
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    return_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, le=MAX_TOKEN_ID)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: int | None = Field(default=None, ge=-(2**31), le=2**31 - 1)
    request_id: Name | None = None
    rid: Name | None = None
    cache_salt: Name | None = None
    data_parallel_rank: int | None = Field(default=None, ge=0, le=4095)
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class CompletionRequest(_Sampling):
    """POST /v1/completions. logprobs: how many alternatives beside the chosen token."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    add_special_tokens: bool | None = None
    allow_special_tokens: bool | None = None


class ChatCompletionRequest(_Sampling):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(default=None, ge=0, le=MAX_TOKEN_ID)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class GenerateRequest(_Sampling):
    """POST /generate: token ids in, token ids out. Stop strings work as everywhere; text comes along on request."""

    prompt_token_ids: list[TokenId] = Field(min_length=1)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    return_text: bool | None = None


class TokenizeRequest(_Schema):
    """POST /tokenize: a prompt, or messages as for chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    allow_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Schema):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool | None = None


Request = TypeVar("Request", bound=BaseModel)


def parse_request(kind: type[Request], body: bytes | dict[str, Any]) -> Request:
    """Decode and check a body. Raises RequestRejected naming the field, what is wrong with it and the fix."""
    if isinstance(body, bytes):
        try:
            body = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RequestRejected(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestRejected(f"the body must be a JSON object, got {type(body).__name__}")
    given = {name: value for name, value in body.items() if value is not None}  # null asks for the default
    for name in NEUTRAL.keys() & given.keys() - kind.model_fields.keys():
        if any(given[name] == value and type(given[name]) is type(value) for value in NEUTRAL[name]):
            del given[name]
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _rejection(error.errors(include_url=False)) from None
    except RecursionError as error:
        raise RequestRejected("the body is nested too deeply") from error


def _rejection(problems: list[Any]) -> RequestRejected:
    """The first problem in the user's words."""
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    # Locations inside unions also name the alternative that was tried ("list[str]", "function-after"): keep fields and indices.
    location = [part for part in problem["loc"] if isinstance(part, int) or part.isidentifier()]
    field = ".".join(map(str, location)) or "body"
    top = str(location[0]) if location else None
    if problem["type"] == "extra_forbidden":
        fix = INSTEAD.get(str(problem["loc"][-1]), "remove it")
        return RequestRejected(f"{field}: this field is not supported here; {fix}", param=field)
    if problem["type"] == "missing":
        return RequestRejected(f"{field}: is required", param=field)
    shown = repr(problem.get("input"))
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    if top in FORMS:
        return RequestRejected(f"{top}: must be {FORMS[top]}; got {shown}", param=top)
    message = problem["msg"]
    return RequestRejected(f"{field}: {message[0].lower()}{message[1:]}, got {shown}", param=top)
