"""Where weights come from: a checkpoint streamed from disk, its inventory, or random numbers.

A layer asks `Weights` for its tensors by their published names while it is built; the names of a model family stand in
its own file and nowhere else. The same constructors run twice: first on the meta device against an `Inventory`, which
compares every name and shape with the files' headers before anything is read, then against the `Checkpoint`.

    WeightsError(ValueError)  missing, unused, doubled or misshapen tensors, a missing or truncated file

FP8 weights keep their 128 x 128 block scales where the device multiplies FP8 (`keep_fp8`), else they are dequantized as
they are read. What is FP8 is decided by the tensors that are present, not by config.json.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from kernels.layout import FP8, FP8_MAX, WEIGHT_BLOCK, BlockScaledWeight, Weight

Progress = Callable[[int, int], None]  # bytes read so far, bytes to read
_MOST_NAMES = 20  # listed in an error message
_IGNORED_SUFFIX = "rotary_emb.inv_freq"  # a derived buffer that old checkpoints carry
_SCALE = "_scale_inv"


class WeightsError(ValueError):
    """The checkpoint does not fit the model; the message lists the names or the file."""


# ---- what a layer asks for ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """The slice of one published matrix [rows, cols] that this rank keeps."""

    name: str  # published name without ".weight"
    rows: int
    cols: int
    row_range: tuple[int, int]
    col_range: tuple[int, int]

    @staticmethod
    def whole(name: str, rows: int, cols: int) -> Part:
        return Part(name, rows, cols, (0, rows), (0, cols))

    @staticmethod
    def of_rows(name: str, rows: int, cols: int, index: int, count: int) -> Part:
        """Slice `index` of `count` equal ones over the output dimension (column-parallel: heads, hidden units)."""
        return Part(name, rows, cols, _share(rows, index, count), (0, cols))

    @staticmethod
    def of_cols(name: str, rows: int, cols: int, index: int, count: int) -> Part:
        """Slice over the input dimension (row-parallel); the product is summed over the ranks."""
        return Part(name, rows, cols, (0, rows), _share(cols, index, count))

    @property
    def height(self) -> int:
        return self.row_range[1] - self.row_range[0]

    @property
    def width(self) -> int:
        return self.col_range[1] - self.col_range[0]

    @property
    def is_block_aligned(self) -> bool:
        """Whether the slice cuts no 128 x 128 block; the matrix's own end may be ragged."""
        edges = (self.row_range[0], self.col_range[0])
        ends = ((self.row_range[1], self.rows), (self.col_range[1], self.cols))
        return all(e % WEIGHT_BLOCK == 0 for e in edges) and all(e % WEIGHT_BLOCK == 0 or e == full for e, full in ends)


def _share(size: int, index: int, count: int) -> tuple[int, int]:
    if size % count:
        raise WeightsError(f"a dimension of {size} cannot be split into {count} equal parts")
    return index * size // count, (index + 1) * size // count


class Source(Protocol):
    """Where tensors come from. `shape` is the published one, `index` the slice to read."""

    def is_fp8(self, name: str) -> bool: ...

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...], device: torch.device) -> torch.Tensor: ...

    def mark_known(self, name: str) -> None: ...


