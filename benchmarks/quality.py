"""Quality parity on the bundled model (Tables 1 and 2 in small): `python -m benchmarks.quality [--quick] [--device cuda]`.

    perplexity  held-out text, every token computed by the decode path through the cache (benchmarks/teacher.py); and how
                often the best token is the exact cache's
    recall      a code stated once and asked for again after a distance: all four digits right, teacher-forced. The text
                between is prefilled once with an exact cache, the question and the answer are decoded through each scheme
    generation  lengths of answers until their end token, at a temperature, seeds equal across schemes; and greedy answers
                compared token by token with the exact cache's
    lm_eval     the same through the server and its HTTP API, by the command of that name where it is installed: the next word of
                held-out text scored, and codes recalled, under the product's three formats. Prompts are prefilled in chunks of
                64 tokens, so that all but the last are read from the cache

`fp32`, `bf16` and `fp8` are the product's own caches and operations. The schemes of Table 3 are simulated on the FP32 cache
(benchmarks/schemes.py); so are all of them in `recall`, where they share one prefill. On a GPU only the product's bf16 and
fp8 are measured, with its Hopper kernels; the reference is then bf16. Appends to results/quality.jsonl, one line a row of
text, prompt or group of prompts, and skips what is there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.activations import HELD_OUT, held_out_ids
from benchmarks.demo_model.recall import RecallTask
from benchmarks.lm_eval_local import evaluate, write_task
from benchmarks.records import RESULTS, Records
from benchmarks.schemes import ALTERNATIVES, COMPARED, EXACT, Scheme, decode_attention, decode_with
from benchmarks.teacher import Teacher, load_demo
from engine.tokenizer import Tokenizer
from kernels.layout import CacheFormat, LatentCache
from tests.distributed.launched import PYTHON, Launched

PARTS = ("perplexity", "recall", "generation", "lm_eval")
SEED = 0
ROW = 1024  # tokens of a row of held-out text
QUESTION = 8  # last tokens of a recall prompt, which are decoded and not prefilled
MOST_TOKENS = 200
CONTEXT_WORDS, RECALLED = 100, 512  # of the tasks for lm_eval: words before the scored one, tokens between code and question
TEMPERATURE = 0.7
METHODS = {
    "perplexity": "teacher-forced decode through the cache, one decode row a token, reads of the row's own cache only",
    "recall": "exact prefill, question and answer decoded through the scheme, teacher-forced argmax",
    "lm_eval": "lm_eval's local-completions against the launched server, prefill in chunks of 64 tokens",
    "generation": "LLM.chat, greedy and sampled with one seed a prompt; token counts from the engine's token ids",
}
QUESTIONS = (
    "What is a {}?", "Tell me a story about a {}.", "Define {}.", "Use the word {} in a sentence.",
)  # fmt: skip
WORDS = ("garden", "ship", "king", "river", "fox", "house", "letter", "mountain", "horse", "stone", "servant", "voice")


class Lab:
    """The model, one cache format at a time, and schemes read through the exact one."""

    def __init__(self, device: str, max_tokens: int) -> None:
        self.device, self.max_tokens = device, max_tokens
        self.model, self.config, folder = load_demo(device, max_tokens)
        self.tokenizer = Tokenizer.load(folder)
        self.documents = held_out_ids(self.tokenizer.encode)
        self._amax: list[float] = []

    def teacher(self, fmt: CacheFormat, max_tokens: int) -> Teacher:
        return Teacher(self.model, self.config, fmt, max_tokens, self.device)

    def reading(self, scheme: Scheme, caches: list[LatentCache]) -> contextlib.AbstractContextManager[None]:
        """Reads of exact caches go through a scheme."""
        return decode_attention(decode_with(scheme, dict(zip((c.content.data_ptr() for c in caches), self._static_amax()))))

    def _static_amax(self) -> list[float]:
        """Largest latent of each layer over the calibration text: a row that is never measured."""
        if not self._amax:
            teacher = self.teacher(CacheFormat.FP32, ROW)
            teacher.prefill(next(iter(self.documents.values()))[-ROW:])
            self._amax = [float(cache.content.abs().max()) for cache in teacher.caches]
        return self._amax


# ---- perplexity


def text_rows(documents: dict[str, list[int]], count: int) -> list[tuple[str, int, list[int]]]:
    """(title, first token, ROW + 1 ids): rows taken from the documents in turn, never the end of the first (calibration)."""
    found, start = [], 0
    while len(found) < count:
        taken = [
            (title, start, ids[start : start + ROW + 1]) for title, ids in documents.items() if start + 2 * ROW + 1 <= len(ids)
        ]
        if not taken:
            break
        found += taken
        start += ROW
    return found[:count]


def perplexity(lab: Lab, records: Records, rows: int) -> None:
    formats = (
        [CacheFormat.BF16, CacheFormat.FP8] if lab.device == "cuda" else [CacheFormat.FP32, CacheFormat.BF16, CacheFormat.FP8]
    )
    for title, start, ids in text_rows(lab.documents, rows):
        key = {"figure": "perplexity", "on": lab.device, "document": title, "start": start}
        names = [fmt.value for fmt in formats] + [scheme.name for scheme in ALTERNATIVES if lab.device == "cpu"]
        if all(records.has(**key, scheme=name) for name in names):
            continue
        best: torch.Tensor | None = None
        for name in names:
            fmt = next((fmt for fmt in formats if fmt.value == name), CacheFormat.FP32)
            teacher = lab.teacher(fmt, ROW + 64)
            scheme = next((scheme for scheme in ALTERNATIVES if scheme.name == name), None)
            with lab.reading(scheme, teacher.caches) if scheme else contextlib.nullcontext():
                logits = teacher.logits(ids[:-1]).cpu()
            loss = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none").double()
            choice = logits.argmax(-1)
            best = choice if best is None else best
            agreed = int((choice == best).sum())
            if not records.has(**key, scheme=name):
                records.write(**key, scheme=name, tokens=len(ids) - 1, nll=float(loss.sum()), agreed=agreed)
            print(
                f"perplexity {title} {start} {name:<8} {float(loss.mean().exp()):.4f}, agreement {agreed / len(loss):.4f}",
                flush=True,
            )


# ---- recall


def recall(lab: Lab, records: Records, distances: list[int], prompts: int) -> None:
    task = RecallTask(lambda text: lab.tokenizer.encode(text, add_special_tokens=False))
    filler = np.concatenate([np.asarray(ids) for ids in lab.documents.values()])
    for distance in distances:
        for index in range(prompts):
            key = {"figure": "recall", "on": lab.device, "distance": distance, "prompt": index}
            if all(records.has(**key, scheme=scheme.name) for scheme in (EXACT, *COMPARED)):
                continue
            rng = np.random.default_rng([SEED, distance, index])
            first = int(rng.integers(max(1, len(filler) - distance)))
            prompt, answer = task.prompt(rng, np.resize(filler[first:], distance), distance, bos=(0,))
            teacher = lab.teacher(CacheFormat.FP32, len(prompt) + 64)
            teacher.prefill(prompt[:-QUESTION])
            begun = teacher.length
            for scheme in (EXACT, *COMPARED):
                teacher.length = begun  # the tokens after it are written again
                with lab.reading(scheme, teacher.caches):
                    logits = teacher.logits(prompt[-QUESTION:] + answer[:-1])[-len(answer) :].cpu()
                right = (logits.argmax(-1) == torch.tensor(answer)).tolist()
                loss = float(torch.nn.functional.cross_entropy(logits, torch.tensor(answer)))
                if not records.has(**key, scheme=scheme.name):
                    records.write(**key, scheme=scheme.name, right=sum(right), whole=all(right), nll=loss)
            print(f"recall {distance} {index} (last scheme: {sum(right)} of {len(answer)} digits)", flush=True)


# ---- generation


def chats(count: int) -> list[list[dict[str, str]]]:
    """Conversations of one question."""
    texts = [question.format(word) for word in WORDS for question in QUESTIONS][:count]
    return [[{"role": "user", "content": text}] for text in texts]


def generation(lab: Lab, records: Records, count: int, alternatives: tuple[Scheme, ...]) -> None:
    """Answers under each format and alternative: the engine's own LLM with that cache, or its FP32 cache read through a scheme."""
    from engine.llm import LLM
    from engine.sampling_params import SamplingParams

    prompts = chats(count)
    greedy: list[list[int]] | None = None
    formats = [(name, name, None) for name in ("fp32", "bf16", "fp8")]
    for name, fmt, scheme in (*formats, *((other.name, "fp32", other) for other in alternatives)):
        key = {"figure": "generation", "on": lab.device, "scheme": name, "prompts": count}
        if records.has(**key) and (greedy is not None or name != "fp32"):
            continue
        llm = LLM(
            "demo", cache_format=fmt, device="cpu", max_model_len=512, num_cache_blocks=count * 8 + 8, max_num_seqs=count,
            prefix_cache=False,
        )  # fmt: skip
        caches = llm._core._executor._runner.cache.layers  # type: ignore[attr-defined]
        with lab.reading(scheme, caches) if scheme else contextlib.nullcontext():
            outs = [
                llm.chat(prompts, params, use_tqdm=False)
                for params in (
                    SamplingParams(temperature=0.0, max_tokens=MOST_TOKENS),
                    [SamplingParams(temperature=TEMPERATURE, seed=1 + i, max_tokens=MOST_TOKENS) for i in range(count)],
                )
            ]
        chosen, sampled = ([out.outputs[0] for out in part] for part in outs)
        greedy = greedy or [list(out.token_ids) for out in chosen]
        same = [_common(list(out.token_ids), other) for out, other in zip(chosen, greedy)]
        if not records.has(**key):
            records.write(
                **key,
                lengths=[len(out.token_ids) for out in sampled],
                ended=sum(out.finish_reason == "stop" for out in sampled),
                greedy_lengths=[len(out.token_ids) for out in chosen],
                greedy_same=same,
                greedy_identical=sum(list(out.token_ids) == other for out, other in zip(chosen, greedy)),
            )
        print(f"generation {name:<8} mean length {np.mean([len(out.token_ids) for out in sampled]):.1f}", flush=True)


