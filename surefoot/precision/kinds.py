"""The ways to quantise the operands of a product: which format, and which entries share a scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from surefoot.precision.formats import E2M1, E4M3, E5M2, Format, Tile
from surefoot.precision.meter import Role

Name = Literal["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8", "mxfp4", "nvfp4"]

WHOLE, ROW = Tile(None, None), Tile(1, None)


@dataclass(frozen=True)
class Kind:
    """`rows` and `block` are tiles of an operand whose contraction runs along its columns: of activations and gradients, and
    of weights."""

    forward: Format
    gradient: Format
    rows: Tile
    block: Tile
    is_delayed: bool = False
    has_two_levels: bool = False

    def form(self, role: Role) -> Format:
        """The format of an operand."""
        return self.gradient if role == "gradient" else self.forward

    def tile(self, role: Role, *, along_rows: bool) -> Tile:
        """The entries that share a scale where the contraction runs along the rows, or the columns."""
        tile = self.block if role == "weight" else self.rows
        return tile.turned if along_rows else tile

    @property
    def has_tiles(self) -> bool:
        """Whether tiles have a fixed length along the contraction."""
        return self.rows.columns is not None

    @property
    def is_of_pass(self) -> bool:
        """Whether tokens of a whole pass, on all ranks, share a scale: then micro-batches are part of the function."""
        return not self.is_delayed and (not self.has_tiles or self.has_two_levels)

    @property
    def length(self) -> int:
        """That length; 1 where a tile is as long as its operand."""
        return self.rows.columns or 1


def kind_of(name: Name, *, gradient: Literal["e4m3", "e5m2"], tile: int) -> Kind:
    """By name; `tile` is the length of blockwise tiles.

    tensorwise, delayed   one scale an operand: of what it holds, or of what it held in the last steps (Micikevicius et al.,
                          2022)
    rowwise               one a row along the contraction (torchao)
    blockwise             1 x 128 of activations and gradients, 128 x 128 of weights (DeepSeek-AI, 2024)
    mxfp8, mxfp4          1 x 32 (Rouhani et al., 2023)
    nvfp4                 1 x 16, an e4m3 scale each (Abecassis et al., 2025)
    """
    backward = {"e4m3": E4M3, "e5m2": E5M2}[gradient]
    if name in {"tensorwise", "delayed"}:
        return Kind(E4M3, backward, WHOLE, WHOLE, is_delayed=name == "delayed")
    if name == "rowwise":
        return Kind(E4M3, backward, ROW, ROW)
    if name == "blockwise":
        return Kind(E4M3, backward, Tile(1, tile), Tile(tile, tile))
    if name == "mxfp8":
        return Kind(E4M3, backward, Tile(1, 32), Tile(1, 32))
    if name == "mxfp4":
        return Kind(E2M1, E2M1, Tile(1, 32), Tile(1, 32))
    return Kind(E2M1, E2M1, Tile(1, 16), Tile(1, 16), has_two_levels=True)
