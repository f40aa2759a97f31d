"""Published models give the logits, the loss, the gradients and the tokens that transformers gives them."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from published import NAMES, filled, reference
from torch import Tensor
from torch.nn import functional as F

from surefoot.checkpoint.hub import open_published, read_published, theirs_of, write_published
from surefoot.config.errors import ConfigError, SurefootError
from surefoot.infer.engine import generate
from surefoot.models.hf.family import families, family_of, function_of, settings_for
from surefoot.models.initialise import named_weights
from surefoot.models.presets.families import deepseek_v3


def loss_of(logits_BLV: Tensor, tokens_BL: Tensor) -> Tensor:
    return F.cross_entropy(logits_BLV[:, :-1].flatten(0, 1), tokens_BL[:, 1:].flatten())


@pytest.mark.parametrize("name", NAMES)
def test_logits_loss_and_gradients(name: str) -> None:
    ref = reference(name)
    logits_BLV = ref.logits(ref.model)
    assert (logits_BLV - ref.stored["logits"]).abs().max() < 3e-5
    loss = loss_of(logits_BLV, ref.tokens_BL)
    assert abs(loss.item() - ref.meta["loss"]) < 1e-5
    loss.backward()
    ours = {full_name: getattr(block, own).grad for full_name, block, own in named_weights(ref.model)}
    norms = ref.meta["grad_norms"]
    compared = set()
    for tie in ref.family.ties(ref.config):
        if any(own not in ours for own in tie.ours):
            continue  # a state, which has no gradient
        names = [in_memory(disk_name, name) for disk_name in tie.theirs]
        if any(ours[own] is None for own in tie.ours):
            # What comes after the last state that is read.
            assert all(norms[their_name] is None for their_name in names)
            compared.update(names)
            continue
        grads = tie.to_theirs([ours[own] for own in tie.ours])
        for their_name, grad in zip(names, grads, strict=True):
            if their_name in norms:
                assert float(grad.norm()) == pytest.approx(norms[their_name], rel=1e-4, abs=1e-7), their_name
                compared.add(their_name)
    # In transformers' memory, where the norms were taken, all experts of a layer are two tensors, whatever the disk has.
    for layer in range(getattr(ref.config, "depth", 0)):
        for fused, names in (("gate_up_proj", ("w_gate", "w_up")), ("down_proj", ("w_down",))):
            found = [full_name for full_name in norms if full_name.startswith(f"model.layers.{layer}.")]
            for their_name in (name for name in found if name.endswith(f"experts.{fused}")):
                grads = [ours[f"layers.{layer}.ffn.experts.{own}"].flatten() for own in names]
                assert float(torch.cat(grads).norm()) == pytest.approx(norms[their_name], rel=1e-4), their_name
                compared.add(their_name)
    assert compared == norms.keys()


def in_memory(disk_name: str, family: str) -> str:
    """The name in transformers' memory of a tensor on a disk."""
    if family == "llava" and disk_name.startswith("language_model.model."):
        return disk_name.replace("language_model.model.", "model.language_model.")
    if family == "llava" and disk_name != "language_model.lm_head.weight":
        return f"model.{disk_name}"
    return disk_name.replace(".router.layer.", ".router.").removeprefix("language_model.")  # Granite


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_over_a_cache(name: str) -> None:
    ref = reference(name)
    greedy_BL = ref.stored["greedy"]
    num_new = ref.stored["step_logits"].shape[1]
    for row, row_L in enumerate(greedy_BL.tolist()):
        prompt, new = row_L[:-num_new], row_L[-num_new:]
        seeing = ref.seeing(ref.model, slice(row, row + 1))
        found = generate(seeing, prompt, num_new, lambda logits: logits.argmax(-1), dtype=torch.float32)
        assert list(found) == new


@pytest.mark.parametrize("name", NAMES)
def test_export_of_import_is_the_same_model(name: str, tmp_path: Any) -> None:
    ref = reference(name)
    weights = dict(ref.model.state_dict())
    theirs = theirs_of(ref.family, ref.config, weights, torch.float32)
    published = open_published(ref.path)
    write_published(tmp_path, published.settings, theirs, torch.float32)
    again = open_published(tmp_path)
    assert again.settings == published.settings
    assert again.files.keys() == published.files.keys()
    assert (tmp_path / "model.safetensors").stat().st_size == (ref.path / "model.safetensors").stat().st_size
    back = read_published(again, ref.family, ref.config, torch.float32)
    assert all(torch.equal(tensor, weights[full_name]) for full_name, tensor in back.items())