# ---- lm_eval


def lm_eval(lab: Lab, records: Records, words: int, recalls: int) -> None:
    """words: held-out words to score; recalls: codes to recall over RECALLED tokens of running text."""
    if shutil.which("lm_eval") is None:
        print("lm_eval: left out, the command is not on the PATH")
        return
    documents = [json.loads(line)["text"].split(" ") for line in HELD_OUT.read_text(encoding="utf-8").splitlines()]
    scored = [_next_word(documents[i % len(documents)], i, words) for i in range(words)]
    asked = [_asked_in_text(lab, index) for index in range(recalls)]
    digits = {"filter": [{"function": "regex", "regex_pattern": "([0-9]{4})"}, {"function": "take_first"}], "name": "digits"}
    for fmt in ("fp32", "bf16", "fp8"):
        key = {"figure": "lm_eval", "on": lab.device, "scheme": fmt, "words": words, "recalls": recalls}
        if records.has(**key):
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_task(folder, "next_word", "score", scored)
            write_task(folder, "recall", "text", asked, filter_list=[digits])
            options = ("--cache-format", fmt, "--num-cache-blocks", "256", "--max-model-len", "2048", "--prefill-chunk", "64")
            with Launched(PYTHON, "--device", lab.device, *options, log=folder / "server.log") as launched:
                launched.wait_ready()
                samples = evaluate(launched.port, folder, ["next_word", "recall"])["samples"]
        nll = [-float(line["filtered_resps"][0][0]) for line in samples["next_word"]]
        best, right = [line["acc"] for line in samples["next_word"]], [line["exact_match"] for line in samples["recall"]]
        records.write(**key, nll=nll, best=best, recalled=right)
        print(
            f"lm_eval {fmt}: {np.mean(nll):.4f} nats a word, {sum(best)} best, {sum(right):.0f} of {recalls} recalled",
            flush=True,
        )


