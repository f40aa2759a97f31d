from collections.abc import Callable

import pytest

from surefoot.config import DataError
from surefoot.data.dataset import Corpus
from surefoot.data.inspect import describe_step, steps_of_document


@pytest.fixture
def corpus(make_corpus: Callable[..., Corpus]) -> Corpus:
    return make_corpus({"a": [30, 7, 5, 120] * 4, "b": [40] * 8})


def test_a_step_is_described_by_the_text_of_its_rows(corpus: Corpus) -> None:
    rows = describe_step(corpus, 3, 4)
    batch = corpus.batch(8, 4)
    assert [row.number for row in rows] == [8, 9, 10, 11]
    for row, tokens_L in zip(rows, batch.tokens_BL, strict=True):
        assert row.sample == corpus.locate(row.number)
        assert len(row.texts) == len(row.sample.documents)
        for text, (_, start, end) in zip(row.texts, row.sample.documents, strict=True):
            assert len(corpus.tokenizer.encode_batch([text])[0]) >= end - start  # separators are spelled out
        whole = corpus.tokenizer.decode(tokens_L)
        assert "�" in whole or "".join(row.texts) == whole


def test_steps_of_a_document_are_those_whose_description_names_it(corpus: Corpus) -> None:
    name = corpus.locate(0).documents[0][0]
    described = [
        step
        for step in range(1, 41)
        if any(name == document for row in describe_step(corpus, step, 4) for document, _, _ in row.sample.documents)
    ]
    assert steps_of_document(corpus, name, 4, 40) == described
    assert described[0] == 1


def test_bad_questions_are_refused(corpus: Corpus) -> None:
    with pytest.raises(ValueError, match="count from 1"):
        describe_step(corpus, 0, 4)
    with pytest.raises(DataError, match="no such document"):
        steps_of_document(corpus, "nothing like it", 4, 10)