@pytest.mark.parametrize("name", NAMES)
def test_settings_are_written_as_they_are_read(name: str) -> None:
    ref = reference(name)
    family, settings = settings_for(ref.config)
    assert family.name == name
    assert function_of(family.model(settings, name)) == function_of(ref.config)
    original = json.loads((ref.path / "config.json").read_text())
    expected = {"rope_parameters"} | _ABSENT.get(name, set())  # which may be said in several ways, or not at all
    parts = [key for key in original if key.endswith("_config")]
    pairs = [(settings, original), *((settings[key], original[key]) for key in parts)]
    for written, said in pairs:
        keys = (written.keys() & said.keys()) - {*expected, *parts}
        assert {key for key in keys if written[key] != said[key]} == set()


# What decides no logits, and why.
_WITHOUT_EFFECT = {
    "max_position_embeddings": "a limit",
    "initializer_range": "of training from the start",
    "pad_token_id": "of the tokenizer",
    "bos_token_id": "of the tokenizer",
    "use_cache": "the same logits either way",
    "pretraining_tp": "how products were once cut up",
    "router_aux_loss_coef": "of a loss that is not in the logits",
    "output_router_logits": "of what is returned beside them",
    "transformers_version": "a note",
    "dtype": "of storage",
    "projection_dim": "of CLIP's own loss",
    "initializer_factor": "of training from the start",
    "alpha_initializer": "of training from the start",
    "alphas_initializer_range": "of training from the start",
    "freeze_lm_head": "of another program's training",
    "freeze_text_layers": "of another program's training",
    "freeze_vision_layers": "of another program's training",
    "perceiver_config.use_resampler": "said outside",
}
_ABSENT = {
    "qwen3_moe": {"intermediate_size"},
    "qwen3_next": {"intermediate_size"},
    "granitemoehybrid": {"rope_parameters.rope_theta"},
    "deepseek_v3": {
        "rope_parameters.beta_fast",
        "rope_parameters.beta_slow",
    },  # bounds between the same two of its 4 pairs
}
"""What describes a kind of part that the small model has none of, or too few."""


@pytest.mark.parametrize("name", NAMES)
def test_every_scalar_of_a_config_counts_or_is_refused(name: str) -> None:
    """Each changed alone: the logits change, or it is refused, as the weights are that do not fit any more."""
    ref = reference(name)
    published = open_published(ref.path)
    before = ref.logits(ref.model)
    without_effect = set()
    for path, changed in mutations(published.settings):
        try:
            family = family_of(changed, "config.json")
            config = family.model(changed, "config.json")
            weights = read_published(published, family, config, torch.float32)
        except SurefootError:
            continue
        with torch.no_grad():
            if torch.equal(ref.logits(filled(config, weights)), before):
                without_effect.add(path)
    known = _WITHOUT_EFFECT.keys() | _ABSENT.get(name, set())
    assert {path for path in without_effect if path not in known and path.split(".")[-1] not in known} == set()
    assert any(path.endswith("initializer_range") for path in without_effect)


def mutations(settings: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Each number, truth value and word of a config.json changed alone, nested ones too."""
    found = []

    def walk(value: Any, path: tuple[Any, ...]) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, (*path, key))
        elif isinstance(value, list):
            for index, item in enumerate(value):
                walk(item, (*path, index))
        elif value is not None:
            changed = copy.deepcopy(settings)
            target: Any = changed
            for key in path[:-1]:
                target = target[key]
            target[path[-1]] = (
                not value
                if isinstance(value, bool)
                else f"other-{value}"
                if isinstance(value, str)
                else value * 2 + 1
                if isinstance(value, int)
                else value * 1.5 + 0.25
            )
            found.append((".".join(map(str, path)), changed))

    walk(settings, ())
    return found


def test_families_are_found_by_their_files() -> None:
    assert {"llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2"} <= families().keys()


@pytest.mark.parametrize("coefficients", [{}, {"mscale_all_dim": 0.707}, {"mscale": 0.707, "mscale_all_dim": 1.2}])
def test_deepseek_positions_are_written_as_they_are_read(coefficients: dict[str, float]) -> None:
    ref = reference("deepseek_v3")
    said = json.loads((ref.path / "config.json").read_text())
    rope = {key: value for key, value in said["rope_parameters"].items() if not key.startswith("mscale")}
    rope |= coefficients | {"factor": 40.0}
    config = ref.family.decoder(said | {"rope_parameters": rope, "q_lora_rank": None}, "config.json")
    settings = ref.family.settings_of(config)
    assert settings["q_lora_rank"] is None
    assert {key: settings["rope_parameters"].get(key) for key in coefficients} == coefficients


def test_the_recipe_of_deepseek_has_its_published_settings() -> None:
    family, settings = settings_for(deepseek_v3())
    assert family.name == "deepseek_v3"
    expected = {
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
    }
    assert expected.items() <= settings.items()


@pytest.mark.parametrize("name", ["llava", "idefics"])
def test_no_run_is_made_of_what_reads_images(name: str) -> None:
    ref = reference(name)
    said = json.loads((ref.path / "config.json").read_text())
    with pytest.raises(ConfigError, match="reads images, which no run trains on yet"):
        ref.family.decoder(said, "config.json")
