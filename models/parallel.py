"""Ranks and collectives: the only file that creates process groups.

rank = dp_rank * tp + tp_rank. Attention is data-parallel over `dp` replicas and split by heads over the `tp` ranks of a
replica; experts lie over all ranks. Tensors travel over NCCL (gloo on a CPU), control messages over gloo. A group of one
rank costs nothing: its collectives return their argument.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

import torch
import torch.distributed as dist

_FIRST_FRAME_BYTES = 4096  # most plans fit into one broadcast; the rest of a longer one follows


@dataclass(frozen=True)
class ParallelContext:
    """This rank's place and its process groups; groups are None where they have one rank.

    fp8_dispatch: rows travel to the experts of other ranks as E4M3 codes and scales (models/layers/expert_dispatch.py)
    """

    dp: int
    tp: int
    dp_rank: int
    tp_rank: int
    world: dist.ProcessGroup | None = None
    replica: dist.ProcessGroup | None = None
    replica_control: dist.ProcessGroup | None = None
    leaders_control: dist.ProcessGroup | None = None
    fp8_dispatch: bool = False

    @staticmethod
    def single() -> ParallelContext:
        return ParallelContext(dp=1, tp=1, dp_rank=0, tp_rank=0)

    @staticmethod
    def simulated(dp: int, tp: int, *, fp8_dispatch: bool = False) -> SimulatedContext:
        """Rank 0 of dp * tp ranks that do not exist."""
        return SimulatedContext(dp=dp, tp=tp, dp_rank=0, tp_rank=0, fp8_dispatch=fp8_dispatch)

    @staticmethod
    def create(dp: int, tp: int, device: torch.device | str, *, fp8_dispatch: bool = False) -> ParallelContext:
        """Build every group over torch.distributed's default group, on all ranks in one order.

        Raises ValueError when the default group's size is not dp * tp, or it is missing and dp * tp > 1.
        """
        world_size = dp * tp
        if world_size == 1:
            return ParallelContext.single()
        if not dist.is_initialized():
            raise ValueError(f"dp {dp} and tp {tp} need torch.distributed with {world_size} ranks, which is not initialised")
        if dist.get_world_size() != world_size:
            raise ValueError(f"dp {dp} times tp {tp} is {world_size}, but {dist.get_world_size()} ranks were started")
        rank = dist.get_rank()
        dp_rank, tp_rank = divmod(rank, tp)
        data = "nccl" if torch.device(device).type == "cuda" else "gloo"
        world = dist.new_group(list(range(world_size)), backend=data)
        replicas = [list(range(d * tp, (d + 1) * tp)) for d in range(dp)] if tp > 1 else []
        replica_groups = [dist.new_group(ranks, backend=data) for ranks in replicas]
        control_groups = [dist.new_group(ranks, backend="gloo") for ranks in replicas]
        leaders = dist.new_group([d * tp for d in range(dp)], backend="gloo") if dp > 1 else None
        return ParallelContext(
            dp=dp,
            tp=tp,
            dp_rank=dp_rank,
            tp_rank=tp_rank,
            world=world,
            replica=replica_groups[dp_rank] if replicas else None,
            replica_control=control_groups[dp_rank] if replicas else None,
            leaders_control=leaders if tp_rank == 0 else None,
            fp8_dispatch=fp8_dispatch,
        )

    @property
    def rank(self) -> int:
        return self.dp_rank * self.tp + self.tp_rank

    @property
    def world_size(self) -> int:
        return self.dp * self.tp

    @property
    def has_peers(self) -> bool:
        """Whether other ranks exist, whose steps must match this one's."""
        return self.world_size > 1

    @property
    def is_leader(self) -> bool:
        return self.tp_rank == 0

    @property
    def _leader_rank(self) -> int:
        return self.dp_rank * self.tp

    # ---- tensors ----

    def tp_all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the replica's ranks, in place."""
        if self.replica is not None:
            dist.all_reduce(x, group=self.replica)
        return x

    def tp_all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Concatenate the replica's ranks' equal shapes along `dim`."""
        return x if self.replica is None else _all_gather(x, self.tp, self.replica, dim)

    def tp_broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """The leader's values, in place."""
        if self.replica is not None:
            dist.broadcast(x, src=self._leader_rank, group=self.replica)
        return x

    def ep_all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[n, ...] of every rank -> [world_size * n, ...] in rank order."""
        return x if self.world is None else _all_gather(x, self.world_size, self.world, 0)

    def ep_reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """[world_size * n, ...] summed over all ranks; this rank keeps its own [n, ...]."""
        if self.world is None:
            return x
        out = x.new_empty(x.shape[0] // self.world_size, *x.shape[1:])
        dist.reduce_scatter_tensor(out, x.contiguous(), group=self.world)
        return out

    # ---- control plane ----

    def leaders_all_gather(self, values: list[int]) -> list[list[int]]:
        """The same number of integers from the leader of every replica, in order. Called by leaders only."""
        if self.leaders_control is None:
            return [values]
        mine = torch.tensor(values, dtype=torch.int64)
        return _all_gather(mine.unsqueeze(0), self.dp, self.leaders_control, 0).tolist()

    def tp_broadcast_bytes(self, payload: bytes | None) -> bytes:
        """The leader's bytes on every rank of its replica; followers pass None."""
        if self.replica_control is None:
            assert payload is not None, "the only rank of a replica is its leader"
            return payload
        head = torch.empty(_FIRST_FRAME_BYTES, dtype=torch.uint8)
        if payload is not None:
            frame = struct.pack("<Q", len(payload)) + payload
            first = frame[:_FIRST_FRAME_BYTES]
            head[: len(first)] = torch.frombuffer(bytearray(first), dtype=torch.uint8)
        dist.broadcast(head, src=self._leader_rank, group=self.replica_control)
        (size,) = struct.unpack("<Q", head[:8].numpy().tobytes())
        rest = size + 8 - _FIRST_FRAME_BYTES
        if rest <= 0:
            return head[8 : 8 + size].numpy().tobytes()
        if payload is not None:
            tail = torch.frombuffer(bytearray(payload[_FIRST_FRAME_BYTES - 8 :]), dtype=torch.uint8)
        else:
            tail = torch.empty(rest, dtype=torch.uint8)
        dist.broadcast(tail, src=self._leader_rank, group=self.replica_control)
        return head[8:].numpy().tobytes() + tail.numpy().tobytes()


