"""Decoding is measured over states of the right size, which storages and formulas agree on."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from surefoot.blocks.ffn.swiglu import SwiGLUConfig
from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.cli.main import app
from surefoot.config import ConfigError
from surefoot.infer.decode import CHUNK, measure
from surefoot.infer.states import stored_bytes
from surefoot.models.decoder import DecoderConfig


def test_stored_bytes_counts_each_storage_once_and_whole() -> None:
    base = torch.zeros(10, 4)
    assert stored_bytes([{"a": base[:2], "b": base[5:]}, torch.zeros(3, dtype=torch.float64)]) == 160 + 24
    assert stored_bytes([None, "text", 3]) == 0


def test_contexts_are_filled_and_counted() -> None:
    mixer = AttentionConfig(num_heads=2, num_kv_heads=1)
    config = DecoderConfig(vocab_size=30, width=8, depth=2, mixer=mixer, mixer_pattern="m-", ffn=SwiGLUConfig(hidden=8))
    said: list[str] = []
    found = list(
        measure(
            config,
            [5, CHUNK + 3],
            2,
            4,
            dtype=torch.float32,
            device=torch.device("cpu"),
            announce=said.append,
        )
    )
    assert [each.context for each in found] == [5, CHUNK + 3]
    assert [each.state_bytes for each in found] == [2 * 2 * 4 * 4 * (each.context + 4) for each in found]
    assert all(each.state_bytes == each.formula_bytes for each in found)
    assert all(0 < each.fastest <= each.seconds <= each.slowest for each in found)
    assert f"filling {CHUNK:,} of {CHUNK + 3:,}" in said


def test_the_command_prints_a_row_a_context() -> None:
    answer = CliRunner().invoke(app, ["bench", "decode", "quickstart", "--context", "8,24", "--steps", "2"])
    assert answer.exit_code == 0, answer.output
    assert "4,096 B" in answer.output  # 4 layers x 2 x 2 heads x 64 x 4 bytes
    for arguments, message in ((["--dtype", "fp8"], "--dtype: 'fp8'"), (["--context", "-1"], "--context")):
        refused = CliRunner().invoke(app, ["bench", "decode", "quickstart", *arguments])
        assert isinstance(refused.exception, ConfigError)
        assert message in str(refused.exception)


def test_no_steps_are_refused() -> None:
    assert CliRunner().invoke(app, ["bench", "decode", "quickstart", "--steps", "0"]).exit_code == 2


@pytest.mark.parametrize("name", ["no-such", "missing.py:recipe"])
def test_an_unknown_recipe_is_named(name: str) -> None:
    answer = CliRunner().invoke(app, ["bench", "decode", name])
    assert isinstance(answer.exception, ConfigError)
    assert name.split(":", maxsplit=1)[0] in str(answer.exception)
