"""`surefoot import`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from surefoot.checkpoint.hub import SETTINGS, copy_beside, open_published, read_published
from surefoot.checkpoint.remote import fetch
from surefoot.config import DataError, RunError, override
from surefoot.data.dataset import CorpusConfig, WeightedSource
from surefoot.data.sources.stdlib import StdlibConfig
from surefoot.data.tokenizers.file import FileTokenizerConfig
from surefoot.models.hf.family import family_of
from surefoot.observe.folder import RunFolder
from surefoot.optim.adamw import AdamWConfig
from surefoot.optim.schedule import LinearToZero
from surefoot.train.run import Run, TrainConfig
from surefoot.train.start import write_start

SOURCE = "imported"
"""The folder of a run with the settings and the tokenizer of the model that it comes from."""

BESIDE = (SETTINGS, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def run(source: str, out: Path | None, sets: list[str]) -> None:
    """Turn a published model into a run that has taken no step; nothing is left behind where it is refused."""
    path = (
        Path(source) if Path(source).is_dir() else fetch(source, (*BESIDE, "*.safetensors", "*.safetensors.index.json"))
    )
    published = open_published(path)
    where = str(path / SETTINGS)
    family = family_of(published.settings, where)
    config = family.decoder(published.settings, where)
    name = re.sub(r"[^A-Za-z0-9._-]", "-", Path(source).resolve().name).lstrip("._-")[:100] or family.name
    folder = out or Path("runs") / name
    if folder.exists():
        raise RunError(f"{folder}: already exists; give --out another name")
    positions = published.settings.get("max_position_embeddings")
    length = min(positions, 1024) if type(positions) is int and positions > 1 else 1024
    chosen = override(
        Run(
            name=name,
            model=config,
            # Fine-tuning on something else is a --set away; this is on every machine.
            data=CorpusConfig(
                sources=(WeightedSource(source=StdlibConfig()),),
                tokenizer=FileTokenizerConfig(path=str((folder / SOURCE).resolve())),
                sequence_length=length,
            ),
            optim=AdamWConfig(lr=1e-5),
            schedule=LinearToZero(warmup=0.1),
            train=TrainConfig(num_steps=1000, batch=16),
        ),
        sets,
    )
    weights = read_published(published, family, config, chosen.precision.weight_dtype)
    made = RunFolder.create(folder, chosen)
    (folder / SOURCE).mkdir()
    copied = copy_beside(path, folder / SOURCE, BESIDE)
    write_start(made, chosen, weights)
    total = sum(weight.numel() for weight in weights.values())
    print(f"{family.architecture}, {total:,} weights -> {folder}")
    if "tokenizer.json" not in copied:
        _say(f"{path} has no tokenizer.json: generate and train need --set data.tokenizer.path=… at import")
    else:
        try:
            FileTokenizerConfig(path=str(folder / SOURCE)).build()
        except DataError as error:
            _say(f"the tokenizer came along but cannot be used as it is: {error}")


def _say(text: str) -> None:
    print(f"surefoot: {text}", file=sys.stderr)
