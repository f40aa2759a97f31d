"""Mamba-2's recurrence (Dao and Gu, 2024): h = e^(dt a) h + dt x Bᵀ, y = h C, for each head, by blocks of positions.

Within a block outputs are a masked product as in attention; from block to block only the state goes. A document starts with
no state: what lies before its first position is masked out, not merely decayed.

Legend: B batch, L length, H heads, G groups of heads that share B and C, Q = H / G heads a group, P head size, N state size;
R runs, n blocks of c positions, i a position and j an earlier one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.ops.runs import OneRun, Runs, from_blocks, in_blocks, starts_in_blocks


def ssd_plain(
    x_BLHP: Tensor,
    log_decay_BLH: Tensor,
    b_BLGN: Tensor,
    c_BLGN: Tensor,
    starts: Tensor,
    state_BHPN: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The reference of `ssd`: one position after the other."""
    batch, length, num_heads, size = x_BLHP.shape
    per_group = num_heads // b_BLGN.shape[2]
    b_BLHN, c_BLHN = (tensor.repeat_interleave(per_group, 2) for tensor in (b_BLGN, c_BLGN))
    starts_BL = starts.expand(batch, length)
    h_BHPN = x_BLHP.new_zeros((batch, num_heads, size, b_BLGN.shape[3])) if state_BHPN is None else state_BHPN
    y = []
    for t in range(length):
        kept_BHPN = torch.where(starts_BL[:, t, None, None, None], 0, h_BHPN)
        h_BHPN = log_decay_BLH[:, t, :, None, None].exp() * kept_BHPN + x_BLHP[:, t, :, :, None] * b_BLHN[:, t, :, None]
        y.append((h_BHPN * c_BLHN[:, t, :, None]).sum(-1))
    return torch.stack(y, 1), h_BHPN


def ssd(
    x_BLHP: Tensor,
    log_decay_BLH: Tensor,
    b_BLGN: Tensor,
    c_BLGN: Tensor,
    starts: Tensor,
    state_BHPN: Tensor | None = None,
    *,
    block: int = 64,
    runs: Runs | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs (B, L, H, P) and the state after the last position (B, H, P, N).

    `x` comes times dt, `log_decay` is dt a, `starts` (L) or (B, L) says where documents start. All are of one dtype, fp32 or
    wider: in bf16 decay loses three digits. The result does not depend on `block` but for rounding.
    """
    runs = runs or OneRun()
    batch, length, num_heads, _ = x_BLHP.shape
    num_groups = b_BLGN.shape[2]
    per_group = num_heads // num_groups
    block = min(block, length // runs.num_runs)

    def blocks(x_BLX: Tensor) -> Tensor:
        return in_blocks(x_BLX, runs, block)  # positions of zeros change nothing

    x_BnGQcP = blocks(x_BLHP).unflatten(3, (num_groups, per_group)).permute(0, 1, 3, 4, 2, 5)
    b_BnG1cN, c_BnG1cN = (blocks(tensor).transpose(2, 3)[:, :, :, None] for tensor in (b_BLGN, c_BLGN))
    decay_BnGQc = blocks(log_decay_BLH).unflatten(3, (num_groups, per_group)).permute(0, 1, 3, 4, 2).cumsum(-1)
    # What is carried counts only between positions of equal numbers of starts.
    starts_Bnc, is_seen_Bnij = starts_in_blocks(starts, batch, length, runs, block)
    starts_Bn11c, is_seen = starts_Bnc[:, :, None, None], is_seen_Bnij[:, :, None, None]
    end_BnGQ1, starts_end_Bn111 = decay_BnGQc[..., -1:], starts_Bn11c[..., -1:]

    between = decay_BnGQc[..., :, None] - decay_BnGQc[..., None, :]
    # Masked before exp: later positions would give positive exponents.
    weights_BnGQij = between.masked_fill(~is_seen, float("-inf")).exp() * (c_BnG1cN @ b_BnG1cN.mT)
    y_BnGQcP = weights_BnGQij @ x_BnGQcP

    to_end = (end_BnGQ1 - decay_BnGQc).exp() * (starts_Bn11c == starts_end_Bn111)
    made_BnGQPN = (x_BnGQcP * to_end[..., None]).mT @ b_BnG1cN
    kept_BnGQ11 = (end_BnGQ1.exp() * (starts_end_Bn111 == 0))[..., None]
    initial = None if state_BHPN is None else state_BHPN.unflatten(1, (num_groups, per_group))
    before_BnGQPN, last_BGQPN = pass_states(made_BnGQPN, kept_BnGQ11, initial, runs)

    from_start = decay_BnGQc.exp() * (starts_Bn11c == 0)
    y_BnGQcP = y_BnGQcP + from_start[..., None] * (c_BnG1cN @ before_BnGQPN.mT)
    y_BLHP = from_blocks(y_BnGQcP.permute(0, 1, 4, 2, 3, 5).flatten(3, 4), runs, length)
    return y_BLHP, last_BGQPN.flatten(1, 2)


def pass_states(made_Bn: Tensor, kept_Bn: Tensor, initial: Tensor | None, runs: Runs) -> tuple[Tensor, Tensor]:
    """The state before each block and after the last, where a block makes h into `kept` h + `made` (both broadcast).

    Between runs first what each makes of nothing, and how much it keeps, are told to all; then each goes through its blocks.
    """
    made_BRm, kept_BRm = (tensor.unflatten(1, (runs.num_runs, -1)) for tensor in (made_Bn, kept_Bn))
    num_blocks = made_BRm.shape[2]
    start = torch.zeros_like(made_Bn[:, :1]) if initial is None else initial[:, None]
    if runs.num_runs == 1:
        state_BR = start
    else:
        made_BR, kept_BR = made_BRm[:, :, 0], kept_BRm[:, :, 0]
        for number in range(1, num_blocks):
            made_BR = kept_BRm[:, :, number] * made_BR + made_BRm[:, :, number]
            kept_BR = kept_BRm[:, :, number] * kept_BR
        made_BA, kept_BA = runs.spread(made_BR), runs.spread(kept_BR)
        states = [start[:, 0]]
        for number in range(made_BA.shape[1] - 1):
            states.append(kept_BA[:, number] * states[-1] + made_BA[:, number])
        state_BR = runs.pick(torch.stack(states, 1))
    before = []
    for number in range(num_blocks):
        before.append(state_BR)
        state_BR = kept_BRm[:, :, number] * state_BR + made_BRm[:, :, number]
    return torch.stack(before, 2).flatten(1, 2), state_BR[:, -1]
