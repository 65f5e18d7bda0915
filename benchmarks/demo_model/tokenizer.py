"""The demo model's byte-level BPE tokenizer, chat template and tokenizer files, in the published layout.

Special tokens carry DeepSeek's published spellings, so that the engine's chat, thinking and tool-call handling meets the
same text as on the large models.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 2048
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
SPECIAL_TOKENS = (
    BOS,
    EOS,
    PAD,
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
)
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
# One token a digit, so that a code of four digits is four tokens; words keep their leading space.
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = """\
{%- if thinking is not defined %}{% set thinking = false %}{% endif -%}
{{ bos_token }}
{%- for message in messages if message.role == 'system' %}{{ message.content }}{% endfor -%}
{%- if tools %}{{ '\\n\\n## Tools' }}{% for tool in tools -%}
{{ '\\n\\n### ' + tool.function.name + '\\n' + (tool.function.description or '') + '\\n' }}
{{- (tool.function.parameters or {}) | tojson }}{% endfor %}{{ '\\n\\n' }}{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' %}{{ '<｜User｜>' + message.content }}
{%- elif message.role == 'assistant' -%}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{ '<｜Assistant｜></think>' }}{% endif -%}
{{ message.content or '' }}
{%- if message.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}{% for call in message.tool_calls -%}
{{ '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}{% endif -%}
{{ eos_token }}
{%- elif message.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}
{%- endif -%}"""


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train the BPE on `texts`; special tokens take the first ids in the order of SPECIAL_TOKENS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the corpus yields {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}")
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "do_sample": True, "temperature": 0.7, "top_p": 0.95}
    for name, content in (("tokenizer_config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


class ChatRenderer:
    """Renders messages through the same template that the checkpoint ships."""

    eos = EOS

    def __init__(self) -> None:
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        self._template = environment.from_string(CHAT_TEMPLATE)

    def __call__(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        return self._template.render(messages=messages, bos_token=BOS, eos_token=EOS, **variables)
