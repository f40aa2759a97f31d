"""Proof that a layout trains the same model as one process.

A shrunk version of a run takes two optimizer steps on one ragged batch, in fp64, on one process and under a plan. Compared
are initial weights, loss, every gradient, the gradient norm, every weight after one plain SGD update and the loss that
evaluation then finds, and every weight after the steps, each put together from all ranks, whose copies must agree. Between
the steps all is saved, lost and loaded: bits must return, and one process must find the same in the checkpoint. Norm scales
and all else that starts at one value is drawn anew first: there a dropped one would not be seen.

How much may differ is measured, not guessed: one process with its sums in another order (other micro-batches) is the noise,
and a plan passes within `MARGIN` times it. Narrow products are narrow around fp64, so that they too are compared to the last
digits, and with them the largest magnitude of every operand; where a scale is of what a forward pass holds, one process takes
the same passes, and noise is another order of samples in them. In bf16 what differs is rounding itself: there one process in
fp64 is the truth, and a plan passes if it is at most `MARGIN_BF16` times as far from it as one process in bf16 is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from surefoot.config import ConfigError, override
from surefoot.dist.pool import Pool
from surefoot.models.multimodal import MultimodalConfig
from surefoot.parallel.apply import check
from surefoot.parallel.plan import Plan
from surefoot.study.matrix import combinations
from surefoot.study.trial import BATCH, MAGNITUDES, Share, trial
from surefoot.train.run import Run

LENGTH, DEPTH = 64, 2
MARGIN, MARGIN_BF16 = 100.0, 2.0
FLOOR = 1e-13
"""Relative difference that fp64 sums of this size always may have."""
LEAST = 1e-6
"""Of the largest tensor of a quantity: a smaller one is compared with that. A gradient that is 0 but for rounding (of a bias of
keys that all queries see) has no digits of its own."""
SUSPICIOUS = 1e-9
"""Relative difference of the loss that another order of sums in fp64 hardly makes: chance may be at work."""
UNIT_FP32 = 2.0**-22
"""By which largest magnitudes may be off, which are kept in fp32."""
UNIT_BF16 = 2.0**-9
"""Half the distance of bf16 numbers: by which any one number may be off."""

QUANTITIES = (
    "initial weights",
    "loss",
    "gradients",
    "gradient norm",
    "SGD update",
    "evaluation",
    "resume",
    "saved state",
    "updated weights",
)
EXACT = frozenset({"initial weights", "resume"})
OF_RESTART = frozenset({"resume", "saved state"})
"""Most of a trial's cost: compared only where a plan is `restarted`."""


def quantities(run: Run) -> tuple[str, ...]:
    """What is compared of a run, in the order in which a wrong one is named."""
    return QUANTITIES if run.precision.kind is None else _WITH_MAGNITUDES


_WITH_MAGNITUDES = (*QUANTITIES[:2], MAGNITUDES, *QUANTITIES[2:])


@dataclass(frozen=True)
class Verdict:
    """One plan: the largest relative difference of each quantity, and what went wrong first, if anything."""

    plan: Plan
    worst: Mapping[str, float]
    failure: str | None


def shrunk(run: Run, compute: str = "fp64") -> Run:
    """The run small enough for a laptop: few layers, one of each kind, a short sequence, 16 samples a step, one process.

    Narrow products keep their kind, in at least one layer; tiles are short, so that context parallelism may cut between them.
    """
    kind, length, depth, narrow = run.precision.kind, LENGTH, DEPTH, []
    if kind is not None:
        depth += run.precision.num_kept
        length *= 2 if kind.has_tiles else 1
        narrow = [
            "precision.keep_layers=null",
            *(["precision.tile=16"] if run.precision.products == "blockwise" else []),
        ]
    length = min(length, run.data.sequence_length)
    model = run.model.in_short(min(depth, run.model.depth))
    train = run.train.model_copy(update={"micro_batch": None})
    small = override(
        run.model_copy(update={"model": model, "plan": Plan(), "train": train}),
        [
            f"train.batch={BATCH}",
            f"data.sequence_length={length}",
            f"precision.compute={compute}",
            *narrow,
        ],
    )
    return small


def deep_enough(run: Run, plan: Plan) -> Run:
    """The run with a layer for each stage of the plan."""
    if run.model.depth >= plan.num_stages:
        return run
    return run.model_copy(update={"model": run.model.in_short(plan.num_stages)})


def legal_plans(run: Run, num_ranks: int) -> list[Plan]:
    """Every combination of `study.matrix` on at most `num_ranks` ranks that the run allows."""
    return [plan for plan in combinations(num_ranks) if _is_legal(plan, run)]


def parse_plan(text: str) -> Plan:
    """`shard=2,tensor=2` as a plan; `ConfigError` names what is wrong."""
    values: dict[str, Any] = {}
    for item in text.split(","):
        name, equals, value = item.strip().partition("=")
        if not equals:
            raise ConfigError("--plan", text, "is not a list like shard=2,tensor=2")
        if name in values:
            raise ConfigError("--plan", text, f"gives {name} twice; drop one")
        values[name] = int(value) if value.lstrip("-").isdigit() else value
    return Plan(**values)


