"""One model's shape, translated once from a Hugging Face config.json; nothing else reads that file's fields.

    ModelConfigError(ValueError)  names the field or architecture that is missing, malformed or not supported

Both spellings of the RoPE fields are taken (`rope_scaling` + `rope_theta`, and `rope_parameters`).
"""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.layout import WEIGHT_BLOCK


class ModelConfigError(ValueError):
    """config.json cannot be served; the message names the field, its value and what is supported."""


@dataclass(frozen=True)
class YarnConfig:
    """Long-context RoPE scaling; the angles' factor is m(mscale) / m(mscale_all_dim), 1 in all published files."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float

    @property
    def angle_factor(self) -> float:
        return _yarn_magnitude(self.factor, self.mscale) / _yarn_magnitude(self.factor, self.mscale_all_dim)

    @property
    def softmax_factor(self) -> float:
        """What the softmax scale is multiplied by: m(mscale_all_dim) squared, 1.87 for DeepSeek-V3."""
        return _yarn_magnitude(self.factor, self.mscale_all_dim) ** 2


def _yarn_magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


@dataclass(frozen=True)
class RopeConfig:
    theta: float
    yarn: YarnConfig | None


@dataclass(frozen=True)
class MoEConfig:
    """num_experts: with weights; num_zero_experts: identities, numbered after them (LongCat); top_k: chosen of both together
    shared_intermediate_size: width of the shared expert, 0 without one; first_dense_layers: leading layers without experts
    scoring, num_groups, top_groups, normalize, scaling_factor: see `kernels.ops.route`
    has_bias: the router has a selection bias (e_score_correction_bias)
    """

    num_experts: int
    num_zero_experts: int
    top_k: int
    expert_intermediate_size: int
    shared_intermediate_size: int
    first_dense_layers: int
    scoring: str
    num_groups: int
    top_groups: int
    normalize: bool
    scaling_factor: float
    has_bias: bool


@dataclass(frozen=True)
class ModelConfig:
    """family: "deepseek" or "longcat"; architecture: the published class name
    num_decoder_layers, num_attention_layers: LongCat has two attentions a layer; the draft layer is in neither
    q_norm_factor, latent_norm_factor: LongCat's factors on the query and the latent, folded into their norms' weights
    latent_norm_eps: of the norms on q_a and kv_a; the published code leaves them at 1e-6 whatever rms_norm_eps says
    softmax_scale: (nope + rope)^-0.5, times YaRN's factor
    announces_fp8: config.json says that weights are FP8 with a scale per 128 x 128 block; the loader goes by the tensors
    """

    family: str
    architecture: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_decoder_layers: int
    num_attention_layers: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe: MoEConfig | None
    rope: RopeConfig
    softmax_scale: float
    rms_norm_eps: float
    latent_norm_eps: float
    q_norm_factor: float
    latent_norm_factor: float
    max_position_embeddings: int
    num_mtp_layers: int
    tie_word_embeddings: bool
    announces_fp8: bool

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


def load_model_config(folder: Path) -> ModelConfig:
    """Read and translate `folder`/config.json. Raises ModelConfigError before anything else is opened."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ModelConfigError(f"{path}: no such file; a model folder needs the published config.json")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also of other encodings, and of numbers with thousands of digits
        raise ModelConfigError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(raw, dict):
        raise ModelConfigError(f"{path}: expected a JSON object, got {type(raw).__name__}")
    try:
        return translate_config(raw)
    except ModelConfigError as error:
        raise ModelConfigError(f"{path}: {error}") from error


_MOST = 1 << 24  # of any size in a config.json; published ones end below 200,000
_MOST_LAYERS = 1 << 10  # a layer is an object each, so a wrong number would cost hours before anything notices
_MOST_EXPERTS = 1 << 14
_TRANSLATORS = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "LongcatFlashForCausalLM": "longcat_flash",
}
_MODEL_TYPES = {"deepseek_v2", "deepseek_v3", "kimi_k2", "longcat_flash"}


def translate_config(raw: dict[str, Any]) -> ModelConfig:
    """Translate the fields of a config.json. Raises ModelConfigError."""
    architecture = _architecture(raw)
    fields = _Fields(raw)
    if architecture == "LongcatFlashForCausalLM":
        return _longcat(fields, architecture)
    return _deepseek(fields, architecture)


