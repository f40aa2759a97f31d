"""`surefoot data`."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.text import Text

from surefoot.config import ConfigError, override
from surefoot.data.inspect import describe_step, steps_of_document
from surefoot.recipes.find import find_recipe


def inspect(recipe: str, sets: list[str], step: int | None, document: str | None, rows: int, allow: list[str]) -> None:
    """Show a step's rows decoded, or the steps of a document."""
    if (step is None) == (document is None):
        raise ConfigError("data inspect", None, "needs one of --step N and --document NAME")
    chosen = override(find_recipe(recipe, allow), sets)
    num_steps = chosen.train.num_steps
    if step is not None and step > num_steps:
        raise ConfigError("--step", step, f"the run has {num_steps} steps, counted from 1")
    dataset = chosen.data.build(announce=lambda text: print(text, file=sys.stderr))
    console = Console(highlight=False, soft_wrap=True)
    if document is not None:
        steps = steps_of_document(dataset, document, chosen.train.batch, num_steps)
        where = ", ".join(map(str, steps)) if steps else "none (it is held out, or its turn never comes)"
        console.print(Text(f"{document}: {len(steps)} of {num_steps} steps: {where}"))
        return
    found = describe_step(dataset, step or 1, chosen.train.batch)
    for row in found[:rows]:
        place = row.sample
        console.print(
            Text(f"─── sample {row.number}  {place.source}  epoch {place.epoch}  window {place.window}", "bold")
        )
        names = place.documents or (("", 0, 0),) * len(row.texts)
        for (name, start, end), text in zip(names, row.texts, strict=True):
            console.print(Text(f"··· {name} tokens {start}:{end}", "dim"))
            console.print(Text(text))
    if len(found) > rows:
        console.print(f"({len(found) - rows} more rows of this step; --rows {len(found)} shows all)")
