"""What published architectures hold of the past, against the figures of their papers and the arithmetic behind them."""

from __future__ import annotations

import pytest
import torch

from surefoot.models.presets import families
from surefoot.planner.serving import Serving
from surefoot.recipes.find import shipped

MIB = 1 << 20
BF16 = 2

# (bytes a token at long context, bytes besides), in bf16; states of recurrent heads are fp32
PUBLISHED = {
    "llama2-7b": (524_288, 0),
    "llama-70b": (327_680, 0),
    "llama-405b": (516_096, 0),
    "qwen25-72b": (327_680, 0),
    "mistral-7b": (0, 512 * MIB),
    "mixtral-8x7b": (131_072, 0),
    "deepseek-v3": (70_272, 0),
    "gemma3-27b": (10 * 2 * 16 * 128 * BF16, 52 * 2 * 16 * 128 * BF16 * 1024),
    "gpt-oss-20b": (24_576, 12 * 2 * 8 * 64 * BF16 * 128),
    "mamba2-2-7b": (0, 160 * MIB + 64 * 3 * (5120 + 2 * 128) * BF16),
    "qwen3-next-80b": (24_576, 72 * MIB + 36 * 3 * (2 * 16 * 128 + 32 * 128) * BF16),
    "jamba-52b": (16_384, 28 * (128 * 64 * 16 * 4 + 3 * (8192 + 2 * 16) * BF16)),
    "nemotron-h-8b": (16_384, 24 * (128 * 64 * 128 * 4 + 3 * (8192 + 2 * 8 * 128) * BF16)),
    "zamba2-2-7b": (9 * 2 * 5120 * BF16, 54 * (80 * 64 * 64 * 4 + 3 * (5120 + 2 * 64) * BF16)),
    "falcon-h1-7b": (45_056, 44 * (24 * 128 * 256 * 4 + 3 * (3072 + 2 * 256) * BF16)),
    "rwkv7-2-9b": (0, 20 * MIB + 32 * 2560 * BF16),
}

PARAMETERS = {
    "llama2-7b": (6.74e9, 6.74e9),
    "qwen25-72b": (72.7e9, 72.7e9),
    "mistral-7b": (7.24e9, 7.24e9),
    "mixtral-8x7b": (46.7e9, 12.9e9),
    "deepseek-v3": (671e9, 37.6e9),
    "gemma3-27b": (27.0e9, 27.0e9),
    "gpt-oss-20b": (20.9e9, 3.6e9 + 201_088 * 2880),  # the card leaves the embedding out
    "mamba2-2-7b": (2.70e9, 2.70e9),
    "qwen3-next-80b": (79.7e9, 3.9e9),
    "nemotron-h-8b": (8.1e9, 8.1e9),
    "zamba2-2-7b": (2.66e9, 2.66e9),
    "falcon-h1-7b": (7.59e9, 7.59e9),
}


def serving(name: str) -> Serving:
    return Serving(shipped()[name]().model, torch.bfloat16)


@pytest.mark.parametrize(("name", "expected"), PUBLISHED.items(), ids=PUBLISHED)
def test_state_bytes_are_the_published_ones(name: str, expected: tuple[int, int]) -> None:
    model, context = serving(name), 1 << 17
    slope = model.state_slope(context)
    assert slope == expected[0]
    assert model.state_bytes(context) - slope * context == expected[1]


@pytest.mark.parametrize(("name", "expected"), PARAMETERS.items(), ids=PARAMETERS)
def test_parameters_are_the_published_ones(name: str, expected: tuple[float, float]) -> None:
    found = serving(name).parameters
    assert found["total"] == pytest.approx(expected[0], rel=0.02)
    assert found["active"] == pytest.approx(expected[1], rel=0.05)


def test_qwen3_next_states_weigh_as_much_as_3072_tokens() -> None:
    model = serving("qwen3-next-80b")
    assert 72 * MIB / model.state_slope(1 << 17) == 3072


def test_decoding_from_the_latent_reads_it_once() -> None:
    """DeepSeek-V3: 1,152 bytes a token and layer, not the 81,920 of keys and values of all heads."""
    mixer = Serving(families.deepseek_v3(), torch.bfloat16).model.mixers()[0]
    assert mixer.decode_bytes(1000, torch.bfloat16) == 1152 * 1000
