"""`surefoot verify`."""

from __future__ import annotations

import time

from surefoot.config import ConfigError, override
from surefoot.dist.pool import Pool
from surefoot.recipes.find import find_recipe
from surefoot.study.matrix import covering
from surefoot.study.outlier import trust
from surefoot.study.verify import Verdict, legal_plans, parse_plan, quantities, shrunk, verify
from surefoot.train.run import Run


def run(
    recipe: str, plans: list[str], check_all: bool, ranks: int, sets: list[str], allow: list[str], compute: str = "fp64"
) -> int:
    """Print a line a plan; the exit code is 1 where a layout trains another model."""
    if compute not in {"fp64", "bf16"}:
        raise ConfigError("--compute", compute, "must be fp64 or bf16")
    chosen = shrunk(override(find_recipe(recipe, allow), sets), compute)
    if check_all == bool(plans):
        raise ConfigError("--plan", plans[0] if plans else None, "goes without --all, and one of the two is needed")
    wanted = legal_plans(chosen, ranks) if check_all else [parse_plan(text) for text in plans]
    restarted = covering(wanted, 1) if check_all else wanted
    started, pool = time.monotonic(), Pool(max(ranks, *(plan.num_ranks for plan in wanted), 2), timeout=60)
    title = "largest relative difference of"
    width = max(len(title), *(len(plan.describe()) for plan in wanted))
    print(
        f"{chosen.name}, shrunk: {len(wanted)} layouts on up to {ranks} ranks against one process, {_numbers(chosen)}"
    )
    if check_all:
        print(
            f"{len(restarted)} of them, with every value of every axis between them, are also stopped and started again"
        )
    compared = quantities(chosen)
    print("  ".join(["", f"{title:{width}}", *compared]))

    def announce(verdict: Verdict) -> None:
        cells = [f"{verdict.worst[name]:.0e}" if name in verdict.worst else "-" for name in compared]
        cells = [cell.rjust(len(name)) for cell, name in zip(cells, compared, strict=True)]
        print("  ".join(["", f"{verdict.plan.describe():{width}}", *cells, verdict.failure or "same"]), flush=True)

    try:
        verdicts = verify(chosen, wanted, pool, announce, restarted)
    finally:
        pool.close()
    trusted = trust(chosen)
    failed = [verdict for verdict in verdicts if verdict.failure]
    print(
        f"{len(verdicts) - len(failed)} of {len(verdicts)} layouts train the same model ({time.monotonic() - started:.0f} s)"
    )
    for line in trusted.describe() if trusted is not None else ():
        print(line)
    return 1 if failed or (trusted is not None and trusted.failure) else 0


def _numbers(run: Run) -> str:
    precision = run.precision
    narrow = "" if precision.kind is None else f" with {precision.products} products"
    return f"{precision.compute}{narrow}" + (" as far from fp64 as it" if precision.compute == "bf16" else "")
