"""The command line: a flag for every field, no flag without one, and messages that name the fix."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from engine.arguments import HELP
from engine.config import EngineConfig, ParallelConfig, SchedulerConfig, ServerConfig
from engine.errors import ConfigError
from engine.launch import parse

KINDS = (EngineConfig, ParallelConfig, SchedulerConfig, ServerConfig)


def test_every_field_has_a_help_text_and_nothing_else_has() -> None:
    fields = {field.name for kind in KINDS for field in dataclasses.fields(kind)} - {"parallel", "scheduler"}
    assert fields == set(HELP)


def test_defaults_are_those_of_the_configuration() -> None:
    assert parse([], {}) == (EngineConfig("demo"), ServerConfig())


def test_values_arrive() -> None:
    config, server = parse(
        ["--model", "m", "--dp", "4", "--tp", "2", "--no-prefix-cache", "--memory-fraction", "0.5", "--policy", "priority",
         "--port", "0", "--api-key", "a", "--api-key", "b", "--drain-s", "1.5", "--no-access-log"],
        {"SNAPMLA_API_KEY": "c"},
    )  # fmt: skip
    assert config.parallel == ParallelConfig(4, 2) and config.scheduler.policy == "priority"
    assert (config.model, config.prefix_cache, config.memory_fraction) == ("m", False, 0.5)
    assert server == ServerConfig(port=0, api_keys=("a", "b", "c"), drain_s=1.5, access_log=False)


@pytest.mark.parametrize("flags", [["--dtype", "float16"], ["--unknown"], ["--dp", "two"], ["--cache-format", "FP8"]])
def test_unknown_spellings_end_with_usage(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Report K06: there is one spelling of every option; any other is refused before dispatch."""
    with pytest.raises(SystemExit):
        parse(flags, {})
    assert flags[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--dp", "0"], "dp"),
        (["--port", "70000"], "port"),
        (["--memory-fraction", "1.0"], "memory_fraction"),
        (["--heartbeat-s", "0"], "heartbeat_s"),
        (["--chat-template", "/nowhere"], "chat_template"),
        (["--api-key", ""], "api_key"),
        (["--num-speculative-tokens", "9"], "num_speculative_tokens"),
    ],
)
def test_values_that_cannot_work_are_named(flags: list[str], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        parse(flags, {})


def test_a_template_file_is_taken(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("x")
    assert parse(["--chat-template", str(tmp_path / "t.jinja")], {})[1].chat_template.endswith("t.jinja")
