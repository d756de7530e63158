"""Decode context parallelism: which positions of a sequence each rank's KV cache holds.

Positions are dealt out to the ranks in pieces of `interleave` (`cp_kv_cache_interleave_size`, 1 up to
`block_size`), round after round. So a rank holds `interleave` positions of every whole round, and of the
last one what falls into its piece. Everything is worked out in host memory for all ranks at once; what a
device needs is copied to it without waiting.

Source of the formula: vLLM's `get_dcp_local_seq_lens` (vllm/v1/attention/backends/utils.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from neffbuild.config.errors import ConfigError


def local_seq_lens(seq_lens: Tensor, dcp_size: int, interleave: int) -> Tensor:
    """How many of each sequence's positions every rank holds: `[dcp_size, rows]` of the dtype given.

    `seq_lens` `[rows]` integer, in host memory. Raises `ConfigError` for sizes below 1.
    """
    _require_positive(dcp_size, interleave)
    rounds = interleave * dcp_size
    # In int64: a narrow or unsigned dtype holds the lengths, and not what they are reckoned with.
    lengths, ranks = seq_lens.long(), torch.arange(dcp_size)[:, None]
    of_last_round = (lengths % rounds - ranks * interleave).clamp(0, interleave)
    whole = torch.div(lengths, rounds, rounding_mode="floor") * interleave
    return (whole + of_last_round).to(seq_lens.dtype)


def placement(positions: Tensor, dcp_size: int, interleave: int) -> tuple[Tensor, Tensor]:
    """The rank that holds each of the positions, and which of its own positions it is there.

    `positions` of any shape, integer. Raises `ConfigError` for sizes below 1.
    """
    _require_positive(dcp_size, interleave)
    piece = torch.div(positions, interleave, rounding_mode="floor")
    local = torch.div(piece, dcp_size, rounding_mode="floor") * interleave + positions % interleave
    return piece % dcp_size, local


def padded_local_max(seq_lens: Tensor, dcp_size: int, interleave: int, multiple: int) -> int:
    """The most positions any rank holds of any sequence, rounded up to `multiple`; `multiple` itself
    where there is nothing. The same on every rank: what all of them gather must have one size."""
    longest = local_seq_lens(seq_lens, dcp_size, interleave).max().item() if len(seq_lens) else 0
    return max(-(-int(longest) // multiple), 1) * multiple


def to_device(seq_lens: Tensor, buffer: Tensor) -> Tensor:
    """Copy `seq_lens` `[rows]` into the first rows of `buffer` and null the others, without waiting for
    the device. Returns `buffer`."""
    rows = len(seq_lens)
    buffer[:rows].copy_(seq_lens, non_blocking=True)
    buffer[rows:].zero_()
    return buffer


def unpad_gathered(gathered: Tensor, seq_len: int, interleave: int) -> Tensor:
    """What an all-gather over the ranks brought, in the order of positions: `[seq_len, …]`.

    `gathered` `[dcp_size, padded, …]`: from each rank the positions it holds, padded to one size. Raises
    `ConfigError` when the ranks cannot hold that many positions.
    """
    dcp_size, padded = gathered.shape[:2]
    position = torch.arange(seq_len, device=gathered.device)
    rank, local = placement(position, dcp_size, interleave)
    if seq_len and int(local.max()) >= padded:
        raise ConfigError(
            f"{dcp_size} ranks of {padded} positions each, dealt out {interleave} at a time, do not hold "
            f"a sequence of {seq_len}",
            field="gathered",
            value=list(gathered.shape[:2]),
            hint="pad every rank's part to `padded_local_max` before it is gathered",
        )
    return gathered[rank, local]


def merge_over(group: dist.ProcessGroup) -> Callable[[Tensor, Tensor], Tensor]:
    """What makes a rank's part of an attention, and the log-sum-exp of its scores, into the whole: one
    all-gather over the ranks. All of them call it in the same order, for as many queries."""

    def merge(output: Tensor, log_sum_exp: Tensor) -> Tensor:
        part = torch.cat((output.float(), log_sum_exp[..., None]), dim=-1)
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part, group=group)
        gathered = torch.stack(parts)
        whole = merge_partial_attention(gathered[..., :-1], gathered[..., -1])
        return whole.to(output.dtype)

    return merge


def merge_partial_attention(outputs: Tensor, log_sum_exps: Tensor) -> Tensor:
    """Attention over a whole context from that over its parts: `[…, D]` in the dtype of `outputs`.

    `outputs` `[parts, …, D]`, each normalised by its own softmax; `log_sum_exps` `[parts, …]` float32, of
    the scores each was made of, -inf for a part in which nothing was visible (its output may be
    anything but NaN). Where no part saw anything the result is 0.
    """
    most = log_sum_exps.amax(dim=0, keepdim=True)
    # Nothing visible anywhere: -inf minus -inf would be NaN.
    shares = (log_sum_exps - most.nan_to_num(neginf=0.0)).exp()
    total = shares.sum(dim=0)
    mixed = (outputs.float() * shares[..., None]).sum(dim=0)
    return (mixed / torch.where(total == 0, 1.0, total)[..., None]).to(outputs.dtype)


def _require_positive(dcp_size: int, interleave: int) -> None:
    for name, value in (
        ("decode_context_parallel_size", dcp_size),
        ("cp_kv_cache_interleave_size", interleave),
    ):
        if value < 1:
            raise ConfigError(f"{name} is {value}; allowed: from 1", field=name, value=value)
