"""Native sparse attention: the paper's equations one query at a time, its limits, decoding, layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.blocks.mixers.sparse import Sparse, SparseConfig
from surefoot.blocks.rope import LinearScaling
from surefoot.config import ConfigError
from surefoot.dist.pool import Pool
from surefoot.infer.states import stored_bytes
from surefoot.ops import seen_attention
from surefoot.ops.attention import attend_plain
from surefoot.ops.documents import EVERYTHING, Documents, Reach
from surefoot.ops.scores import Scores
from surefoot.ops.seen_attention import attend_seen, attend_seen_plain, weights_seen
from surefoot.parallel.apply import check
from surefoot.parallel.plan import Plan
from surefoot.parallel.recompute import RecomputeConfig
from tests.parallel.parity import LENGTH, assert_same_as_one_process, decoder
from tests.redraw import redraw

WIDTH = 16
OPTIONS: dict[str, dict[str, Any]] = {
    "overlapping": {},
    "wide blocks": {"compressed_size": 8, "compressed_stride": 4, "num_selected": 3, "qk_norm": "none"},
    "wide choices": {"selected_size": 8, "num_selected": 3, "rope_scaling": LinearScaling(factor=2.0)},
    "apart": {"compressed_size": 3, "compressed_stride": 3, "selected_size": 6, "num_selected": 3},
}


def config(**changes: Any) -> SparseConfig:
    sizes = {"num_heads": 4, "num_kv_heads": 2, "rope_theta": 20.0, "window": 5}
    blocks = {"compressed_size": 4, "compressed_stride": 2, "selected_size": 4, "num_selected": 4}
    return SparseConfig(**(sizes | blocks | changes))


def built(**changes: Any) -> Sparse:
    """fp64, and every weight drawn."""
    return redraw(config(**changes).build(width=WIDTH, output_scale=1.0))


def x(length: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(1)).double()


def by_hand(mixer: Sparse, inputs: Tensor, ids: list[list[int]]) -> Tensor:
    """One query of one key-value head at a time, documents taken out of their rows."""
    sizes, size, group = mixer.config, mixer.head_size, mixer.num_heads // mixer.num_kv_heads
    theta = torch.tensor([20.0 ** (-2 * i / size) for i in range(size // 2)], dtype=torch.float64)
    if sizes.rope_scaling is not None:
        theta = sizes.rope_scaling.stretch(theta, 20.0)

    def turned(vector: Tensor, position: int) -> Tensor:
        left, right = vector.chunk(2)
        cos, sin = torch.cos(theta * position), torch.sin(theta * position)
        return torch.cat((left * cos - right * sin, right * cos + left * sin))

    def normed(vector: Tensor, norm: Any) -> Tensor:
        return vector if norm is None else vector / (vector.square().mean() + norm.eps).sqrt() * norm.scale

    def head(name: str, number: int, vector: Tensor) -> Tensor:
        return getattr(mixer, name)[number * size : (number + 1) * size] @ vector

    def squeezed(compression: Any, vectors: list[Tensor]) -> Tensor:
        flat = torch.cat([vector + place for vector, place in zip(vectors, compression.position, strict=True)])
        return compression.w_out @ F.gelu(compression.w_in @ flat)

    def attended(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> tuple[Tensor, Tensor]:
        if not keys:
            return torch.zeros(size, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
        weights = torch.softmax(torch.stack(keys) @ query * size**-0.5, 0)
        return weights @ torch.stack(values), weights

    def document(tokens: Tensor) -> Tensor:
        outputs = []
        for i in range(len(tokens)):
            values = []
            for g in range(mixer.num_kv_heads):
                starts = range(0, i + 2 - sizes.compressed_size, sizes.compressed_stride)
                inside = [range(start, start + sizes.compressed_size) for start in starts]
                kc = [
                    squeezed(mixer.compress_k, [head("wk_compressed", g, tokens[j]) for j in block]) for block in inside
                ]
                kc = [
                    turned(normed(k, mixer.norm_k_compressed), block[-1]) for k, block in zip(kc, inside, strict=True)
                ]
                vc = [
                    squeezed(mixer.compress_v, [head("wv_compressed", g, tokens[j]) for j in block]) for block in inside
                ]
                ks, kw = (
                    [
                        turned(normed(head(f"wk_{branch}", g, tokens[j]), getattr(mixer, f"norm_k_{branch}")), j)
                        for j in range(i + 1)
                    ]
                    for branch in ("selected", "window")
                )
                vs, vw = (
                    [head(f"wv_{branch}", g, tokens[j]) for j in range(i + 1)] for branch in ("selected", "window")
                )
                queries = [turned(normed(head("wq", g * group + r, tokens[i]), mixer.norm_q), i) for r in range(group)]
                compressed = [attended(q, kc, vc) for q in queries]
                total = sum(weights for _, weights in compressed)
                own = i // sizes.selected_size
                worth = [0.0] * (own + 1)
                for weight, block in zip(total, inside, strict=True):
                    for j in range(own + 1):
                        both = set(block) & set(range(j * sizes.selected_size, (j + 1) * sizes.selected_size))
                        worth[j] += float(weight.detach()) * len(both) / sizes.compressed_stride
                always = {0, own, max(0, own - 1)}
                order = sorted(range(own + 1), key=lambda j: (j not in always, -worth[j], j))
                chosen = [j for j in range(i + 1) if j // sizes.selected_size in order[: sizes.num_selected]]
                for r, q in enumerate(queries):
                    branches = (
                        compressed[r][0],
                        attended(q, [ks[j] for j in chosen], [vs[j] for j in chosen])[0],
                        attended(q, kw[-sizes.window :], vw[-sizes.window :])[0],
                    )
                    place = 3 * (g * group + r)
                    gates = torch.sigmoid(mixer.gates.weight[place : place + 3] @ tokens[i])
                    values.append(sum(gate * branch for gate, branch in zip(gates, branches, strict=True)))
            outputs.append(mixer.wo @ torch.cat(values))
        return torch.stack(outputs)

    rows = []
    for row, numbers in zip(inputs, ids, strict=True):
        lengths = [numbers.count(number) for number in dict.fromkeys(numbers)]
        rows.append(torch.cat([document(part) for part in row.split(lengths)]))
    return torch.stack(rows)


IDS = [[0] * 3 + [1] * 24 + [2] * 2, [0] * 29]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_it_is_what_the_paper_says(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen_attention, "_BLOCK_BYTES", 0)  # as many runs of queries as there may be
    mixer, inputs = built(**options), x(29)
    expected = by_hand(mixer, inputs, IDS)
    by_hand_grads = torch.autograd.grad(expected.square().sum(), list(mixer.parameters()))
    for is_plain in (False, True):
        mixer.is_plain = is_plain
        found = mixer(inputs, Documents(torch.tensor(IDS), 29))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        grads = torch.autograd.grad(found.square().sum(), list(mixer.parameters()))
        for (name, _), ours, theirs in zip(mixer.named_parameters(), grads, by_hand_grads, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_alone_is_as_packed(options: dict[str, Any]) -> None:
    """The forms for one document and for many agree on one."""
    mixer, inputs = built(**options), x(29)
    packed = mixer(inputs, Documents(torch.tensor([[0] * 28 + [1]] * 2), 29))[:, :28]
    torch.testing.assert_close(mixer(inputs[:, :28], Documents(None, 28)), packed, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("cuts", [(1,) * 33, (33,), (2, 3, 5, 23), (30, 1, 1, 1), (1, 32)])
@torch.no_grad()
def test_stepping_equals_one_pass(options: dict[str, Any], cuts: tuple[int, ...]) -> None:
    mixer, inputs = built(**options), x(33)
    state, parts = mixer.new_state(2, 33, torch.float64), []
    for piece in inputs.split(cuts, 1):
        parts.append(mixer(piece, Documents(None, piece.shape[1], start=state.length), state))
    torch.testing.assert_close(torch.cat(parts, 1), mixer(inputs, Documents(None, 33)), rtol=0, atol=1e-12)
    assert stored_bytes(state) == 2 * mixer.state_bytes(33, torch.float64)


@torch.no_grad()
def test_all_selected_is_full_attention_and_the_window_is_a_window() -> None:
    """With gates that leave one branch alone (Yuan et al., 2025, section 3.2)."""
    mixer, inputs, docs = built(num_selected=8, qk_norm="none"), x(29), Documents(None, 29)
    mixer.gates.forward = lambda x_BLD: (x_BLD.new_zeros(()), x_BLD.new_ones(()), x_BLD.new_zeros(()))
    for branch, reach in (("selected", EVERYTHING), ("window", Reach(5))):
        q, k, v = (
            (inputs @ getattr(mixer, name).mT).unflatten(-1, (-1, 4)) for name in ("wq", f"wk_{branch}", f"wv_{branch}")
        )
        q, k = (mixer.rope.turn(part, mixer.rope.tables(docs, part.dtype)) for part in (q, k))
        expected = attend_plain(q, k, v, docs, Scores(reach=reach)).flatten(2) @ mixer.wo.mT
        torch.testing.assert_close(mixer(inputs, docs), expected, rtol=0, atol=1e-12)
        mixer.gates.forward = lambda x_BLD: (x_BLD.new_zeros(()), x_BLD.new_zeros(()), x_BLD.new_ones(()))


@torch.no_grad()
def test_decoding_reads_the_chosen_blocks_alone() -> None:
    """Keys of no other block are touched: they may be anything, and nothing changes."""
    mixer, inputs = built(num_selected=3), x(40)
    outputs = []
    for spoil in (False, True):
        state = mixer.new_state(2, 40, torch.float64)
        mixer(inputs[:, :39], Documents(None, 39), state)
        if spoil:
            state.selected.buffers[0][:, 4:32] = torch.nan
            state.selected.buffers[1][:, 4:32] = torch.nan
        outputs.append(mixer(inputs[:, 39:], Documents(None, 1, start=39), state))
    hidden = outputs[1].isnan().any(-1)
    torch.testing.assert_close(outputs[0], outputs[1].where(~hidden[..., None], outputs[0]))
    # Three of ten blocks are always chosen (4 tokens each): no fourth is, so the others lie untouched.
    assert not hidden.any()


def test_what_a_token_costs() -> None:
    mixer, length = built(), 40
    state = 2 * 2 * 4 * 2  # keys and values of two heads in bf16
    assert mixer.state_bytes(length, torch.bfloat16) == state * (length + 5 + 19 + 3)
    assert mixer.decode_bytes(length, torch.bfloat16) == state * (16 + 5 + 19 + 3)
    seen = [sum(1 for end in range(3, 40, 2) if end <= i) for i in range(length)]
    chosen = [min(i + 1, 3 * 4 + i % 4 + 1) for i in range(length)]
    window = [min(i + 1, 5) for i in range(length)]
    keys = sum(seen + chosen + window) / length
    fewer = mixer.flops(length, causal=False) - mixer.flops(length, causal=True)
    assert fewer == pytest.approx(4 * 16 * (19 + 2 * length - keys))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_attention_over_what_is_seen(dtype: torch.dtype) -> None:
    """Also of queries that see nothing, and of masks that end early."""
    generator = torch.Generator().manual_seed(2)
    q, k, v, pull = (
        torch.randn(2, *shape, generator=generator).to(dtype) for shape in ((9, 4, 8), (7, 2, 8), (7, 2, 8), (9, 4, 8))
    )
    mask = torch.rand(2, 2, 9, 6, generator=generator) < 0.5
    mask[:, :, 2] = False

    def seen(run: slice) -> Tensor:
        return mask[:, :, run]

    leaves = [part.requires_grad_() for part in (q, k, v)]
    exact = [part.detach().double().requires_grad_() for part in leaves]
    ours = attend_seen(*leaves, seen)
    theirs, weights = attend_seen_plain(*exact, seen)
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)
    assert not ours[:, 2].any()
    for found, expected in zip(
        torch.autograd.grad(ours, leaves, pull), torch.autograd.grad(theirs, exact, pull.double()), strict=True
    ):
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    summed = weights.unflatten(1, (2, 2)).sum(2)
    torch.testing.assert_close(weights_seen(q, k, seen).double(), summed.detach(), rtol=tolerance, atol=tolerance)


def model() -> Any:
    return decoder(depth=2).model_copy(update={"mixer": config(num_selected=3)})


@pytest.mark.parametrize(
    "plan",
    [
        Plan(tensor=2),
        Plan(shard=2, zero=3),
        Plan(pipeline=2),
        Plan(context=2),
        Plan(context=4, context_kind="ring", recompute=RecomputeConfig(mode="selective")),
        Plan(context=2, context_kind="ulysses", tensor=2),
        Plan(recompute=RecomputeConfig(mode="full")),
        Plan(recompute=RecomputeConfig(mode="selective")),
    ],
    ids=Plan.describe,
)
def test_gradients_are_those_of_one_process(pool: Pool, plan: Plan) -> None:
    assert_same_as_one_process(pool, plan, model(), num_micro=2)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan(tensor=4), "must divide 2 kv_heads of layers.0.mixer"),
    ],
)
def test_layouts_it_cannot_serve_are_refused(plan: Plan, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(plan, model(), LENGTH)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"compressed_stride": 3}, "compressed_stride: 3: must divide compressed_size 4"),
        ({"selected_size": 5}, "compressed_stride: 2: must divide selected_size 5"),
        ({"num_kv_heads": 3}, "num_kv_heads: 3: must divide num_heads 4"),
        ({"num_selected": 2}, "num_selected: 2: must be at least 3"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(**changes)
