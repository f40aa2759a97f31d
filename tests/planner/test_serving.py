"""Serving costs against arithmetic done by hand, and the command that prints them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from surefoot.blocks.ffn.moe import MoEConfig
from surefoot.blocks.ffn.swiglu import SwiGLUConfig
from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.cli.main import app
from surefoot.config import ConfigError, to_json
from surefoot.models.decoder import DecoderConfig
from surefoot.planner.devices import Device, parse_device
from surefoot.planner.serving import USABLE, Serving
from surefoot.recipes.llama import llama_70b
from surefoot.recipes.quickstart import quickstart

VOCAB, WIDTH, HIDDEN = 100, 32, 48
SLOW = Device("slow", 10**7, 1e9, 1e9)


def serving(**changes: object) -> Serving:
    values: dict[str, object] = {
        "vocab_size": VOCAB,
        "width": WIDTH,
        "depth": 2,
        "mixer": AttentionConfig(num_heads=4, num_kv_heads=2),
        "ffn": SwiGLUConfig(hidden=HIDDEN),
    }
    return Serving(DecoderConfig(**(values | changes)), torch.bfloat16)


def test_llama_70b_holds_the_published_bytes_a_token() -> None:
    """80 layers x 2 x 8 heads x 128 x 2 bytes."""
    found = Serving(llama_70b().model, torch.bfloat16)
    assert found.state_slope(4096) == 327_680
    assert found.state_bytes(4096) == 4096 * 327_680


def test_decode_by_hand() -> None:
    context, batch = 1000, 3
    attention = WIDTH * WIDTH * 2 + 2 * 16 * WIDTH
    flops = 2 * (2 * (attention + 3 * WIDTH * HIDDEN) + 4 * WIDTH * context) + 2 * VOCAB * WIDTH
    weights = 2 * (attention + 3 * WIDTH * HIDDEN + 2 * WIDTH + 2 * 8) + WIDTH + VOCAB * WIDTH + batch * WIDTH
    state = 2 * 2 * 2 * 8 * 2 * context
    found = serving().decode(context, batch, SLOW)
    assert found.flops == batch * flops
    assert found.num_bytes == 2 * weights + batch * state
    assert found.seconds == max(found.flops, found.num_bytes) / 1e9


def test_a_tied_head_is_read_whole_and_once() -> None:
    apart, tied = serving(), serving(tied=True)
    assert apart.weight_bytes_read(1) - tied.weight_bytes_read(1) == 2 * WIDTH
    assert apart.weight_bytes - tied.weight_bytes == 2 * VOCAB * WIDTH


def test_more_tokens_meet_more_experts() -> None:
    moe = serving(ffn=MoEConfig(num_experts=8, top_k=2, hidden=16))
    expert = 3 * WIDTH * 16
    router_and_rest = moe.weight_bytes_read(1) - 2 * 2 * 2 * expert
    for num_tokens in (1, 4, 1000):
        met = 8 * (1 - (1 - 2 / 8) ** num_tokens)
        rows = 2 * WIDTH * (min(num_tokens, VOCAB) - 1)
        assert moe.weight_bytes_read(num_tokens) == pytest.approx(router_and_rest + rows + 2 * 2 * met * expert)


def test_the_largest_batch_is_the_last_that_fits() -> None:
    model, context = serving(), 1000
    largest = model.largest_batch(context, SLOW)
    room = USABLE * SLOW.memory
    assert model.weight_bytes + largest * model.state_bytes(context) <= room
    assert model.weight_bytes + (largest + 1) * model.state_bytes(context) > room
    assert model.largest_batch(context, Device("tiny", 1000, 1.0, 1.0)) == 0


def test_prefill_is_bound_by_compute_and_a_step_by_memory() -> None:
    llama, h100 = Serving(llama_70b().model, torch.bfloat16), parse_device("h100").times(8)
    assert llama.prefill(8192, 1, h100).limit == "compute"
    assert llama.decode(8192, 1, h100).limit == "memory"
    assert llama.decode(8192, 1, h100).seconds > llama.weight_bytes / h100.bandwidth


@pytest.mark.parametrize(
    "text", ["h10", "", "80GiB,1e12", "80GiB,x,1e12", "80GiB,nan,1e12", "80,1e12,1e12", "80GiB,-1,1"]
)
def test_a_device_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--device"):
        parse_device(text)


def test_the_command_shows_recipes_and_runs_side_by_side(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "run.json").write_text(to_json(quickstart()))
    (folder / "facts.json").write_text('{"result": {"heldout_bits_per_byte": 1.2345}}')
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    answer = CliRunner().invoke(
        app,
        [
            "cost",
            "quickstart-moe",
            "--runs",
            str(folder),
            "--context",
            "1k",
            "--batch",
            "2",
            "--device",
            "1GiB,1e12,1e11",
        ],
        env={"COLUMNS": "200"},
    )
    assert answer.exit_code == 0, answer.output
    assert "1.2345" in answer.output
    for words in ("mine", "quickstart-moe", "2,048 B", "1,024", "largest batch"):
        assert words in answer.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quickstart", "--context", "4k,x"], "--context: '4k,x'"),
        (["quickstart", "--batch", "0"], "--batch: '0'"),
        (["quickstart", "--dtype", "int3"], "--dtype: 'int3'"),
        ([], "RECIPE: None"),
        (["no-such"], "RECIPE: 'no-such'"),
    ],
)
def test_bad_input_is_named(arguments: list[str], message: str) -> None:
    answer = CliRunner().invoke(app, ["cost", *arguments])
    assert isinstance(answer.exception, ConfigError)
    assert message in str(answer.exception)