def _next_word(text: list[str], index: int, count: int) -> tuple[str, str]:
    """The `index`-th of `count` places of a document: the words before, and the next one."""
    at = CONTEXT_WORDS + index * (len(text) - CONTEXT_WORDS - 1) // count
    return " ".join(text[at - CONTEXT_WORDS : at]), " " + text[at]


def _asked_in_text(lab: Lab, index: int) -> tuple[str, str]:
    """A recall prompt as text, and its code."""
    task = RecallTask(lambda text: lab.tokenizer.encode(text, add_special_tokens=False))
    filler = np.concatenate([np.asarray(ids) for ids in lab.documents.values()])
    rng = np.random.default_rng([SEED, RECALLED, index])
    first = int(rng.integers(len(filler) - RECALLED))
    prompt, answer = task.prompt(rng, filler[first : first + RECALLED], RECALLED, bos=())
    return lab.tokenizer.decode(prompt, True), lab.tokenizer.decode(answer, True).strip()


def _common(a: list[int], b: list[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="fewer rows, prompts and distances; answers under one alternative only"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", type=int, help=f"rows of {ROW} held-out tokens (default: 20, quick 4)")
    parser.add_argument(
        "--distances", type=int, nargs="+", help="recall distances in tokens (default: 256 1024 4096, quick 256 1024)"
    )
    parser.add_argument(
        "--prompts", type=int, help="recall prompts a distance (default: 20, quick 4); as many chats, in whole groups of 4"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "quality.jsonl")
    args = parser.parse_args()
    distances = args.distances or ([256, 1024] if args.quick else [256, 1024, 4096])
    prompts = args.prompts or (4 if args.quick else 20)
    lab = Lab(args.device, max(ROW, *distances) + 256)
    for part in args.only:
        if args.device == "cuda" and part != "perplexity":
            print(f"{part}: runs on the CPU only, where every scheme can be simulated on the exact cache")
            continue
        records = Records(args.out, device=args.device, method=METHODS[part], seed=SEED)
        if part == "perplexity":
            perplexity(lab, records, args.rows or (4 if args.quick else 20))
        elif part == "recall":
            recall(lab, records, distances, prompts)
        elif part == "lm_eval":
            lm_eval(lab, records, 40 if args.quick else 200, 8 if args.quick else 40)
        else:
            generation(lab, records, -(-prompts // 4) * 4, ALTERNATIVES[:1] if args.quick else ALTERNATIVES)


if __name__ == "__main__":
    main()
