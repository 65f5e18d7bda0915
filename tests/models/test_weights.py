"""Loading: errors that list names before anything is read, slices that reassemble, FP8 blocks, draft tensors, dummy weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.layout import BlockScaledWeight, CacheFormat
from models.causal_lm import load_model
from models.config import ModelConfigError, check_parallel, load_model_config
from models.parallel import ParallelContext
from models.weights import Checkpoint, Part, ProgressLine, RandomSource, Weights, WeightsError
from tests.models.driver import Driver
from tests.reference_checkpoints import reference_checkpoint, references


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A writable copy of the tiny DeepSeek-V3 checkpoint."""
    folder = tmp_path / "model"
    shutil.copytree(reference_checkpoint("deepseek_v3-tiny"), folder)
    return folder


def load(folder: Path, **kwargs):
    return load_model(
        folder,
        load_model_config(folder),
        ParallelContext.single(),
        device="cpu",
        dtype=torch.float32,
        max_model_len=512,
        **kwargs,
    )


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def edit(shard: Path, change) -> None:
    tensors = load_file(shard)
    change(tensors)
    save_file(tensors, shard)


def logits_of(folder: Path, ids: list[int], **kwargs) -> torch.Tensor:
    model = load(folder, **kwargs)
    return model.logits(Driver(model, load_model_config(folder)).step(prefills={0: ids}))


# ---- errors -------------------------------------------------------------------------------------------------------


def test_missing_and_unused_names_are_both_listed(checkpoint) -> None:
    """Report L07: a renamed prefix is reported by its names, not served with quantization or layers silently off."""
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    shard = checkpoint / json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"][name]
    edit(shard, lambda t: t.__setitem__("model.layers.1.ffn.experts.3.up_proj.weight", t.pop(name)))
    with pytest.raises(WeightsError) as error:
        load(checkpoint)
    assert f"1 missing: {name}" in str(error.value)
    assert "1 unused: model.layers.1.ffn.experts.3.up_proj.weight" in str(error.value)


def test_doubled_names_are_listed(checkpoint) -> None:
    first, second = shards(checkpoint)[:2]
    name = next(iter(load_file(first)))
    edit(second, lambda t: t.__setitem__(name, torch.zeros(1)))
    with pytest.raises(WeightsError, match=f"1 doubled: {name}"):
        load(checkpoint)


def test_wrong_shapes_are_listed(checkpoint) -> None:
    raw = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(raw | {"kv_lora_rank": 40}))
    with pytest.raises(WeightsError, match=r"kv_a_layernorm.weight is \[48\], the model needs \[40\]"):
        load(checkpoint)


def test_missing_shard(checkpoint) -> None:
    gone = shards(checkpoint)[1]
    gone.unlink()
    with pytest.raises(WeightsError, match=f"1 missing shard files: {gone.name}"):
        load(checkpoint)


@pytest.mark.parametrize("keep", [4, 100, -8])
def test_truncated_shard(checkpoint, keep) -> None:
    """Cut inside the length, inside the header, inside the last tensor."""
    shard = shards(checkpoint)[0]
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=f"{shard.name}.*truncated"):
        load(checkpoint)


def test_files_that_are_not_safetensors(checkpoint) -> None:
    shard = shards(checkpoint)[0]
    shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n")
    with pytest.raises(WeightsError, match=shard.name):
        load(checkpoint)
    for path in checkpoint.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(WeightsError, match="only safetensors checkpoints"):
        load(checkpoint)


def test_index_that_leaves_the_folder_or_is_malformed(checkpoint) -> None:
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    with pytest.raises(WeightsError, match="outside the folder"):
        load(checkpoint)
    index.write_text("{")
    with pytest.raises(WeightsError, match="weight_map"):
        load(checkpoint)


def test_no_tensor_is_read_before_the_inventory_is_checked(checkpoint, monkeypatch) -> None:
    edit(shards(checkpoint)[0], lambda t: t.__setitem__("extra", torch.zeros(1)))
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(WeightsError, match="1 unused: extra"):
        load(checkpoint)


# ---- what is accepted ---------------------------------------------------------------------------------------------


