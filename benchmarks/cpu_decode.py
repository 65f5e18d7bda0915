"""Tokens per second on a CPU, against transformers on the same checkpoint: `python -m benchmarks.cpu_decode --model DIR`.

The peer is transformers' `generate` run one prompt at a time, in a process of its own, with the same threads, dtype and
prompts; a checkpoint with FP8 weights is dequantized for it. Every round times the peer and each of our cases once, in
turn, greedy decoding with a fixed number of new tokens, after a warm-up; figures are medians over rounds of output tokens
over wall seconds, prefill included. Appends one JSON line to results/cpu_decode.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.records import RESULTS, append, machine_state

ROOT = Path(__file__).resolve().parent.parent
ALONE = 4  # prompts of the one-at-a-time cases: their speed does not depend on how many follow each other


def dequantized(folder: Path, target: Path) -> Path:
    """`folder` itself, or a copy in `target` with FP8 weights as BF16, which transformers can run on a CPU."""
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_text())
    if config.pop("quantization_config", None) is None:
        return folder
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        tensors |= load_file(path)
    plain = {}
    for name, tensor in tensors.items():
        scale = tensors.get(f"{name}_scale_inv")
        if scale is not None:
            rows, columns = tensor.shape
            spread = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
            tensor = (tensor.float() * spread).bfloat16()
        if not name.endswith("_scale_inv"):
            plain[name] = tensor
    save_file(plain, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config))
    return target


def serve_peer(folder: Path, dtype: str) -> None:
    """Child process: time `generate` on each line of {"prompts": [[ids]], "tokens": n} and answer with seconds."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as scratch:
        source = dequantized(folder, Path(scratch))
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype)).eval()
    for line in sys.stdin:
        job = json.loads(line)
        started = time.perf_counter()
        for prompt in job["prompts"]:
            ids = torch.tensor([prompt])
            mask = torch.ones_like(ids)
            out = model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=job["tokens"],
                min_new_tokens=job["tokens"],
                pad_token_id=0,
            )
            assert out.shape[1] == len(prompt) + job["tokens"]
        print(json.dumps({"seconds": time.perf_counter() - started}), flush=True)


class Peer:
    """transformers in a child process."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.cpu_decode", "--peer", "--model", str(folder), "--dtype", dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )

    def speed(self, prompts: list[list[int]], tokens: int) -> float:
        """Output tokens per second, one prompt after the other."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        return len(prompts) * tokens / json.loads(self._process.stdout.readline())["seconds"]

    def close(self) -> None:
        self._process.kill()


class Ours:
    """This engine with one cache format."""

    def __init__(self, folder: Path, dtype: str, cache_format: str, max_model_len: int) -> None:
        from engine.llm import LLM

        self.llm = LLM(
            str(folder), dtype=dtype, device="cpu", cache_format=cache_format, max_model_len=max_model_len, prefix_cache=False
        )

    def speed(self, prompts: list[list[int]], tokens: int, together: bool) -> float:
        """Output tokens per second, all prompts at once or one after the other."""
        from engine.sampling_params import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        started = time.perf_counter()
        for batch in [prompts] if together else [[prompt] for prompt in prompts]:
            for result in self.llm.generate(batch, params, use_tqdm=False):
                assert len(result.outputs[0].token_ids) == tokens
        return len(prompts) * tokens / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--name", default="", help="name of the checkpoint in the results (default: the folder's)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--prompts", type=int, default=16, help="concurrent prompts")
    parser.add_argument("--input", type=int, default=32, help="tokens per prompt")
    parser.add_argument("--output", type=int, default=128, help="new tokens per prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--caches", nargs="+", default=["exact", "fp8"], help="cache formats; exact is the dtype's own")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        serve_peer(args.model, args.dtype)
        return
    # Read when torch is loaded, here and in the child: the same for both sides.
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    vocab = json.loads((args.model / "config.json").read_text())["vocab_size"]
    rng = random.Random(0)
    prompts = [[rng.randrange(8, vocab) for _ in range(args.input)] for _ in range(args.prompts)]

    peer = Peer(args.model, args.dtype)
    formats = {"exact": "bf16" if args.dtype == "bfloat16" else "fp32"}
    engines = {
        cache: Ours(args.model, args.dtype, formats.get(cache, cache), args.input + args.output + 1) for cache in args.caches
    }
    alone = prompts[:ALONE]
    speeds: dict[str, list[float]] = {}

    def record(name: str, value: float) -> None:
        speeds.setdefault(name, []).append(value)
        print(f"{name:24s} {value:8.1f} tokens/s", flush=True)

    peer.speed(prompts[:1], 8)
    for engine in engines.values():
        engine.speed(prompts, 8, together=True)
    for round_index in range(args.rounds):
        print(f"round {round_index + 1} of {args.rounds}, load {os.getloadavg()[0]:.1f}")
        record("transformers, 1 prompt", peer.speed(alone, args.output))
        for cache, engine in engines.items():
            record(f"{cache} cache, {args.prompts} prompts", engine.speed(prompts, args.output, together=True))
            record(f"{cache} cache, 1 prompt", engine.speed(alone, args.output, together=False))
    peer.close()
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    base = medians["transformers, 1 prompt"]
    line: dict[str, Any] = {
        "benchmark": "cpu_decode",
        "model": args.name or args.model.name,
        "dtype": args.dtype,
        "prompts": args.prompts,
        "input_tokens": args.input,
        "output_tokens": args.output,
        "threads": args.threads,
        "tokens_per_s": {name: round(value, 1) for name, value in medians.items()},
        "over_transformers": {name: round(value / base, 2) for name, value in medians.items() if not name.startswith("tr")},
        "rounds": {name: [round(value, 1) for value in values] for name, values in speeds.items()},
        "wait_policy": os.environ["OMP_WAIT_POLICY"],
        "torch": version("torch"),
        "transformers": version("transformers"),
        **machine_state("cpu"),
    }
    append(RESULTS / "cpu_decode.jsonl", line)
    print(json.dumps(line["over_transformers"], indent=1))


if __name__ == "__main__":
    main()
