import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from surefoot.config import ConfigError, DataError
from surefoot.data.tokenizer import Tokenizer
from surefoot.data.tokenizers.bpe import BPEConfig
from surefoot.data.tokenizers.bytes import BytesConfig
from surefoot.data.tokenizers.file import FileTokenizerConfig
from surefoot.data.tokenizers.wrapped import DOCUMENT, load_tokenizer

TEXTS = [
    "def main():\n    return 'ünïcode' + \"<|document|>\"\n" * 20,
    "import os, sys\n" * 30,
    "日本語 text \t\r\n\n x",
]


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return BytesConfig().build() if request.param == "bytes" else BPEConfig(vocab_size=400).build(TEXTS)


@given(text=st.text(max_size=80))
@settings(deadline=None)
def test_any_text_comes_back_and_its_bytes_are_counted_exactly(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode_batch([text])[0]
    assert tokenizer.decode(ids) == text
    assert tokenizer.byte_lengths()[ids].sum() == len(text.encode())
    assert tokenizer.encode_batch([text.encode()])[0].tolist() == ids.tolist()
    assert ids.dtype == np.uint32


@pytest.mark.parametrize("text", [DOCUMENT, f"a{DOCUMENT}{DOCUMENT}b"])
def test_a_text_cannot_place_a_separator(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode_batch([text])[0]
    assert tokenizer.document not in ids.tolist()
    assert tokenizer.decode(ids) == text


def test_the_separator_is_shown_and_stands_for_no_bytes(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.document, *tokenizer.encode_batch(["hé"])[0].tolist(), tokenizer.document]
    assert tokenizer.decode(ids) == f"{DOCUMENT}hé{DOCUMENT}"
    assert tokenizer.byte_lengths()[tokenizer.document] == 0
    assert len(tokenizer.byte_lengths()) == tokenizer.vocab_size


def test_half_a_character_decodes_to_a_replacement() -> None:
    tokenizer = BytesConfig().build()
    assert tokenizer.decode([ord("a"), 0xC3]) == "a�"


def test_bytes_are_their_own_ids() -> None:
    tokenizer = BytesConfig().build()
    assert tokenizer.encode_batch(["aé"])[0].tolist() == [97, 0xC3, 0xA9]
    assert (tokenizer.vocab_size, tokenizer.document, tokenizer.pad) == (257, 256, None)


def test_saved_and_loaded_it_is_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    for loaded in (load_tokenizer(tmp_path), FileTokenizerConfig(path=str(tmp_path / "tokenizer.json")).build()):
        assert loaded.fingerprint() == tokenizer.fingerprint()
        assert loaded.encode_batch(TEXTS)[0].tolist() == tokenizer.encode_batch(TEXTS)[0].tolist()
        assert loaded.byte_lengths().tolist() == tokenizer.byte_lengths().tolist()
        assert (loaded.vocab_size, loaded.document) == (tokenizer.vocab_size, tokenizer.document)


def test_training_is_deterministic_and_follows_the_text() -> None:
    one, two, other = (BPEConfig(vocab_size=300).build(texts) for texts in (TEXTS, list(TEXTS), TEXTS[1:]))
    assert one.fingerprint() == two.fingerprint() != other.fingerprint()
    assert one.vocab_size == 300


def test_a_small_corpus_gives_a_smaller_vocabulary() -> None:
    assert BPEConfig(vocab_size=5000).build(["ab ab"]).vocab_size < 300


@pytest.mark.parametrize("size", [256, 0, "4096"])
def test_vocabulary_sizes_without_room_for_bytes_are_refused(size: Any) -> None:
    with pytest.raises(ConfigError, match="vocab_size"):
        BPEConfig(vocab_size=size)


# -- files of others ---------------------------------------------------------------------------------------------------


def description(vocabulary: dict[str, int], specials: list[tuple[str, int]]) -> dict[str, Any]:
    """A word-level tokenizer.json with these special tokens."""
    inner = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, **vocabulary}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.decoder = decoders.Fuse()
    parsed: dict[str, Any] = json.loads(inner.to_str())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    parsed["added_tokens"] = [{"id": id_, "content": content, **plain} for content, id_ in specials]
    return parsed


def write(folder: Path, parsed: object, config: object = None) -> Path:
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(parsed))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return file


WORDS = {"hello": 1, "world": 2}
SPECIALS = [("</s>", 3), ("<pad>", 4)]


def test_separator_is_found_by_name_argument_or_configuration(tmp_path: Path) -> None:
    file = write(tmp_path, description(WORDS, SPECIALS))
    assert load_tokenizer(file).document == 3
    assert load_tokenizer(file).pad is None
    assert load_tokenizer(file, document="world", pad="<pad>").document == 2
    write(tmp_path, description(WORDS, SPECIALS), {"eos_token": {"content": "<pad>"}, "pad_token": "</s>"})
    loaded = load_tokenizer(file)
    assert (loaded.document, loaded.pad) == (4, 3)


def test_padding_declared_in_the_file_counts(tmp_path: Path) -> None:
    parsed = description(WORDS, SPECIALS)
    padding = {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_type_id": 0}
    parsed["padding"] = padding | {"pad_id": 4, "pad_token": "<pad>"}
    parsed["truncation"] = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    loaded = load_tokenizer(write(tmp_path, parsed))
    assert loaded.pad == 4
    assert loaded.encode_batch(["hello world"])[0].tolist() == [1, 2]  # neither padded nor cut
    parsed["padding"] |= {"pad_id": 3, "pad_token": "</s>"}
    with pytest.raises(DataError, match="padding and end of document are both '</s>'"):
        load_tokenizer(write(tmp_path, parsed))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"document": "<nope>"}, "no token '<nope>' to separate"),
        ({"pad": "<nope>"}, "no token '<nope>' for padding"),
        ({"document": "</s>", "pad": "</s>"}, "padding and end of document"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(tmp_path: Path, options: dict[str, str], words: str) -> None:
    file = write(tmp_path, description(WORDS, SPECIALS))
    with pytest.raises(DataError, match=words):
        load_tokenizer(file, **options)


def test_no_separator_and_absurd_ids_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no token to separate documents is known"):
        load_tokenizer(write(tmp_path, description(WORDS, [])))
    parsed = description(WORDS, SPECIALS)
    parsed["model"]["vocab"]["x"] = 4_000_000_000  # a table of lengths would take 32 GB
    with pytest.raises(DataError, match="ids up to 4000000000"):
        load_tokenizer(write(tmp_path, parsed))


@given(
    content=st.one_of(
        st.binary(max_size=60), st.just(b"{}"), st.just(b'{"model": {"type": "BPE"}}'), st.just(b"[" * 9999)
    )
)
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_not_a_tokenizer_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer\.json: "):
        load_tokenizer(tmp_path)


def test_missing_and_truncated_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        load_tokenizer(tmp_path / "tokenizer.json")
    file = write(tmp_path, description(WORDS, SPECIALS))
    file.write_text(file.read_text()[:200])
    with pytest.raises(DataError, match=r"not a tokenizer\.json"):
        load_tokenizer(file)
    write(tmp_path, description(WORDS, SPECIALS))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json: cannot be read"):
        load_tokenizer(file)


def test_byte_fallback_and_sentencepiece_lengths(tmp_path: Path) -> None:
    parsed = description({"▁hello": 1, "<0x0A>": 2, "é": 3}, [("</s>", 4)])
    assert load_tokenizer(write(tmp_path, parsed)).byte_lengths().tolist() == [5, 6, 1, 2, 0]
