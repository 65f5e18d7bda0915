"""Train the demo model: minutes on one H200, or a few steps anywhere.

    python -m benchmarks.demo_model.prepare
    python -m benchmarks.demo_model.train --output .cache/demo_model/run --budget-s 300
    python -m benchmarks.demo_model.train --output /tmp/run --budget-s 60 --batch-tokens 256 --lengths 256 \\
        --heldout-tokens 200 --recall-prompts 1 --sample-tokens 8

The last line is a trial on a CPU. The learning rate and the mix of row lengths follow the share of the wall-clock budget that
is spent, so any budget ends with an annealed model. Writes a checkpoint in the published layout (at intervals and at the end) and log.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch.nn.attention import SDPBackend
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.demo_model.checkpoint import load_checkpoint, save_checkpoint
from benchmarks.demo_model.evaluate import heldout_metrics, load_heldout, recall_accuracy, recall_task, report
from benchmarks.demo_model.model import DemoModel, Shape, causal_attention

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / ".cache" / "demo_model"
DEMO = HERE.parents[1] / "models" / "demo"
LENGTHS = (1024, 8192, 32768)  # equal numbers of tokens a batch, so that compiled code serves all three
MTP_WEIGHT = 0.4
ANSWER_WEIGHT = 4.0  # the digits of an answer are under a tenth of a recall row
BALANCE_RATE = 1e-3  # DeepSeek-V3's bias update without an auxiliary loss


class Rows(IterableDataset):
    """Endless batches (tokens int64 [B, L + 2], weights of tokens as targets float32 [B, L + 2]) of one row length."""

    def __init__(self, tokens: Path, tokenizer: Path, length: int, batch_tokens: int, seed: int) -> None:
        self.tokens, self.tokenizer, self.length, self.seed = tokens, tokenizer, length, seed
        self.rows = max(1, batch_tokens // length)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        worker = torch.utils.data.get_worker_info()
        rng = np.random.default_rng((self.seed, self.length, worker.id if worker else 0))
        with np.load(self.tokens / "training.npz") as arrays:
            text, chat = arrays["text"], arrays["chat"]
        task, size = recall_task(Tokenizer.from_file(str(self.tokenizer))), self.length + 2
        shares = (0.74, 0.16, 0.10) if self.length <= 2048 else (0.60, 0.05, 0.35)
        while True:
            tokens, weights = np.empty((self.rows, size), np.int64), np.ones((self.rows, size), np.float32)
            for row, kind in enumerate(rng.choice(3, self.rows, p=shares)):
                source = chat if kind == 1 else text
                start = int(rng.integers(len(source) - size))
                tokens[row] = source[start : start + size]
                if kind == 2:
                    facts = int(rng.integers(4, 16 + size // 256))
                    made = task.row(rng, tokens[row], size, facts, 2 * facts)
                    tokens[row], weights[row, made.stated], weights[row, made.answer] = made.tokens, 0.0, ANSWER_WEIGHT
            yield torch.from_numpy(tokens), torch.from_numpy(weights)


def head_loss(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted cross entropy of hidden [T, D] against targets [T]."""
    losses = F.cross_entropy(F.linear(hidden, head.bfloat16().to(hidden.dtype)).float(), targets, reduction="none")
    return (losses * weights).sum() / weights.sum()


def next_length(step: int, spent: float, lengths: list[int]) -> int:
    """Every length once, then mostly short rows; longer ones in fixed shares, which grow in the second half of the budget."""
    if step < len(lengths):
        return lengths[step]
    long_every, longest_every = (8, 0) if spent < 0.5 else (4, 16)
    if longest_every and step % longest_every == 3 and len(lengths) > 2:
        return lengths[2]
    return lengths[1] if step % long_every == 1 and len(lengths) > 1 else lengths[0]


