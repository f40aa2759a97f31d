import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surefoot.config import Config, ConfigError, DataError, from_dict, override, to_dict
from surefoot.data.dataset import Batch, Corpus, CorpusConfig, DataConfig, Dataset, WeightedSource
from surefoot.data.packing import IGNORED, Window
from surefoot.data.shards import Announce
from surefoot.data.sources.files import FilesConfig
from surefoot.data.tokenizer import TokenizerConfig
from surefoot.data.tokenizers.bpe import BPEConfig
from surefoot.data.tokenizers.bytes import BytesConfig, BytesTokenizer

Make = Callable[..., Corpus]
FIELDS = ("tokens_BL", "targets_BL", "documents_BL", "sources_B")


def same(one: Batch, two: Batch) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(two, name)) for name in FIELDS)


def pairs(batches: Sequence[Batch]) -> Counter[tuple[int, ...]]:
    """Every prediction with the three tokens before it: enough to count them."""
    found: Counter[tuple[int, ...]] = Counter()
    for batch in batches:
        for tokens_L, targets_L in zip(batch.tokens_BL, batch.targets_BL, strict=True):
            for position in np.flatnonzero(targets_L != IGNORED):
                found[(int(tokens_L[position]), int(targets_L[position]))] += 1
    return found


def expected_pairs(corpus: Corpus, split: str, keep: Callable[[int], int]) -> Counter[tuple[int, ...]]:
    """The same, from the stored documents; `keep` says how many leading positions of a stream are used."""
    found: Counter[tuple[int, ...]] = Counter()
    for part in corpus._shards:
        content = part.splits["train" if split == "train" else "heldout"]
        is_end = np.zeros(len(content.ids), bool)
        is_end[content.ends - 1] = True
        for position in range(keep(len(content.ids))):
            if not is_end[position]:
                found[(int(content.ids[position]), int(content.ids[position + 1]))] += 1
    return found


# -- every token once --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence_length", [1, 16, 50])
def test_an_epoch_predicts_every_target_exactly_once(make_corpus: Make, sequence_length: int) -> None:
    corpus = make_corpus({"a": [37, 5, 90, 14, 60, 41, 8, 77]}, sequence_length=sequence_length)
    n = corpus.num_samples_per_epoch
    wanted = expected_pairs(corpus, "train", lambda size: size // sequence_length * sequence_length)
    for epoch in range(2):
        batches = [corpus.batch(sample, 1) for sample in range(epoch * n, (epoch + 1) * n)]
        assert pairs(batches) == wanted
        assert sorted(corpus.locate(sample).window for sample in range(epoch * n, (epoch + 1) * n)) == list(range(n))
        assert {corpus.locate(sample).epoch for sample in range(epoch * n, (epoch + 1) * n)} == {epoch}


def test_epochs_come_in_different_orders(make_corpus: Make) -> None:
    corpus = make_corpus({"a": [300] * 9})
    n = corpus.num_samples_per_epoch
    first, second = ([corpus.locate(e * n + i).window for i in range(n)] for e in (0, 1))
    assert first != second
    assert first != list(range(n))


@pytest.mark.parametrize("batch_size", [1, 4, 1000])
def test_heldout_reads_every_token_and_byte_once(make_corpus: Make, batch_size: int) -> None:
    corpus = make_corpus({"a": [37, 5, 90, 14, 60] * 3, "b": [50] * 9}, heldout_fraction=0.4)
    batches = list(corpus.heldout(batch_size))
    assert pairs(batches) == expected_pairs(corpus, "heldout", lambda size: size)
    stored = [part.splits["heldout"] for part in corpus._shards]
    num_text = sum(len(split.ids) - 2 * len(split.names) for split in stored)
    assert sum(batch.num_bytes for batch in batches) == num_text  # tokens are bytes here
    assert sum(batch.num_tokens for batch in batches) == num_text + sum(len(split.names) for split in stored)
    assert {len(batch.tokens_BL) for batch in batches[:-1]} <= {batch_size}
    assert all(same(one, two) for one, two in zip(batches, corpus.heldout(batch_size), strict=True))


def test_batch_counts_and_types(make_corpus: Make) -> None:
    batch = make_corpus({"a": [5] * 60}).batch(0, 7)
    assert [getattr(batch, name).dtype for name in FIELDS] == [np.int64, np.int64, np.int32, np.int32]
    assert batch.tokens_BL.shape == batch.targets_BL.shape == batch.documents_BL.shape == (7, 16)
    valid = batch.targets_BL[batch.targets_BL != IGNORED]
    assert batch.num_tokens == len(valid) < 7 * 16
    assert batch.num_bytes == (valid < 256).sum() < batch.num_tokens


# -- a pure function of the sample -------------------------------------------------------------------------------------


def test_batches_do_not_depend_on_how_the_range_is_cut_or_what_was_read_before(make_corpus: Make) -> None:
    corpus = make_corpus({"a": [200] * 10, "b": [90] * 9}, weights=[3, 1])
    whole = corpus.batch(0, 120)
    for size in (1, 7, 40):
        parts = [corpus.batch(first, min(size, 120 - first)) for first in range(0, 120, size)]
        for name in FIELDS:
            assert np.array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(whole, name))
    assert same(corpus.batch(3000, 5), Corpus(corpus._config, corpus.tokenizer, corpus._shards).batch(3000, 5))