def test_one_file_without_index(checkpoint) -> None:
    ids = references("deepseek_v3-tiny")[0].ids
    want = logits_of(checkpoint, ids)
    tensors = {k: v for shard in shards(checkpoint) for k, v in load_file(shard).items()}
    for path in checkpoint.glob("*.safetensors*"):
        path.unlink()
    save_file(tensors, checkpoint / "model.safetensors")
    assert torch.equal(logits_of(checkpoint, ids), want)


@pytest.mark.parametrize(
    "header", [b"[]", b'{"a":{}}', b'{"a":"b"}', b'{"a":{"dtype":"F32","shape":[1],"data_offsets":["x","y"]}}', b"[" * 100_000]
)
def test_a_file_with_another_kind_of_header(checkpoint, header) -> None:
    shards(checkpoint)[1].write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(WeightsError, match=r"model-00002-of-000003\.safetensors: not a safetensors file"):
        load(checkpoint)


def test_a_file_that_goes_on_behind_its_tensors(checkpoint) -> None:
    with shards(checkpoint)[0].open("ab") as file:
        file.write(b"x" * 10)
    with pytest.raises(WeightsError, match=r"model-00001-of-000003\.safetensors: longer than its header says"):
        load(checkpoint)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.float8_e5m2])
def test_tensors_of_other_types_are_refused_by_name(checkpoint, dtype) -> None:
    """Integers would load as if they were weights; their scales are not known here."""
    edit(shards(checkpoint)[0], lambda t: t.update({"model.embed_tokens.weight": t["model.embed_tokens.weight"].to(dtype)}))
    with pytest.raises(WeightsError, match=r"model\.embed_tokens\.weight is (I8|U8|I64|BOOL|F8_E5M2)"):
        load(checkpoint)


def test_a_model_cut_short_in_its_config_is_not_taken_for_drafts(checkpoint) -> None:
    """The third layer would pass for the draft layer; the true draft layer is then one too many."""
    raw = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": 2}))
    with pytest.raises(WeightsError, match=r"unused: model\.layers\.3"):
        load(checkpoint)


def test_draft_tensors_are_left_alone_unless_asked_for(checkpoint) -> None:
    """Report L04: the MTP layer is skipped by its number."""
    assert load(checkpoint).mtp is None
    assert load(checkpoint, with_mtp=True).mtp is not None
    for shard in shards(checkpoint):
        edit(shard, lambda t: [t.pop(n) for n in list(t) if n.startswith("model.layers.3.")])
    assert load(checkpoint).mtp is None
    with pytest.raises(WeightsError, match=r"missing: model\.layers\.3"):
        load(checkpoint, with_mtp=True)


def test_asking_for_a_draft_head_that_is_not_announced() -> None:
    folder = reference_checkpoint("deepseek_v2-tiny")
    with pytest.raises(ModelConfigError, match="num_nextn_predict_layers"):
        load(folder, with_mtp=True)


