"""The two sides of the benchmark train the same model on the same rows; the table is computed as its page says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import peers, plain, rows, workload
from benchmarks.peers import Result
from surefoot.models.decoder import Decoder
from surefoot.models.initialise import initialise
from surefoot.ops.documents import Documents
from surefoot.train.state import named_params

NAMES = {
    "embedding.weight": "embedding.weight",
    "norm.scale": "norm.weight",
    "head.weight": "head.weight",
    "norm_mixer.scale": "norm_attention.weight",
    "norm_ffn.scale": "norm_ffn.weight",
    "mixer.wq": "attention.wq.weight",
    "mixer.wk": "attention.wk.weight",
    "mixer.wv": "attention.wv.weight",
    "mixer.wo": "attention.wo.weight",
    "ffn.w_gate": "w_gate.weight",
    "ffn.w_up": "w_up.weight",
    "ffn.w_down": "w_down.weight",
}


def other_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "layers":
        return ".".join([*parts[:2], NAMES[".".join(parts[2:])]])
    return NAMES[name]


def both(dtype: torch.dtype) -> tuple[Decoder, plain.Llama]:
    """The two models with the same weights, norms away from 1."""
    model, other = workload.common().model.build(), plain.Llama()
    initialise(model, 0)
    with torch.no_grad():
        for param in named_params(model):
            if param.tensor.dim() == 1:
                param.tensor.add_(0.3 * torch.randn(param.tensor.shape))
        weights = dict(other.named_parameters())
        assert {other_name(param.name) for param in named_params(model)} == weights.keys()
        for param in named_params(model):
            weights[other_name(param.name)].copy_(param.tensor)
    return model.to(dtype), other.to(dtype)


def test_rows_are_the_same_and_follow_the_recipe() -> None:
    dataset = workload.common().data.build()
    for step in range(3):
        batch, read = (
            dataset.batch(step * rows.COMMON.batch, rows.COMMON.batch),
            rows.rows(step * rows.COMMON.batch, rows.COMMON.batch),
        )
        assert np.array_equal(batch.tokens_BL, read[:, :-1])
        assert np.array_equal(batch.targets_BL, read[:, 1:])
    starts = np.random.Generator(np.random.PCG64(0)).integers(0, len(rows.corpus()) - 257, 1 << 18)
    assert bytes(rows.rows(5, 1)[0].tolist()) == rows.corpus()[starts[5] : starts[5] + 257].tobytes()


def test_loss_and_every_gradient_agree() -> None:
    model, other = both(torch.float64)
    read = torch.from_numpy(rows.rows(0, 2))
    tokens_BL, targets_BL = read[:, :-1], read[:, 1:]
    objective, _ = model.loss(tokens_BL, targets_BL, Documents(None, rows.COMMON.length))
    (objective / targets_BL.numel()).backward()  # type: ignore[no-untyped-call]
    loss = other(tokens_BL, targets_BL)
    loss.backward()
    # The plain loop turns queries and keys, and takes the loss, in fp32 whatever the rest is in.
    torch.testing.assert_close(objective / targets_BL.numel(), loss, rtol=1e-6, atol=0, check_dtype=False)
    weights = dict(other.named_parameters())
    for param in named_params(model):
        expected, found = weights[other_name(param.name)].grad, param.tensor.grad
        assert expected is not None
        assert found is not None
        assert (found - expected).norm() < 1e-5 * expected.norm(), param.name


def test_steps_of_the_two_optimizers_agree() -> None:
    model, other = both(torch.float64)
    run = workload.common()
    ours, theirs = run.optim.build(named_params(model)), plain.optimizer(other)
    for step in range(4):
        read = torch.from_numpy(rows.rows(step * 2, 2))
        for group in theirs.param_groups:
            group["lr"] = plain.rate(step)
        theirs.zero_grad()
        ours.zero_grad()
        loss = other(read[:, :-1], read[:, 1:])
        loss.backward()
        objective, _ = model.loss(read[:, :-1], read[:, 1:], Documents(None, rows.COMMON.length))
        (objective / (2 * rows.COMMON.length)).backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(objective / (2 * rows.COMMON.length), loss, rtol=1e-5, atol=0, check_dtype=False)
        theirs.step()
        ours.step(run.schedule((step + 0.5) / run.train.num_steps))


def result(name: str, rate: float, peak: float = 1.0) -> Result:
    return Result(name, rate, peak, first_step_seconds=2.0, loader=0.001)


def test_a_ratio_is_between_runs_of_one_round() -> None:
    rounds = [
        {"surefoot": result("surefoot", 300), "plain": result("plain", 100)},
        {"surefoot": result("surefoot", 30), "plain": result("plain", 20)},
        {"surefoot": result("surefoot", 50)},
    ]
    assert peers.ratios(rounds, "surefoot", "plain") == [3.0, 1.5]
    assert "2.25 x" in peers.table(rounds, ["surefoot", "plain"])
    assert "1.50 - 3.00" in peers.table(rounds, ["surefoot", "plain"])


def test_the_rate_is_of_the_median_step_after_the_first() -> None:
    times = [0.0, 9.0, 18.0, 27.0, 36.0, 37.0, 38.0, 47.0, 48.0]
    assert peers.median_rate(times) == rows.COMMON.batch * rows.COMMON.length / 1.0


@pytest.mark.parametrize(("rate", "peak", "failing"), [(150, 1.0, 0), (149, 1.0, 1), (150, 1.1, 1), (100, 2.0, 2)])
def test_bars(rate: float, peak: float, failing: int) -> None:
    rounds = [{"surefoot": result("surefoot", rate, peak), "plain": result("plain", 100)}]
    checks = peers.bars(rounds, {"import": 0.1, "help": 0.2, "torch": 0.0})
    assert sum(not holds for *_, holds in checks) == failing
    slow = peers.bars(rounds, {"import": 0.3, "help": 0.7, "torch": 1.0})
    assert sum(not holds for *_, holds in slow) == failing + 3


@pytest.mark.parametrize(
    "arguments", [["--rounds", "0"], ["--steps", "6"], ["--threads", "x"], ["--json", "/nowhere/at/all.json"]]
)
def test_bad_input_is_refused_before_anything_runs(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        peers.main(arguments)
    assert caught.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_a_trainer_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SUREFOOT_PEERS_SCRIPT", raising=False)
    with pytest.raises(peers.UnavailableError, match="SUREFOOT_PEERS_SCRIPT is not set"):
        peers.run_peer("litgpt", 10, 1)
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('no litgpt here')")
    monkeypatch.setenv("SUREFOOT_PEERS_SCRIPT", str(script))
    with pytest.raises(peers.UnavailableError, match="no litgpt here"):
        peers.run_peer("litgpt", 10, 1)
    script.write_text(
        "import json, sys\nprint('noise')\n"
        "print(json.dumps(dict(tokens_per_s_median=7.0, peak_rss_mb=2, startup_s=1.5, said=sys.argv[1:])))"
    )
    assert peers.run_peer("litgpt", 10, 1) == Result("litgpt", 7.0, 2 * 2**20, 1.5)