def test_the_seed_changes_the_order_and_not_the_text(make_corpus: Make) -> None:
    corpus = make_corpus({"a": [200] * 10})
    other = Corpus(override(corpus._config, ["seed=1"]), corpus.tokenizer, corpus._shards)
    n = corpus.num_samples_per_epoch
    one, two = (np.array([c.locate(sample).window for sample in range(n)]) for c in (corpus, other))
    assert sorted(one) == sorted(two)
    assert (one == two).mean() < 0.2


# -- mixing ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [[0.7, 0.3], [1.0, 9.0], [2.0, 2.0]])
def test_ratios_hold_in_predicted_tokens_after_packing(make_corpus: Make, weights: list[float]) -> None:
    # Short documents fill windows with separators that predict nothing: mixing by windows would be off by 9 %.
    corpus = make_corpus({"long": [500] * 12, "short": [8] * 300}, weights=weights)
    num_samples = 6000
    tokens = np.zeros(2)
    for first in range(0, num_samples, 500):
        batch = corpus.batch(first, 500)
        np.add.at(tokens, batch.sources_B, (batch.targets_BL != IGNORED).sum(axis=1))
    audit = corpus.audit(num_samples)
    assert [source["tokens"] for source in audit["sources"]] == tokens.tolist()
    for source, share, weight in zip(audit["sources"], tokens / tokens.sum(), weights, strict=True):
        assert source["realised_share"] == pytest.approx(share)
        assert source["requested_share"] == pytest.approx(weight / sum(weights))
        assert abs(share - weight / sum(weights)) < 0.005
    assert json.loads(json.dumps(audit)) == audit


def test_an_audit_of_nothing(make_corpus: Make) -> None:
    audit = make_corpus({"a": [500] * 12}).audit(0)
    assert (audit["tokens"], audit["sources"][0]["realised_share"]) == (0, 0.0)


# -- provenance --------------------------------------------------------------------------------------------------------


def test_located_documents_hold_the_text_of_the_batch(make_corpus: Make) -> None:
    corpus = make_corpus({"a": [30, 7, 5, 120] * 4, "b": [40] * 8})
    paths = {source.source.name: Path(source.source.paths[0]).parent for source in corpus._config.sources}  # type: ignore[attr-defined]
    for sample in range(80):
        batch, located = corpus.batch(sample, 1), corpus.locate(sample)
        read = []
        for name, start, end in located.documents:
            source, _, file = name.partition("/")
            stored = [256, *(paths[source] / file).read_bytes(), 256]
            read += stored[start:end]
        assert batch.tokens_BL[0].tolist() == read
        assert located.source == corpus._config.sources[batch.sources_B[0]].source.name
        assert len(located.documents) == batch.documents_BL[0, -1] + 1