@dataclass(frozen=True)
class Weights:
    """Tensors by published name under `prefix`, placed on `device`; matrices in `dtype` or in block-scaled FP8."""

    source: Source
    device: torch.device
    dtype: torch.dtype
    keep_fp8: bool
    prefix: str = ""

    def at(self, name: str) -> Weights:
        """The same weights one level deeper."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def elsewhere(self, *names: str) -> None:
        """Tensors that another rank keeps, or that repeat another tensor of this model: expected, but not read."""
        for name in names:
            self.source.mark_known(f"{self.prefix}{name}.weight")
            if self.source.is_fp8(f"{self.prefix}{name}.weight"):
                self.source.mark_known(f"{self.prefix}{name}.weight{_SCALE}")

    def norm(self, name: str, size: int, factor: float = 1.0) -> torch.Tensor:
        """FP32 [size], times `factor`: kept in FP32 since a factor folded into BF16 would move the result by its rounding."""
        return self._vector(f"{name}.weight", size).mul_(factor)

    def bias(self, name: str, size: int) -> torch.Tensor:
        """FP32 [size]."""
        return self._vector(name, size)

    def _vector(self, name: str, size: int) -> torch.Tensor:
        tensor = self.source.read(self.prefix + name, (size,), (slice(0, size),), self.device)
        return tensor.to(torch.float32, copy=True)

    def plain(self, part: Part, dtype: torch.dtype | None = None, padded_rows: int = 0) -> torch.Tensor:
        """One matrix [rows, cols] that is never kept in FP8, zero-padded to `padded_rows`."""
        out = torch.zeros(max(part.height, padded_rows), part.width, dtype=dtype or self.dtype, device=self.device)
        self._fill(out[: part.height], None, part)
        return out

    def matrix(self, *parts: Part) -> Weight:
        """Matrices over one input, stacked along their rows, so that one product computes them all.

        Kept in FP8 only if every part is FP8 and begins on a block of the stack; else all are dequantized.
        """
        height, width = sum(p.height for p in parts), parts[0].width
        weight = self._allocate((height, width), self._stays_fp8(parts))
        self._fill_rows(weight, parts)
        return weight

    def experts(self, ids: Iterable[int], all_ids: Iterable[int], hidden: int, inter: int) -> tuple[Weight, Weight]:
        """gate_up [E, 2 I, D] and down [E, D, I] of the experts `ids`; those of other ranks are only checked off."""
        ids = list(ids)
        kept = set(ids)
        for e in all_ids:
            if e not in kept:
                self.elsewhere(*(f"{e}.{name}_proj" for name in ("gate", "up", "down")))
        gate_up_parts = [[Part.whole(f"{e}.{n}_proj", inter, hidden) for n in ("gate", "up")] for e in ids]
        down_parts = [[Part.whole(f"{e}.down_proj", hidden, inter)] for e in ids]
        gate_up = self._allocate((len(ids), 2 * inter, hidden), all(map(self._stays_fp8, gate_up_parts)))
        down = self._allocate((len(ids), hidden, inter), all(map(self._stays_fp8, down_parts)))
        for i in range(len(ids)):  # one expert at a time, in the order of the files
            self._fill_rows(_item(gate_up, i), gate_up_parts[i])
            self._fill_rows(_item(down, i), down_parts[i])
        return gate_up, down

    def _stays_fp8(self, parts: Iterable[Part]) -> bool:
        parts = list(parts)
        if not (self.keep_fp8 and all(self.source.is_fp8(f"{self.prefix}{p.name}.weight") for p in parts)):
            return False
        return all(p.is_block_aligned for p in parts) and all(p.height % WEIGHT_BLOCK == 0 for p in parts[:-1])

    def _allocate(self, shape: tuple[int, ...], fp8: bool) -> Weight:
        if not fp8:
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        blocks = tuple(-(-n // WEIGHT_BLOCK) for n in shape[-2:])
        data = torch.empty(shape, dtype=FP8, device=self.device)
        return BlockScaledWeight(data, torch.empty(shape[:-2] + blocks, device=self.device))

    def _fill_rows(self, weight: Weight, parts: Iterable[Part]) -> None:
        row = 0
        for part in parts:
            end = row + part.height
            if isinstance(weight, BlockScaledWeight):
                scale_rows = slice(row // WEIGHT_BLOCK, -(-end // WEIGHT_BLOCK))
                self._fill(weight.data[row:end], weight.scale[scale_rows], part)
            else:
                self._fill(weight[row:end], None, part)
            row = end

    def _fill(self, out: torch.Tensor, out_scale: torch.Tensor | None, part: Part) -> None:
        """Read a part into `out`: FP8 codes beside their scales, or plain values."""
        name = f"{self.prefix}{part.name}.weight"
        index = (slice(*part.row_range), slice(*part.col_range))
        fp8 = self.source.is_fp8(name)
        values = self.source.read(name, (part.rows, part.cols), index, self.device)
        if fp8:
            blocks = tuple(-(-n // WEIGHT_BLOCK) for n in (part.rows, part.cols))
            over = tuple(slice(s.start // WEIGHT_BLOCK, -(-s.stop // WEIGHT_BLOCK)) for s in index)
            scale = self.source.read(name + _SCALE, blocks, over, self.device).float()
            if out_scale is not None:
                out_scale.copy_(scale)
            elif not out.is_meta:  # an inventory only asks; torch would load its compiler for arithmetic on nothing
                values = values.float() * _per_element(scale, index)
        out.copy_(values)


def _item(weight: Weight, i: int) -> Weight:
    return BlockScaledWeight(weight.data[i], weight.scale[i]) if isinstance(weight, BlockScaledWeight) else weight[i]


def _per_element(scale: torch.Tensor, index: tuple[slice, ...]) -> torch.Tensor:
    """Block scales of a slice -> one scale per element of it."""
    for dim, s in enumerate(index):
        block = torch.arange(s.start, s.stop, device=scale.device) // WEIGHT_BLOCK - s.start // WEIGHT_BLOCK
        scale = scale.index_select(dim, block)
    return scale


# ---- sources ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stored:
    file: Path
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """A folder of safetensors files, opened by headers alone; one file at a time is mapped while reading.

    Raises WeightsError on a missing or truncated file and on a name that two files hold.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.stored: dict[str, _Stored] = {}
        doubled = []
        for file in _files(self.folder):
            for name, (dtype, shape) in _read_header(file).items():
                if name in self.stored:
                    doubled.append(name)
                self.stored[name] = _Stored(file, dtype, shape)
        if doubled:
            raise WeightsError(f"{self.folder}: {_listed('doubled', doubled)}")
        self.bytes_read = 0
        self.bytes_total = 0
        self.progress: Progress | None = None
        self._open: tuple[Path, Any] | None = None

    def is_fp8(self, name: str) -> bool:
        entry = self.stored.get(name)
        return entry is not None and entry.dtype == "F8_E4M3"

    @property
    def has_fp8(self) -> bool:
        return any(entry.dtype == "F8_E4M3" for entry in self.stored.values())

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...], device: torch.device) -> torch.Tensor:
        file = self.stored[name].file
        if self._open is None or self._open[0] != file:
            self._open = (file, safe_open(str(file), framework="pt"))
        whole = all(s == slice(0, n) for s, n in zip(index, shape))
        tensor = self._open[1].get_tensor(name) if whole else self._open[1].get_slice(name)[index]
        self.bytes_read += tensor.nbytes
        if self.progress is not None:
            self.progress(self.bytes_read, self.bytes_total)
        return tensor.to(device)

    def mark_known(self, name: str) -> None:
        """The inventory has already checked it."""

    def close(self) -> None:
        self._open = None