def _architecture(raw: dict[str, Any]) -> str:
    """The architecture field decides; model_type, which some files leave null, only where it is absent."""
    named = raw.get("architectures")
    supported = ", ".join(_TRANSLATORS)
    if isinstance(named, list) and named:
        architecture = str(named[0])
        if architecture not in _TRANSLATORS:
            raise ModelConfigError(f"architectures: {architecture!r} is not supported; supported are {supported}")
    else:
        types = {kind: name for name, kind in _TRANSLATORS.items()} | {"kimi_k2": "DeepseekV3ForCausalLM"}
        architecture = types.get(str(raw.get("model_type")), "")
        if not architecture:
            raise ModelConfigError(
                f"architectures is missing and model_type {raw.get('model_type')!r} is not supported; supported are {supported}"
            )
    model_type = raw.get("model_type")
    if model_type is not None and str(model_type) not in _MODEL_TYPES:
        raise ModelConfigError(f"model_type: {model_type!r} is not supported; supported are {', '.join(sorted(_MODEL_TYPES))}")
    return architecture


class _Fields:
    """Typed access to config.json; every failure names the field."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = raw

    def integer(self, name: str, default: int | None = None, low: int = 1, high: int = _MOST) -> int:
        value = self.raw.get(name, default)
        if value is None:
            value = default
        if value is None:
            raise ModelConfigError(f"{name}: missing from config.json")
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ModelConfigError(f"{name}: must be a whole number of at least {low}, got {value!r}")
        if value > high:
            raise ModelConfigError(f"{name}: at most {high} are supported, got {value!r:.30}")
        return value

    def number(self, name: str, default: float | None = None, zero: bool = False) -> float:
        value = self.raw.get(name, default)
        if value is None:
            raise ModelConfigError(f"{name}: missing from config.json")
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or value < 0
            or not (value or zero)
        ):
            raise ModelConfigError(f"{name}: must be a positive number{' or 0' if zero else ''}, got {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelConfigError(f"{name}: must be true or false, got {value!r}")
        return value

    def require(self, name: str, supported: Any, default: Any = None) -> None:
        """Refuse a feature by its field: any value but `supported` (and an absent field meaning `default`)."""
        value = self.raw.get(name)
        value = (supported if default is None else default) if value is None else value
        if value != supported:
            raise ModelConfigError(f"{name}: {value!r} is not supported, only {supported!r}")

    def refuse(self, *names: str, feature: str) -> None:
        for name in names:
            if self.raw.get(name):
                raise ModelConfigError(f"{name}: {feature} is not supported, and config.json sets it to {self.raw[name]!r}")


def _shared_fields(fields: _Fields, family: str, architecture: str) -> dict[str, Any]:
    """Fields of all families."""
    fields.require("hidden_act", "silu")
    fields.require("attention_bias", False)
    fields.require("partial_rotary_factor", 1.0)  # what of a head is rotated is qk_rope_head_dim's to say
    fields.refuse("index_topk", "index_n_heads", "index_head_dim", feature="sparse attention with an indexer")
    fields.refuse("mlp_bias", "use_sliding_window", "sliding_window", feature="this layer variant")
    for name in fields.raw:
        if "ngram" in name.lower():
            fields.refuse(name, feature="n-gram embedding")
    q_lora_rank = fields.raw.get("q_lora_rank")
    nope, rope_dim = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    if rope_dim % 2:
        raise ModelConfigError(f"qk_rope_head_dim: must be even, got {rope_dim}")
    rope = _rope(fields)
    return {
        "family": family,
        "architecture": architecture,
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "num_heads": fields.integer("num_attention_heads"),
        "q_lora_rank": None if q_lora_rank is None else fields.integer("q_lora_rank"),
        "kv_lora_rank": fields.integer("kv_lora_rank"),
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": fields.integer("v_head_dim"),
        "rope": rope,
        "softmax_scale": (nope + rope_dim) ** -0.5 * (rope.yarn.softmax_factor if rope.yarn else 1.0),
        "latent_norm_eps": 1e-6,
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "num_mtp_layers": fields.integer("num_nextn_predict_layers", 0, low=0, high=_MOST_LAYERS),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
        "announces_fp8": _announces_fp8(fields),
    }


def _deepseek(fields: _Fields, architecture: str) -> ModelConfig:
    """DeepSeek-V2 and V2-Lite; DeepSeek-V3, V3.1, R1, Kimi-K2 and Moonlight."""
    fields.require("rope_interleave", True)
    layers = fields.integer("num_hidden_layers", high=_MOST_LAYERS)
    is_v3 = architecture == "DeepseekV3ForCausalLM"
    return ModelConfig(
        **_shared_fields(fields, "deepseek", architecture),
        num_decoder_layers=layers,
        num_attention_layers=layers,
        intermediate_size=fields.integer("intermediate_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        q_norm_factor=1.0,
        latent_norm_factor=1.0,
        moe=_deepseek_moe(fields, is_v3) if fields.raw.get("n_routed_experts") is not None else None,
    )


def _deepseek_moe(fields: _Fields, is_v3: bool) -> MoEConfig:
    fields.require("moe_layer_freq", 1)
    if is_v3:
        fields.require("scoring_func", "sigmoid")
        fields.require("topk_method", "noaux_tc")
        groups, top_groups = fields.integer("n_group", 8), fields.integer("topk_group", 4)
    else:
        fields.require("scoring_func", "softmax")
        fields.require("norm_topk_prob", False)
        method = fields.raw.get("topk_method") or "greedy"
        if method not in ("greedy", "group_limited_greedy"):
            raise ModelConfigError(f"topk_method: {method!r} is not supported, only 'greedy' and 'group_limited_greedy'")
        limited = method == "group_limited_greedy"
        groups, top_groups = (fields.integer("n_group"), fields.integer("topk_group")) if limited else (1, 1)
    width = fields.integer("moe_intermediate_size")
    moe = MoEConfig(
        num_experts=fields.integer("n_routed_experts", high=_MOST_EXPERTS),
        num_zero_experts=0,
        top_k=fields.integer("num_experts_per_tok"),
        expert_intermediate_size=width,
        shared_intermediate_size=width * fields.integer("n_shared_experts", 0, low=0),
        first_dense_layers=fields.integer("first_k_dense_replace", 0, low=0),
        scoring="sigmoid" if is_v3 else "softmax",
        num_groups=groups,
        top_groups=top_groups,
        normalize=fields.flag("norm_topk_prob", True) if is_v3 else False,
        scaling_factor=fields.number("routed_scaling_factor", 1.0),
        has_bias=is_v3,
    )
    _check_groups(moe)
    return moe


def _longcat(fields: _Fields, architecture: str) -> ModelConfig:
    """LongCat-Flash: two attentions and two dense MLPs a layer beside one MoE with zero-computation experts."""
    fields.require("attention_method", "MLA")
    fields.require("router_bias", False)
    fields.require("zero_expert_type", "identity")
    shared = _shared_fields(fields, "longcat", architecture)
    if shared["q_lora_rank"] is None:
        raise ModelConfigError("q_lora_rank: LongCat-Flash needs query compression, config.json has none")
    layers = fields.integer("num_layers", high=_MOST_LAYERS)
    hidden = shared["hidden_size"]
    moe = MoEConfig(
        num_experts=fields.integer("n_routed_experts", high=_MOST_EXPERTS),
        num_zero_experts=fields.integer("zero_expert_num", 0, low=0, high=_MOST_EXPERTS),
        top_k=fields.integer("moe_topk"),
        expert_intermediate_size=fields.integer("expert_ffn_hidden_size"),
        shared_intermediate_size=0,
        first_dense_layers=0,
        scoring="softmax",
        num_groups=1,
        top_groups=1,
        normalize=fields.flag("norm_topk_prob", False),
        scaling_factor=fields.number("routed_scaling_factor", 1.0),
        has_bias=True,
    )
    _check_groups(moe)
    return ModelConfig(
        **shared,
        num_decoder_layers=layers,
        num_attention_layers=2 * layers,
        intermediate_size=fields.integer("ffn_hidden_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
        q_norm_factor=math.sqrt(hidden / shared["q_lora_rank"]) if fields.flag("mla_scale_q_lora", True) else 1.0,
        latent_norm_factor=math.sqrt(hidden / shared["kv_lora_rank"]) if fields.flag("mla_scale_kv_lora", True) else 1.0,
        moe=moe,
    )


def _check_groups(moe: MoEConfig) -> None:
    choices = moe.num_experts + moe.num_zero_experts
    if choices % moe.num_groups or moe.top_groups > moe.num_groups:
        raise ModelConfigError(f"n_group: {choices} experts cannot form {moe.num_groups} groups keeping {moe.top_groups}")
    if moe.top_k > choices // moe.num_groups * moe.top_groups:
        raise ModelConfigError(f"num_experts_per_tok: {moe.top_k} exceeds the experts that routing may choose from")


def _rope(fields: _Fields) -> RopeConfig:
    """Both spellings: rope_theta beside rope_scaling {type}, or rope_parameters {rope_theta, rope_type}."""
    scaling = fields.raw.get("rope_parameters") or fields.raw.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ModelConfigError(f"rope_scaling: must be an object, got {scaling!r}")
    theta = _Fields(fields.raw | scaling).number("rope_theta", 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta, None)
    if kind not in ("yarn", "deepseek_yarn"):
        raise ModelConfigError(f"rope_scaling: type {kind!r} is not supported, only 'yarn', 'deepseek_yarn' and 'default'")
    yarn = _Fields(scaling)
    yarn.require("truncate", True)
    yarn.refuse("attention_factor", feature="an explicit attention factor")
    if scaling.get("mscale") is None or scaling.get("mscale_all_dim") is None:
        raise ModelConfigError("rope_scaling: mscale and mscale_all_dim must both be given")
    return RopeConfig(
        theta,
        YarnConfig(
            factor=yarn.number("factor"),
            original_max_position_embeddings=yarn.integer("original_max_position_embeddings"),
            beta_fast=yarn.number("beta_fast", 32.0),
            beta_slow=yarn.number("beta_slow", 1.0),
            mscale=yarn.number("mscale", zero=True),
            mscale_all_dim=yarn.number("mscale_all_dim", zero=True),
        ),
    )


def _announces_fp8(fields: _Fields) -> bool:
    raw = fields.raw.get("quantization_config")
    if raw is None:
        return False
    if not isinstance(raw, dict):
        raise ModelConfigError(f"quantization_config: must be an object, got {raw!r}")
    for name, supported in {
        "quant_method": "fp8",
        "weight_block_size": [WEIGHT_BLOCK] * 2,
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
    }.items():
        if raw.get(name, supported if name in ("fmt", "activation_scheme") else None) != supported:
            raise ModelConfigError(f"quantization_config.{name}: {raw.get(name)!r} is not supported, only {supported!r}")
    scale_format = raw.get("scale_fmt") or "float"
    if scale_format not in ("float", "ue8m0"):
        raise ModelConfigError(f"quantization_config.scale_fmt: {scale_format!r} is not supported, only 'float' and 'ue8m0'")
    return True


# ---- parallel sizes -----------------------------------------------------------------------------------------------


def check_parallel(config: ModelConfig, dp: int, tp: int, *, fp8_weights: bool) -> None:
    """Raise ModelConfigError when heads or experts cannot be split this way; the message lists the sizes that work.

    fp8_weights: also warn when the split cuts 128-blocks, since a matrix without whole blocks is not kept in FP8
    """
    if config.num_heads % tp:
        raise ModelConfigError(f"tp: {config.num_heads} heads cannot be split over {tp}; valid: {_divisors(config.num_heads)}")
    if config.moe is not None and config.moe.num_experts % (dp * tp):
        valid = _divisors(config.moe.num_experts)
        raise ModelConfigError(
            f"dp * tp: {config.moe.num_experts} experts cannot be split over {dp * tp} ranks; valid: {valid}"
        )
    if fp8_weights and not _fp8_shards_fit(config, tp):
        valid = [n for n in _divisors(config.num_heads) if _fp8_shards_fit(config, n)]
        warnings.warn(
            f"tp: {tp} cuts some of this model's FP8 matrices inside their {WEIGHT_BLOCK}-blocks; those take BF16, twice the "
            f"bytes. Sizes that cut none: {valid}",
            stacklevel=2,
        )


def _fp8_shards_fit(config: ModelConfig, tp: int) -> bool:
    """tp 1 cuts nothing and always fits."""
    moe = config.moe
    widths = [config.num_heads * config.qk_head_dim, config.num_heads * config.v_head_dim, config.intermediate_size]
    widths += [moe.shared_intermediate_size] if moe is not None and moe.shared_intermediate_size else []
    return tp == 1 or all(width % (tp * WEIGHT_BLOCK) == 0 for width in widths)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
