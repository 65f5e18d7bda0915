"""A replica without a model: a thread that speaks the messages and counts tokens upwards from the prompt's last one."""

from __future__ import annotations

import threading
import time

from engine.heartbeat import Heartbeat
from engine.messages import (
    AbortRequest,
    AddRequest,
    Hello,
    Ready,
    ReplicaStats,
    RequestFailed,
    ResetPrefixCache,
    Shutdown,
    StepOutput,
    TokenLogprob,
    TokenOutput,
)
from engine.transport import Address, WorkerSocket


class FakeReplica:
    """One rank that is its own leader.

    script: token ids every request gets in place of counting, one per step; then counting goes on
    step_s: seconds of a step; queue_limit: live requests beyond which new ones are refused
    """

    def __init__(
        self,
        address: Address,
        dp_rank: int = 0,
        *,
        vocab_size: int = 256,
        max_model_len: int = 4096,
        script: list[int] | None = None,
        step_s: float = 0.001,
        queue_limit: int = 10_000,
    ) -> None:
        self.dp_rank, self.vocab_size, self.max_model_len = dp_rank, vocab_size, max_model_len
        self.script, self.step_s, self.queue_limit = script or [], step_s, queue_limit
        self.received: list[AddRequest] = []
        self.aborted: list[tuple[str, str]] = []
        self.resets = 0
        self.live: dict[str, tuple[AddRequest, int]] = {}
        self.paused = threading.Event()
        self._dead = threading.Event()
        self._link = WorkerSocket(address)
        self.heartbeat = Heartbeat(address, dp_rank, dp_rank, 60.0, lambda: None)
        self._link.send(Hello(dp_rank, dp_rank, "steps"))
        self._link.send(Ready(dp_rank, "fake", max_model_len, vocab_size, 64, "fp8"))
        self.heartbeat.enter("ready")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Fall silent, as a killed process does."""
        self._dead.set()
        self._thread.join(5)
        self.heartbeat.close()
        self._link.close()

    def _run(self) -> None:
        while not self._dead.is_set():
            for message in self._link.receive(0.0 if self.live else 0.01):
                self._handle(message)
            if self.live and not self.paused.is_set():
                time.sleep(self.step_s)
                self._step()

    def _handle(self, message: object) -> None:
        match message:
            case AddRequest():
                self.received.append(message)
                if len(self.live) >= self.queue_limit:
                    self._link.send(RequestFailed(message.request_id, "too many requests are waiting", "queue_full"))
                elif len(message.prompt_token_ids) >= self.max_model_len:
                    text = f"the prompt has {len(message.prompt_token_ids)} tokens, the context {self.max_model_len}"
                    self._link.send(RequestFailed(message.request_id, text, "context_length_exceeded", "prompt"))
                else:
                    self.live[message.request_id] = (message, 0)
            case AbortRequest():
                entry = self.live.pop(message.request_id, None)
                self.aborted.append((message.request_id, message.reason))
                if entry is not None:
                    reason = "stop" if message.reason == "stop" else "abort"
                    self._send([self._output(entry[0], [], entry[1], reason)])
            case ResetPrefixCache():
                self.resets += 1
            case Shutdown():
                self._dead.set()

    def _step(self) -> None:
        outputs = []
        for name, (request, done) in list(self.live.items()):
            token = (
                self.script[done] if done < len(self.script) else (request.prompt_token_ids[-1] + done + 1) % self.vocab_size
            )
            done += 1
            most = request.params.max_tokens or self.max_model_len - len(request.prompt_token_ids)
            reason = None
            if token in request.eos_token_ids and not request.params.ignore_eos:
                reason = "stop"
            elif done >= most:
                reason = "length"
            self.live[name] = (request, done)
            if reason is not None:
                del self.live[name]
            outputs.append(self._output(request, [token], done, reason))
        self._send(outputs)

    def _output(self, request: AddRequest, tokens: list[int], done: int, reason: str | None) -> TokenOutput:
        wanted = request.params.logprobs
        scored = None if wanted is None else [TokenLogprob(t, -0.5, 1, [(t, -0.5)][:wanted]) for t in tokens]
        prompt = None
        if request.params.prompt_logprobs is not None and done == 1:
            prompt = [
                None,
                *(
                    TokenLogprob(t, -1.0, 2, [(t, -1.0)][: request.params.prompt_logprobs])
                    for t in request.prompt_token_ids[1:]
                ),
            ]
        return TokenOutput(
            request.request_id,
            tokens,
            finish_reason=reason,
            logprobs=scored,
            prompt_logprobs=prompt,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_output_tokens=done,
            scheduled_time=request.arrival,
        )

    def _send(self, outputs: list[TokenOutput]) -> None:
        stats = ReplicaStats(
            dp_rank=self.dp_rank, num_running=len(self.live), num_blocks=64, num_free_blocks=64 - min(64, len(self.live))
        )
        self._link.send(StepOutput(outputs, stats))