def test_bf16_weights_with_left_over_quantization_config(checkpoint) -> None:
    """Report L06: decided by the tensors present, with a warning."""
    ids = references("deepseek_v3-tiny")[0].ids
    want = logits_of(checkpoint, ids)
    raw = json.loads((checkpoint / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (checkpoint / "config.json").write_text(json.dumps(raw))
    with pytest.warns(UserWarning, match="announces FP8 weights, but the files hold none"):
        assert torch.equal(logits_of(checkpoint, ids), want)


def test_tensor_and_scale_in_different_shards(tmp_path) -> None:
    source = reference_checkpoint("deepseek_v3-tiny-fp8")
    tensors = {k: v for shard in shards(source) for k, v in load_file(shard).items()}
    shutil.copy(source / "config.json", tmp_path)
    save_file({k: v for k, v in tensors.items() if "scale_inv" in k}, tmp_path / "a.safetensors")
    save_file({k: v for k, v in tensors.items() if "scale_inv" not in k}, tmp_path / "b.safetensors")
    ids = references("deepseek_v3-tiny-fp8")[0].ids
    assert torch.equal(logits_of(tmp_path, ids), logits_of(source, ids))


def test_fp8_tensor_without_its_scale(tmp_path) -> None:
    source = reference_checkpoint("deepseek_v3-tiny-fp8")
    folder = tmp_path / "model"
    shutil.copytree(source, folder)
    name = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    for shard in shards(folder):
        edit(shard, lambda t: t.pop(name, None))
    with pytest.raises(WeightsError, match=f"1 missing: {name}"):
        load(folder)


@pytest.mark.parametrize("variant", ["deepseek_v3-slim-fp8", "deepseek_v3-tiny-fp8"])
def test_kept_fp8_weights_stand_for_the_same_values(variant) -> None:
    """What a CUDA device keeps in FP8 equals what a CPU dequantizes, partial blocks and stacked matrices included."""
    checkpoint = Checkpoint(reference_checkpoint(variant))
    config = load_model_config(checkpoint.folder)
    hidden, q, kv = config.hidden_size, config.q_lora_rank, config.kv_lora_rank + config.qk_rope_head_dim
    inter = config.moe.expert_intermediate_size
    kept = Weights(checkpoint, torch.device("cpu"), torch.float32, keep_fp8=True)
    plain = Weights(checkpoint, torch.device("cpu"), torch.float32, keep_fp8=False)
    attention = (Part.whole("q_a_proj", q, hidden), Part.whole("kv_a_proj_with_mqa", kv, hidden))
    name = "model.layers.1.self_attn"
    stacked = kept.at(name).matrix(*attention)
    assert isinstance(stacked, BlockScaledWeight) == (q % 128 == 0)  # else the second matrix begins inside a block
    values = stacked.dequantize() if isinstance(stacked, BlockScaledWeight) else stacked
    assert torch.equal(values, plain.at(name).matrix(*attention))
    alone = kept.at(name).matrix(attention[1])
    assert isinstance(alone, BlockScaledWeight)
    assert torch.equal(alone.dequantize(), plain.at(name).matrix(attention[1]))
    experts = [w.at("model.layers.1.mlp.experts").experts([2, 3], range(8), hidden, inter) for w in (kept, plain)]
    for fp8, dense in zip(*experts):
        assert torch.equal(fp8.dequantize() if isinstance(fp8, BlockScaledWeight) else fp8, dense)


def test_slices_of_all_ranks_reassemble() -> None:
    """Report L10: every rank reads its slices only, cut by rows, columns and through FP8 blocks."""
    checkpoint = Checkpoint(reference_checkpoint("deepseek_v3-tiny-fp8"))
    weights = Weights(checkpoint, torch.device("cpu"), torch.float32, keep_fp8=False).at("model.layers.0.mlp")
    config = load_model_config(checkpoint.folder)
    whole = weights.matrix(Part.whole("gate_proj", config.intermediate_size, config.hidden_size))
    before = checkpoint.bytes_read
    rows = [weights.matrix(Part.of_rows("gate_proj", config.intermediate_size, config.hidden_size, i, 4)) for i in range(4)]
    assert torch.equal(torch.cat(rows), whole)
    assert checkpoint.bytes_read - before < whole.numel() + 200  # the codes once, and a few scales
    whole = weights.matrix(Part.whole("down_proj", config.hidden_size, config.intermediate_size))
    cols = [weights.matrix(Part.of_cols("down_proj", config.hidden_size, config.intermediate_size, i, 4)) for i in range(4)]
    assert torch.equal(torch.cat(cols, dim=1), whole)


def test_progress_reaches_the_total(checkpoint) -> None:
    seen = []
    load(checkpoint, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] > 0


def test_progress_line_shows_the_rate_of_long_loads_only(capsys, monkeypatch) -> None:
    """Report L10: progress with its rate."""
    now = [0.0]
    monkeypatch.setattr("models.weights.time.monotonic", lambda: now[0])
    short, long = ProgressLine("Loading"), ProgressLine("Loading", interval_s=10.0)
    now[0] = 0.5
    short(10**9, 10**9)
    assert capsys.readouterr().err == ""
    for now[0], done in ((4.0, 2 * 10**9), (5.0, 3 * 10**9), (20.0, 10**10)):
        long(done, 10**10)
    lines = capsys.readouterr().err.splitlines()
    assert [line.strip() for line in lines] == [
        "Loading: 2.00 of 10.00 GB, 0.50 GB/s, 16 s left",
        "Loading: 10.00 of 10.00 GB, 0.50 GB/s, in 20 s",
    ]
    small = ProgressLine("Loading")
    now[0] = 22.0
    small(52 * 10**6, 52 * 10**6)
    assert "Loading: 52.00 of 52.00 MB, 26.00 MB/s, in 2 s" in capsys.readouterr().err


def test_every_tensor_is_read_once(checkpoint, monkeypatch) -> None:
    read, original = [], Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda self, name, *args: (read.append(name), original(self, name, *args))[1])
    load(checkpoint, with_mtp=True)
    repeated = {"model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"}
    assert len(read) == len(set(read))
    assert set(read) == set(Checkpoint(checkpoint).stored) - repeated


# ---- dummy weights and sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["deepseek_v3-tiny", "longcat_flash-tiny", "deepseek_v3-tiny-fp8"])
def test_dummy_weights_need_config_json_alone(variant, tmp_path) -> None:
    shutil.copy(reference_checkpoint(variant) / "config.json", tmp_path)
    model = load(tmp_path, load_format="dummy", with_mtp=True)
    driver = Driver(model, load_model_config(tmp_path), fmt=CacheFormat.FP32)
    logits = model.logits(driver.step(prefills={0: list(range(20))}))
    assert torch.isfinite(logits).all() and 0.1 < float(logits.std()) < 100


def test_dummy_fp8_weights_have_their_layout() -> None:
    weights = Weights(RandomSource(fp8=True), torch.device("cpu"), torch.bfloat16, keep_fp8=True)
    weight = weights.matrix(Part.whole("mlp.gate_proj", 300, 256))
    assert isinstance(weight, BlockScaledWeight) and weight.scale.shape == (3, 2)
    assert 0.5 < float(weight.dequantize().std()) * 16 < 2.0


def test_sizes_that_cannot_be_split_are_listed() -> None:
    config = load_model_config(reference_checkpoint("deepseek_v3-tiny"))
    with pytest.raises(ModelConfigError, match=r"4 heads cannot be split over 3; valid: \[1, 2, 4\]"):
        check_parallel(config, 1, 3, fp8_weights=False)
    with pytest.raises(ModelConfigError, match=r"8 experts cannot be split over 16 ranks; valid: \[1, 2, 4, 8\]"):
        check_parallel(config, 8, 2, fp8_weights=False)
    slim = load_model_config(reference_checkpoint("deepseek_v3-slim-fp8"))
    check_parallel(slim, 1, 1, fp8_weights=True)
    with pytest.warns(
        UserWarning, match=r"inside their 128-blocks; those take BF16, twice the bytes. Sizes that cut none: \[1\]"
    ):
        check_parallel(slim, 1, 2, fp8_weights=True)


def test_a_slice_that_cuts_blocks_is_dequantized() -> None:
    """Report D18: a shard of 192 or 64 rows works at any size, in BF16 where it has no whole 128-blocks."""
    config = load_model_config(reference_checkpoint("deepseek_v3-slim-fp8"))
    checkpoint = Checkpoint(reference_checkpoint("deepseek_v3-slim-fp8"))
    for tp in (1, 2):
        name, rows = "q_b_proj", config.num_heads * config.qk_head_dim
        part = Part.of_rows(name, rows, config.q_lora_rank, 0, 8 * tp if tp > 1 else 1)
        weights = Weights(checkpoint, torch.device("cpu"), torch.bfloat16, keep_fp8=True).at("model.layers.0.self_attn")
        weight = weights.matrix(part)
        assert isinstance(weight, BlockScaledWeight) == (tp == 1)
        whole = Weights(checkpoint, torch.device("cpu"), torch.float32, keep_fp8=False).at("model.layers.0.self_attn")
        expected = whole.matrix(Part.whole(name, rows, config.q_lora_rank))[: part.height]
        real = weight.dequantize() if isinstance(weight, BlockScaledWeight) else weight.float()
        assert (real - expected).abs().max() <= 0.004 * expected.abs().max()
