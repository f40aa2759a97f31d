"""Blocks against their bars: experts beside a dense network, state mixers in blocks beside position by position, MLA's decode.

    python benchmarks/blocks.py [experts] [mixers] [latent] [--rounds 5] [--json]

Two threads, a quiet machine, runs of the two sides in turn; a ratio is of two runs of one round, and the median over rounds
counts. Legend: B batch, L length, D width.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.peers import Check, print_checks, wait_until_quiet  # noqa: E402
from surefoot.blocks import delta as delta_block  # noqa: E402
from surefoot.blocks.base import MixerConfig  # noqa: E402
from surefoot.blocks.ffn.moe import MoEConfig  # noqa: E402
from surefoot.blocks.ffn.swiglu import SwiGLUConfig  # noqa: E402
from surefoot.blocks.mixers import mamba2, retention, rwkv7  # noqa: E402
from surefoot.blocks.mixers.attention import AttentionConfig  # noqa: E402
from surefoot.blocks.mixers.delta_net import GatedDeltaNetConfig  # noqa: E402
from surefoot.blocks.mixers.kda import KDAConfig  # noqa: E402
from surefoot.blocks.mixers.mla import MLAConfig  # noqa: E402
from surefoot.dist.startup import tune_allocator  # noqa: E402
from surefoot.infer.states import stored_bytes  # noqa: E402
from surefoot.models.count import flops_per_token  # noqa: E402
from surefoot.models.decoder import DecoderConfig  # noqa: E402
from surefoot.models.initialise import initialise  # noqa: E402
from surefoot.ops.delta import delta_plain  # noqa: E402
from surefoot.ops.documents import Documents  # noqa: E402
from surefoot.ops.ssd import ssd_plain  # noqa: E402

EXPERTS, FASTER = 1.25, 5.0
BATCH, LENGTH, WIDTH, VOCABULARY = 8, 256, 256, 8192
LONG = 2048
MIXERS: dict[str, MixerConfig] = {
    "Mamba-2": mamba2.Mamba2Config(num_heads=8, head_size=64, state_size=64),
    "lightning attention": retention.RetentionConfig(num_heads=4, head_size=64),
    "Gated DeltaNet": GatedDeltaNetConfig(num_heads=4, key_size=64, value_size=64),
    "KDA": KDAConfig(num_heads=4, key_size=64, value_size=64),
    "RWKV-7": rwkv7.RWKV7Config(num_heads=4, head_size=64, rank=16, gate_rank=32),
}
SECONDS_A_RUN = 1.0
"""At least, of repeated passes."""


def experts(rounds: int) -> Iterator[Check]:
    """Forward and backward of a decoder with 8 experts, 2 a token, beside a dense one of as many FLOPs a token."""
    dense = DecoderConfig(
        vocab_size=VOCABULARY,
        width=WIDTH,
        depth=4,
        mixer=AttentionConfig(num_heads=4, num_kv_heads=4),
        ffn=SwiGLUConfig(hidden=768),
    )
    routed = dense.model_copy(update={"ffn": MoEConfig(num_experts=8, top_k=2, hidden=384)})
    sides = [_step(config) for config in (routed, dense)]
    (own, own_flops), (other, other_flops) = sides
    text, ratio = _compare(own, other, rounds)
    yield (
        f"8 experts, 2 a token, at most {EXPERTS} x the dense model",
        f"{text}, at {own_flops / other_flops:.3f} x its FLOPs a token",
        ratio <= EXPERTS,
    )


def mixers(rounds: int) -> Iterator[Check]:
    """Forward and backward of one mixer over 2,048 positions, beside the same one position after the other."""
    for name, config in MIXERS.items():
        mixer = config.build(width=WIDTH, output_scale=1.0)
        initialise(mixer, 0)
        x_BLD, docs = torch.randn(1, LONG, WIDTH, dtype=torch.bfloat16), Documents(None, LONG)

        def blocks(mixer: torch.nn.Module = mixer, x_BLD: Tensor = x_BLD, docs: Documents = docs) -> None:
            mixer(x_BLD, docs).float().square().mean().backward()

        def recurrent(run: Callable[[], None] = blocks) -> None:
            with one_by_one():
                run()

        text, ratio = _compare(recurrent, blocks, rounds)
        yield f"{name} over {LONG} positions at least {FASTER:g} x as fast in blocks", text, ratio >= FASTER


@contextmanager
def one_by_one() -> Iterator[None]:
    """Within it state mixers go from position to position."""
    forms = ((mamba2, "ssd", _ssd), (retention, "ssd", _ssd), (rwkv7, "delta", _delta), (delta_block, "delta", _delta))
    with ExitStack() as stack:
        for module, name, form in forms:
            stack.enter_context(mock.patch.object(module, name, form))
        yield


def latent(_rounds: int) -> Iterator[Check]:
    """What MLA holds and reads to decode, from storages and from the bytes that its products read."""
    config = MLAConfig(num_heads=16, latent_size=128, head_size=64, rope_size=32, value_size=64)
    mixer = config.build(width=WIDTH, output_scale=1.0)
    initialise(mixer, 0)
    state = mixer.new_state(1, LENGTH, torch.bfloat16)
    with torch.no_grad():
        mixer.bfloat16()(torch.randn(1, LENGTH, WIDTH).bfloat16(), Documents(None, LENGTH), state)
    held, latents = stored_bytes([state]), LENGTH * (128 + 32) * 2
    expanded = LENGTH * 16 * (64 + 32 + 64) * 2
    read = mixer.decode_bytes(LENGTH, torch.bfloat16)
    yield (
        "MLA holds and reads the latent to decode, not expanded heads",
        f"holds {held:,} bytes, reads {read:,}; latents are {latents:,}, expanded heads {expanded:,}",
        held == read == latents,
    )


def _step(config: DecoderConfig) -> tuple[Callable[[], None], float]:
    model = config.build()
    initialise(model, 0)
    generator = torch.Generator().manual_seed(0)
    tokens_BL, targets_BL = (torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator) for _ in range(2))
    docs = Documents(None, LENGTH)

    def run() -> None:
        model.loss(tokens_BL, targets_BL, docs, dtype=torch.bfloat16)[0].backward()
        model.zero_grad()

    return run, flops_per_token(model, LENGTH)["causal"]


def _compare(slow: Callable[[], None], fast: Callable[[], None], rounds: int) -> tuple[str, float]:
    """Seconds of the first over seconds of the second, in words and as the median over rounds."""
    slow()
    fast()
    found = []
    for _ in range(rounds):
        wait_until_quiet(lambda text: print(text, file=sys.stderr))
        found.append((_seconds(slow), _seconds(fast)))
    ratios = [one / other for one, other in found]
    ratio = statistics.median(ratios)
    times = " against ".join(f"{1000 * statistics.median(side):.1f} ms" for side in zip(*found, strict=True))
    return f"{ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f}), {times}", ratio


def _seconds(run: Callable[[], None]) -> float:
    """The median of passes repeated for a while."""
    times: list[float] = []
    while sum(times) < SECONDS_A_RUN or len(times) < 3:
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _ssd(*arguments: Any, block: int = 0, runs: object = None) -> tuple[Tensor, Tensor]:  # noqa: ARG001 - as `ssd` is called
    return ssd_plain(*arguments)


def _delta(*arguments: Any, block: int = 0, runs: object = None) -> tuple[Tensor, Callable[[], Tensor]]:  # noqa: ARG001
    y, state = delta_plain(*arguments)
    return y, lambda: state


BLOCKS: dict[str, Callable[[int], Iterator[Check]]] = {"experts": experts, "mixers": mixers, "latent": latent}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is named, or everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("blocks", nargs="*", help=", ".join(BLOCKS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON list a bar")
    chosen = parser.parse_args(arguments)
    for name in chosen.blocks:
        if name not in BLOCKS:
            parser.error(f"{name}: is none of {', '.join(BLOCKS)}")
    if chosen.rounds < 1:
        parser.error(f"--rounds {chosen.rounds}: must be at least 1")
    tune_allocator()
    torch.set_num_threads(2)
    checks = (check for name in chosen.blocks or BLOCKS for check in BLOCKS[name](chosen.rounds))
    return print_checks(checks, as_json=chosen.json)


if __name__ == "__main__":
    sys.exit(main())
