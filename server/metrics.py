"""Figures for Prometheus: the metric names of vLLM under our own prefix, with a label per replica.

Counting is a few additions on plain Python numbers, so that no metric can raise into a request; exposition builds the
Prometheus families from them when `/metrics` is read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.messages import Ready, ReplicaStats, TokenOutput

PREFIX = "snapmla:"
REPLICA = ("engine", "model_name")
_FIRST_TOKEN = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
]  # fmt: skip
_PER_TOKEN = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
]  # fmt: skip
_REQUEST = [
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
]  # fmt: skip
_DELIVERY = [0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0]
_TOKENS = [float(m * 10**e) for e in range(6) for m in (1, 2, 5)] + [1e6]
_CHOICES = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 128.0]


class Histogram:
    """Counts of observations in buckets, their number and sum."""

    def __init__(self, bounds: list[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts under Prometheus' labels."""
        total, out = 0, []
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            out.append((bound, float(total)))
        return out


_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token", _FIRST_TOKEN),
    "inter_token_latency_seconds": ("Between tokens of a request; several tokens of one step share its time", _PER_TOKEN),
    "request_time_per_output_token_seconds": ("Mean time per token after the first", _PER_TOKEN),
    "e2e_request_latency_seconds": ("From arrival to the last token", _REQUEST),
    "request_queue_time_seconds": ("From arrival to the first scheduled step", _REQUEST),
    "request_prefill_time_seconds": ("From the first scheduled step to the first token", _REQUEST),
    "request_decode_time_seconds": ("From the first to the last token", _REQUEST),
    "request_inference_time_seconds": ("From the first scheduled step to the last token", _REQUEST),
    "request_prompt_tokens": ("Prompt tokens of a request", _TOKENS),
    "request_generation_tokens": ("Output tokens of a request", _TOKENS),
    "request_params_n": ("Choices asked for", _CHOICES),
    "request_params_max_tokens": ("Output limit asked for", _TOKENS),
    "iteration_tokens_total": ("Prompt and output tokens of an engine step", _TOKENS),
    "frontend_delivery_seconds": ("From a token's arrival at the front end to the write to its socket", _DELIVERY),
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of requests that got a first token",
    "prompt_tokens_cached": "Prompt tokens found in the prefix cache",
    "generation_tokens": "Output tokens delivered to clients",
}
_STATS_COUNTERS = {
    "num_preemptions": ("num_preemptions", "Sequences that gave up their cache to others"),
    "prefix_cache_queries": ("prefix_queries", "Prompt tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("prefix_hits", "Prompt tokens found there"),
    "spec_decode_num_drafts": ("spec_drafts", "Verification passes"),
    "spec_decode_num_draft_tokens": ("spec_draft_tokens", "Draft tokens proposed"),
    "engine_steps": ("num_steps", "Steps of the engine"),
    "engine_step_seconds": ("step_seconds", "Time in steps"),
    "engine_model_seconds": ("model_seconds", "Time of the model in steps"),
}
_STATS_GAUGES = {
    "num_requests_running": ("num_running", "Sequences that hold rows"),
    "num_requests_waiting": ("num_waiting", "Sequences that wait"),
    "reserved_tokens": ("reserved_tokens", "Prompt and output tokens that open requests may use"),
    "cache_blocks": ("num_blocks", "Cache blocks"),
    "cache_blocks_free": ("num_free_blocks", "Cache blocks without content"),
    "spec_decode_depth": ("spec_depth", "Drafts made behind the latest step"),
    "cache_blocks_reusable": ("num_cached_blocks", "Cache blocks of known prefixes that no live request uses"),
}


class Metrics(Collector):
    """All figures of one server. Keys are dp_rank, or what the label says."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.histograms: dict[str, defaultdict[int, Histogram]] = {
            name: defaultdict(partial(Histogram, bounds)) for name, (_, bounds) in _HISTOGRAMS.items()
        }
        self.counters: dict[str, dict[int, float]] = {name: defaultdict(float) for name in _COUNTERS}
        self.finished: dict[tuple[int, str], int] = defaultdict(int)
        self.rejected: dict[str, int] = defaultdict(int)
        self.replicas: dict[int, Ready] = {}
        self.stats: dict[int, ReplicaStats] = {}
        self.expert_load: list[list[int]] = []  # rows since start, by MoE layer and expert
        self.start_up: dict[str, float] = {}
        self.http: dict[tuple[str, str], int] = defaultdict(int)
        self.open_requests = 0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    # ---- counting

    def step(self, stats: ReplicaStats) -> None:
        before = self.stats.get(stats.dp_rank, ReplicaStats())
        tokens = stats.prompt_tokens + stats.generation_tokens - before.prompt_tokens - before.generation_tokens
        if stats.num_steps > before.num_steps and tokens > 0:
            self.histograms["iteration_tokens_total"][stats.dp_rank].observe(tokens)
        self.stats[stats.dp_rank] = stats

    def params(self, dp_rank: int, n: int, max_tokens: int) -> None:
        """What a request asked for."""
        self.histograms["request_params_n"][dp_rank].observe(n)
        self.histograms["request_params_max_tokens"][dp_rank].observe(max_tokens)

    def first_token(self, dp_rank: int, seconds: float) -> None:
        self.histograms["time_to_first_token_seconds"][dp_rank].observe(seconds)

    def prompt(self, dp_rank: int, output: TokenOutput) -> None:
        """The first output of a prompt's first choice."""
        self.counters["prompt_tokens"][dp_rank] += output.num_prompt_tokens
        self.counters["prompt_tokens_cached"][dp_rank] += output.num_cached_tokens

    def tokens(self, dp_rank: int, count: int, seconds: float) -> None:
        """count tokens came `seconds` after the one before."""
        self.histograms["inter_token_latency_seconds"][dp_rank].observe(seconds / count, count)

    def finish(self, dp_rank: int, output: TokenOutput, arrival: float, first: float | None, now: float) -> None:
        """The terminal output of a request; first: when its first token came (None: it had none)."""
        observe = {
            "e2e_request_latency_seconds": now - arrival,
            "request_prompt_tokens": output.num_prompt_tokens,
            "request_generation_tokens": output.num_output_tokens,
        }
        if output.scheduled_time:
            observe["request_queue_time_seconds"] = max(0.0, output.scheduled_time - arrival)
            observe["request_inference_time_seconds"] = max(0.0, now - output.scheduled_time)
            if first is not None:
                observe["request_prefill_time_seconds"] = max(0.0, first - output.scheduled_time)
        if first is not None:
            observe["request_decode_time_seconds"] = now - first
            if output.num_output_tokens > 1:
                observe["request_time_per_output_token_seconds"] = (now - first) / (output.num_output_tokens - 1)
        for name, value in observe.items():
            self.histograms[name][dp_rank].observe(value)
        self.finished[dp_rank, output.finish_reason or "error"] += 1

    # ---- reading

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        model, stats = self.model_name, sorted(self.stats.items())
        for name, (text, _) in _HISTOGRAMS.items():
            found = sorted(self.histograms[name].items())
            yield _family(HistogramMetricFamily, name, text, REPLICA, [(rank, model, h.buckets(), h.sum) for rank, h in found])
        for name, text in _COUNTERS.items():
            counts = self.counters[name]
            yield _family(
                CounterMetricFamily, name, text, REPLICA, [(rank, model, counts[rank]) for rank in sorted(self.replicas)]
            )
        for kind, figures in ((CounterMetricFamily, _STATS_COUNTERS), (GaugeMetricFamily, _STATS_GAUGES)):
            for name, (field, text) in figures.items():
                yield _family(kind, name, text, REPLICA, [(rank, model, getattr(s, field)) for rank, s in stats])
        yield from self._fidelity(stats)
        yield from self._experts()
        yield from self._cache_and_drafts(stats)
        yield from self._front_end()

    def _fidelity(self, stats: list[tuple[int, ReplicaStats]]) -> Iterator[Metric]:
        text, model = "Steps in which attention was compared with exact attention", self.model_name
        yield _family(
            CounterMetricFamily, "fidelity_steps", text, REPLICA, [(rank, model, s.fidelity_steps) for rank, s in stats]
        )
        for name, text in (("mean", "over the compared steps"), ("worst", "in the worst compared step")):
            errors = [(rank, layer, e) for rank, s in stats for layer, e in enumerate(getattr(s, f"fidelity_{name}"))]
            yield _family(
                GaugeMetricFamily, f"attention_error_{name}", f"Relative L2 error of a layer's attention {text}",
                (*REPLICA, "layer"), [(rank, model, layer, error) for rank, layer, error in errors],
            )  # fmt: skip

    def _experts(self) -> Iterator[Metric]:
        """A series an expert and one a layer: one for each expert of each layer would be fifteen thousand for DeepSeek-V3."""
        model = self.model_name
        sums = [(model, expert, sum(counts)) for expert, counts in enumerate(zip(*self.expert_load))]
        text = "Rows that an expert's number has computed in all layers"
        yield _family(CounterMetricFamily, "expert_tokens", text, ("model_name", "expert"), sums)
        used = [(layer, row) for layer, row in enumerate(self.expert_load) if sum(row)]
        text = "Rows of a layer's busiest expert over the mean of its experts, since start"
        ratios = [(model, layer, max(row) * len(row) / sum(row)) for layer, row in used]
        yield _family(GaugeMetricFamily, "expert_imbalance", text, ("model_name", "layer"), ratios)

    def _cache_and_drafts(self, stats: list[tuple[int, ReplicaStats]]) -> Iterator[Metric]:
        model = self.model_name
        text = "Part of the cache that live requests hold, 0 to 1"
        unused = [(rank, s.num_blocks, s.num_free_blocks + s.num_cached_blocks) for rank, s in stats if s.num_blocks]
        usage = [(rank, model, 1.0 - free / blocks) for rank, blocks, free in unused]
        yield _family(GaugeMetricFamily, "kv_cache_usage_perc", text, REPLICA, usage)
        accepted = [(rank, s.spec_accepted_per_pos) for rank, s in stats]
        sums = [(rank, model, sum(counts)) for rank, counts in accepted]
        yield _family(CounterMetricFamily, "spec_decode_num_accepted_tokens", "Draft tokens accepted", REPLICA, sums)
        placed = [(rank, model, place, count) for rank, counts in accepted for place, count in enumerate(counts)]
        name, text = "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted at each position"
        yield _family(CounterMetricFamily, name, text, (*REPLICA, "position"), placed)

    def _front_end(self) -> Iterator[Metric]:
        model = self.model_name
        ended = [(rank, model, reason, count) for (rank, reason), count in sorted(self.finished.items())]
        text = "Requests that ended, by reason"
        yield _family(CounterMetricFamily, "request_success", text, (*REPLICA, "finished_reason"), ended)
        refused = [(model, reason, count) for reason, count in sorted(self.rejected.items())]
        yield _family(CounterMetricFamily, "admission_rejections", "Requests refused", ("model_name", "reason"), refused)
        answers = [(handler, status, count) for (handler, status), count in sorted(self.http.items())]
        yield _family(CounterMetricFamily, "http_requests", "HTTP responses", ("handler", "status"), answers)
        yield GaugeMetricFamily(PREFIX + "open_requests", "Choices the front end waits for", value=self.open_requests)
        text = "Slowest rank's time in a phase"
        yield _family(GaugeMetricFamily, "startup_phase_seconds", text, ("phase",), self.start_up.items())
        caches = [
            (rank, model, {"num_blocks": str(ready.num_blocks), "block_size": "64", "cache_format": ready.cache_format})
            for rank, ready in sorted(self.replicas.items())
        ]
        yield _family(InfoMetricFamily, "cache_config", "Cache of a replica", REPLICA, caches)


def _family(
    kind: Callable[..., Any], name: str, text: str, labels: tuple[str, ...], samples: Iterable[tuple[Any, ...]]
) -> Metric:
    """samples: the labels' values, then what the kind counts."""
    family = kind(PREFIX + name, text, labels=labels)
    for sample in samples:
        family.add_metric([*map(str, sample[: len(labels)])], *sample[len(labels) :])
    return family
