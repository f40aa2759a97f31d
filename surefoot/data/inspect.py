"""Which text a step trained on, and which steps trained on a text."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.data.dataset import Dataset, Sample


@dataclass(frozen=True)
class Row:
    """One sample of a step. `texts` decodes the part of each of `sample.documents` that the row holds."""

    number: int
    sample: Sample
    texts: tuple[str, ...]


def describe_step(dataset: Dataset, step: int, samples_per_step: int) -> list[Row]:
    """The rows of a step's batch; steps count from 1, as in metrics.jsonl."""
    if step < 1:
        raise ValueError(f"step is {step}; steps count from 1")
    first = (step - 1) * samples_per_step
    batch = dataset.batch(first, samples_per_step)
    rows = []
    for offset, (tokens_L, documents_L) in enumerate(zip(batch.tokens_BL, batch.documents_BL, strict=True)):
        sample = dataset.locate(first + offset)
        num_documents = len(sample.documents) or int(documents_L[-1]) + 1
        texts = [dataset.tokenizer.decode(tokens_L[documents_L == document]) for document in range(num_documents)]
        rows.append(Row(first + offset, sample, tuple(texts)))
    return rows


def steps_of_document(dataset: Dataset, name: str, samples_per_step: int, num_steps: int) -> list[int]:
    """The steps of [1, num_steps] whose batch held a part of a document, in order. Raises `DataError` on its name."""
    samples = dataset.samples_of(name, num_steps * samples_per_step)
    return sorted({sample // samples_per_step + 1 for sample in samples})