@pytest.mark.parametrize("until", [0, 1, 100, 700])
def test_samples_of_a_document_are_those_that_locate_finds(make_corpus: Make, until: int) -> None:
    corpus = make_corpus({"a": [30, 7, 5, 120] * 4, "b": [40] * 8}, weights=[1, 5])
    found: dict[str, list[int]] = {}
    for sample in range(until):
        for name, _, _ in corpus.locate(sample).documents:
            found.setdefault(name, []).append(sample)
    for part in corpus._shards:
        for name in part.splits["train"].names:
            assert corpus.samples_of(f"{part.source}/{name}", until) == found.get(f"{part.source}/{name}", [])


def test_document_names(make_corpus: Make) -> None:
    corpus = make_corpus({"a": [50] * 20, "b": [50] * 9})
    heldout = corpus._shards[0].splits["heldout"].names[0]
    assert corpus.samples_of(f"a/{heldout}", 10_000) == []
    with pytest.raises(DataError, match="several sources"):
        corpus.samples_of("0003.txt", 10)
    assert corpus.samples_of("0015.txt", 500) == corpus.samples_of("a/0015.txt", 500)
    with pytest.raises(DataError, match=r"b/003\.txt: there is no such document; did you mean b/000"):
        corpus.samples_of("b/003.txt", 10)
    with pytest.raises(DataError, match="no such document"):
        corpus.samples_of("\n", 10)


def test_facts_are_json_and_say_what_was_read(make_corpus: Make) -> None:
    corpus = make_corpus({"a": [50] * 20})
    facts = json.loads(json.dumps(corpus.facts()))
    source = facts["sources"][0]
    assert source["name"] == "a"
    assert source["splits"]["train"]["documents"] + source["splits"]["heldout"]["documents"] == 20
    assert source["splits"]["train"]["tokens"] + source["splits"]["heldout"]["tokens"] == source["text_bytes"]
    assert facts["tokenizer"]["byte_scale"] == 1.0
    assert facts["samples_per_epoch"] == corpus.num_samples_per_epoch


# -- tokenizers --------------------------------------------------------------------------------------------------------


def test_a_trained_tokenizer_is_kept_and_exact(write_files: Callable[..., FilesConfig], cache: Path) -> None:
    config = CorpusConfig(
        sources=(WeightedSource(source=write_files("a", [400] * 20)),),
        tokenizer=BPEConfig(vocab_size=300),
        sequence_length=8,
    )
    said: list[str] = []
    first, second = config.build(announce=said.append), config.build(announce=said.append)
    assert [line.split(" (")[0] for line in said] == ["training the tokenizer", "a: tokenising"]
    assert first.tokenizer.fingerprint() == second.tokenizer.fingerprint()
    assert first.facts()["tokenizer"]["byte_scale"] == 1.0
    heldout_files = first._shards[0].splits["heldout"].names
    folder = Path(config.sources[0].source.paths[0]).parent  # type: ignore[attr-defined]
    text = sum((folder / name).stat().st_size for name in heldout_files)
    assert sum(batch.num_bytes for batch in first.heldout(4)) == text
    [kept] = [path for path in (cache / "tokenizers").iterdir() if path.is_dir()]
    with (kept / "tokenizer.json").open("a") as file:
        file.write(" ")
    with pytest.raises(DataError, match=r"tokenizer\.json: .*so the cache is damaged"):
        config.build()


class Lossy(BytesTokenizer):
    """Says of every id that it stands for three bytes."""

    def byte_lengths(self) -> Any:
        return np.full(self.vocab_size, 3.0)


class LossyConfig(TokenizerConfig):
    def build(self, texts: object = ()) -> Lossy:  # noqa: ARG002
        return Lossy()


def test_inexact_byte_lengths_are_scaled_to_the_true_total(write_files: Callable[..., FilesConfig]) -> None:
    source = WeightedSource(source=write_files("a", [40] * 20))
    corpus = CorpusConfig(sources=(source,), tokenizer=LossyConfig(), sequence_length=8).build()
    assert corpus.facts()["tokenizer"]["byte_scale"] == pytest.approx(1 / 3)


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_sequence_longer_than_the_corpus(make_corpus: Make) -> None:
    with pytest.raises(DataError, match="a: sequence_length 5000 is longer than its"):
        make_corpus({"a": [50] * 20}, sequence_length=5000)


