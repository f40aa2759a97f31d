"""Recurrences that correct what they have stored: the delta rule (Schlag et al., 2021) and its kin, by blocks of positions.

At each position and for each head, with the state S a map from keys to values,

    S = e^g S;   u = value + Sᵀ read;   S = S + write uᵀ + k vᵀ;   y = Sᵀ q

where k vᵀ may be absent. Gated DeltaNet (Yang et al., 2024) has read = -β k, write = k and value = β v; KDA (Kimi Team, 2025)
the same with a decay for each entry of a key; RWKV-7 (Peng et al., 2025) all of it. Within a block the u solve a triangular
system (Yang et al., 2024b); from block to block only the state goes. Documents are kept apart as in `ops.ssd`.

Legend: B batch, L length, H heads, K key size, V value size, E decays a head (1 or K); R runs, n blocks of c positions,
i a position and j an earlier one, X anything.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from surefoot.ops.runs import OneRun, Runs, from_blocks, in_blocks, starts_in_blocks


def delta_plain(
    q_BLHK: Tensor,
    read_BLHK: Tensor,
    write_BLHK: Tensor,
    value_BLHV: Tensor,
    log_decay_BLHE: Tensor,
    starts: Tensor,
    state_BHKV: Tensor | None = None,
    added: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The reference of `delta`: one position after the other. Returns outputs and the last state."""
    batch, length, num_heads, key_size = q_BLHK.shape
    starts_BL = starts.expand(batch, length)
    empty = q_BLHK.new_zeros((batch, num_heads, key_size, value_BLHV.shape[-1]))
    s_BHKV = empty if state_BHKV is None else state_BHKV
    y = []
    for t in range(length):
        kept_BHKV = torch.where(starts_BL[:, t, None, None, None], 0, s_BHKV)
        s_BHKV = log_decay_BLHE[:, t, :, :, None].exp() * kept_BHKV
        u_BHV = value_BLHV[:, t] + (read_BLHK[:, t, :, :, None] * s_BHKV).sum(2)
        s_BHKV = s_BHKV + write_BLHK[:, t, :, :, None] * u_BHV[:, :, None]
        if added is not None:
            s_BHKV = s_BHKV + added[0][:, t, :, :, None] * added[1][:, t, :, None]
        y.append((q_BLHK[:, t, :, :, None] * s_BHKV).sum(2))
    return torch.stack(y, 1), s_BHKV


