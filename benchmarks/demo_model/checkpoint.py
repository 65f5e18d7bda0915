"""Write the trained parameters in DeepSeek-V3's published layout, and read such a folder back into the training model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.demo_model.model import DemoModel, Layer, Linear, Moe, Shape, block_scales, spread_scales

SHARDS = 2


def published_tensors(model: DemoModel) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """(published name, FP32 view of the parameter, stored as FP8) of every tensor; the views may be written to.

    The MTP module repeats embedding and head, as published.
    """
    yield "model.embed_tokens.weight", model.embed_tokens, False
    for index, layer in enumerate(model.layers):
        yield from _layer_tensors(f"model.layers.{index}.", layer)
    yield "model.norm.weight", model.norm.weight, False
    yield "lm_head.weight", model.lm_head, False
    prefix, mtp = f"model.layers.{len(model.layers)}.", model.mtp
    yield prefix + "embed_tokens.weight", model.embed_tokens, False
    yield prefix + "enorm.weight", mtp.enorm.weight, False
    yield prefix + "hnorm.weight", mtp.hnorm.weight, False
    yield prefix + "eh_proj.weight", mtp.eh_proj.weight, False
    yield from _layer_tensors(prefix, mtp.layer)
    yield prefix + "shared_head.norm.weight", mtp.norm.weight, False
    yield prefix + "shared_head.head.weight", model.lm_head, False


def _layer_tensors(prefix: str, layer: Layer) -> Iterator[tuple[str, torch.Tensor, bool]]:
    for name, module in layer.named_modules():
        if isinstance(module, Moe):
            yield f"{prefix}{name}.gate.weight", module.gate, False
            yield f"{prefix}{name}.gate.e_score_correction_bias", module.e_score_correction_bias, False
            for kind in ("gate_proj", "up_proj", "down_proj"):
                for expert, weight in enumerate(getattr(module, kind)):
                    yield f"{prefix}{name}.experts.{expert}.{kind}.weight", weight, True
        elif isinstance(module, Linear):
            yield f"{prefix}{name}.weight", module.weight, module.quantized
        elif hasattr(module, "weight"):
            yield f"{prefix}{name}.weight", module.weight, False


@torch.no_grad()
def save_checkpoint(model: DemoModel, folder: Path) -> None:
    """Write config.json, the safetensors shards and their index to `folder`."""
    stored: dict[str, torch.Tensor] = {}
    for name, parameter, quantized in published_tensors(model):
        weight = parameter.detach().float().cpu()
        if quantized:
            scales = block_scales(weight)
            stored[name] = (weight / spread_scales(scales, *weight.shape)).to(torch.float8_e4m3fn)
            stored[name + "_scale_inv"] = scales
        elif name.endswith("e_score_correction_bias"):
            stored[name] = weight.clone()
        else:
            stored[name] = weight.bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.shape.config(), indent=1) + "\n")
    names, total, weight_map = list(stored), sum(t.nbytes for t in stored.values()), {}
    shards: list[list[str]] = [[]]
    size = 0
    for name in names:
        if size >= total / SHARDS * len(shards) and len(shards) < SHARDS:
            shards.append([])
        shards[-1].append(name)
        size += stored[name].nbytes
    for number, part in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        save_file({n: stored[n].contiguous() for n in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a published folder in FP32, block-scaled weights dequantized."""
    raw: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        raw |= load_file(file)
    plain = {}
    for name, tensor in raw.items():
        if name.endswith("_scale_inv"):
            continue
        plain[name] = tensor.float()
        if name + "_scale_inv" in raw:
            plain[name] *= spread_scales(raw[name + "_scale_inv"], *tensor.shape)
    return plain


@torch.no_grad()
def load_checkpoint(folder: Path, dtype: torch.dtype = torch.bfloat16) -> DemoModel:
    """The training model with the stored (dequantized) values and activations of `dtype`, in evaluation mode."""
    model, tensors = DemoModel(Shape(), dtype=dtype), read_tensors(folder)
    for name, parameter, _ in published_tensors(model):
        parameter.copy_(tensors[name])
    return model.eval()
