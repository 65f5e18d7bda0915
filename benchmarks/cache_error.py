"""What each rounding of FP8 decode attention costs: exact values -> stored values -> quantized P, and BF16 beside it.

    python -m benchmarks.cache_error [--out benchmarks/results/cache_error.jsonl]

Steps of the chain, each a relative error ||x - y|| / ||y|| of the attention output in latent space, against FP64 attention
on the unrounded latents, keys and queries:

    bf16    BF16 cache and queries, exact P
    stored  FP8 latents and queries, BF16 RoPE in the pre-scaled domain, exact P                      (3.1, Eq. 6)
    p64     as stored, P quantized per block of 64 tokens, P.V and sums in FP32: the tiled oracle      (Eq. 12, 13)
    p128    the same with blocks of 128
    rope8   as p64, but RoPE also E4M3 with a scale per token: what keeping it in BF16 avoids

"p64 alone" and "p128 alone" compare the oracle with exact attention on the same stored values, so they hold P's
quantization and FP32 accumulation only. Inputs: random latents with a mean, or the demo model's own latents and queries.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from kernels import ops
from kernels.layout import BLOCK_SIZE, CacheFormat, LatentCache, LatentQuery
from kernels.reference.latent import quantize_rows
from kernels.reference.mla_decode import exact_attention, tiled_attention

ROOT = Path(__file__).resolve().parent.parent
LENGTHS = (512, 4096, 32768)


def store(values: tuple[torch.Tensor, torch.Tensor], fmt: CacheFormat | None) -> tuple[torch.Tensor, ...]:
    """Content and RoPE [..., C], [..., R] in a format: (content, rope, scale or None); None keeps FP32."""
    content, rope = values
    if fmt is None:
        return content, rope, None
    if fmt is CacheFormat.BF16:
        return content.bfloat16(), rope.bfloat16(), None
    codes, scale = quantize_rows(content)
    return codes, (rope / scale.unsqueeze(-1)).bfloat16(), scale


def quantized_rope(cache: LatentCache) -> LatentCache:
    """The same cache with RoPE rounded to E4M3 with its own scale per token."""
    codes, scale = quantize_rows(cache.rope.float())
    return replace(cache, rope=(codes.float() * scale.unsqueeze(-1)).bfloat16())


def chain(
    keys: tuple[torch.Tensor, torch.Tensor], queries: tuple[torch.Tensor, torch.Tensor], softmax_scale: float
) -> dict[str, float]:
    """Errors of one sequence. keys: FP32 [L, C] and [L, R]; queries: [H, C] and [H, R], both rotated."""
    length = keys[0].shape[0]
    blocks = -(-length // BLOCK_SIZE)
    paged = tuple(
        torch.nn.functional.pad(k, (0, 0, 0, blocks * BLOCK_SIZE - length)).view(blocks, BLOCK_SIZE, -1) for k in keys
    )  # fmt: skip
    one = tuple(q.view(1, 1, *q.shape) for q in queries)
    table = torch.arange(blocks, dtype=torch.int32).view(1, -1)
    lens = torch.tensor([length], dtype=torch.int32)
    kwargs = {"softmax_scale": softmax_scale, "causal": True}

    def pair(fmt: CacheFormat | None) -> tuple[LatentQuery, LatentCache]:
        return LatentQuery(*store(one, fmt)), LatentCache(*store(paged, fmt))

    exact, bf16, fp8 = (pair(fmt) for fmt in (None, CacheFormat.BF16, CacheFormat.FP8))
    true_out, true_lse = exact_attention(*exact, table, lens, **kwargs)
    stored_out, stored_lse = exact_attention(*fp8, table, lens, **kwargs)
    p64, p128 = (tiled_attention(*fp8, table, lens, block=block, **kwargs)[0] for block in (64, 128))
    rope8, _ = tiled_attention(fp8[0], quantized_rope(fp8[1]), table, lens, block=64, **kwargs)

    def error(x: torch.Tensor, y: torch.Tensor) -> float:
        return float((x.double() - y).norm() / y.norm())

    return {
        "bf16": error(exact_attention(*bf16, table, lens, **kwargs)[0], true_out),
        "stored": error(stored_out, true_out),
        "p64": error(p64, true_out),
        "p128": error(p128, true_out),
        "rope8": error(rope8, true_out),
        "p64_alone": error(p64, stored_out),
        "p128_alone": error(p128, stored_out),
        "lse_abs": float((stored_lse - true_lse).abs().max()),
    }


def random_cases(heads: int) -> Iterator[dict[str, object]]:
    """Content logits of about 1.7 nats standard deviation; `rope` is the standard deviation of the keys' RoPE part."""
    for length in LENGTHS:
        for mean, rope in ((0.0, 1.0), (0.5, 1.0), (3.0, 1.0), (0.5, 8.0)):
            g = torch.Generator().manual_seed(length)
            keys = torch.randn(length, 512, generator=g) + mean, torch.randn(length, 64, generator=g) * rope
            queries = torch.randn(heads, 512, generator=g), torch.randn(heads, 64, generator=g)
            case = {"input": "random", "mean": mean, "rope": rope, "tokens": length}
            yield case | chain(keys, queries, (128 + 64) ** -0.5)