def delta(
    q_BLHK: Tensor,
    read_BLHK: Tensor,
    write_BLHK: Tensor,
    value_BLHV: Tensor,
    log_decay_BLHE: Tensor,
    starts: Tensor,
    state_BHKV: Tensor | None = None,
    added: tuple[Tensor, Tensor] | None = None,
    *,
    block: int = 64,
    runs: Runs | None = None,
) -> tuple[Tensor, Callable[[], Tensor]]:
    """Outputs (B, L, H, V), and what makes the state after the last position (B, H, K, V), which training never needs.

    `starts` (L) or (B, L) says where documents start, `added` is k (B, L, H, K) and v (B, L, H, V). All are of one dtype, fp32
    or wider. `block` is a power of two; the result does not depend on it but for rounding. Where a head has several decays, a
    block holds c² K numbers a head, so that no exponent is positive.
    """
    runs = runs or OneRun()
    batch, length = q_BLHK.shape[:2]
    block = block_of(length // runs.num_runs, block)

    def blocks(x_BLX: Tensor) -> Tensor:
        return in_blocks(x_BLX, runs, block)  # positions of zeros change nothing

    q, read, write, value = (blocks(x).transpose(2, 3) for x in (q_BLHK, read_BLHK, write_BLHK, value_BLHV))
    decay_BnHcE = blocks(log_decay_BLHE).transpose(2, 3).cumsum(-2)
    starts_Bnc, is_seen_Bnij = starts_in_blocks(starts, batch, length, runs, block)
    starts_Bn1c, is_seen = starts_Bnc[:, :, None], is_seen_Bnij[:, :, None]

    is_first_Bn1c1 = (starts_Bn1c == 0)[..., None]
    from_start_BnHcE = decay_BnHcE.exp() * is_first_Bn1c1
    end_BnH1E = decay_BnHcE[..., -1:, :]
    to_end_BnHcE = (end_BnH1E - decay_BnHcE).exp() * (starts_Bn1c == starts_Bn1c[..., -1:])[..., None]
    kept_BnHE1 = (end_BnH1E.exp() * is_first_Bn1c1[..., -1:, :]).mT

    weights = _Weights(read, q, decay_BnHcE, is_seen)
    read_BnHij, q_BnHij = weights.of(write)
    solved_BnHij = unit_inverse(read_BnHij.tril(-1))
    made_BnHKV: Tensor | None = None
    y_added: Tensor | None = None
    if added is not None:
        k, v = (blocks(x).transpose(2, 3) for x in added)
        read_k_BnHij, q_k_BnHij = weights.of(k)
        value = value + read_k_BnHij.tril(-1) @ v
        made_BnHKV, y_added = (k * to_end_BnHcE).mT @ v, q_k_BnHij @ v
    sizes = (value.shape[-1], read.shape[-1])
    u_BnHcV, w_BnHcK = (solved_BnHij @ torch.cat((value, read * from_start_BnHcE), -1)).split(sizes, -1)
    scan = _Scan(u_BnHcV, w_BnHcK, write * to_end_BnHcE, kept_BnHE1, made_BnHKV, runs)
    corrected_BnHcV, carried_BnHcV, last = scan(q * from_start_BnHcE, state_BHKV)
    y = q_BnHij @ corrected_BnHcV + carried_BnHcV
    y_BncHV = (y if y_added is None else y + y_added).transpose(2, 3)
    return from_blocks(y_BncHV, runs, length), last


def block_of(length: int, block: int) -> int:
    """The block in use: the smallest power of two that holds `length` positions, `block` at most."""
    return min(block, 1 << (length - 1).bit_length())


def delta_flops(length: int, block: int, key_size: int, value_size: int, *, causal: bool, has_added: bool) -> float:
    """FLOPs a position and head in products, without a state before; `causal` counts half of each block's scores."""
    block = block_of(length, block)
    num_blocks = -(-length // block)
    seen, is_added = ((block + 1) / 2 if causal else block), int(has_added)
    inverse, size = 0.0, 2
    while size < block:
        inverse += 2.0 * size * size
        size *= 2
    scores = 4.0 * seen * key_size * (1 + is_added)
    solved = 2.0 * seen * (key_size + value_size)
    outputs = 2.0 * seen * value_size * (1 + 2 * is_added)
    carried = 6.0 * key_size * value_size * (num_blocks - 1) / num_blocks + 2.0 * key_size * value_size * is_added
    return num_blocks * block / length * (scores + inverse + solved + outputs + carried)


def unit_inverse(lower_Xcc: Tensor) -> Tensor:
    """The inverse of I - A for strictly lower A of a power of two rows: blocks of 1, 2, 4, … from those of half the size.

    A series of powers of A would need as few products, but its terms cancel: they grow as binomials do where keys agree.
    """
    size = lower_Xcc.shape[-1]
    inverse_Xmss = torch.ones_like(lower_Xcc[..., :1, :1]).expand(*lower_Xcc.shape[:-1], 1).unsqueeze(-1)
    half = 1
    while half < size:
        pairs = size // (2 * half)
        split = lower_Xcc.unflatten(-1, (pairs, 2, half)).unflatten(-4, (pairs, 2, half))
        # (…, pair, 2, s, pair, 2, s): of each pair's own, the later rows against the earlier columns.
        below_Xmss = split[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
        earlier, later = inverse_Xmss.unflatten(-3, (pairs, 2)).unbind(-3)
        below_Xmss = below_Xmss if half == 1 else later @ below_Xmss @ earlier
        above = torch.zeros_like(below_Xmss)
        inverse_Xmss = torch.cat((torch.cat((earlier, above), -1), torch.cat((below_Xmss, later), -1)), -2)
        half *= 2
    return inverse_Xmss.squeeze(-3)


class _Weights:
    """What positions read of what earlier ones of their document and block wrote, decayed in between."""

    def __init__(self, read_BnHcK: Tensor, q_BnHcK: Tensor, decay_BnHcE: Tensor, is_seen: Tensor) -> None:
        between = decay_BnHcE[..., :, None, :] - decay_BnHcE[..., None, :, :]
        # Masked before exp: later positions would give positive exponents.
        self.decay_BnHijE = between.masked_fill(~is_seen[..., None], float("-inf")).exp()
        self.read, self.q = read_BnHcK, q_BnHcK

    def of(self, write_BnHcK: Tensor) -> tuple[Tensor, Tensor]:
        """Of reads and of queries, (B, n, H, i, j) each, on and below the diagonal."""
        if self.decay_BnHijE.shape[-1] == 1:
            both = torch.cat((self.read, self.q), -2) @ write_BnHcK.mT
            read, q = both.chunk(2, -2)
            decay = self.decay_BnHijE[..., 0]
            return read * decay, q * decay
        both = (write_BnHcK[..., None, :, :] * self.decay_BnHijE) @ torch.stack((self.read, self.q), -1)
        read, q = both.unbind(-1)
        return read, q


class _Scan:
    """States from block to block: each turns S into kept S + writeᵀ (u + w S) + made."""

    def __init__(
        self,
        u_BnHcV: Tensor,
        w_BnHcK: Tensor,
        write_BnHcK: Tensor,
        kept_BnHE1: Tensor,
        made_BnHKV: Tensor | None,
        runs: Runs,
    ) -> None:
        self.runs = runs
        self.u, self.w, self.write, self.kept = (
            x.unflatten(1, (runs.num_runs, -1)).unbind(2) for x in (u_BnHcV, w_BnHcK, write_BnHcK, kept_BnHE1)
        )
        self.made = None if made_BnHKV is None else made_BnHKV.unflatten(1, (runs.num_runs, -1)).unbind(2)

    def __call__(self, q_BnHcK: Tensor, state_BHKV: Tensor | None) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
        """Every u and what queries read of the states before their blocks, (B, n, H, c, V); what makes the last state."""
        queries = q_BnHcK.unflatten(1, (self.runs.num_runs, -1)).unbind(2)
        state = self._first(state_BHKV)
        corrected, carried = [], []
        for number, u_BRHcV in enumerate(self.u):
            if state is None:
                corrected.append(u_BRHcV)
                carried.append(torch.zeros_like(u_BRHcV))
            else:
                corrected.append(u_BRHcV + self.w[number] @ state)
                carried.append(queries[number] @ state)
            if number < len(self.u) - 1:
                state = self._after(number, state, corrected[number])
        before = state

        def last() -> Tensor:
            return self._after(len(self.u) - 1, before, corrected[-1])[:, -1]

        return torch.stack(corrected, 2).flatten(1, 2), torch.stack(carried, 2).flatten(1, 2), last

    def _after(self, number: int, state: Tensor | None, u_BRHcV: Tensor) -> Tensor:
        """The state after a block."""
        after: Tensor = self.write[number].mT @ u_BRHcV
        if self.made is not None:
            after = after + self.made[number]
        return after if state is None else after + self.kept[number] * state

    def _first(self, initial_BHKV: Tensor | None) -> Tensor | None:
        """The state before each run here: every run tells all what it makes of nothing and what becomes of a state in it."""
        initial = None if initial_BHKV is None else initial_BHKV[:, None]
        if self.runs.num_runs == 1:
            return initial
        size = self.w[0].shape[-1]
        made: Tensor | None = None
        kept = torch.eye(size, dtype=self.w[0].dtype, device=self.w[0].device).expand(*self.w[0].shape[:-2], size, size)
        for number, (u, w, write) in enumerate(zip(self.u, self.w, self.write, strict=True)):
            made = self._after(number, made, u if made is None else u + w @ made)
            kept = self.kept[number] * kept + write.mT @ (w @ kept)
        assert made is not None
        made_BA, kept_BA = self.runs.spread(made), self.runs.spread(kept)
        states = [torch.zeros_like(made_BA[:, 0]) if initial is None else initial[:, 0]]
        for number in range(made_BA.shape[1] - 1):
            states.append(kept_BA[:, number] @ states[-1] + made_BA[:, number])
        return self.runs.pick(torch.stack(states, 1))
