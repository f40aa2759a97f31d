"""A world of any size seen from one rank, with neither peers nor memory: for dry runs.

Code that would train runs as it is. Its tensors have shapes and storages but no bytes (torch's meta device, wherever the code
asked for memory), its collectives return at once, and every question about data (a loss as a number, whether a mask hides
anything) is answered with 1: documents are packed, sums are finite, nothing is clipped. `Ledger` knows which storages are
alive. Attention is what a fused kernel keeps: no tensor of queries by keys but the mask.

What torch keeps private and this needs stands in this file alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from surefoot.dist.count import Counter
from surefoot.dist.mesh import Grid, Mesh, forget_groups

META = torch.device("meta")

_ANSWER = 1.0
_aten = torch.ops.aten
_to_list = torch.Tensor.tolist


@dataclass
class Ledger:
    """Bytes of the storages that are alive, and the most there were at once, from `open` on."""

    live: int = 0
    peak: int = 0
    is_open: bool = False
    _sizes: dict[int, int] = field(default_factory=dict)
    _watched: dict[int, weakref.ref[Any]] = field(default_factory=dict)
    _from_backward: set[int] = field(default_factory=set)

    def open(self, tensors: Iterable[Tensor]) -> None:
        """Start with these; whatever else was made before is taken to be gone."""
        self.is_open = True
        for tensor in tensors:
            self.watch(tensor)

    def watch(self, tensor: Tensor) -> None:
        """Count a tensor's storage until it is gone."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._watched:
            return
        self._watched[key] = weakref.ref(storage, lambda _: self._forget(key))
        if torch._C._current_graph_task_id() != -1:
            self._from_backward.add(key)
        self.resize(storage)

    def claim(self, tensor: Tensor) -> None:
        """It is a backward pass's now, whoever made it."""
        if torch._C._current_graph_task_id() != -1:
            self._from_backward.add(tensor.untyped_storage()._cdata)

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Note the size that a watched storage has now."""
        key = storage._cdata
        if key in self._watched:
            size = storage.nbytes()
            self.live += size - self._sizes.get(key, 0)
            self._sizes[key] = size
            self.peak = max(self.peak, self.live)

    @property
    def gradients(self) -> int:
        """Bytes alive that a backward pass made: between passes, gradients."""
        return sum(self._sizes[key] for key in self._from_backward)

    def _forget(self, key: int) -> None:
        del self._watched[key]
        self._from_backward.discard(key)
        self.live -= self._sizes.pop(key, 0)


class _NoMemory(TorchDispatchMode):
    """Every tensor is made on meta, whatever device is asked for.

    Layers are alike: what an operation returns for operands of one form is worked out once.
    """

    def __init__(self, ledger: Ledger, counter: Counter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger, self._counter = ledger, counter
        self._kinds: dict[Any, _Kind] = {}
        self._forms: dict[Any, list[_Form]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        if func is _aten._local_scalar_dense.default and args[0].is_meta:
            return _ANSWER
        if func.namespace == "c10d":
            self._counter.note(func, args)
        kwargs = kwargs or {}
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": META}
            if "generator" in kwargs:
                kwargs["generator"] = None
        found = self._run(func, args, kwargs)
        if self._ledger.is_open:
            for tensor in _tensors((found,)):
                if tensor.is_meta:
                    self._ledger.watch(tensor)
                    if func is _aten.mul_.Tensor:  # a gradient made in a forward pass, as the loss does, is scaled
                        self._ledger.claim(tensor)
        return found

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        kind = self._kinds.get(func) or self._kinds.setdefault(func, _kind_of(func))
        if kind == "other":
            return func(*args, **kwargs)
        key = (func, *map(_described, args), *((name, _described(value)) for name, value in kwargs.items()))
        forms = self._forms.get(key)
        if forms is None:
            found = func(*args, **kwargs)
            made = _tensors((found,))
            if all(tensor.is_meta for tensor in made):
                self._forms[key] = [_Form(tensor) for tensor in made]
            return found
        if kind == "in place":
            return args[0]
        tensors = tuple(form.make() for form in forms)
        return tensors[0] if len(func._schema.returns) == 1 else tensors


_Kind = Literal["in place", "new", "other"]


class _Form:
    """Shape, strides and dtype of a result."""

    def __init__(self, tensor: Tensor) -> None:
        self._form = tuple(tensor.shape), tensor.stride(), tensor.dtype

    def make(self) -> Tensor:
        shape, stride, dtype = self._form
        return torch.empty_strided(shape, stride, dtype=dtype, device=META)


def _kind_of(func: Any) -> _Kind:
    """Whether an operation returns the first operand it has changed, or new tensors, as far as its schema can tell."""
    arguments, returns = func._schema.arguments, func._schema.returns
    if func.namespace != "aten" or not returns or any(str(each.type) != "Tensor" for each in returns):
        return "other"
    changed = [each for each in arguments if each.alias_info is not None]
    if not changed and all(each.alias_info is None for each in returns):
        return "new"
    is_pointwise = torch.Tag.pointwise in func.tags or func is _aten.copy_.default
    return "in place" if is_pointwise and changed == arguments[:1] and func._schema.name.endswith("_") else "other"


def _described(value: object) -> object:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device.type
    if isinstance(value, list | tuple):
        return tuple(map(_described, value))
    return type(value), value


def _tensors(values: Iterable[object]) -> list[Tensor]:
    """Those among `values`, and in lists among them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def _tolist(tensor: Tensor) -> Any:
    return _to_list(tensor) if not tensor.is_meta else _filled(tuple(tensor.shape))