@dataclass(frozen=True)
class SimulatedContext(ParallelContext):
    """One rank alone, holding what rank 0 of a larger deployment holds, to measure its step on a machine with fewer devices.

    Nothing travels. The ranks that are missing are imagined as twins: each brings the same rows to the experts, and what it
    would compute is what this rank computes. Results have the right shapes; their values mean nothing.
    """

    @property
    def has_peers(self) -> bool:
        return False

    def tp_all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return x if self.tp == 1 else torch.cat([x] * self.tp, dim=dim)

    def ep_all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x] * self.world_size)

    def ep_reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the twins' rows: with `turned` ids, each choice of this rank's own rows counted once."""
        return x.unflatten(0, (self.world_size, -1)).sum(dim=0)

    def turned(self, ids: torch.Tensor, num_experts: int, num_choices: int) -> torch.Tensor:
        """Expert ids int32 [n, K] as all twins would have chosen, [world_size * n, K]: the i-th twin's choices are moved on by
        i ranks, so that the rows' choices, which lie on all ranks, meet on this rank exactly once each.

        This rank's experts so get n * K (token, expert) pairs in all, their share where every rank brings n rows. Ids -1
        (padding) and num_experts .. num_choices - 1 (zero-computation experts) stay.
        """
        table, offsets = _twins(self.world_size, num_experts, num_choices, ids.device)
        return table[ids + offsets].flatten(0, 1)


@functools.cache
def _twins(world_size: int, num_experts: int, num_choices: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What each id becomes at each twin, int32 [world_size * (1 + num_choices)], -1 first; and where id 0 of a twin lies,
    int64 [world_size, 1, 1]. A table, because a simulated step must not pay for its own arithmetic in every layer."""
    share = num_experts // world_size
    experts = torch.arange(num_experts, dtype=torch.int32)
    others = torch.arange(num_experts, num_choices, dtype=torch.int32)
    nobody = torch.tensor([-1], dtype=torch.int32)
    lines = [torch.cat((nobody, (experts + i * share) % num_experts, others)) for i in range(world_size)]
    offsets = torch.arange(world_size) * (1 + num_choices) + 1
    return torch.cat(lines).to(device), offsets[:, None, None].to(device)


def _all_gather(x: torch.Tensor, size: int, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    x = x.contiguous()
    out = x.new_empty(size * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x, group=group)
    if dim == 0:
        return out
    return torch.cat(out.chunk(size, dim=0), dim=dim)
