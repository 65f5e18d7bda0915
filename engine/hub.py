"""Where a model's files come from, and what they say about generation: a local folder, a hub id, or the bundled demo."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.tokenizer import Tokenizer, read_json

DEMO_MODEL = "demo"
CONFIG_PATTERNS = ("*.json", "*.jinja", "tiktoken.model")
WEIGHT_PATTERNS = ("*.safetensors",)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(@[\w./-]+)?")


@dataclass(frozen=True)
class GenerationConfig:
    """A model's recommended sampling (generation_config.json): None where it says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def sampling(self) -> dict[str, Any]:
        """The recommendations, by SamplingParams' names."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "eos_token_ids"}
        return {name: value for name, value in values.items() if value is not None}


def resolve_model(model: str, *, weights: bool = True) -> Path:
    """Folder with the model's files; a hub id is downloaded first (HF_HUB_OFFLINE and HF_HOME are honoured).

    model: local folder, hub id `owner/name` or `owner/name@revision`, or "demo"
    weights: False fetches configuration and tokenizer only
    Raises ConfigError naming the model, what is missing and the fix.
    """
    if model == DEMO_MODEL:
        folder = Path(__file__).resolve().parent.parent / "models" / "demo"
        if not (folder / "config.json").is_file():
            raise ConfigError(f"the bundled demo model is missing from {folder}: reinstall the package")
        return folder
    try:
        folder = Path(model).expanduser()
        exists, is_folder = folder.exists(), folder.is_dir()
    except (OSError, RuntimeError) as error:  # a name too long for a path, or the home of nobody
        raise ConfigError(f"model {model:.60}: is no path ({_first_line(error):.80}); give a folder or a hub id") from error
    if is_folder:
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"model {model}: the folder has no config.json; give the folder that holds the checkpoint's files"
            )
        return folder
    if exists:
        raise ConfigError(f"model {model}: is a file; give the folder that holds config.json and the weights")
    if model.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(model):
        raise ConfigError(f"model {model}: no such folder, and not a hub id of the form owner/name")
    return _download(model, CONFIG_PATTERNS + (WEIGHT_PATTERNS if weights else ()))


def _download(model: str, patterns: tuple[str, ...]) -> Path:
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name, _, revision = model.partition("@")
    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                name, revision=revision or None, allow_patterns=list(patterns), ignore_patterns=["*/*"]
            )
        )
    except HFValidationError as error:
        raise ConfigError(f"model {model}: no such folder, and not a hub id: {error}") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        if constants.HF_HUB_OFFLINE:
            fix = f"HF_HUB_OFFLINE is set and {name} is not in the cache {constants.HF_HUB_CACHE}: unset it or download it once"
        elif os.environ.get("HF_TOKEN") is None:
            fix = "check the name and the network; a gated model needs HF_TOKEN"
        else:
            fix = "check the name, the network and that HF_TOKEN may read it"
        raise ConfigError(
            f"model {model}: no such folder, and the hub did not deliver it ({_first_line(error)}); {fix}"
        ) from error
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model {model}: the repository has no config.json, so it is no checkpoint this engine can load")
    return folder


def load_generation_config(folder: Path) -> GenerationConfig:
    """Read generation_config.json; a model without one recommends nothing. Raises ConfigError on a malformed file."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return GenerationConfig()
    values = read_json(path)
    if values.get("do_sample") is False:  # the model recommends greedy decoding, whatever else the file lists
        values = {"temperature": 0.0, "eos_token_id": values.get("eos_token_id")}
    return GenerationConfig(
        temperature=_number(path, values, "temperature"),
        top_p=_number(path, values, "top_p"),
        top_k=_number(path, values, "top_k"),
        min_p=_number(path, values, "min_p"),
        repetition_penalty=_number(path, values, "repetition_penalty"),
        eos_token_ids=_ids(path, values.get("eos_token_id")),
    )


def end_token_ids(folder: Path, tokenizer: Tokenizer, turn_end: int | None = None) -> list[int]:
    """Every token that ends a generation: those of config.json, generation_config.json, the tokenizer and, where the chat
    template closes a turn with another token (Kimi does), that one."""
    ids = set(load_generation_config(folder).eos_token_ids)
    if (folder / "config.json").is_file():
        ids.update(_ids(folder / "config.json", read_json(folder / "config.json").get("eos_token_id")))
    ids.update(token_id for token_id in (tokenizer.eos_token_id, turn_end) if token_id is not None)
    return sorted(token_id for token_id in ids if 0 <= token_id < tokenizer.vocab_size)


def _number(path: Path, values: dict[str, Any], name: str) -> Any:
    value = values.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise ConfigError(f"{path}: {name} must be a number, got {value!r}")
    return value


def _ids(path: Path, value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(token_id, bool) or not isinstance(token_id, int) for token_id in ids):
        raise ConfigError(f"{path}: eos_token_id must be a token id or a list of them, got {value!r}")
    return tuple(ids)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