def verify(
    run: Run,
    plans: Sequence[Plan],
    pool: Pool,
    announce: Callable[[Verdict], None],
    restarted: Collection[Plan] | None = None,
) -> list[Verdict]:
    """A verdict for each plan of a shrunk run; each is announced as it is reached. Only `restarted` plans (None: all) are also
    stopped and started again."""
    for plan in plans:
        check(plan, deep_enough(run, plan).model, run.data.sequence_length, run.precision)
        if plan.num_ranks > pool.num_ranks:
            raise ConfigError("plan", plan.describe(), f"needs {plan.num_ranks} ranks; give --ranks {plan.num_ranks}")
        _check_batch(plan)
    references: dict[object, tuple[list[Share], dict[str, float]]] = {}
    verdicts = []
    for plan in plans:
        deep = deep_enough(run, plan)
        passes = _passes_of(deep, plan)
        key = (deep.model.depth, passes)
        if key not in references:
            references[key] = reference_of(deep, passes)
        restarts = restarted is None or plan in restarted
        with TemporaryDirectory() as folder:
            shares = pool.run(trial, deep, plan, num_micro_batches(plan), Path(folder) if restarts else None)
        verdict = judge(plan, shares, *references[key], restarts=restarts)
        announce(verdict)
        verdicts.append(verdict)
    return verdicts


def _check_batch(plan: Plan) -> None:
    ranks = plan.num_data_ranks
    if BATCH % ranks:
        nearest = min((size for size in range(1, BATCH + 1) if BATCH % size == 0), key=lambda size: abs(size - ranks))
        raise ConfigError(
            "plan.shard",
            plan.shard,
            f"makes replicate x shard x expert = {ranks} ranks that must share {BATCH} samples equally; nearest that do: "
            f"{nearest}",
        )
    if num_micro_batches(plan) is None:
        raise ConfigError(
            "plan.pipeline",
            plan.pipeline,
            f"with schedule {plan.schedule} takes no number of micro-batches of {BATCH // ranks} samples a rank; use fewer "
            "replicate, shard or expert ranks",
        )


def num_micro_batches(plan: Plan) -> int | None:
    """Of a trial: two at least, and as many as the plan's pipeline wants; None where the plan cannot share the batch."""
    rank_batch, rest = divmod(BATCH, plan.num_data_ranks)
    if rest:
        return None
    return min(2, rank_batch) if plan.pipeline == 1 else plan.num_micro_batches(rank_batch)


Passes = tuple[tuple[int, ...], ...]
"""Which samples go through the model together, pass by pass."""

ALL: Passes = (tuple(range(BATCH)),)


def _passes_of(run: Run, plan: Plan) -> Passes:
    """Of one process that is to be compared with a plan: all samples at once, unless those of a pass share scales."""
    kind, num_micro = run.precision.kind, num_micro_batches(plan)
    if kind is None or not kind.is_of_pass or num_micro is None:
        return ALL
    by_rank = torch.arange(BATCH).view(plan.num_data_ranks, num_micro, -1)
    return tuple(tuple(samples.flatten().tolist()) for samples in by_rank.unbind(1))


def reference_of(
    run: Run, passes: Passes = ALL, reader: MultimodalConfig | None = None
) -> tuple[list[Share], dict[str, float]]:
    """One process, and how far from it a plan may be; of a `reader` of images if there is one."""
    if run.precision.compute != "fp64":
        wide = run.model_copy(update={"precision": run.precision.in_wide("fp64")})
        exact, one = (one_process(of, passes, reader) for of in (wide, run))
        _refuse_chance(run, one, passes, reader)
        own = _differences(one, exact)
        exact[0].parts["initial weights"] = one[0].parts["initial weights"]  # bf16 weights start rounded
        allowed = {quantity: MARGIN_BF16 * max(error, UNIT_BF16) for quantity, error in own.items()}
        return exact, allowed | dict.fromkeys(EXACT, 0.0)
    reference = one_process(run, passes, reader)
    return reference, _allowed(run, reference, passes, reader)


def one_process(run: Run, passes: Passes = ALL, reader: MultimodalConfig | None = None) -> list[Share]:
    """The trial of one process, as the only share."""
    order = [sample for samples in passes for sample in samples]
    with TemporaryDirectory() as folder:
        share = trial(run, Plan(), len(passes), Path(folder), order, reader)
    return [] if share is None else [share]


def _allowed(run: Run, reference: Sequence[Share], passes: Passes, reader: MultimodalConfig | None) -> dict[str, float]:
    """`MARGIN` times what each quantity differs by when the same sums are taken in another order."""
    is_fixed = len(passes) > 1 or (run.precision.kind is not None and run.precision.kind.is_of_pass)
    other = tuple(samples[::-1] for samples in passes) if is_fixed else tuple((sample,) for sample in range(BATCH))
    reordered = _differences(one_process(run, other, reader), reference)
    if reordered["loss"] > SUSPICIOUS:
        _refuse_chance(run, reference, passes, reader)
    allowed = {quantity: MARGIN * max(error, FLOOR) for quantity, error in reordered.items()}
    return allowed | dict.fromkeys(EXACT, 0.0) | dict.fromkeys({MAGNITUDES} & allowed.keys(), UNIT_FP32)


