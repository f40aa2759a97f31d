"""A model written for llama.cpp says the same there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.blocks.ffn.swiglu import SwiGLUConfig
from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.blocks.rope import Llama3Scaling
from surefoot.checkpoint.gguf import write_gguf
from surefoot.checkpoint.hub import theirs_of
from surefoot.data.tokenizers.bpe import BPEConfig
from surefoot.data.tokenizers.bytes import BytesConfig
from surefoot.models.decoder import DecoderConfig
from surefoot.models.hf.family import settings_for
from surefoot.models.hf.gguf import describe
from surefoot.models.initialise import initialise
from surefoot.ops.documents import Documents

TEXTS = ["def f(x): return x + 1\n", "for name in names: print(name)\n", "class A:\n    pass\n"]
SCALED = {"rope_scaling": Llama3Scaling(factor=8.0, original_length=16)}


@pytest.mark.parametrize(
    ("tokenizer", "qk_norm", "options"),
    [(BPEConfig(vocab_size=300), "none", {}), (BytesConfig(), "head", {}), (BytesConfig(), "none", SCALED)],
)
def test_llama_cpp_says_the_same(tmp_path: Path, tokenizer: Any, qk_norm: Any, options: dict[str, Any]) -> None:
    pytest.importorskip("gguf")
    xllamacpp = pytest.importorskip("xllamacpp")
    built = tokenizer.build(TEXTS * 20)
    config = DecoderConfig(
        vocab_size=320,  # more than there are tokens
        width=64,
        depth=2,
        mixer=AttentionConfig(num_heads=4, num_kv_heads=2, head_size=32, qk_norm=qk_norm, rope_theta=50.0, **options),
        ffn=SwiGLUConfig(hidden=64),
    )
    model = config.build()
    initialise(model, 0)
    with torch.no_grad():
        # The server joins tokens until their bytes are a character; so none is likely that is no character by itself.
        for token in range(config.vocab_size):
            if token >= built.vocab_size or token == built.document or not built.decode([token]).isascii():
                model.head.weight[token] = 0
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(1))
    family, settings = settings_for(config)
    theirs = theirs_of(family, config, dict(model.state_dict()), torch.float32)
    built.save(tmp_path)
    file = write_gguf(tmp_path, describe(family, settings, theirs), "test")
    prompt = "for name in"
    ids = [built.document, *built.encode_batch([prompt])[0].tolist()]
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_gpu_layers, params.warmup = str(file), 128, 0, False
    params.cpuparams.n_threads = 1
    server = xllamacpp.Server(params)
    answer = server.handle_completions(
        {"prompt": ids, "max_tokens": 8, "temperature": 0.0, "n_probs": 5, "logprobs": 5}
    )
    text, top = built_text(answer)
    with torch.no_grad():
        new, own = list(ids), []
        for _ in range(8):
            hidden = model(torch.tensor([new]), Documents(None, len(new), device=torch.device("cpu")))
            own.append(model.logits(hidden)[0, -1].log_softmax(-1))
            new.append(int(own[-1].argmax()))
    assert top, answer
    for token, log_probability in top:
        assert abs(float(own[0][token]) - log_probability) < 5e-4
    assert text == built.decode(new[len(ids) :])


def built_text(answer: dict[str, Any]) -> tuple[str, list[tuple[int, float]]]:
    choice = answer["choices"][0]
    first = choice["logprobs"]["content"][0]
    return choice["text"], [(entry["id"], entry["logprob"]) for entry in first["top_logprobs"]]