class Inventory:
    """Compares what a model asks for with what a checkpoint holds, reading nothing."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.asked: set[str] = set()
        self.bytes = 0
        self.misshapen: list[str] = []
        self.unreadable: list[str] = []

    def is_fp8(self, name: str) -> bool:
        return self.checkpoint.is_fp8(name)

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...], device: torch.device) -> torch.Tensor:
        self.mark_known(name)
        entry = self.checkpoint.stored.get(name)
        if entry is not None and entry.shape != shape:
            self.misshapen.append(f"{name} is {list(entry.shape)}, the model needs {list(shape)}")
        if entry is not None and (entry.dtype not in _ITEM_BYTES or (self.is_fp8(name) and len(shape) == 1)):
            self.unreadable.append(f"{name} is {entry.dtype}")
        dtype = FP8 if self.is_fp8(name) else torch.float32
        tensor = torch.empty([s.stop - s.start for s in index], dtype=dtype, device="meta")
        self.bytes += tensor.nbytes if entry is None else tensor.numel() * _ITEM_BYTES.get(entry.dtype, 0)
        return tensor

    def mark_known(self, name: str) -> None:
        if name in self.asked:
            raise WeightsError(f"{name} is used twice by the model's definition")
        self.asked.add(name)

    def check(self, is_draft: Callable[[str], bool]) -> None:
        """Raise WeightsError unless names agree; draft (MTP) tensors that were not asked for are left alone."""
        stored = self.checkpoint.stored
        missing = sorted(self.asked - stored.keys())
        unused = [
            n for n in sorted(stored.keys() - self.asked) if not is_draft(n) and not n.endswith(_IGNORED_SUFFIX)
        ]  # fmt: skip
        problems = [_listed("missing", missing)] if missing else []
        problems += [_listed("unused", unused)] if unused else []
        problems += [_listed("misshapen", self.misshapen)] if self.misshapen else []
        problems += [_listed(f"of a type that is not one of {_READABLE}", self.unreadable)] if self.unreadable else []
        if problems:
            raise WeightsError(f"{self.checkpoint.folder}: the checkpoint does not fit config.json: " + "; ".join(problems))


class RandomSource:
    """Random weights made on the device, the same on every rank: FP8 codes and scales where `fp8`, else FP32."""

    def __init__(self, fp8: bool) -> None:
        self.fp8 = fp8

    def is_fp8(self, name: str) -> bool:
        plain = ("embed_tokens", "lm_head", "shared_head.head", ".gate.weight", "classifier", "eh_proj", "norm")
        return self.fp8 and not any(part in name for part in plain)

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...], device: torch.device) -> torch.Tensor:
        size = [s.stop - s.start for s in index]
        if len(shape) == 1:
            return torch.zeros(size, device=device) if name.endswith("bias") else torch.ones(size, device=device)
        if name.endswith(_SCALE):
            # Codes below are unit normals times 100; undone here together with the fan-in of about 128 columns a block.
            return torch.full(size, 0.01 / (shape[1] * WEIGHT_BLOCK) ** 0.5, device=device)
        generator = torch.Generator(device=device).manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(size, generator=generator, device=device)
        if self.is_fp8(name):
            return values.mul_(100.0).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
        # Published in BF16, so no more precise than that: a router that fits BF16 is multiplied in it.
        return values.mul_(shape[1] ** -0.5).bfloat16().float()

    def mark_known(self, name: str) -> None:
        """Nothing to check."""


class ProgressLine:
    """Bytes read, their rate and what is left, on one line of standard error; silent for loads under a second."""

    def __init__(self, label: str, interval_s: float = 0.5) -> None:
        self.label, self.interval_s = label, interval_s if sys.stderr.isatty() else 10.0
        self.start = time.monotonic()
        self.shown = self.start + 1.0 - self.interval_s

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        last = done >= total and self.shown > self.start + 1.0 - self.interval_s
        if not last and now - self.shown < self.interval_s:
            return
        self.shown = now
        rate = done / max(now - self.start, 1e-9)
        left = f"{(total - done) / max(rate, 1.0):.0f} s left" if done < total else f"in {now - self.start:.0f} s"
        size, unit = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
        line = f"{self.label}: {done / size:.2f} of {total / size:.2f} {unit}, {rate / size:.2f} {unit}/s, {left}"
        end = "\r" if sys.stderr.isatty() and done < total else "\n"
        print(line.ljust(90), end=end, file=sys.stderr, flush=True)


# ---- files --------------------------------------------------------------------------------------------------------

_ITEM_BYTES = {"F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4, "F64": 8}
_READABLE = "F8_E4M3 (matrices with block scales), BF16, F16, F32 and F64"


def _files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those of its index, else all."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = [folder / name for name in sorted(set(weight_map.values()))]
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
            raise WeightsError(f"{index}: not a safetensors index with a weight_map ({error!r})") from error
        if outside := [f.name for f in files if f.parent.resolve() != folder.resolve()]:
            raise WeightsError(f"{index}: names files outside the folder: {outside[:_MOST_NAMES]}")
        if absent := [f.name for f in files if not f.is_file()]:
            raise WeightsError(f"{folder}: {_listed('missing shard files', absent)}; download the checkpoint again")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{folder}: no *.safetensors files; only safetensors checkpoints are supported")
    return files


def _read_header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(dtype, shape) by name. Raises WeightsError when the file is shorter or longer than it says."""
    size = file.stat().st_size
    with file.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > size - 8:
            raise WeightsError(f"{file}: truncated or not a safetensors file ({size} bytes); download it again")
        try:
            header = json.loads(f.read(length))
            header.pop("__metadata__", None)
            entries = {name: (str(e["dtype"]), tuple(e["shape"])) for name, e in header.items()}
            needed = 8 + length + max((e["data_offsets"][1] for e in header.values()), default=0)
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
            raise WeightsError(f"{file}: not a safetensors file ({error!r:.200}); download it again") from error
    if size != needed:
        fault = "truncated" if size < needed else "longer than its header says"
        raise WeightsError(f"{file}: {fault}, {size} bytes of {needed}; download it again")
    return entries


def _listed(what: str, names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{len(names)} {what}: {', '.join(names[:_MOST_NAMES])}{more}"
