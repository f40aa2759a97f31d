"""What quantised products are watched for: the largest magnitude, what saturates, what vanishes, how old scales are.

Each product of the model has three operands (input, weight, gradient of the output), each a row of one small tensor that
passes add to. Ranks hold different rows (pipeline) or parts of a row's tensor (everything else), so rows are added up over
all ranks once a step, largest magnitudes by maximum; all ranks know all rows. From those come the scales of the next step
where scaling is delayed.

Legend: G operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from surefoot.precision.formats import Quantised, scale_of

Role = Literal["input", "weight", "gradient"]
ROLES: tuple[Role, ...] = ("input", "weight", "gradient")

_ENTRIES, _NARROWED, _SATURATED, _SEEN, _LOST = range(5)


class Meter:
    """Counts over all operands of a model; `names` are weights' full names, the same on all ranks."""

    def __init__(self, names: Sequence[str], device: torch.device, history: int | None) -> None:
        self.rows = {
            (name, role): 3 * index + place for index, name in enumerate(names) for place, role in enumerate(ROLES)
        }
        self._counts_G5 = torch.zeros((len(self.rows), 5), dtype=torch.float64, device=device)
        self._amax_G = torch.zeros(len(self.rows), device=device)
        self._length = history
        self._history: dict[tuple[str, Role], list[float]] = {key: [] for key in self.rows}
        self._scales: dict[tuple[str, Role], Tensor] = {}

    def delayed_scale(self, key: tuple[str, Role], largest: float) -> Tensor | None:
        """From the largest magnitude of the last steps (Micikevicius et al., 2022); None while none but 0 was seen."""
        if key not in self._scales and (amax := max(self._history[key], default=0.0)) > 0:
            amax_ = torch.tensor(amax, dtype=torch.float32, device=self._amax_G.device)
            self._scales[key] = scale_of(amax_, largest)
        return self._scales.get(key)

    def note_before(self, key: tuple[str, Role], num_entries: int, amax: Tensor) -> None:
        """An operand of a training pass, before it is quantised."""
        row = self._amax_G[self.rows[key]]
        torch.maximum(row, amax.amax(), out=row)
        self._counts_G5[self.rows[key], _ENTRIES] += num_entries

    def note(self, key: tuple[str, Role], found: Quantised) -> None:
        """What quantising it did."""
        row = self._counts_G5[self.rows[key]]
        row[_NARROWED] += found.values.numel()
        row[_SEEN] += found.seen
        row[_LOST] += found.lost
        if found.saturated is not None:
            row[_SATURATED] += found.saturated

    @torch.no_grad()
    def end_step(
        self, sum_: Callable[[Tensor], Tensor], max_: Callable[[Tensor], Tensor]
    ) -> dict[str, dict[str, float]]:
        """Add up over all ranks and start again. By `name/role`, of operands that were met: the largest magnitude `amax`,
        the shares that were `narrowed`, of these `saturated` and `underflowed` (not 0 before and 0 after), and `scale_age`.

        The age is the number of steps since the magnitude was seen that sets the scale; 0 where scaling is not delayed.
        """
        counts = sum_(self._counts_G5.clone()).tolist()
        amaxes = max_(self._amax_G.clone()).tolist()
        self._counts_G5.zero_()
        self._amax_G.zero_()
        found = {}
        for (key, row), amax in zip(self.rows.items(), amaxes, strict=True):
            entries, narrowed, saturated, seen, lost = counts[row]
            if entries:
                found["/".join(key)] = {
                    "amax": amax,
                    "narrowed": narrowed / entries,
                    "saturated": saturated / max(1.0, narrowed),
                    "underflowed": lost / max(1.0, seen),
                    "scale_age": float(self._age(key)),
                }
        if self._length is not None:
            self._scales.clear()
            for key, amax in zip(self.rows, amaxes, strict=True):
                # A step that is not finite is not taken, and would poison the scale.
                if math.isfinite(amax):
                    self._history[key] = [*self._history[key], amax][-self._length :]
        return found

    def _age(self, key: tuple[str, Role]) -> int:
        history = self._history[key]
        return len(history) - max(range(len(history)), key=lambda index: (history[index], index)) if history else 0

    def state(self) -> dict[str, list[float]]:
        """The history by `name/role`, equal on all ranks; empty where scaling is not delayed."""
        return {"/".join(key): list(values) for key, values in self._history.items() if values}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """Take up a history."""
        self._scales.clear()
        for key in self.rows:
            self._history[key] = [float(value) for value in state.get("/".join(key), ())]

    def describe(self, found: Mapping[str, Mapping[str, float]]) -> list[str]:
        """What the first step showed: which matrices are narrow, and which their blocks multiply by themselves."""
        names = list(dict.fromkeys(name for name, _ in self.rows))
        missed = [name for name in names if f"{name}/weight" not in found]
        lines = [f"narrow products (emulated): {len(names) - len(missed)} matrices"]
        if missed:
            lines.append(
                f"not narrow, though asked for: {', '.join(missed)}, which their blocks multiply by themselves"
            )
        return lines


def worst_of(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The largest `saturated`, `underflowed` and `scale_age` of all operands; empty where there are none."""
    keys = ("saturated", "underflowed", "scale_age") if found else ()
    return {key: max(row[key] for row in found.values()) for key in keys}
