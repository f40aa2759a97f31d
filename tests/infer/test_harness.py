"""lm-eval asks a model in memory and its export, and hears the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.blocks.ffn.swiglu import SwiGLUConfig
from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.checkpoint.hub import theirs_of, write_published
from surefoot.data.tokenizers.bytes import BytesConfig
from surefoot.infer.harness import language_model
from surefoot.models.decoder import DecoderConfig
from surefoot.models.hf.family import settings_for
from surefoot.models.initialise import initialise

LENGTH = 48


@pytest.mark.filterwarnings("ignore")
def test_the_same_numbers_as_through_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    HFLM = pytest.importorskip("lm_eval.models.huggingface").HFLM
    tokenizer = BytesConfig().build([])
    config = DecoderConfig(
        vocab_size=tokenizer.vocab_size,
        width=32,
        depth=2,
        mixer=AttentionConfig(num_heads=2, num_kv_heads=1, qk_norm="none"),
        ffn=SwiGLUConfig(hidden=48),
    )
    model = config.build()
    initialise(model, 0)
    family, settings = settings_for(config)
    theirs = theirs_of(family, config, model.state_dict(), torch.float32)
    write_published(tmp_path, settings | {"max_position_embeddings": LENGTH}, theirs, torch.float32)
    tokenizer.save(tmp_path)
    other = HFLM(pretrained=str(tmp_path), dtype="float32", device="cpu", batch_size=1, max_length=LENGTH)
    own = language_model(
        model,
        lambda text: tokenizer.encode_batch([text])[0].tolist(),
        tokenizer.decode,
        separator=other.prefix_token_id,
        length=LENGTH,
        vocab_size=tokenizer.vocab_size,
    )

    def asked(kind: str, arguments: list[tuple[Any, ...]]) -> tuple[Any, Any]:
        requests = [
            instance(request_type=kind, doc={}, arguments=one, idx=number) for number, one in enumerate(arguments)
        ]
        return tuple(getattr(one, kind)(requests, disable_tqdm=True) for one in (own, other))  # type: ignore[return-value]

    pairs = [("def f(x):", " return x"), ("", "import torch"), ("a " * 60, "long"), ("two ", "words")]
    found, wanted = asked("loglikelihood", pairs)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in wanted], rel=1e-5)
    texts = [("short",), ("a longer text that takes several windows " * 4,)]
    found, wanted = asked("loglikelihood_rolling", texts)
    assert found == pytest.approx(wanted, rel=1e-5)
    first = asked("generate_until", [("def f", {"until": ["\n\n"], "max_gen_toks": 12})])
    assert first[0] == first[1]
    stop = first[0][0][3:5]
    found, wanted = asked(
        "generate_until",
        [("def f", {"until": [stop], "max_gen_toks": 12}), ("x " * 40, {"until": [], "max_gen_toks": 8})],
    )
    assert found == wanted
    assert stop not in found[0]
    with pytest.raises(ValueError, match="leaves no room"):
        asked("generate_until", [("x", {"max_gen_toks": LENGTH})])
    with pytest.raises(ValueError, match="only greedy"):
        asked("generate_until", [("x", {"do_sample": True})])