def learning_rate(peak: float, spent: float) -> float:
    """Warm up over 2 % of the budget, hold until 30 %, then fall linearly to nothing."""
    return peak * min(spent / 0.02 + 0.02, 1.0, max(0.0, (1.0 - spent) / 0.7))


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Nearest orthogonal matrices of [..., M, N] by five Newton-Schulz steps with the quintic coefficients of Muon."""
    x = matrices.bfloat16()
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if wide else x.mT


class Muon(torch.optim.Optimizer):
    """Momentum whose matrix updates are orthogonalized, scaled to the size of AdamW's, so both share one learning rate.

    Parameters of one shape are handled together; leading dimensions are separate matrices.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        shapes: dict[torch.Size, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            shapes.setdefault(parameter.shape, []).append(parameter)
        groups = [{"params": same} for same in shapes.values()]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters, lr, momentum = group["params"], group["lr"], group["momentum"]
            gradients = torch.stack([p.grad for p in parameters])
            average = group.setdefault("average", torch.zeros_like(gradients))
            average.lerp_(gradients, 1 - momentum)
            update = orthogonalize(gradients.lerp_(average, momentum)) * (0.2 * max(gradients.shape[-2:]) ** 0.5)
            torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
            torch._foreach_add_(parameters, list(update.float().unbind(0)), alpha=-lr)


def optimizers_for(model: DemoModel, peak: float, weight_decay: float, fused: bool) -> list[torch.optim.Optimizer]:
    """Muon with weight decay for the matrices inside layers; AdamW without for embedding, head, router and gains."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        inner = parameter.ndim >= 2 and not name.endswith(("embed_tokens", "lm_head", "gate"))
        (matrices if inner else others).append(parameter)
    adam = torch.optim.AdamW(others, lr=peak, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=fused)
    return [Muon(matrices, peak, weight_decay), adam]


def fastest_attention() -> SDPBackend:
    """FlashAttention (values padded to 192) or cuDNN, whichever does a training pass at 8,192 tokens faster here."""
    seconds = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        query, key = (torch.randn(8, 8, 8192, 192, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        value = torch.randn(8, 8, 8192, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        try:
            for _ in range(2):
                torch.cuda.synchronize()
                started = time.perf_counter()
                causal_attention(query, key, value, backend).sum().backward()
                torch.cuda.synchronize()
                seconds[backend] = time.perf_counter() - started
        except RuntimeError as error:  # cuDNN releases differ in the widths they support
            print(f"{backend.name} is not usable: {str(error).splitlines()[0]}", flush=True)
            seconds.pop(backend, None)
    print("attention seconds:", {backend.name: round(value, 4) for backend, value in seconds.items()}, flush=True)
    return min(seconds, key=seconds.__getitem__)


def compile_parts(model: DemoModel) -> None:
    """Compile everything but attention; the compiled parts see tokens only, so one compilation serves every row length."""
    for layer in [*model.layers, model.mtp.layer]:
        layer.before = torch.compile(layer.before, dynamic=False)
        layer.after = torch.compile(layer.after, dynamic=False)
    model.mtp.join = torch.compile(model.mtp.join, dynamic=False)


class Log:
    """log.jsonl of a run; every line is also printed, with the seconds since the start."""

    def __init__(self, path: Path) -> None:
        self._file, self._started = path.open("w", encoding="utf-8"), time.perf_counter()

    def __call__(self, record: dict) -> None:
        line = json.dumps({"seconds": round(time.perf_counter() - self._started, 1), **record})
        print(line, flush=True)
        self._file.write(line + "\n")
        self._file.flush()


class Training:
    """A model on its way; `spent` is the share of the wall-clock budget that is gone."""

    def __init__(self, args: argparse.Namespace, model: DemoModel, device: str) -> None:
        self._peak, self._lengths, self._device = args.learning_rate, args.lengths, device
        self.model = model.to(device).train()
        self._layers = [*model.layers, model.mtp.layer]
        self._backend = fastest_attention() if device == "cuda" else None
        for layer in self._layers:
            layer.backend, layer.dropout = self._backend, args.dropout
        if args.compile:
            compile_parts(model)
        self._loss_of = torch.compile(head_loss, dynamic=False) if args.compile else head_loss
        self._optimizers = optimizers_for(model, self._peak, args.weight_decay, fused=device == "cuda")
        tokenizer = args.output / "tokenizer.json"
        self._batches = {}
        for length in args.lengths:
            rows = Rows(args.tokens, tokenizer, length, args.batch_tokens, args.seed)
            loader = DataLoader(rows, batch_size=None, num_workers=args.workers, prefetch_factor=4, pin_memory=device == "cuda")
            self._batches[length] = iter(loader)

    def step(self, number: int, spent: float) -> tuple[torch.Tensor, int]:
        """Losses of the model and of its draft layer, FP32 [2], and the tokens of the batch."""
        model = self.model
        tokens, weights = next(self._batches[next_length(number, spent, self._lengths)])
        tokens, weights = tokens.to(self._device, non_blocking=True), weights.to(self._device, non_blocking=True)
        for group in (group for optimizer in self._optimizers for group in optimizer.param_groups):
            group["lr"] = learning_rate(self._peak, spent)
        hidden, drafted, loads = model.hidden_states(tokens[:, :-1])
        main_loss = self._loss_of(hidden, model.lm_head, tokens[:, 1:-1].flatten(), weights[:, 1:-1].flatten())
        mtp_loss = self._loss_of(drafted, model.lm_head, tokens[:, 2:].flatten(), weights[:, 2:].flatten())
        (main_loss + MTP_WEIGHT * mtp_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for moe, load in zip(model.moes(), loads, strict=True):
                moe.e_score_correction_bias += BALANCE_RATE * min(1.0, 2 - 2 * spent) * (load.float().mean() - load).sign()
        return torch.stack((main_loss.detach(), mtp_loss.detach())), tokens.shape[0] * (tokens.shape[1] - 2)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        self.model.eval()
        for layer in self._layers:
            layer.backend = None  # cuDNN would plan every new row length afresh
        with torch.compiler.set_stance("force_eager"):
            yield
        self.model.train()
        for layer in self._layers:
            layer.backend = self._backend


def train(training: Training, args: argparse.Namespace, evaluate: Callable[[int], None], emit: Log) -> tuple[int, int]:
    """Until the budget is spent. evaluate: called with the step at intervals. Returns steps and tokens."""
    step, seen, evaluated, trained_from = 0, 0, time.perf_counter(), time.perf_counter()
    marks: list[torch.Tensor] = []
    while (spent := (time.perf_counter() - trained_from) / args.budget_s) < 1.0:
        losses, count = training.step(step, spent)
        if step == 0:  # compilation is over
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            trained_from = time.perf_counter()
        step, seen, marks = step + 1, seen + count, [*marks[-49:], losses]
        if step in (1, 2, 10) or step % 200 == 0:
            loss, draft = torch.stack(marks).mean(0).tolist()
            emit(
                {"measure": "training", "step": step, "tokens": seen, "loss": loss, "mtp_loss": draft, "spent": round(spent, 4)}
            )
        if time.perf_counter() - evaluated > args.evaluate_every_s:
            evaluate(step)
            evaluated = time.perf_counter()
    return step, seen


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokens", type=Path, default=CACHE / "tokens")
    parser.add_argument("--start-from", type=Path, help="folder of a checkpoint whose weights to go on from")
    parser.add_argument("--budget-s", type=float, default=200, help="seconds of training, counted from the end of compilation")
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of short, long and longest rows")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--workers", type=int, default=4, help="data processes of each row length")
    parser.add_argument("--heldout-tokens", type=int, default=1 << 20, help="most tokens evaluated of each held-out document")
    parser.add_argument("--recall-prompts", type=int, default=32, help="prompts at each recall distance")
    parser.add_argument("--sample-tokens", type=int, default=90, help="length of the samples printed at the end")
    parser.add_argument("--evaluate-every-s", type=float, default=45)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    args.output.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (DEMO / name).resolve() != (args.output / name).resolve():
            shutil.copy(DEMO / name, args.output / name)
    emit = Log(args.output / "log.jsonl")
    tokenizer = Tokenizer.from_file(str(args.output / "tokenizer.json"))
    documents = {title: ids[: args.heldout_tokens] for title, ids in load_heldout(tokenizer).items()}
    filler, task = np.concatenate(list(documents.values())), recall_task(tokenizer)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # BF16 is slow on most CPUs
    model = load_checkpoint(args.start_from, dtype) if args.start_from else DemoModel(Shape(), dtype=dtype)
    training = Training(args, model, device)
    emit({"measure": "setup", "arguments": {k: str(v) for k, v in vars(args).items()}, "torch": torch.__version__,
          "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
          "parameters": sum(p.numel() for p in model.parameters())})  # fmt: skip

    def evaluate(step: int) -> None:
        save_checkpoint(model, args.output)
        with training.evaluating():
            emit({"measure": "heldout", "step": step, **heldout_metrics(model, documents, 1024)})
            for distance in (d for d in (256, 1024, 8192) if d <= max(args.lengths)):
                whole, digits = recall_accuracy(model, task, filler, distance, args.recall_prompts)
                emit({"measure": "recall", "distance": distance, "codes": whole, "digits": digits})

    step, seen = train(training, args, evaluate, emit)
    save_checkpoint(model, args.output)
    emit({"measure": "finished", "step": step, "tokens": seen, "checkpoint_bytes": sum(
        f.stat().st_size for f in args.output.glob("*.safetensors"))})  # fmt: skip
    distances = [d for d in (64, 256, 1024, 4096, 8192, 16384, 32000) if d <= max(args.lengths)]
    with torch.compiler.set_stance("force_eager"):
        exported = load_checkpoint(args.output, dtype).to(device)
        report(exported, tokenizer, documents, distances, args.recall_prompts, emit, [1024, 8192], args.sample_tokens)


if __name__ == "__main__":
    main()
