"""`surefoot import` and `surefoot export`: a published model becomes a run and a run a published model, or is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from surefoot.checkpoint.load import latest
from surefoot.cli.verbs import export, import_
from surefoot.config import load_json
from surefoot.config.errors import SurefootError
from surefoot.data.tokenizers.bytes import BytesConfig
from surefoot.observe.folder import RunFolder
from surefoot.train.run import Run
from surefoot.train.trainer import Trainer

REF = Path(__file__).parents[1] / "refs" / "llama"


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """The small llama, to be damaged."""
    folder = tmp_path / "published"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(REF / name, folder / name)
    return folder


def change(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_import_then_export_gives_the_same_files(published: Path, tmp_path: Path) -> None:
    BytesConfig().build().save(published)
    import_.run(str(published), tmp_path / "run", ["data.sequence_length=16"])
    export.run(tmp_path / "run", "hf", tmp_path / "out", None, None, [])
    ours, theirs = load_file(tmp_path / "out" / "model.safetensors"), load_file(published / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text()) == json.loads((published / name).read_text())


def test_an_imported_run_trains_on(published: Path, tmp_path: Path, corpus: Path) -> None:
    source = {"type": "surefoot.data.sources.files.FilesConfig", "name": "files", "paths": [str(corpus / "*.txt")]}
    weighted = [{"type": "surefoot.data.dataset.WeightedSource", "source": source}]
    weights = load_file(published / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name].repeat(5, 1)[:258].contiguous()
    save_file(weights, published / "model.safetensors")
    change(published, vocab_size=258)
    BytesConfig().build().save(published)
    sets = [f"data.sources={json.dumps(weighted)}", "data.sequence_length=32", "train.num_steps=2", "train.batch=2"]
    import_.run(str(published), tmp_path / "run", [*sets, "precision.compute=fp32", "data.heldout_fraction=0.2"])
    trainer = Trainer(load_json(tmp_path / "run" / "run.json", Run), RunFolder.open(tmp_path / "run"))
    assert trainer.fit()
    checkpoint = latest(tmp_path / "run" / "checkpoints", announce=print)
    assert checkpoint is not None
    assert checkpoint.step == 2


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model_type": "unheard"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type"),
        ({"num_hidden_layers": 3}, "model.layers.2"),
        ({"num_hidden_layers": 1}, "model.layers.1"),
        ({"tie_word_embeddings": True}, "lm_head.weight"),
        ({"intermediate_size": 40}, "mlp.gate_proj.weight"),
        ({"hidden_size": "32"}, "hidden_size"),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_name(
    published: Path, tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    change(published, **values)
    with pytest.raises(SurefootError, match=said.replace(".", r"\.")):
        import_.run(str(published), tmp_path / "run", [])
    assert not (tmp_path / "run").exists()


def test_pickles_foreign_files_and_paths_are_refused(published: Path, tmp_path: Path) -> None:
    file = published / "model.safetensors"
    index = published / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}))
    with pytest.raises(SurefootError, match="plain name"):
        import_.run(str(published), tmp_path / "run", [])
    index.unlink()
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(SurefootError, match="not a readable safetensors"):
        import_.run(str(published), tmp_path / "run", [])
    file.rename(published / "pytorch_model.bin")
    with pytest.raises(SurefootError, match="is a pickle"):
        import_.run(str(published), tmp_path / "run", [])


def test_shards_are_read_by_their_index(published: Path, tmp_path: Path) -> None:
    weights = load_file(published / "model.safetensors")
    names = sorted(weights)
    halves = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for shard, own in halves.items():
        save_file({name: weights[name] for name in own}, published / shard, metadata={"format": "pt"})
    (published / "model.safetensors").unlink()
    table = {name: shard for shard, own in halves.items() for name in own}
    (published / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    import_.run(str(published), tmp_path / "run", [])
    export.run(tmp_path / "run", "hf", tmp_path / "out", None, None, [])
    ours = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(ours[name], weights[name]) for name in names)
