"""What a front end knows of its model, and how it turns a request body into work for the engine.

Server and offline runner share this: prompt text and ids, sampling parameters with the model's defaults, every limit that
can be checked before the engine sees the request. Loads no torch.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.chat import ChatTemplate
from engine.chat_format import ChatFormat, reasoning_is_open
from engine.errors import RequestRejected
from engine.grammar import GrammarCompiler, after_reasoning
from engine.hub import GenerationConfig, end_token_ids, load_generation_config
from engine.messages import AddRequest
from engine.openai_types import (
    MAX_PROMPTS,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    NamedToolChoice,
    ResponseFormat,
    TokenizeRequest,
    Tool,
)
from engine.sampling_params import SamplingParams
from engine.structured_output import forced_call_grammar, requested_grammar
from engine.tokenizer import Tokenizer, read_json

COMPLETION_MAX_TOKENS = 16
MAX_PROMPT_CHARS_PER_TOKEN = 64  # a longer text cannot fit the context; refused before it is tokenized
MAX_CHOICES_PER_REQUEST = 1024

AnyGenerate = CompletionRequest | ChatCompletionRequest | GenerateRequest


@dataclass(frozen=True)
class Prompt:
    """One prompt as the engine gets it; text None where token ids were given (the text may be longer: truncation)."""

    text: str | None
    token_ids: list[int]


@dataclass(frozen=True)
class Work:
    """One request, ready to run: `len(prompts) * params.n` choices, those of prompt p being p * n .. p * n + n - 1.

    kind: "completion", "chat" or "generate"; prompt_only: max_tokens was 0, the one token the engine makes is dropped
    forced_call: "" for tool_choice required, a function's name for that function, None when nothing is forced
    """

    kind: str
    request_id: str
    prompts: list[Prompt]
    params: SamplingParams
    priority: int = 0
    salt: str = ""
    dp_rank: int | None = None
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    prompt_only: bool = False
    return_token_ids: bool = False
    return_text: bool = True
    show_prompt_logprobs: bool = False
    tools: list[dict[str, Any]] | None = None
    forced_call: str | None = None
    end_ids: list[int] = field(default_factory=list)

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    def add_requests(self, arrival: float) -> list[AddRequest]:
        """Messages that start the choices, in their order; ids are `<request id>-<choice>`."""
        return [
            AddRequest(
                request_id=f"{self.request_id}-{index}",
                prompt_token_ids=self.prompts[index // self.params.n].token_ids,
                params=self.params.for_choice(index % self.params.n),
                arrival=arrival,
                eos_token_ids=self.end_ids,
                priority=self.priority,
                salt=self.salt,
            )
            for index in range(self.num_choices)
        ]


class ServedModel:
    """A model as its users meet it: name, tokenizer, template, defaults, limits. Safe to use from several threads."""

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        chat_format: ChatFormat,
        *,
        end_ids: list[int],
        max_model_len: int,
        defaults: GenerationConfig | None = None,
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.template = template
        self.chat_format = chat_format
        self.end_ids = end_ids
        self.max_model_len = max_model_len
        self.defaults = defaults or GenerationConfig()
        self.visible_ids = {with_tools: chat_format.visible_ids(tokenizer, with_tools) for with_tools in (False, True)}
        self.grammars = GrammarCompiler(tokenizer, end_ids)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        name: str,
        max_model_len: int,
        chat_template: str = "",
        reasoning_parser: str = "auto",
        tool_call_parser: str = "auto",
    ) -> ServedModel:
        """Read a model folder. Raises ConfigError naming the file or flag."""
        tokenizer = Tokenizer.load(folder)
        template = ChatTemplate.load(folder, chat_template or None)
        config = read_json(folder / "config.json")
        chat_format = ChatFormat.detect(
            template.source, tokenizer, str(config.get("model_type") or ""), reasoning_parser, tool_call_parser
        )
        return cls(
            name,
            tokenizer,
            template,
            chat_format,
            end_ids=end_token_ids(folder, tokenizer, template.turn_end(tokenizer)),
            max_model_len=max_model_len,
            defaults=load_generation_config(folder),
        )

    # ---- requests

    def completion(self, request: CompletionRequest) -> Work:
        """Raises RequestRejected naming the field, the limit and the fix."""
        self._check_model(request.model)
        prompts = [self._truncated(request, prompt) for prompt in self._completion_prompts(request)]
        echo = bool(request.echo)
        params = self._params(
            request,
            prompts,
            max_tokens=request.max_tokens,
            default_max_tokens=COMPLETION_MAX_TOKENS,
            logprobs=request.logprobs,
            prompt_logprobs=request.logprobs if echo and request.prompt_logprobs is None else request.prompt_logprobs,
            grammar=self._grammar(request, request.response_format),
        )
        return self._work("completion", request, prompts, params, prompt_only=request.max_tokens == 0, echo=echo)

    def chat(self, request: ChatCompletionRequest) -> Work:
        """Raises RequestRejected naming the field, the limit and the fix."""
        self._check_model(request.model)
        if request.top_logprobs and not request.logprobs:
            raise RequestRejected("top_logprobs: needs logprobs: true", param="top_logprobs")
        if (
            None not in (request.max_tokens, request.max_completion_tokens)
            and request.max_tokens != request.max_completion_tokens
        ):
            raise RequestRejected("max_tokens: differs from max_completion_tokens; give one of them", param="max_tokens")
        tools, forced = self._tools(request)
        text, token_ids = self._chat_prompt(request, tools)
        prompts = [self._truncated(request, Prompt(text, token_ids))]
        grammar = self._grammar(request, request.response_format)
        if forced is not None:
            if grammar is not None:
                raise RequestRejected(
                    "tool_choice: a forced call cannot be combined with structured output", param="tool_choice"
                )
            grammar = forced_call_grammar(tools or [], forced)
            self.grammars.check(grammar, "tools")
        if grammar is not None and (closing := reasoning_is_open(self.chat_format, text)):
            grammar = after_reasoning(grammar, closing, self.tokenizer)
        max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        params = self._params(
            request,
            prompts,
            max_tokens=max_tokens,
            default_max_tokens=None,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            prompt_logprobs=request.prompt_logprobs,
            grammar=grammar,
        )
        return self._work("chat", request, prompts, params, prompt_only=max_tokens == 0, tools=tools, forced_call=forced)

    def generate(self, request: GenerateRequest) -> Work:
        """Raises RequestRejected naming the field, the limit and the fix."""
        self._check_model(request.model)
        prompts = [self._truncated(request, self._checked_ids(request.prompt_token_ids, "prompt_token_ids"))]
        params = self._params(
            request,
            prompts,
            max_tokens=request.max_tokens,
            default_max_tokens=None,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            grammar=self._grammar(request, None),
        )
        prompt_only = request.max_tokens == 0
        return self._work("generate", request, prompts, params, prompt_only=prompt_only, return_text=bool(request.return_text))

    def tokenize(self, request: TokenizeRequest) -> dict[str, Any]:
        """Body of the answer to /tokenize."""
        self._check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise RequestRejected("prompt: give either prompt or messages", param="prompt")
        if request.messages is not None:
            _, ids = self._chat_prompt(request, _dumped(request.tools))
        else:
            ids = self.encode(request.prompt or "", request.add_special_tokens is not False, bool(request.allow_special_tokens))
        body: dict[str, Any] = {"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids}
        if request.return_token_strs:
            body["token_strs"] = [self.tokenizer.token_text(token_id) for token_id in ids]
        return body

    def detokenize(self, request: DetokenizeRequest) -> dict[str, Any]:
        """Body of the answer to /detokenize."""
        self._check_model(request.model)
        ids = self._checked_ids(request.tokens, "tokens").token_ids
        return {"prompt": self.tokenizer.decode(ids, skip_special=bool(request.skip_special_tokens))}

    def encode(self, text: str, add_special_tokens: bool = True, allow_special: bool = False) -> list[int]:
        """Token ids of a prompt, whose length is limited before any work is done on it."""
        check_text_size("prompt", text, self.max_model_len)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens, allow_special=allow_special)

    # ---- parts

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise RequestRejected(
                f"model: {name!r} is not served here; use {self.name!r}", code="model_not_found", param="model"
            )

    def _completion_prompts(self, request: CompletionRequest) -> list[Prompt]:
        prompt = request.prompt
        listed: list[Any] = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else list(prompt)
        if not 1 <= len(listed) <= MAX_PROMPTS:
            raise RequestRejected(f"prompt: must hold 1 to {MAX_PROMPTS} prompts, got {len(listed)}", param="prompt")
        if len(listed) * (request.n or 1) > MAX_CHOICES_PER_REQUEST:
            raise RequestRejected(f"n: at most {MAX_CHOICES_PER_REQUEST} choices over all prompts of a request", param="n")
        special = request.add_special_tokens is not False, bool(request.allow_special_tokens)
        return [
            Prompt(item, self.encode(item, *special)) if isinstance(item, str) else self._checked_ids(item, "prompt")
            for item in listed
        ]

    def _chat_prompt(
        self, request: ChatCompletionRequest | TokenizeRequest, tools: list[dict[str, Any]] | None
    ) -> tuple[str, list[int]]:
        check_text_size("messages", request.messages or [], self.max_model_len)
        continued = bool(request.continue_final_message)
        return self.template.encode(
            self.tokenizer,
            request.messages or [],
            tools=tools,
            add_generation_prompt=not continued if request.add_generation_prompt is None else request.add_generation_prompt,
            continue_final_message=continued,
            **template_switches(request.chat_template_kwargs),
        )

    def _checked_ids(self, ids: list[int], param: str) -> Prompt:
        limit = self.tokenizer.vocab_size
        if wrong := next((token_id for token_id in ids if not 0 <= token_id < limit), None):
            raise RequestRejected(f"{param}: token id {wrong} is out of range 0..{limit - 1}", param=param)
        return Prompt(None, list(ids))

    def _truncated(self, request: AnyGenerate, prompt: Prompt) -> Prompt:
        keep = request.truncate_prompt_tokens
        if keep == 0:
            raise RequestRejected(
                "truncate_prompt_tokens: must be at least 1, or -1 for the whole context", param="truncate_prompt_tokens"
            )
        if keep is not None:
            keep = self.max_model_len - 1 if keep < 0 else keep
            if len(prompt.token_ids) > keep:
                prompt = Prompt(prompt.text, prompt.token_ids[-keep:])
        if not prompt.token_ids:
            raise RequestRejected("prompt: must not be empty; give at least one token", param="prompt")
        if len(prompt.token_ids) >= self.max_model_len:
            raise _too_long(f"the prompt has {len(prompt.token_ids)} tokens", self.max_model_len)
        return prompt

    def _params(
        self,
        request: AnyGenerate,
        prompts: list[Prompt],
        *,
        max_tokens: int | None,
        default_max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
        grammar: str | None,
    ) -> SamplingParams:
        """Sampling parameters with defaults and limits applied. max_tokens 0 runs the prompt and drops one token."""
        longest = max(len(prompt.token_ids) for prompt in prompts)
        room = self.max_model_len - longest
        if max_tokens is None:
            max_tokens = min(default_max_tokens, room) if default_max_tokens is not None else room
        elif max_tokens > room:
            raise _too_long(f"the prompt has {longest} tokens and max_tokens asks for {max_tokens} more", self.max_model_len)
        given = request.model_dump(
            include={
                "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
                "min_tokens", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
                "allowed_token_ids",
            },
            exclude_none=True,
        )  # fmt: skip
        stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
        values: dict[str, Any] = {**self.defaults.sampling, **given}
        params = SamplingParams(
            **values,
            seed=None if request.seed is None else request.seed % 2**63,
            max_tokens=max(1, max_tokens),
            stop=stop,
            logit_bias=_token_keys(request.logit_bias or {}),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
        )
        params.validate(self.tokenizer.vocab_size)
        return params

    def _work(self, kind: str, request: AnyGenerate, prompts: list[Prompt], params: SamplingParams, **more: Any) -> Work:
        options = request.stream_options
        if options is not None and not request.stream:
            raise RequestRejected("stream_options: only with stream: true", param="stream_options")
        if request.request_id and request.rid and request.request_id != request.rid:
            raise RequestRejected("rid: differs from request_id; give one of them", param="rid")
        prefix = {"completion": "cmpl-", "chat": "chatcmpl-", "generate": "gen-"}[kind]
        return Work(
            kind=kind,
            request_id=request.request_id or request.rid or prefix + secrets.token_hex(16),
            prompts=prompts,
            params=params,
            priority=request.priority or 0,
            salt=request.cache_salt or "",
            dp_rank=request.data_parallel_rank,
            stream=bool(request.stream),
            include_usage=options is not None and options.include_usage,
            continuous_usage=options is not None and options.continuous_usage_stats,
            return_token_ids=bool(request.return_token_ids),
            show_prompt_logprobs=request.prompt_logprobs is not None,
            end_ids=self.end_ids,
            **more,
        )

    # ---- tools and structured output

    def _tools(self, request: ChatCompletionRequest) -> tuple[list[dict[str, Any]] | None, str | None]:
        """(tools to offer, forced call as in Work.forced_call)."""
        tools, choice = _dumped(request.tools), request.tool_choice
        if choice is None or choice == "auto":
            choice = "auto" if tools else "none"
        if choice == "none":
            return None, None
        if not tools:
            raise RequestRejected("tool_choice: needs tools", param="tool_choice")
        if choice == "auto" and self.chat_format.tools is None:
            raise RequestRejected(
                "tools: no tool-call format is known for this model; use tool_choice required, or start with --tool-call-parser",
                param="tools",
            )
        if isinstance(choice, NamedToolChoice):
            if choice.function.name not in {tool["function"]["name"] for tool in tools}:
                raise RequestRejected(f"tool_choice: {choice.function.name!r} is not among the tools", param="tool_choice")
            return tools, choice.function.name
        return tools, "" if choice == "required" else None

    def _grammar(self, request: AnyGenerate, response_format: ResponseFormat | None) -> str | None:
        """The grammar a request asks for, checked; None without."""
        asked = requested_grammar(request, response_format)
        if asked is None:
            return None
        self.grammars.check(asked.grammar, asked.param)
        return asked.grammar


def template_switches(kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """User-given template variables; names that `render` itself takes are refused, not passed on."""
    if kwargs is not None and not isinstance(kwargs, dict):
        raise RequestRejected(f"chat_template_kwargs: must be a dict, got {kwargs!r:.60}", param="chat_template_kwargs")
    own = {"messages", "tools", "add_generation_prompt", "continue_final_message", "tokenizer"}
    if taken := sorted(own & set(kwargs or {})):
        raise RequestRejected(
            f"chat_template_kwargs: {taken[0]!r} is not a switch of the template; use the field of that name",
            param="chat_template_kwargs",
        )
    return dict(kwargs or {})


def _token_keys(bias: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token_id): float(value) for token_id, value in bias.items()}
    except ValueError as error:
        raise RequestRejected(f"logit_bias: keys must be token ids: {error}", param="logit_bias") from error


def _dumped(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    return [tool.model_dump(exclude_none=True) for tool in tools] if tools else None


def _text_size(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_text_size(item) for item in value.values())
    return sum(_text_size(item) for item in value) if isinstance(value, list) else 0


def check_text_size(param: str, value: Any, max_model_len: int) -> None:
    """Refuse text, wherever it stands in `value`, that is too long for the context however it is tokenized."""
    if (size := _text_size(value)) > max_model_len * MAX_PROMPT_CHARS_PER_TOKEN:
        raise _too_long(f"{param}: {size} characters", max_model_len, param)


def _too_long(what: str, limit: int, param: str = "prompt") -> RequestRejected:
    return RequestRejected(
        f"{what}, more than this model's context of {limit} tokens allows; shorten the prompt or lower max_tokens",
        code="context_length_exceeded",
        param=param,
    )
