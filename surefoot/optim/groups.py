"""Sorting parameters into groups by role. Roles come from axes alone; names are never matched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from surefoot.optim.base import Group, OptimizerConfig, Param, Role

ROLES: tuple[Role, ...] = ("matrix", "vocabulary", "vector")


def split_by_role(params: Sequence[Param]) -> dict[Role, list[Param]]:
    """Every parameter under its role, in the order given; roles without parameters are left out.

    Raises `ValueError` where there are none, or where a name or a tensor comes twice: a tied weight is one parameter.
    """
    if not params:
        raise ValueError("an optimizer needs at least one parameter")
    names: set[str] = set()
    tensors: set[int] = set()
    for param in params:
        if param.name in names or id(param.tensor) in tensors:
            raise ValueError(f"the name or the tensor of parameter {param.name} comes twice")
        names.add(param.name)
        tensors.add(id(param.tensor))
    split: dict[Role, list[Param]] = {role: [param for param in params if param.role == role] for role in ROLES}
    return {role: members for role, members in split.items() if members}


def describe(
    config: OptimizerConfig, split: Mapping[Role, Sequence[Param]], methods: Mapping[Role, str]
) -> list[Group]:
    """One `Group` a role, with the configured rates."""
    return [
        Group(
            role=role,
            method=methods[role],
            lr=config.lr_of(role),
            weight_decay=config.weight_decay_of(role),
            names=tuple(param.name for param in members),
            num_elements=sum(param.num_elements for param in members),
        )
        for role, members in split.items()
    ]
