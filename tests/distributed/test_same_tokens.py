"""The same tokens from one process and from every parallel layout behind the server (decision: FP32 and the exact cache,
so all tokens are equal). CPU, gloo."""

from __future__ import annotations

import json
import random
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
import torch

from engine.hub import resolve_model
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from tests.comparator import Differences, Generation, assert_same_generations, assert_same_tokens
from tests.distributed.launched import PYTHON, SMALL, Launched, free_port, torchrun
from tests.reference_checkpoints import reference_checkpoint

EXACT = ("--dtype", "float32", "--cache-format", "fp32")
MAX_TOKENS = 12
CONCURRENCY = 16
LAYOUTS = [(1, 2), (2, 1), (2, 2), (8, 1), (1, 8), (4, 2)]


def folder_of(model: str) -> str:
    return model if model == "demo" else str(reference_checkpoint(model))


@cache
def expected(model: str, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """(prompts, greedy tokens) of one process."""
    torch.set_num_threads(1)
    llm = LLM(folder_of(model), dtype="float32", cache_format="fp32", num_cache_blocks=512, max_model_len=256)
    rng = random.Random(5)
    vocab = llm.info.model_config.vocab_size
    prompts = [[rng.randrange(3, vocab) for _ in range(rng.randrange(1, 90))] for _ in range(count)]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    results = llm.generate(prompts, params, use_tqdm=False)
    return prompts, [result.outputs[0].token_ids for result in results]


def compare(launched: Launched, model: str, count: int) -> None:
    """Ask for all prompts, CONCURRENCY at a time."""
    prompts, wanted = expected(model, count)

    def ask(prompt: list[int]) -> list[int]:
        body = launched.post(
            "/generate", prompt_token_ids=prompt, temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, timeout=400
        )
        return body["choices"][0]["token_ids"]

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        answers = list(pool.map(ask, prompts))
    for number, (got, want) in enumerate(zip(answers, wanted, strict=True)):
        assert_same_tokens(got, want, label=f"prompt {number}: ")


@pytest.mark.timeout(500)
def test_data_and_tensor_parallel_together(tmp_path: Path) -> None:
    with Launched(PYTHON, "--dp", "2", "--tp", "2", *SMALL, *EXACT, log=tmp_path / "log") as launched:
        launched.wait_ready()
        compare(launched, "demo", 12)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("acceptance", ["exact", "ratio"])
@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2), (2, 2)])
def test_with_drafts(tmp_path: Path, dp: int, tp: int, acceptance: str) -> None:
    """Greedy requests at two drafts a step: replicas agree on lines and depth, ranks of a replica draft alike."""
    options = ("--dp", str(dp), "--tp", str(tp), "--num-speculative-tokens", "2", "--speculative-acceptance", acceptance)
    with Launched(PYTHON, *options, *SMALL, *EXACT, log=tmp_path / "log") as launched:
        launched.wait_ready()
        compare(launched, "demo", 12)
        with urllib.request.urlopen(f"http://127.0.0.1:{launched.port}/metrics", timeout=30) as answer:
            metrics = answer.read().decode()
        accepted = re.findall(r"^snapmla:spec_decode_num_accepted_tokens_total\{.*\} (\d+)", metrics, re.M)
        assert len(accepted) == dp and sum(map(int, accepted)) > 20


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model", ["demo", "deepseek_v3-tiny", "longcat_flash-tiny"])
@pytest.mark.parametrize(("dp", "tp"), LAYOUTS)
def test_every_layout(tmp_path: Path, model: str, dp: int, tp: int) -> None:
    """Report K03: the same cache format and the same tokens under every parallel mode."""
    command = torchrun() if (dp, tp) == (4, 2) else PYTHON
    options = ("--model", folder_of(model), "--dp", str(dp), "--tp", str(tp), "--num-cache-blocks", "128", *EXACT)
    with Launched(command, *options, "--max-model-len", "256", log=tmp_path / "log") as launched:
        if model != "demo" and _num_heads(model) % tp:
            assert launched.wait(120) != 0 and "heads cannot be split" in launched.text()
            return
        launched.wait_ready()
        compare(launched, model, 50)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (2, 2)])
def test_two_nodes(tmp_path: Path, dp: int, tp: int) -> None:
    """Report D16, D19: two torchrun agents on one host play two nodes."""
    master = str(free_port())
    per_node = str(dp * tp // 2)

    def node(rank: str) -> list[str]:
        address = ("--master-addr", "127.0.0.1", "--master-port", master)
        return torchrun("--nnodes", "2", "--nproc-per-node", per_node, "--node-rank", rank, *address)

    options = ("--dp", str(dp), "--tp", str(tp), *SMALL, *EXACT)
    with (
        Launched(node("0"), *options, log=tmp_path / "node0") as first,
        Launched(node("1"), *options, log=tmp_path / "node1", port=first.port) as second,
    ):
        first.wait_ready()
        compare(first, "demo", 50)
        first.process.terminate()
        first.wait(60)
        second.wait(60)
        assert not first.left() and not second.left()


def _num_heads(model: str) -> int:
    return json.loads((Path(folder_of(model)) / "config.json").read_text())["num_attention_heads"]


def generations(launched: Launched, prompts: list[list[int]]) -> list[Generation]:
    """Greedy continuations with the two best log probabilities, CONCURRENCY at a time."""

    def ask(prompt: list[int]) -> Generation:
        body = launched.post(
            "/generate", prompt_token_ids=prompt, temperature=0, max_tokens=32, ignore_eos=True, logprobs=2, timeout=120
        )
        (choice,) = body["choices"]
        best = [[top["logprob"] for top in score["top_logprobs"]] for score in choice["logprobs"]["content"]]
        ids = choice["token_ids"]
        # the runner-up goes by its rank: its text does not tell its id
        return Generation(ids, [{token: first, -1: second} for token, (first, second) in zip(ids, best, strict=True)])

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return list(pool.map(ask, prompts))


@pytest.mark.multigpu
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["demo", "deepseek_v3-slim-fp8", "longcat_flash-slim"])
@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2)])
def test_two_gpus(tmp_path: Path, model: str, dp: int, tp: int) -> None:
    """Report D02, D17, K03: NCCL, the FP8 cache and the kernels, with graphs and without: the tokens of one GPU up to
    near-ties, at batches on both sides of the captured sizes. The noise is that of one GPU between kernels and reference."""
    folder = resolve_model(folder_of(model))
    rng = random.Random(6)
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    prompts = [[rng.randrange(3, vocab) for _ in range(rng.randrange(1, 200))] for _ in range(50)]
    layouts = {
        "one": (),
        "reference": ("--kernels", "reference"),
        "graphs": ("--dp", str(dp), "--tp", str(tp)),
        "eager": ("--dp", str(dp), "--tp", str(tp), "--no-cuda-graphs"),
    }
    with ExitStack() as stack:
        options = ("--model", str(folder), "--num-cache-blocks", "512", "--max-model-len", "512")
        launches = {
            name: stack.enter_context(Launched(PYTHON, *options, *layout, log=tmp_path / name))
            for name, layout in layouts.items()
        }
        found = {}
        for name, launched in launches.items():
            launched.wait_ready()
            found[name] = generations(launched, prompts)
    noise = Differences.between(found["reference"], found["one"])
    for name in ("graphs", "eager"):
        differences, equal = assert_same_generations(found[name], found["one"], noise, f"{model} {dp}x{tp} {name}: ")
        print(f"{model} {dp}x{tp} {name}: {equal} of {50 * 32} tokens equal, {differences}; control {noise}")
