"""Quality of a demo checkpoint with the training code's own forward pass (no cache, BF16 activations, FP8 block weights).

    python -m benchmarks.demo_model.evaluate [--model models/demo] [--output benchmarks/results/demo_model_training.jsonl]

Held-out perplexity, how often the MTP module's draft equals what the main model would say, recall by distance, samples.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from benchmarks.demo_model.checkpoint import load_checkpoint
from benchmarks.demo_model.model import DemoModel
from benchmarks.demo_model.recall import RecallTask
from benchmarks.demo_model.tokenizer import BOS_ID, EOS_ID
from benchmarks.records import append

HERE = Path(__file__).resolve().parent
PROMPTS = (
    "It was a fine morning in May, and the",
    "In the beginning",
    "The captain looked out over the sea and",
    "She had always been of the opinion that",
    "<｜User｜>Tell me a story about a fox and a bear.<｜Assistant｜></think>",
    "<｜User｜>What is a garden?<｜Assistant｜></think>",
    "<｜User｜>Hello! What can you do?<｜Assistant｜></think>",
    "<｜User｜>What is 4 plus 5?<｜Assistant｜><think>",
)


def load_heldout(tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """Token ids of each held-out document by title, each begun by the bos token."""
    lines = (HERE / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return {d["title"]: np.asarray(tokenizer.encode(d["text"]).ids) for d in map(json.loads, lines)}


def recall_task(tokenizer: Tokenizer) -> RecallTask:
    return RecallTask(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)


@torch.inference_mode()
def heldout_metrics(model: DemoModel, documents: dict[str, np.ndarray], length: int) -> dict[str, float]:
    """Loss in nats a token over rows of `length` tokens (the last row of a document may be shorter), and draft agreement.

    `draft_agreement`: how often the draft for token t + 2, made from the true token t + 1, is the main model's argmax there.
    `tokens_per_step`: tokens one verified draft a step yields at that agreement.
    """
    device = model.embed_tokens.device
    loss = agreed = tokens = drafts = 0.0
    by_document = {}
    for title, ids in documents.items():
        total = count = 0.0
        for start in range(0, len(ids) - 2, length):
            row = torch.from_numpy(ids[start : start + length + 1].astype(np.int64)).to(device)[None]
            hidden, drafted, _ = model.hidden_states(row)
            logits = model.head(hidden).float()
            total += F.cross_entropy(logits, row[0, 1:], reduction="sum").item()
            count += logits.shape[0]
            draft, choice = model.head(drafted)[:-1].argmax(-1), logits[1:].argmax(-1)
            agreed += (draft == choice).sum().item()
            drafts += draft.shape[0]
        by_document[title] = math.exp(total / count)
        loss, tokens = loss + total, tokens + count
    mean = loss / tokens
    return {
        "row_length": length,
        "tokens": int(tokens),
        "loss": mean,
        "perplexity": math.exp(mean),
        "draft_agreement": agreed / drafts,
        "tokens_per_step": 1 + agreed / drafts,
        **{f"perplexity_{title}": value for title, value in by_document.items()},
    }


@torch.inference_mode()
def recall_accuracy(
    model: DemoModel, task: RecallTask, filler: np.ndarray, distance: int, prompts: int, seed: int = 7
) -> tuple[float, float]:
    """(codes recalled whole, digits right), teacher-forced argmax, over `prompts` prompts at one distance."""
    rng = np.random.default_rng(seed + distance)
    device = model.embed_tokens.device
    whole = digits = 0.0
    for _ in range(prompts):
        start = int(rng.integers(max(1, len(filler) - distance)))
        prompt, answer = task.prompt(rng, np.resize(filler[start:], distance), distance, bos=(BOS_ID,))
        row = torch.tensor([prompt + answer], device=device)
        hidden, _, _ = model.hidden_states(row)
        right = model.head(hidden[-len(answer) :]).argmax(-1) == row[0, -len(answer) :]
        whole += right.all().item()
        digits += right.float().mean().item()
    return whole / prompts, digits / prompts


@torch.inference_mode()
def sample(model: DemoModel, tokenizer: Tokenizer, prompt: str, tokens: int, temperature: float, seed: int = 0) -> str:
    """Continue `prompt` by recomputing everything at each token; temperature 0 is greedy."""
    device = model.embed_tokens.device
    generator = torch.Generator().manual_seed(seed)
    ids = tokenizer.encode(prompt).ids
    for _ in range(tokens):
        hidden, _, _ = model.hidden_states(torch.tensor([[*ids, EOS_ID]], device=device))
        logits = model.head(hidden[-1:]).float().cpu()[0]
        if temperature:
            kept = logits.topk(40)
            ids.append(int(kept.indices[torch.multinomial((kept.values / temperature).softmax(-1), 1, generator=generator)]))
        else:
            ids.append(int(logits.argmax()))
        if ids[-1] == EOS_ID:
            break
    return tokenizer.decode(ids, skip_special_tokens=False)


def report(
    model: DemoModel,
    tokenizer: Tokenizer,
    documents: dict[str, np.ndarray],
    distances: list[int],
    prompts: int,
    emit: Callable[[dict], None],
    lengths: list[int],
    sample_tokens: int = 90,
) -> None:
    """Emit one record for each row length and each recall distance, and print samples."""
    filler = np.concatenate(list(documents.values()))
    for length in lengths:
        emit({"measure": "heldout", **heldout_metrics(model, documents, length)})
    task = recall_task(tokenizer)
    for distance in distances:
        started = time.perf_counter()
        whole, digits = recall_accuracy(model, task, filler, distance, prompts)
        seconds = round(time.perf_counter() - started, 2)
        emit(
            {
                "measure": "recall",
                "distance": distance,
                "prompts": prompts,
                "codes": whole,
                "digits": digits,
                "seconds": seconds,
            }
        )
    for prompt in PROMPTS:
        print("-----", sample(model, tokenizer, prompt, sample_tokens, temperature=0.7), flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", type=Path, default=HERE.parents[1] / "models" / "demo")
    arguments.add_argument("--output", type=Path, help="append the records to this JSON-lines file")
    arguments.add_argument("--distances", type=int, nargs="*", default=[64, 256, 1024, 4096, 8192, 16384])
    arguments.add_argument("--lengths", type=int, nargs="*", default=[1024, 8192], help="row lengths of the perplexity")
    arguments.add_argument("--prompts", type=int, default=32, help="recall prompts at each distance")
    arguments.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the activations")
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = arguments.parse_args()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))

    def emit(record: dict) -> None:
        record = {
            "stage": "exported checkpoint",
            "device": args.device,
            "dtype": args.dtype,
            "torch": torch.__version__,
            **record,
        }
        print(json.dumps(record), flush=True)
        if args.output:
            append(args.output, record)

    model = load_checkpoint(args.model, getattr(torch, args.dtype)).to(args.device)
    report(model, tokenizer, load_heldout(tokenizer), args.distances, args.prompts, emit, args.lengths)


if __name__ == "__main__":
    main()
