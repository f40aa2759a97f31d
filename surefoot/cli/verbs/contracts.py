"""`surefoot verify --blocks`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from surefoot.config import ConfigError
from surefoot.dist.pool import Pool
from surefoot.study.contracts import BrokenError, Finding, Subject, examples_of, find_blocks, try_on
from surefoot.study.image_contracts import find_image_parts, image_examples_of
from surefoot.study.laid_contracts import COLUMNS, contracts_of


def run(wanted: str | None) -> int:
    """Print a row for each example of each block, of one block where it is named; the exit code is 1 on a failure."""
    tried: dict[str, Callable[[], Sequence[Subject]]] = {_name(cls): partial(examples_of, cls) for cls in find_blocks()}
    tried |= {_name(cls): partial(image_examples_of, cls) for cls in find_image_parts()}
    if wanted is not None and wanted.lower().removesuffix("config") not in tried:
        raise ConfigError("--blocks", wanted, f"is no block; there are {', '.join(sorted(tried))}")
    chosen = [make for name, make in tried.items() if wanted is None or name == wanted.lower().removesuffix("config")]
    started, pool, reasons = time.monotonic(), Pool(2, timeout=120), dict[str, str]()
    failures, num_examples = list[str](), 0
    print("worst relative error of each contract; fp64, layouts on two ranks against one process")
    print("  ".join(["", f"{'block':28}", *(f"{name:>8}" for name in COLUMNS)]))
    try:
        for make in chosen:
            try:
                examples = make()
            except BrokenError as error:
                failures.append(str(error))
                continue
            num_examples += len(examples)
            for example in examples:
                cells = []
                for name, contract in contracts_of(example, pool).items():
                    finding = try_on(example, contract)
                    cells.append(_cell(finding, reasons))
                    if finding.failure:
                        failures.append(f"{example.name}: {name}: {finding.failure}")
                print("  ".join(["", f"{example.name:28}", *(f"{cell:>8}" for cell in cells)]), flush=True)
    finally:
        pool.close()
    for reason, mark in reasons.items():
        print(f"  {mark}  does not apply: {reason}")
    for failure in failures:
        print(f"  FAILED  {failure}")
    seconds = time.monotonic() - started
    print(f"{num_examples} examples of {len(chosen)} blocks, {len(failures)} failures ({seconds:.0f} s)")
    return 1 if failures else 0


def _name(cls: type) -> str:
    return cls.__name__.removesuffix("Config").lower()


def _cell(finding: Finding, reasons: dict[str, str]) -> str:
    """What stands in the table; a reason is written once below it, under a mark of its own."""
    if finding.failure:
        return "FAILED"
    if finding.reason:
        return reasons.setdefault(finding.reason, f"({len(reasons) + 1})")
    return "0" if not finding.worst else f"{finding.worst:.0e}"