def demo_cases(num_tokens: int) -> Iterator[dict[str, object]]:
    """The demo model's latents and queries of its last token, layer by layer, on the model's own greedy text."""
    from models.causal_lm import load_model
    from models.config import load_model_config
    from models.parallel import ParallelContext
    from tests.models.driver import Driver

    folder = ROOT / "models" / "demo"
    config = load_model_config(folder)
    model = load_model(folder, config, ParallelContext.single(), device="cpu", dtype=torch.float32, max_model_len=num_tokens)
    captured: list[tuple] = []
    decode = ops.mla_decode

    def capture(query, cache, block_table, seq_lens, *args, **kwargs):
        captured.append((query, cache, block_table, int(seq_lens[0]), kwargs["softmax_scale"]))
        return decode(query, cache, block_table, seq_lens, *args, **kwargs)

    driver = Driver(model, config, num_blocks=num_tokens // BLOCK_SIZE + 2)
    ids = torch.randint(3, config.vocab_size, (8,), generator=torch.Generator().manual_seed(0)).tolist()
    hidden = driver.step(prefills={0: ids})
    for _ in range(num_tokens - len(ids)):
        captured.clear()
        ops.mla_decode = capture
        try:
            ids.append(int(model.logits(hidden[-1:]).argmax()))
            hidden = driver.step(decodes={0: ids[-1:]})
        finally:
            ops.mla_decode = decode
    for layer, (query, cache, table, length, scale) in enumerate(captured):
        blocks = table[0, : -(-length // BLOCK_SIZE)].long()
        keys = tuple(part[blocks].flatten(0, 1)[:length] for part in (cache.content, cache.rope))
        errors = chain(keys, (query.content[0, 0], query.rope[0, 0]), scale)
        yield {"input": "demo model", "layer": layer, "tokens": length} | errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "cache_error.jsonl")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--demo-tokens", type=int, default=768)
    args = parser.parse_args()
    state = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    columns = ("bf16", "stored", "p64", "p128", "rope8", "p64_alone", "p128_alone", "lse_abs")
    print("input".ljust(38) + "".join(c.rjust(12) for c in columns))
    with args.out.open("w") as out, torch.inference_mode():
        for case in (*random_cases(args.heads), *demo_cases(args.demo_tokens)):
            label = " ".join(f"{k} {v}" if k != "input" else str(v) for k, v in case.items() if k not in columns)
            print(label.ljust(38) + "".join(f"{case[c]:12.2e}" for c in columns), flush=True)
            out.write(json.dumps(case | state) + "\n")


if __name__ == "__main__":
    main()
