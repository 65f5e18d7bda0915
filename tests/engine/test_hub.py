"""Where models come from, and the ids that end a generation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.chat import ChatTemplate
from engine.errors import ConfigError
from engine.hub import end_token_ids, load_generation_config, resolve_model
from engine.tokenizer import Tokenizer
from tests.engine.test_tokenizer import kimi_folder


def test_local_folder_and_demo(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path
    assert (resolve_model("demo") / "config.json").is_file()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./nowhere", "no such folder"),
        ("/no/such/place", "no such folder"),
        ("a/b/c/d", "not a hub id"),
        ("bad name!", "not a hub id"),
        ("owner/absent-model", "HF_HUB_OFFLINE"),
    ],
)
def test_models_that_are_not_there(model: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_model(model)


def test_a_folder_without_config_and_a_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "weights.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="is a file"):
        resolve_model(str(tmp_path / "weights.safetensors"))


def test_a_cached_hub_model_is_used_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's cache layout, without network: the snapshot that `main` names."""
    from huggingface_hub import constants

    commit = "0" * 40
    repository = tmp_path / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model("owner/name") == snapshot


def test_generation_config(tmp_path: Path) -> None:
    assert load_generation_config(tmp_path).temperature is None
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"temperature": 0.6, "top_p": 0.95, "do_sample": True, "eos_token_id": [1, 2]}))
    config = load_generation_config(tmp_path)
    assert (config.temperature, config.top_p, config.eos_token_ids) == (0.6, 0.95, (1, 2))
    path.write_text(json.dumps({"temperature": 0.6, "do_sample": False}))
    assert load_generation_config(tmp_path).temperature == 0.0
    path.write_text(json.dumps({"temperature": "hot"}))
    with pytest.raises(ConfigError, match="temperature must be a number"):
        load_generation_config(tmp_path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="not readable JSON"):
        load_generation_config(tmp_path)


def test_end_tokens_are_a_union_with_the_templates_turn_end(tmp_path: Path) -> None:
    """Report L12: Kimi ends a turn with a token that no configuration file names."""
    tokens = kimi_folder(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    source = "{% for m in messages %}<|im_{{ m.role }}|>{{ m.content }}<|im_end|>{% endfor %}"
    template = ChatTemplate({"default": source}, {})
    turn_end = template.turn_end(tokenizer)
    assert turn_end == len(tokens) + 2
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": len(tokens)}))
    assert end_token_ids(tmp_path, tokenizer, turn_end) == [len(tokens), len(tokens) + 1, len(tokens) + 2]
    assert tokenizer.decode([turn_end]) == ""
    with pytest.raises(ConfigError, match="eos_token_id"):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "x"}))
        end_token_ids(tmp_path, tokenizer)
