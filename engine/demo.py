"""`python -m engine.demo`: the bundled model answers and continues several prompts at once, and says how fast it was."""

from __future__ import annotations

import textwrap
import time

from engine.llm import LLM, RequestOutput
from engine.sampling_params import SamplingParams

QUESTIONS = [
    "Tell me a story about a fox and a bear.",
    "Tom has a red kite. What color is the kite?",
    "Count from 3 to 9.",
    "Tell me a story about an owl.",
]
BEGINNINGS = [
    "In the beginning",
    "The king said unto his servants,",
    "She walked down to the sea and",
    "And it came to pass in those days, that",
]
MAX_TOKENS = 96


def show(title: str, result: RequestOutput) -> int:
    choice = result.outputs[0]
    print(f"> {title}")
    print(textwrap.indent(textwrap.fill(choice.text.strip(), 96), "    "), "\n", flush=True)
    return len(choice.token_ids)


def main() -> None:
    started = time.perf_counter()
    llm = LLM("demo")
    loaded = time.perf_counter()
    print(f"bundled demo model, {llm.info.cache_format} cache, on {llm.info.device}: ready in {loaded - started:.1f} s\n")
    answers = llm.chat(
        [[{"role": "user", "content": text}] for text in QUESTIONS], SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    )
    texts = llm.generate(BEGINNINGS, SamplingParams(temperature=0.7, top_p=0.95, max_tokens=MAX_TOKENS, seed=7))
    elapsed = time.perf_counter() - loaded
    tokens = sum(show(title, result) for title, result in zip(QUESTIONS + BEGINNINGS, answers + texts))
    print(f"{tokens} tokens, {len(QUESTIONS)} prompts at once, in {elapsed:.2f} s: {tokens / elapsed:.0f} tokens/s")
    print("next: make serve, or python -m engine.offline --help")


if __name__ == "__main__":
    main()