def test_one_document_cannot_be_split(make_corpus: Make) -> None:
    with pytest.raises(DataError, match=r"leaves no document (to train on|of 1 for evaluation)"):
        make_corpus({"a": [500]}, heldout_fraction=0.5)
    corpus = make_corpus({"b": [500]}, heldout_fraction=0.0)
    assert list(corpus.heldout(4)) == []
    with pytest.raises(DataError, match="leaves no document to train on"):
        make_corpus({"c": [500] * 3}, heldout_fraction=0.999999)


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"sequence_length": 0}, "sequence_length"),
        ({"heldout_fraction": 1.0}, "heldout_fraction"),
        ({"heldout_fraction": -0.1}, "heldout_fraction"),
        ({"seed": -1}, "seed"),
        ({"sources": ()}, "sources"),
    ],
)
def test_values_out_of_range_are_named(values: dict[str, Any], path: str) -> None:
    source = WeightedSource(source=FilesConfig(paths=("x",)))
    with pytest.raises(ConfigError, match=path):
        CorpusConfig(**{"sources": (source,), "tokenizer": BytesConfig(), "sequence_length": 8} | values)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_weights_must_be_positive_numbers(weight: float) -> None:
    with pytest.raises(ConfigError, match="weight"):
        WeightedSource(source=FilesConfig(paths=("x",)), weight=weight)


def test_sources_need_names_of_their_own() -> None:
    source = WeightedSource(source=FilesConfig(paths=("x",)))
    with pytest.raises(ConfigError, match=r"sources\.1\.source\.name: 'files': is taken"):
        CorpusConfig(sources=(source, source), tokenizer=BytesConfig(), sequence_length=8)


def test_configurations_round_trip() -> None:
    source = WeightedSource(source=FilesConfig(paths=("x",)), weight=2.5)
    config = CorpusConfig(sources=(source,), tokenizer=BPEConfig(vocab_size=300), sequence_length=8)
    assert from_dict(json.loads(json.dumps(to_dict(config))), DataConfig) == config


# -- a user's own ------------------------------------------------------------------------------------------------------


class Counting(Dataset):
    """Rows that count."""

    def __init__(self, sequence_length: int) -> None:
        self.tokenizer = BytesConfig().build()
        self.sequence_length, self.num_samples_per_epoch = sequence_length, 10

    def batch(self, first_sample: int, count: int) -> Batch:
        rows = [
            np.arange(first, first + self.sequence_length + 1) % 256
            for first in range(first_sample, first_sample + count)
        ]
        documents_L = np.zeros(self.sequence_length, np.int32)
        windows = [Window(row[:-1], row[1:], documents_L) for row in rows]
        return Batch.of(windows, [0] * count, self.tokenizer.byte_lengths())

    def heldout(self, batch_size: int) -> Iterator[Batch]:
        yield self.batch(0, batch_size)


class CountingConfig(DataConfig):
    def build(self, *, announce: Announce = lambda _: None) -> Counting:  # noqa: ARG002
        return Counting(self.sequence_length)


def test_a_dataset_of_rows_needs_three_methods() -> None:
    dataset = CountingConfig(sequence_length=4).build()
    batch = dataset.batch(3, 2)
    assert batch.tokens_BL.tolist() == [[3, 4, 5, 6], [4, 5, 6, 7]]
    assert (batch.num_tokens, batch.num_bytes, dataset.vocab_size) == (8, 8.0, 257)
    assert (dataset.locate(23).epoch, dataset.locate(23).window) == (2, 3)
    assert dataset.facts() == {}
    assert dataset.audit(5)["samples"] == 5
    with pytest.raises(DataError, match="cannot say"):
        dataset.samples_of("x", 5)


@pytest.mark.parametrize("cls", [DataConfig, TokenizerConfig])
def test_bases_are_abstract(cls: type[Config]) -> None:
    with pytest.raises(ConfigError, match="name a class that is a kind of"):
        from_dict({}, cls)
