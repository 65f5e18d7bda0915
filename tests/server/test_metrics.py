"""Figures: exposition, the dashboard that reads it, and counters that no input can break."""

from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from engine.messages import Ready, ReplicaStats, TokenOutput
from server.metrics import PREFIX, Histogram, Metrics

DASHBOARD = Path(__file__).resolve().parents[2] / "server" / "grafana.json"
# Names that dashboards of vLLM read, without its prefix.
VLLM_NAMES = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "prompt_tokens_cached_total",
    "generation_tokens_total",
    "request_success_total",
    "iteration_tokens_total_bucket",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "request_time_per_output_token_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket",
    "request_inference_time_seconds_bucket",
    "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_params_n_bucket",
    "request_params_max_tokens_bucket",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
    "cache_config_info",
    "admission_rejections_total",
]


def filled() -> Metrics:
    """Every metric with at least one sample."""
    metrics = Metrics("m")
    metrics.replicas[0] = Ready(0, "m", 100, 10, 5, "fp8", 1)
    metrics.step(ReplicaStats(num_steps=1, num_blocks=5, num_free_blocks=2, prompt_tokens=3, spec_accepted_per_pos=[2, 1]))
    output = TokenOutput(
        "r", [1, 2], "length", num_prompt_tokens=3, num_cached_tokens=1, num_output_tokens=4, scheduled_time=1.0
    )
    metrics.expert_load = [[6, 2, 0, 0], [1, 1, 1, 1]]
    metrics.params(0, 2, 16)
    metrics.first_token(0, 0.2)
    metrics.prompt(0, output)
    metrics.tokens(0, 3, 0.3)
    metrics.finish(0, output, 0.5, 1.5, 2.5)
    metrics.counters["generation_tokens"][0] += 4
    metrics.rejected["queue_full"] += 1
    metrics.http["/v1/completions", "200"] += 1
    metrics.histograms["frontend_delivery_seconds"][0].observe(0.001)
    metrics.start_up["model"] = 1.0
    return metrics


def names(metrics: Metrics) -> set[str]:
    families = text_string_to_metric_families(metrics.exposition().decode())
    return {sample.name.removeprefix(PREFIX) for family in families for sample in family.samples}


def test_exposition_parses_and_has_the_names_people_chart() -> None:
    assert set(VLLM_NAMES) <= names(filled())


def test_every_metric_of_the_dashboard_exists() -> None:
    known = names(filled())
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    used = {name for text in expressions for name in re.findall(rf"{PREFIX}(\w+)", text)}
    assert len(used) > 12 and used <= known, used - known
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_figures_of_one_request() -> None:
    samples = {
        (sample.name.removeprefix(PREFIX), sample.labels.get("finished_reason", "")): sample.value
        for family in text_string_to_metric_families(filled().exposition().decode())
        for sample in family.samples
    }
    assert samples["e2e_request_latency_seconds_sum", ""] == 2.0
    assert samples["request_queue_time_seconds_sum", ""] == samples["request_prefill_time_seconds_sum", ""] == 0.5
    assert samples["request_decode_time_seconds_sum", ""] == 1.0
    assert abs(samples["request_time_per_output_token_seconds_sum", ""] - 1 / 3) < 1e-9
    assert samples["inter_token_latency_seconds_count", ""] == 3
    assert samples["request_success_total", "length"] == 1
    assert samples["kv_cache_usage_perc", ""] == 0.6


def test_nothing_that_is_counted_can_raise() -> None:
    """Report O04, O05: totals that fall back (a preempted request's cached tokens), negative times and unknown ranks."""
    metrics = Metrics("m")
    metrics.step(ReplicaStats(num_steps=5, prompt_tokens=100, prefix_hits=50))
    metrics.step(ReplicaStats(num_steps=6, prompt_tokens=10, prefix_hits=-3))
    metrics.first_token(9, -1.0)
    metrics.prompt(9, TokenOutput("r", [], num_prompt_tokens=-1, num_cached_tokens=-5))
    metrics.finish(9, TokenOutput("r", [], None, num_output_tokens=-1, scheduled_time=9e9), 1e9, None, 0.0)
    list(text_string_to_metric_families(metrics.exposition().decode()))


def test_histogram_buckets_are_cumulative() -> None:
    histogram = Histogram([1.0, 2.0])
    histogram.observe(1.0)
    histogram.observe(1.5, 2)
    histogram.observe(99.0)
    assert histogram.buckets() == [("1.0", 1.0), ("2.0", 3.0), ("+Inf", 4.0)] and histogram.sum == 103.0


def test_experts_are_summed_over_layers_and_judged_by_layer() -> None:
    text = filled().exposition().decode()
    for line in ('expert_tokens_total{expert="0",model_name="m"} 7.0', 'expert_tokens_total{expert="3",model_name="m"} 1.0'):
        assert PREFIX + line in text
    for line in ('expert_imbalance{layer="0",model_name="m"} 3.0', 'expert_imbalance{layer="1",model_name="m"} 1.0'):
        assert PREFIX + line in text
    assert "expert_tokens_total{" not in Metrics("dense").exposition().decode()
