"""Byte-level BPE, trained on the corpus's own training split."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from pydantic import Field
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from surefoot.data.tokenizer import TokenizerConfig
from surefoot.data.tokenizers.wrapped import DOCUMENT, WrappedTokenizer


class BPEConfig(TokenizerConfig):
    """Byte-pair encoding over UTF-8 bytes with GPT-2's word pattern; any text encodes, and decodes to itself.

    Sennrich, Haddow and Birch (2016), Neural Machine Translation of Rare Words with Subword Units; Radford et al.
    (2019), Language Models are Unsupervised Multitask Learners.
    """

    reads_texts: ClassVar[bool] = True

    vocab_size: int = Field(gt=256, le=1 << 24, description="256 bytes, the document separator, and learned merges")

    def build(self, texts: Iterable[str]) -> WrappedTokenizer:
        """Train. A small corpus may have fewer merges to learn: `vocab_size` of the result is then smaller."""
        inner = Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab_size,
            special_tokens=[DOCUMENT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        return WrappedTokenizer(inner, document=DOCUMENT, where="bpe")
