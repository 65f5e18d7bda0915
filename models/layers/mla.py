"""Multi-head latent attention: absorbed for decode rows, expanded for prefill rows; the split is here and nowhere else.

W_UK and W_UV are the two row groups of one matrix [H, nope + v, C]. Expanded attention multiplies latents by all of it at
once; absorbed attention multiplies queries by the first group and attention's output, still in latent space, by the second.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels import ops
from kernels.layout import BlockScaledWeight, LatentCache, Rows, plain_rows
from kernels.reference.linear import product_dtype
from models.batch import ForwardBatch, PrefillMetadata
from models.config import ModelConfig
from models.layers.norm import InputNorm, RMSNorm
from models.parallel import ParallelContext
from models.weights import Part, Weights


class MLA:
    """One attention layer; heads are split over the replica, the latent cache is whole on every rank.

    cache_index: which of the batch's caches is this layer's; cos_sin: FP32 [P, R], shared by all layers
    """

    def __init__(
        self, weights: Weights, config: ModelConfig, parallel: ParallelContext, cos_sin: torch.Tensor, cache_index: int
    ) -> None:
        self.parallel, self.cos_sin, self.cache_index = parallel, cos_sin, cache_index
        self.heads = config.num_heads // parallel.tp
        self.nope, self.rope_dim, self.v_dim = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.latent_dim, self.eps = config.kv_lora_rank, config.latent_norm_eps
        self.softmax_scale = config.softmax_scale
        hidden, q_rows = config.hidden_size, config.num_heads * config.qk_head_dim
        share = parallel.tp_rank, parallel.tp

        kv_a = Part.whole("kv_a_proj_with_mqa", self.latent_dim + self.rope_dim, hidden)
        if config.q_lora_rank is None:
            self.q_norm, self.q_b = None, None
            self.input_proj = weights.matrix(Part.of_rows("q_proj", q_rows, hidden, *share), kv_a)
            q_width = self.heads * config.qk_head_dim
        else:
            q_width = config.q_lora_rank
            self.input_proj = weights.matrix(Part.whole("q_a_proj", q_width, hidden), kv_a)
            q_norm = RMSNorm(weights.norm("q_a_layernorm", q_width, config.q_norm_factor), self.eps)
            self.q_b = weights.matrix(Part.of_rows("q_b_proj", q_rows, q_width, *share))
            self.q_norm = InputNorm(q_norm, self.q_b)
        self.widths = [q_width, self.latent_dim, self.rope_dim]
        self.latent_norm = weights.norm("kv_a_layernorm", self.latent_dim, config.latent_norm_factor)
        kv_rows = config.num_heads * (self.nope + self.v_dim)
        self.kv_b = weights.plain(Part.of_rows("kv_b_proj", kv_rows, self.latent_dim, *share))
        self.kv_b = self.kv_b.to(product_dtype(self.kv_b))
        per_head = self.kv_b.unflatten(0, (self.heads, -1))
        self.w_uk = per_head[:, : self.nope]  # [H, nope, C]
        self.w_uv = per_head[:, self.nope :].transpose(1, 2)  # [H, C, v]
        self.o_proj = weights.matrix(Part.of_cols("o_proj", hidden, config.num_heads * self.v_dim, *share))

    def __call__(self, x: Rows, batch: ForwardBatch) -> torch.Tensor:
        """[T, D] -> [T, D]; writes this step's keys into the layer's cache."""
        meta, cache = batch.attention, batch.caches[self.cache_index]
        q, latent, k_rope = ops.linear(x, self.input_proj).split(self.widths, dim=-1)
        if self.q_norm is not None and self.q_b is not None:
            q = ops.linear(self.q_norm(q), self.q_b)
        q = q.unflatten(-1, (self.heads, -1))
        rows, decode_rows = latent.shape[0], meta.num_decode_tokens
        kept = ops.append_kv(
            cache, latent, k_rope, self.latent_norm, batch.positions, self.cos_sin, meta.slots,
            eps=self.eps, keep=rows - decode_rows, copy=batch.probe.copy(self.cache_index, rows) if batch.probe is not None else None,
        )  # fmt: skip
        out: Rows = self._absorbed(q[:decode_rows], batch, cache) if decode_rows else q.new_empty(0, self.heads * self.v_dim)
        if meta.prefill is not None:
            expanded = self._expanded(q[decode_rows:], batch.positions[decode_rows:], *kept, meta.prefill, cache)
            out = torch.cat((plain_rows(out), expanded)) if decode_rows else expanded
        return self.parallel.tp_all_reduce(ops.linear(out, self.o_proj))

    def _absorbed(self, q: torch.Tensor, batch: ForwardBatch, cache: LatentCache) -> Rows:
        """Decode rows [T, H, nope + R] against the paged cache, in latent space (Eq. 5) -> [T, H * v]."""
        meta = batch.attention
        assert meta.decode_plan is not None, "decode rows come with a plan"
        query = ops.absorb_query(q, self.w_uk, batch.positions[: q.shape[0]], self.cos_sin, fmt=cache.format)
        query = query.unflatten(meta.num_decode_seqs, meta.query_len)
        out, _ = ops.mla_decode(
            query, cache, meta.block_table, meta.seq_lens, meta.num_query,
            softmax_scale=self.softmax_scale, causal=True, plan=meta.decode_plan, out_dtype=q.dtype,
        )  # fmt: skip
        if batch.probe is not None and batch.probe.comparing:
            content = torch.bmm(q[..., : self.nope].transpose(0, 1).to(self.w_uk.dtype), self.w_uk).transpose(0, 1).to(q.dtype)
            batch.probe.compare(
                self.cache_index, content, q[..., self.nope :], batch.positions, self.cos_sin, meta, out, self.softmax_scale
            )
        only = meta.prefill is None  # else these rows are joined with the prefill's before o_proj
        return ops.project_values(out.flatten(0, 1), self.w_uv, quantize=only and isinstance(self.o_proj, BlockScaledWeight))

    def _expanded(
        self,
        q: torch.Tensor,
        positions: torch.Tensor,
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        prefill: PrefillMetadata,
        cache: LatentCache,
    ) -> torch.Tensor:
        """Prefill rows: the chunk against itself unquantized, then against its cached context piece by piece -> [T, H * v].

        latent [T, C] and k_rope [T, R] are the chunk's own, as append_kv returned them.
        """
        ops.rope(q[..., self.nope :], positions, self.cos_sin, interleaved=True, in_place=True)
        out, lse = ops.prefill_attention(
            q, *self._expand(latent, k_rope), prefill.cu_lens_q, prefill.cu_lens_q,
            max_len_q=prefill.max_len_q, max_len_k=prefill.max_len_q, softmax_scale=self.softmax_scale, causal=True,
            lens_q=prefill.lens_q, lens_k=prefill.lens_q,
        )  # fmt: skip
        for piece in prefill.context:
            cached = ops.fetch_dequant(
                cache, prefill.block_table, piece.starts, piece.cu_lens, total=piece.total, dtype=q.dtype
            )
            part = ops.prefill_attention(
                q, *self._expand(*cached), prefill.cu_lens_q, piece.cu_lens,
                max_len_q=prefill.max_len_q, max_len_k=piece.max_len, softmax_scale=self.softmax_scale, causal=False,
                lens_q=prefill.lens_q, lens_k=piece.lens,
            )  # fmt: skip
            out, lse = ops.merge_attention(out, lse, *part)
        return out.flatten(1)

    def _expand(self, latent: torch.Tensor, k_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [T, H, nope + R] and values [T, H, v] of latents [T, C] and rotated shared keys [T, R] (Eq. 2)."""
        kv = F.linear(latent.to(self.kv_b.dtype), self.kv_b).to(latent.dtype)
        k_nope, v = kv.unflatten(-1, (self.heads, -1)).split((self.nope, self.v_dim), dim=-1)
        return ops.join_heads(k_nope, k_rope), v
