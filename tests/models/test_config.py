"""Translation of config.json: both spellings, all families, and a refusal by name of everything else."""

from __future__ import annotations

import json

import pytest

from models.config import ModelConfigError, load_model_config, translate_config

V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168,
    "num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 61, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 163840, "num_nextn_predict_layers": 1, "hidden_act": "silu",
    "attention_bias": False, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096},
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}  # fmt: skip
V2_LITE = {
    **{k: v for k, v in V3.items() if k not in ("quantization_config", "num_nextn_predict_layers", "n_group", "topk_group")},
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048, "num_attention_heads": 16,
    "num_hidden_layers": 27, "q_lora_rank": None, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "norm_topk_prob": False, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
    "topk_method": "greedy", "first_k_dense_replace": 1,
    "rope_scaling": V3["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
LONGCAT = {
    "architectures": ["LongcatFlashForCausalLM"], "vocab_size": 131072, "hidden_size": 6144, "num_attention_heads": 64,
    "num_layers": 28, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "ffn_hidden_size": 12288, "expert_ffn_hidden_size": 2048, "n_routed_experts": 512, "zero_expert_num": 256,
    "zero_expert_type": "identity", "moe_topk": 12, "routed_scaling_factor": 6.0, "norm_topk_prob": False, "router_bias": False,
    "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "attention_method": "MLA", "rms_norm_eps": 1e-5, "rope_theta": 1e7,
    "max_position_embeddings": 131072, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
KIMI_K2 = V3 | {
    "model_type": "kimi_k2", "vocab_size": 163840, "num_attention_heads": 64, "n_routed_experts": 384, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0, "rope_theta": 50000.0,
    "rope_scaling": V3["rope_scaling"] | {"factor": 32.0, "beta_fast": 1.0},
}  # fmt: skip
MOONLIGHT = V3 | {
    "vocab_size": 163840, "hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 27, "q_lora_rank": None,
    "n_routed_experts": 64, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1408,
    "num_nextn_predict_layers": 0, "rope_scaling": None, "rope_theta": 50000.0, "quantization_config": None,
}  # fmt: skip


def test_deepseek_v3() -> None:
    config = translate_config(V3)
    assert (config.family, config.num_attention_layers, config.num_mtp_layers) == ("deepseek", 61, 1)
    assert config.softmax_scale == pytest.approx(0.13524, abs=1e-5)
    assert config.rope.yarn.angle_factor == 1.0
    assert config.announces_fp8
    moe = config.moe
    assert (moe.num_experts, moe.top_k, moe.num_groups, moe.top_groups, moe.shared_intermediate_size) == (256, 8, 8, 4, 2048)
    v31 = translate_config(V3 | {"quantization_config": V3["quantization_config"] | {"scale_fmt": "ue8m0"}})
    assert v31.announces_fp8


def test_deepseek_v2_lite() -> None:
    """Report N18: the softmax factor comes from mscale_all_dim, the angles' factor is the ratio, 1."""
    config = translate_config(V2_LITE)
    assert config.q_lora_rank is None and not config.moe.has_bias and config.moe.num_groups == 1
    assert config.softmax_scale == pytest.approx(0.11472, abs=1e-5)
    assert config.rope.yarn.angle_factor == 1.0
    full = translate_config(V2_LITE | {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3})
    assert (full.moe.num_groups, full.moe.top_groups) == (8, 3)


def test_kimi_k2_and_moonlight() -> None:
    kimi, moonlight = translate_config(KIMI_K2), translate_config(MOONLIGHT)
    assert (kimi.moe.num_experts, kimi.moe.num_groups, kimi.num_heads) == (384, 1, 64)
    assert moonlight.rope.yarn is None and moonlight.softmax_scale == pytest.approx(192**-0.5)
    assert moonlight.q_lora_rank is None and not moonlight.announces_fp8
    without_architecture = {k: v for k, v in KIMI_K2.items() if k != "architectures"}
    assert translate_config(without_architecture) == kimi


def test_longcat_flash() -> None:
    """Report C07: a null model_type is no obstacle, the architecture decides."""
    config = translate_config(LONGCAT | {"model_type": None})
    assert (config.family, config.num_decoder_layers, config.num_attention_layers) == ("longcat", 28, 56)
    assert (config.q_norm_factor, config.latent_norm_factor) == (pytest.approx(2.0), pytest.approx(12**0.5))
    assert (config.rms_norm_eps, config.latent_norm_eps) == (1e-5, 1e-6)
    assert (config.moe.num_zero_experts, config.moe.top_k, config.moe.scaling_factor) == (256, 12, 6.0)
    assert translate_config(LONGCAT | {"mla_scale_q_lora": False}).q_norm_factor == 1.0


def test_both_spellings_of_the_rope_fields() -> None:
    old = translate_config(V3)
    scaling = {("rope_type" if k == "type" else k): v for k, v in V3["rope_scaling"].items()}
    new = {k: v for k, v in V3.items() if k not in ("rope_scaling", "rope_theta")} | {
        "rope_parameters": scaling | {"rope_theta": 10000}
    }
    assert translate_config(new) == old
    assert translate_config(V3 | {"rope_scaling": V3["rope_scaling"] | {"type": "deepseek_yarn"}}) == old
    plain = {k: v for k, v in LONGCAT.items() if k != "rope_theta"} | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7}
    }
    assert translate_config(plain) == translate_config(LONGCAT)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures: 'LlamaForCausalLM'"),
        ({"architectures": None, "model_type": "llama"}, "model_type 'llama'"),
        ({"architectures": ["LongcatFlashNgramForCausalLM"]}, "LongcatFlashNgramForCausalLM"),
        ({"model_type": "deepseek_v32"}, "model_type: 'deepseek_v32'"),
        ({"index_topk": 2048}, "index_topk: sparse attention"),
        ({"attention_bias": True}, "attention_bias"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"n_group": 7}, "n_group: 256 experts"),
        ({"num_experts_per_tok": 200}, "num_experts_per_tok: 200"),
        ({"kv_lora_rank": None}, "kv_lora_rank: missing"),
        ({"kv_lora_rank": "512"}, "kv_lora_rank: must be a whole number"),
        ({"hidden_size": 0}, "hidden_size: must be a whole number of at least 1"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers: at most 1024 are supported, got 10000000"),
        ({"hidden_size": 10**400}, "hidden_size: at most"),
        ({"n_routed_experts": 10**9}, "n_routed_experts: at most"),
        ({"qk_rope_head_dim": 0}, "qk_rope_head_dim"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "type 'linear'"),
        ({"rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}}, "mscale"),
        ({"rope_scaling": V3["rope_scaling"] | {"mscale": "a"}}, "mscale: must be a positive number or 0"),
        ({"model_type": ["deepseek_v3"]}, "model_type"),
        ({"rope_scaling": "yarn"}, "rope_scaling: must be an object"),
        ({"ngram_vocab_size": 7}, "ngram_vocab_size: n-gram"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.quant_method: 'awq'"),
        ({"quantization_config": V3["quantization_config"] | {"weight_block_size": [64, 64]}}, "weight_block_size"),
        ({"quantization_config": V3["quantization_config"] | {"scale_fmt": "e5m2"}}, "scale_fmt"),
    ],
)
def test_unsupported_features_are_refused_by_name(changes, named) -> None:
    """Reports C06, K08, K16, N19: n-gram variants, V3.2, a model without RoPE part and sparse indexers are refused clearly."""
    with pytest.raises(ModelConfigError) as error:
        translate_config(V3 | changes)
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"zero_expert_type": "copy"}, "zero_expert_type"), ({"attention_method": "GQA"}, "attention_method"),
     ({"router_bias": True}, "router_bias"), ({"q_lora_rank": None}, "q_lora_rank"), ({"moe_topk": None}, "moe_topk: missing")],
)  # fmt: skip
def test_unsupported_longcat_features(changes, named) -> None:
    with pytest.raises(ModelConfigError, match=named):
        translate_config(LONGCAT | changes)


def test_config_files(tmp_path) -> None:
    with pytest.raises(ModelConfigError, match="no such file"):
        load_model_config(tmp_path)
    path = tmp_path / "config.json"
    for text, named in (
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object"),
        ("\x00\xff", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        (f'{{"vocab_size": {"9" * 5000}}}', "not valid JSON"),
        ('{"architectures": ["LlamaForCausalLM"]}', "architectures: 'LlamaForCausalLM'"),
    ):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(ModelConfigError, match=named) as error:
            load_model_config(tmp_path)
        assert str(path) in str(error.value)
    path.write_text(json.dumps(V3))
    assert load_model_config(tmp_path).vocab_size == 129280
