"""Contracts that need more than a moment: a block under each axis of a plan on two ranks, and under torch's compiler."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from surefoot.config import ConfigError
from surefoot.dist.pool import Pool
from surefoot.parallel.apply import check
from surefoot.parallel.plan import Plan
from surefoot.study.contracts import (
    EXACT,
    LENGTH,
    SINGLE,
    BrokenError,
    Contract,
    InapplicableError,
    Subject,
    at_most,
)
from surefoot.study.image_contracts import IMAGES, ImageExample
from surefoot.study.trial import BATCH, trial
from surefoot.study.verify import judge, num_micro_batches

LAYOUTS: Mapping[str, Sequence[Plan]] = {
    "shard": (Plan(shard=2, zero=3), Plan(replicate=2)),
    "tensor": (Plan(tensor=2),),
    "context": tuple(Plan(context=2, context_kind=kind) for kind in ("gather", "ulysses", "ring")),
    "pipeline": (Plan(pipeline=2),),
    "expert": (Plan(expert=2),),
}
"""Layouts on two ranks that train what one process trains. A cell without any legal plan says why the first is not."""


def on_ranks(plans: Sequence[Plan], pool: Pool) -> Contract:
    """The contract that the plans train the same parameters as one process (`study.verify`)."""

    def trained_alike(example: Subject) -> float:
        if example.looks_ahead:
            raise InapplicableError(
                "in training each token's experts depend on which others lie in its micro-batch, so another cut of the batch "
                "is another function"
            )
        worst, refusals, has_run = 0.0, [], False
        for plan in plans:
            try:
                check(plan, example.model, LENGTH)
            except ConfigError as refusal:
                refusals.append(str(refusal))
                continue
            has_run = True
            with tempfile.TemporaryDirectory() as folder:
                arguments = example.run, plan, num_micro_batches(plan), Path(folder), range(BATCH), example.reader
                shares = pool.run(trial, *arguments)
            verdict = judge(plan, shares, *example.reference)
            if verdict.failure:
                raise BrokenError(f"{plan.describe()}: {verdict.failure}")
            worst = max(worst, *verdict.worst.values())
        if not has_run:
            raise InapplicableError(refusals[0])
        return worst

    return trained_alike


def compiled(example: Subject) -> float:
    """Loss and every gradient are the same where `torch.compile` traces the model, whatever it leaves out of its graphs."""
    found: list[dict[str, Tensor]] = []
    for is_compiled in (False, True):
        model = example.built()
        if is_compiled:
            torch.compiler.reset()
            # More graphs than it would like are no matter here.
            logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
            # No code is generated: what is traced, and what the tracer makes of hand-written gradients, is in question.
            model.loss = torch.compile(model.loss, backend="aot_eager")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what the tracer looks at in passing
            objective, _ = example.loss(model)
            objective.backward()
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        found.append(gradients | {"loss": objective.detach()})
    eager, traced = found
    if eager.keys() != traced.keys():
        raise BrokenError(f"{min(eager.keys() ^ traced.keys())} has a gradient only with, or only without, a compiler")
    # A gradient that is 0 but for rounding (of a bias of keys that all queries see) is compared with the others.
    least = 1e-6 * max(float(value.abs().max()) for value in eager.values())
    worst = max(
        float((traced[name] - value).abs().max() / value.abs().max().clamp_min(least)) for name, value in eager.items()
    )
    return at_most(worst, EXACT, "gradients differ under torch.compile")


COLUMNS = (*SINGLE, "compile", *LAYOUTS)
"""The heads of all columns."""


def contracts_of(example: Subject, pool: Pool) -> dict[str, Contract]:
    """By the head of their column."""
    own = IMAGES if isinstance(example, ImageExample) else SINGLE
    return {**own, "compile": compiled, **{name: on_ranks(plans, pool) for name, plans in LAYOUTS.items()}}