def _filled(shape: tuple[int, ...]) -> Any:
    return _ANSWER if not shape else [_filled(shape[1:]) for _ in range(shape[0])]


def _attention(
    q_BHLK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: ARG001 - the kernel reads it off the shapes
) -> Tensor:
    """torch alone would take its unfused form on meta, and keep every probability."""
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q_BHLK.dtype).masked_fill(attn_mask, float("-inf"))
    found = _aten._scaled_dot_product_flash_attention_for_cpu(
        q_BHLK, k_BGSK, v_BGSK, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )
    return cast(Tensor, found[0])


class FakeMesh(Mesh):
    """A grid over a fake world; torch's own meshes compute with ranks, which are real numbers."""

    def device_mesh(self, device_type: str, *parts: tuple[str, ...]) -> DeviceMesh:
        """See `Mesh.device_mesh`. FSDP2 works for devices that have streams, and a CPU's cost nothing."""
        with _disable_current_modes():
            return super().device_mesh("cpu" if device_type == "meta" else device_type, *parts)


@dataclass(frozen=True)
class FakeWorld:
    """One rank of it: its mesh, what it holds and what it sends."""

    mesh: FakeMesh
    ledger: Ledger
    counter: Counter


@contextmanager
def fake_world(grid: Grid, rank: int) -> Iterator[FakeWorld]:
    """A world of `grid.num_ranks` seen from one of them, on the device `META`. Leaves no process group behind.

    `RuntimeError` where there is a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError("a dry run needs a process of its own: this one has a process group")
    world = FakeWorld(FakeMesh(grid, rank), Ledger(), Counter())
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        found = resize(storage, size)
        world.ledger.resize(storage)
        return found

    forget_groups()
    # One process has no groups, as in training.
    if grid.num_ranks > 1:
        dist.init_process_group("cpu:fake,meta:fake", store=FakeStore(), rank=rank, world_size=grid.num_ranks)
        # Without a default, torch warns when the group ends.
        cast(ProcessGroup, dist.group.WORLD)._set_default_backend(ProcessGroup.BackendType.CUSTOM)
    try:
        with (
            mock.patch.object(torch.UntypedStorage, "resize_", resize_),
            # FSDP2 refuses weights without memory.
            mock.patch.object(_fsdp_param_group.FSDPParamGroup, "_validate_no_meta_params", return_value=None),
            mock.patch.object(torch.Tensor, "tolist", _tolist),
            mock.patch.object(F, "scaled_dot_product_attention", _attention),
            _NoMemory(world.ledger, world.counter),
        ):
            yield world
    finally:
        if grid.num_ranks > 1:
            dist.destroy_process_group()
            forget_groups()