def _refuse_chance(run: Run, reference: Sequence[Share], passes: Passes, reader: MultimodalConfig | None) -> None:
    """`ConfigError` where one process that does the same again finds something else: no noise could be told from a fault."""
    error, name = _difference(one_process(run, passes, reader), reference, "gradients")
    if error != 0:
        raise ConfigError(
            "model",
            run.name,
            f"is another one each time: the gradient of {name} differs by {error:.1e} between two equal runs of one process. "
            "Something in it draws random numbers, as dropout does; switch that off to verify layouts",
        )


def _differences(shares: Sequence[Share], reference: Sequence[Share]) -> dict[str, float]:
    return {quantity: _difference(shares, reference, quantity)[0] for quantity in _found_in(reference)}


def _found_in(reference: Sequence[Share]) -> tuple[str, ...]:
    return _WITH_MAGNITUDES if reference[0].parts[MAGNITUDES] else QUANTITIES


def judge(
    plan: Plan,
    shares: Sequence[Share | None],
    reference: Sequence[Share],
    allowed: Mapping[str, float],
    *,
    restarts: bool = True,
) -> Verdict:
    """Whether the ranks' shares are those of one process, within what is allowed; `restarts` says whether the trial had a new
    start to compare."""
    present = [share for share in shares if share is not None]
    worst: dict[str, float] = {}
    for quantity in _found_in(reference):
        if quantity in OF_RESTART and not restarts:
            continue
        try:
            error, name = _difference(present, reference, quantity)
        except _DisagreementError as disagreement:
            return Verdict(plan, worst, str(disagreement))
        worst[quantity] = error
        if not error <= allowed[quantity]:
            said = f"{quantity}: {name} is off by {error:.1e}, allowed {allowed[quantity]:.1e}"
            return Verdict(plan, worst, said + (_where(present, reference) if quantity == "loss" else ""))
    return Verdict(plan, worst, None)


def _where(shares: Sequence[Share], reference: Sequence[Share]) -> str:
    """A wrong loss names no tensor: the one whose gradient is furthest off does."""
    try:
        error, name = _difference(shares, reference, "gradients")
    except _DisagreementError as disagreement:
        return f"; {disagreement}"
    return f"; furthest off of all gradients is that of {name}, by {error:.1e}"


class _DisagreementError(Exception):
    """Ranks hold different copies of one part, or together not the whole."""


def _difference(shares: Sequence[Share], reference: Sequence[Share], quantity: str) -> tuple[float, str]:
    """The largest relative difference of a quantity and whose it is."""
    for share in shares:
        if quantity in share.failures:
            raise _DisagreementError(f"{quantity}: {share.failures[quantity]}")
    ours, theirs = _whole(shares, quantity), _whole(reference, quantity)
    if ours.keys() != theirs.keys():
        odd = min(ours.keys() ^ theirs.keys())
        raise _DisagreementError(f"{quantity}: {odd} is on one side only")
    sizes = {name: float(value.norm()) for name, value in theirs.items()}
    least = max(1e-300, LEAST * max(sizes.values()))
    errors = [(float((ours[name] - value).norm()) / max(sizes[name], least), name) for name, value in theirs.items()]
    # NaN compares with nothing, so it is looked for first.
    return next((item for item in errors if item[0] != item[0]), max(errors))


def _whole(shares: Sequence[Share], quantity: str) -> dict[str, Tensor]:
    """Full tensors from all ranks' parts. The first rank's numbers stand for all, which must have the same bits."""
    if quantity in shares[0].numbers:
        numbers = {share.numbers[quantity] for share in shares}
        if len(numbers) > 1:
            raise _DisagreementError(f"{quantity}: ranks have {sorted(numbers)[:2]}")
        return {quantity: torch.tensor([shares[0].numbers[quantity]], dtype=torch.float64)}
    full: dict[str, Tensor] = {}
    for share in shares:
        for name, (box, shape, narrow) in share.parts.get(quantity, {}).items():
            values = narrow.double()
            whole = full.setdefault(name, torch.full(shape, float("nan"), dtype=torch.float64))
            there = whole[box.slices]
            if (
                values.numel()
                and not bool(there.isnan().all())
                and not torch.allclose(there, values, rtol=1e-9, atol=1e-12)
            ):
                raise _DisagreementError(f"{quantity}: copies of {name} differ between ranks")
            whole[box.slices] = values
    for name, whole in full.items():
        if bool(whole.isnan().any()):
            raise _DisagreementError(f"{quantity}: no rank holds all of {name}, or it is not a number")
    return full


def _is_legal(plan: Plan, run: Run) -> bool:
    try:
        check(plan, deep_enough(run, plan).model, run.data.sequence_length, run.precision)
    except ConfigError:
        return False
    return num_micro_batches(plan) is not None
