"""`LLM(model).generate(prompts, params)`: the engine in the caller's own process, for Python users.

One rank; several GPUs want `python -m engine.launch`. All requests of a call are checked before any of them runs, so a bad
one raises and harms no other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from engine.chat import ChatTemplate
from engine.config import EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.errors import ConfigError, RequestRejected
from engine.grammar import GrammarCompiler
from engine.hub import end_token_ids, load_generation_config, resolve_model
from engine.messages import AddRequest, ReplicaStats, RequestFailed, TokenOutput
from engine.output import OutputStream
from engine.request_output import CompletionOutput, RequestMetrics, RequestOutput, logprobs_of, prompt_logprobs_of
from engine.sampling_params import SamplingParams
from engine.served_model import check_text_size, template_switches
from engine.tokenizer import Tokenizer
from engine.worker import WorkerInfo, assemble_core, build_worker, create_context

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = list[dict[str, Any]]


@dataclass
class _Choice:
    """One live choice: what the engine knows as one request."""

    request: int
    index: int
    stream: OutputStream
    params: SamplingParams
    error: str | None = None
    finished: bool = False


@dataclass
class _Call:
    """One prompt of a `generate` call."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    metrics: RequestMetrics
    choices: list[_Choice] = field(default_factory=list)


class LLM:
    """model: local folder, hub id, or "demo" for the bundled model.

    options: fields of EngineConfig and SchedulerConfig by name, for example dtype="bfloat16" or max_num_seqs=64
    info: what "auto" became (engine.worker.WorkerInfo)
    Raises ConfigError naming the field or file before weights are read.
    """

    def __init__(self, model: str | Path = "demo", **options: Any) -> None:
        config = engine_config(model, options)
        folder = resolve_model(config.model, weights=False)
        self.tokenizer = Tokenizer.load(folder)
        self._chat_template = ChatTemplate.load(folder)
        turn_end = self._chat_template.turn_end(self.tokenizer)
        self._eos_token_ids = end_token_ids(folder, self.tokenizer, turn_end)
        self._grammars = GrammarCompiler(self.tokenizer, self._eos_token_ids)
        self._core, self.info = build_core(config)
        self._vocab_size = self.info.model_config.vocab_size
        self._num_requests = 0

    # ---- what users call

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete each prompt; results in the prompts' order.

        prompts: a text, a list of token ids, {"prompt_token_ids": [...]} or {"prompt": "..."}; or a list of these
        sampling_params: one for all prompts or one for each; None takes what the model's generation_config.json recommends
        Raises RequestRejected for the first bad prompt or parameter, before anything runs. Ctrl-C ends the call after the
        step that runs, a second one at once (and this engine with it).
        """
        listed: list[Any] = [prompts] if _is_one_prompt(prompts) else _listed("prompts", prompts)
        return self._run([self._encoded(prompt) for prompt in listed], sampling_params, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template."""
        conversations = _listed("messages", messages)
        if conversations and isinstance(conversations[0], Mapping):
            conversations = [conversations]
        for conversation in conversations:
            if not isinstance(conversation, (list, tuple)) or not all(isinstance(message, dict) for message in conversation):
                raise RequestRejected(
                    f"messages: a conversation must be a list of dicts with role and content, got {conversation!r:.60}",
                    param="messages",
                )
            check_text_size("messages", conversation, self.info.max_model_len)
        switches = template_switches(chat_template_kwargs)
        prompts: list[tuple[str | None, list[int]]] = [
            self._chat_template.encode(
                self.tokenizer,
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **switches,
            )
            for conversation in conversations
        ]
        return self._run(prompts, sampling_params, use_tqdm)

    def default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends, our defaults elsewhere."""
        return SamplingParams(**load_generation_config(self.info.folder).sampling)

    def stats(self) -> ReplicaStats:
        """Totals since start and present load."""
        return self._core.stats()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prompt beginnings."""
        self._core.reset_prefix_cache()

    # ---- requests

    def _encoded(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """(text if known, token ids) of one prompt."""
        ids: Any = prompt
        text: Any = prompt if isinstance(prompt, str) else None
        if isinstance(prompt, Mapping):
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if unknown := sorted(map(str, prompt.keys() - {"prompt", "prompt_token_ids"})):
                raise RequestRejected(
                    f"prompt: {unknown[0]!r} is no field of a prompt; it has prompt and prompt_token_ids", param="prompt"
                )
        if isinstance(ids, (list, tuple)) and (text is None or isinstance(text, str)):
            return text, list(ids)
        if isinstance(text, str):
            check_text_size("prompt", text, self.info.max_model_len)
            return text, self.tokenizer.encode(text)
        raise RequestRejected(
            f"prompt: must be a text, a list of token ids or a dict with prompt_token_ids, got {prompt!r:.60}", param="prompt"
        )

    def _run(
        self,
        prompts: list[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        all_params = self._params_of(sampling_params, len(prompts))
        with _held_interrupt() as interrupted:
            calls, live = self._add(prompts, all_params)
            try:
                with tqdm(
                    total=len(calls), desc="Generating", unit="req", disable=not use_tqdm, dynamic_ncols=True
                ) as progress:
                    self._loop(calls, live, progress, interrupted)
            finally:
                for request_id in live:  # interrupted or failed: leave the engine as it was
                    self._core.abort(request_id)
        return [self._result(call) for call in calls]

    def _params_of(
        self, sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> Sequence[SamplingParams]:
        if sampling_params is None:
            sampling_params = self.default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * count
        listed = _listed("sampling_params", sampling_params)
        for params in listed:
            if not isinstance(params, SamplingParams):
                raise RequestRejected(f"sampling_params: must be SamplingParams, got {params!r:.60}", param="sampling_params")
        if len(listed) != count:
            raise RequestRejected(
                f"sampling_params: {len(listed)} for {count} prompts; give one, or one a prompt", param="sampling_params"
            )
        return listed

    def _add(
        self, prompts: list[tuple[str | None, list[int]]], all_params: Sequence[SamplingParams]
    ) -> tuple[list[_Call], dict[str, _Choice]]:
        """Queue every choice of every prompt, or none of them."""
        calls: list[_Call] = []
        live: dict[str, _Choice] = {}
        try:
            for (text, ids), params in zip(prompts, all_params):
                params.validate(self._vocab_size)
                if params.grammar is not None:
                    self._grammars.check(params.grammar, "grammar")
                request_id = str(self._num_requests)
                self._num_requests += 1
                call = _Call(request_id, text, ids, RequestMetrics(arrival_time=time.time()))
                for index in range(params.n):
                    choice_params = params.for_choice(index)
                    choice_id = f"{request_id}-{index}"
                    self._core.add(AddRequest(choice_id, ids, choice_params, call.metrics.arrival_time, self._eos_token_ids))
                    stream = OutputStream(self.tokenizer, choice_params, ids)
                    live[choice_id] = _Choice(len(calls), index, stream, choice_params)
                    call.choices.append(live[choice_id])
                calls.append(call)
        except BaseException:
            for choice_id in live:
                self._core.abort(choice_id)
            raise
        return calls, live

    def _loop(self, calls: list[_Call], live: dict[str, _Choice], progress: tqdm, interrupted: threading.Event) -> None:
        """Step the engine until the last choice has ended, or until the end of the step that was interrupted."""
        unfinished = [len(call.choices) for call in calls]
        num_tokens, started, shown = 0, time.perf_counter(), 0.0
        while live and not interrupted.is_set():
            for output in self._core.step():
                choice = live.get(output.request_id)
                if choice is None:
                    continue
                num_tokens += self._take(output, choice, calls[choice.request].metrics)
                if choice.finished:
                    del live[output.request_id]
                    unfinished[choice.request] -= 1
                    progress.update(unfinished[choice.request] == 0)
            now = time.perf_counter()
            if not progress.disable and (now - shown > 0.2 or not live):
                shown = now
                progress.set_postfix_str(f"{num_tokens / max(now - started, 1e-9):.0f} tokens/s")

    def _take(self, output: TokenOutput | RequestFailed, choice: _Choice, metrics: RequestMetrics) -> int:
        """Take one output of one choice; returns how many tokens it brought."""
        if isinstance(output, RequestFailed):
            choice.error, choice.finished = output.message, True
            return 0
        delta = choice.stream.push(output)
        if delta.stopped_by_string:
            self._core.abort(output.request_id, "stop")
        choice.finished = choice.stream.finish_reason is not None
        metrics.num_preemptions = max(metrics.num_preemptions, output.num_preemptions)
        if output.scheduled_time:
            metrics.first_scheduled_time = metrics.first_scheduled_time or output.scheduled_time
        if output.first_token_time:
            metrics.first_token_time = metrics.first_token_time or output.first_token_time
        if choice.finished:
            metrics.finished_time = output.finished_time or time.time()
        return len(output.token_ids)

    def _result(self, call: _Call) -> RequestOutput:
        first = call.choices[0].stream
        return RequestOutput(
            request_id=call.request_id,
            prompt=call.prompt,
            prompt_token_ids=call.prompt_token_ids,
            prompt_logprobs=prompt_logprobs_of(first.prompt_logprobs),
            outputs=[_completion(choice) for choice in call.choices],
            metrics=call.metrics,
            num_cached_tokens=first.num_cached_tokens,
        )


def build_core(config: EngineConfig) -> tuple[EngineCore, WorkerInfo]:
    """An engine of one rank in this process, and what "auto" became. Raises ConfigError before weights are read."""
    parallel = create_context(config, "cpu")
    executor, info = build_worker(config, parallel)
    return assemble_core(config, executor, info, parallel), info


def engine_config(model: str | Path, options: Mapping[str, Any]) -> EngineConfig:
    """EngineConfig from flat options. Raises ConfigError for a name that no field has."""
    scheduler_names = {f.name for f in dataclasses.fields(SchedulerConfig)}
    engine_names = {f.name for f in dataclasses.fields(EngineConfig)} - {"model", "scheduler", "parallel"}
    for name in options:
        if name in ("dp", "tp", "parallel"):
            raise ConfigError(f"{name}: LLM runs in one process on one device; start several with python -m engine.launch")
        if name not in engine_names | scheduler_names:
            known = ", ".join(sorted(engine_names | scheduler_names))
            raise ConfigError(f"{name}: no such option; known are {known}")
    # A call brings all its prompts at once, so the queue has no limit unless one is asked for.
    scheduler = {"max_queued_requests": 0} | {name: value for name, value in options.items() if name in scheduler_names}
    engine = {name: value for name, value in options.items() if name in engine_names}
    return EngineConfig(
        model=str(model) if isinstance(model, Path) else model, scheduler=SchedulerConfig(**scheduler), **engine
    )


@contextlib.contextmanager
def _held_interrupt() -> Iterator[threading.Event]:
    """The event is set by Ctrl-C, which is raised at the end of the block: half a step would leave the scheduler and the
    ranks apart. The second one is raised at once. A handler of the caller's own, or another thread, is left alone."""
    interrupted = threading.Event()
    ours = (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not ours:
        yield interrupted
        return

    def hold(*_: Any) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, hold)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupted.is_set():
        raise KeyboardInterrupt


def _listed(name: str, values: Any) -> list[Any]:
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Mapping)):
        raise RequestRejected(f"{name}: must be a list, got {values!r:.60}", param=name)
    return list(values)


def _is_one_prompt(prompts: Any) -> bool:
    if isinstance(prompts, (str, bytes, Mapping)):
        return True
    return isinstance(prompts, Sequence) and bool(prompts) and all(isinstance(item, int) for item in prompts)


def _completion(choice: _Choice) -> CompletionOutput:
    stream = choice.stream
    return CompletionOutput(
        index=choice.index,
        text=stream.text,
        token_ids=stream.token_ids,
        cumulative_logprob=None if stream.logprobs is None else sum(entry.logprob for entry in stream.logprobs),
        logprobs=None if stream.logprobs is None else [logprobs_of(entry) for entry in stream.logprobs],
        finish_reason=stream.finish_reason if choice.error is None else "error",
        stop_reason=stream.stop_reason,
        error=choice.error,
    )
