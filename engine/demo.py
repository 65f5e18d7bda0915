"""`python -m engine.demo`: the bundled model continues several prompts at once, and says how fast it was."""

from __future__ import annotations

import textwrap
import time

from engine.llm import LLM
from engine.sampling_params import SamplingParams

PROMPTS = [
    "In the beginning",
    "The king said unto his servants,",
    "And it came to pass in those days, that",
    "A function that returns",
    "The meaning of the word river is",
    "She walked down to the sea and",
    "Blessed are they that",
    "The module provides",
]
MAX_TOKENS = 64


def main() -> None:
    started = time.perf_counter()
    llm = LLM("demo")
    loaded = time.perf_counter()
    print(f"bundled demo model, {llm.info.cache_format} cache, on {llm.info.device}: ready in {loaded - started:.1f} s\n")
    params = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=MAX_TOKENS, seed=7)
    results = llm.generate(PROMPTS, params)
    elapsed = time.perf_counter() - loaded
    for result in results:
        choice = result.outputs[0]
        print(textwrap.fill(f"> {result.prompt}", 100))
        print(textwrap.indent(textwrap.fill(choice.text.strip(), 96), "    "), "\n")
    tokens = sum(len(result.outputs[0].token_ids) for result in results)
    print(f"{tokens} tokens for {len(results)} prompts at once in {elapsed:.2f} s: {tokens / elapsed:.0f} tokens/s")
    print("next: make serve, or python -m engine.offline --help")


if __name__ == "__main__":
    main()
