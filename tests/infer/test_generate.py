"""Generation: cached equals uncached, sampling follows its definition."""

from __future__ import annotations

import pytest
import torch

from surefoot.blocks.ffn.swiglu import SwiGLUConfig
from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.config import ConfigError
from surefoot.infer.engine import generate, generate_batch
from surefoot.infer.sampling import SamplingConfig
from surefoot.models.decoder import Decoder, DecoderConfig
from surefoot.models.initialise import initialise


@pytest.fixture(scope="module")
def model() -> Decoder:
    mixer, ffn = AttentionConfig(num_heads=4, num_kv_heads=2), SwiGLUConfig(hidden=64)
    built = DecoderConfig(vocab_size=60, width=32, depth=2, mixer=mixer, ffn=ffn).build()
    initialise(built, 3)
    return built.double()


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0, "seed": 4},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8, "top_k": 30},
    ],
)
def test_cached_equals_uncached(model: Decoder, sampling: dict[str, float]) -> None:
    runs = [
        list(generate(model, [1, 2, 3], 30, SamplingConfig(**sampling).build(), dtype=torch.float64, cached=cached))
        for cached in (True, False)
    ]
    assert runs[0] == runs[1]
    assert len(runs[0]) == 30
    if sampling:
        assert len(set(runs[0])) > 3


def test_the_seed_decides(model: Decoder) -> None:
    def run(seed: int) -> list[int]:
        choose = SamplingConfig(temperature=1.0, seed=seed).build()
        return list(generate(model, [1], 20, choose, dtype=torch.float64))

    assert run(0) == run(0) != run(1)


def test_generation_stops_before_the_end_token(model: Decoder) -> None:
    ids = list(generate(model, [1, 2, 3], 30, SamplingConfig(temperature=1.0).build(), dtype=torch.float64))
    cut = list(generate(model, [1, 2, 3], 30, SamplingConfig(temperature=1.0).build(), dtype=torch.float64, end=ids[9]))
    assert cut == ids[: ids.index(ids[9])]


def test_padding_ids_are_never_chosen(model: Decoder) -> None:
    choose = SamplingConfig(temperature=5.0).build()
    assert max(generate(model, [1], 50, choose, dtype=torch.float64, vocab_size=7)) < 7


def test_an_empty_prompt_is_refused(model: Decoder) -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        list(generate(model, [], 3, SamplingConfig().build(), dtype=torch.float64))


RAGGED = [[1, 2, 3, 4, 5, 6, 7], [9], [11, 12, 13], [9]]


@pytest.mark.parametrize("with_end", [False, True])
def test_ragged_prompts_get_what_each_gets_alone(model: Decoder, with_end: bool) -> None:
    choose = SamplingConfig().build()
    alone = [list(generate(model, prompt, 12, choose, dtype=torch.float64)) for prompt in RAGGED]
    end = alone[0][4] if with_end else None
    if with_end:
        alone = [list(generate(model, prompt, 12, choose, dtype=torch.float64, end=end)) for prompt in RAGGED]
        assert len({len(ids) for ids in alone}) > 1
    assert generate_batch(model, RAGGED, 12, choose, dtype=torch.float64, end=end) == alone


def test_a_batch_draws_no_padding_and_nothing_when_asked_for_nothing(model: Decoder) -> None:
    choose = SamplingConfig(temperature=5.0).build()
    found = generate_batch(model, RAGGED, 20, choose, dtype=torch.float64, vocab_size=20)
    assert max(max(ids) for ids in found) < 20
    assert [len(ids) for ids in found] == [20] * 4
    assert generate_batch(model, RAGGED, 0, choose, dtype=torch.float64) == [[]] * 4
    with pytest.raises(ValueError, match="each prompt needs"):
        generate_batch(model, [[1], []], 3, choose, dtype=torch.float64)


def counts(config: SamplingConfig, logits: list[float], draws: int = 4000) -> torch.Tensor:
    sampler = config.build()
    return torch.bincount(sampler(torch.tensor([logits]).repeat(draws, 1)), minlength=len(logits)) / draws


def test_draws_follow_the_softmax() -> None:
    logits = [0.0, 1.0, 2.0, -1.0]
    found = counts(SamplingConfig(temperature=2.0), logits)
    torch.testing.assert_close(found, (torch.tensor(logits) / 2).softmax(-1), atol=0.03, rtol=0)


def test_top_k_and_top_p_cut_the_tail() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert (counts(SamplingConfig(temperature=1.0, top_k=2), logits)[2:] == 0).all()
    nucleus = counts(SamplingConfig(temperature=1.0, top_p=0.79), logits)
    assert nucleus[2:].tolist() == [0, 0]
    assert counts(SamplingConfig(temperature=1.0, top_p=0.81), logits)[2] > 0
    assert counts(SamplingConfig(temperature=1.0, top_p=1e-9), logits)[0] == 1
    assert counts(SamplingConfig(), logits)[0] == 1


@pytest.mark.parametrize("field", ["top_k", "top_p"])
def test_a_setting_without_effect_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match="has no effect at temperature 0"):
        SamplingConfig(**{field: 1})
