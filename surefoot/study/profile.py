"""Where a step goes: seconds by phase, part and layer, beside what this machine can do at most.

Time belongs to the place that was entered last. A part's forward pass lies between its hooks; its backward pass begins where
autograd reaches the node that made its output, and ends where it reaches the node that made its input. Hooks read clocks and
sizes only, so that the weights come out as they do in training. Seconds inside waits for collectives are kept apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, record_function

from surefoot.config import ConfigError, override
from surefoot.data.loader import Loader
from surefoot.dist.heartbeat import Heartbeat
from surefoot.dist.heartbeat import Phase as Beat
from surefoot.dist.waiting import WaitClock
from surefoot.models.count import build_meta, flops_per_token
from surefoot.ops.autograd import is_again
from surefoot.optim.base import Optimizer, Param
from surefoot.optim.schedule import progress_of
from surefoot.optim.update import UpdateMeter
from surefoot.parallel.apply import Laid, check
from surefoot.train.facts import peak_flops
from surefoot.train.ready import get_ready
from surefoot.train.run import Run
from surefoot.train.step import take_step

WARM_UP = 2
"""Steps before the first that is timed: they build kernels and fill the allocator."""

PHASES = ("data", "forward", "recompute", "backward", "gradients", "optimizer", "recording")
PARTS = ("embedding", "mixer", "ffn", "norm", "connection", "head", "other")
MFU = "flops_per_token.causal x tokens a second a rank / max(matmul ceiling, what was achieved)"


class Place(NamedTuple):
    """A phase of the step, and of the passes the part and the layer counted from 0."""

    phase: str
    part: str = "other"
    layer: int | None = None


@dataclass
class Spent:
    """Seconds of own work and of waits for collectives; bytes that must move at least, were no cache to hold any."""

    seconds: float = 0.0
    waited: float = 0.0
    num_bytes: float = 0.0


@dataclass(frozen=True)
class Profile:
    """What was found, a step. `step_seconds` is without hooks, `hooked_seconds` with them; `flops` are this rank's, by
    part and layer."""

    step_seconds: float
    hooked_seconds: float
    tokens_per_second: float
    flops_per_second: float
    spent: dict[Place, Spent]
    flops: dict[tuple[str, int | None], float]
    peak: float | None
    peak_source: str
    bandwidth: float
    params: list[Param] = field(repr=False)

    @property
    def mfu(self) -> float | None:
        """See `MFU`; None where the ceiling is not known."""
        return None if self.peak is None else self.flops_per_second / max(self.flops_per_second, self.peak)

    def total(self, *, phase: str | None = None, part: str | None = None, layer: int | None = None) -> Spent:
        """Over all places that agree with what is given."""
        return _sum(each for place, each in self.spent.items() if _agrees(place, phase, part, layer))

    def total_flops(self, *, part: str) -> float:
        """The same of FLOPs, forward and backward together: the head's loss makes its gradients in its forward pass."""
        return sum(flops for (name, _), flops in self.flops.items() if name == part)


def _agrees(place: Place, phase: str | None, part: str | None, layer: int | None) -> bool:
    return phase in (None, place.phase) and part in (None, place.part) and layer in (None, place.layer)


def _sum(those: Iterable[Spent]) -> Spent:
    total = Spent()
    for each in those:
        total.seconds += each.seconds
        total.waited += each.waited
        total.num_bytes += each.num_bytes
    return total


class Timeline:
    """Adds up what each place has cost. With `labels`, each stay in a place is a range in torch's profiler too."""

    def __init__(self, device: torch.device, clock: WaitClock) -> None:
        self.spent: dict[Place, Spent] = {}
        self.labels = False
        self._device, self._clock = device, clock
        self._place: Place | None = None
        self._since = self._waited = 0.0
        self._outer: list[Place | None] = []
        self._range: record_function | None = None

    def enter(self, place: Place | None) -> None:
        """From here on time belongs to `place`; to none, where it is None."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # a part on a GPU has run only then
        now, waited = time.perf_counter(), self._clock.seconds
        if self._place is not None:
            spent = self.at(self._place)
            spent.waited += waited - self._waited
            spent.seconds += now - self._since - (waited - self._waited)
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if self.labels and place is not None:
            layer = "" if place.layer is None else f" {place.layer}"
            self._range = record_function(f"{place.phase}: {place.part}{layer}")
            self._range.__enter__()
        self._place, self._since, self._waited = place, time.perf_counter(), self._clock.seconds

    def at(self, place: Place) -> Spent:
        """What a place has cost so far."""
        return self.spent.setdefault(place, Spent())

    def begin(self, place: Place) -> None:
        """A part's forward pass begins inside of where time goes now."""
        self._outer.append(self._place)
        self.enter(place)

    def end(self) -> None:
        """It ends: time goes again where it went, but never to the backward pass of an earlier micro-batch."""
        outer = self._outer.pop()
        is_stale = outer is not None and outer.phase == "backward" and not is_again()
        self.enter(Place("forward") if is_stale else outer)


_PLACES = {"data": Place("data"), "forward-backward": Place("forward"), "optimizer": Place("optimizer")}


class _Phases(Heartbeat):
    """A heartbeat that also tells the timeline which phase of the step begins."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        super().__init__()
        self.timeline: Timeline | None = None
        self._heartbeat = heartbeat

    def enter(self, phase: Beat, step: int | None = None) -> None:
        """See `Heartbeat.enter`."""
        self._heartbeat.enter(phase, step)
        if self.timeline is not None and phase in _PLACES:
            self.timeline.enter(_PLACES[phase])


@contextmanager
def watched(laid: Laid, timeline: Timeline) -> Iterator[None]:
    """While it lasts, the passes of a model without a pipeline tell the timeline where they are."""
    model = laid.text
    with ExitStack() as stack:
        for module, part, layer in parts_of(model):
            before, after = _hooks(timeline, module, part, layer)
            stack.callback(module.register_forward_pre_hook(before).remove)
            stack.callback(module.register_forward_hook(after, always_call=True).remove)
        # The head's loss and the reduction are no modules' forward passes: the methods are covered by timed ones.
        before, after = _hooks(timeline, model.head, "head", None)
        loss, reduce = model.head.loss, laid.data_parallel.reduce

        def timed_loss(*arguments: Any) -> Any:
            before(model.head, arguments)
            result = loss(*arguments)
            after(model.head, arguments, result)
            return result

        def timed_reduce() -> None:
            timeline.enter(Place("gradients"))
            reduce()

        for owner, name, timed in ((model.head, "loss", timed_loss), (laid.data_parallel, "reduce", timed_reduce)):
            vars(owner)[name] = timed
            stack.callback(vars(owner).pop, name)
        yield


def parts_of(model: nn.Module) -> Iterator[tuple[nn.Module, str, int | None]]:
    """The modules of a decoder whose passes are timed, with part and layer."""
    yield model.get_submodule("embedding"), "embedding", None
    yield model.get_submodule("norm"), "norm", None
    for index, layer in enumerate(model.get_submodule("layers").children()):
        yield layer, "other", index
        for name, module in layer.named_children():
            yield module, "connection" if name.startswith("connect") else name.partition("_")[0], index


def _hooks(
    timeline: Timeline, module: nn.Module, part: str, layer: int | None
) -> tuple[Callable[..., None], Callable[..., None]]:
    def before(_module: nn.Module, arguments: tuple[Any, ...]) -> None:
        for x in arguments[:1]:
            # What made the input is no part's, unless it was the end of one.
            _mark(timeline, x, Place("backward", "other", layer))
        timeline.begin(Place("recompute" if is_again() else "forward", part, layer))

    def after(_module: nn.Module, arguments: tuple[Any, ...], result: Any) -> None:
        timeline.end()
        found = result[0] if isinstance(result, tuple) else result
        _mark(timeline, found, Place("backward", part, layer))
        if part == "other" or is_again() or found is arguments[0]:  # a plain residual connection hands on what it reads
            return
        taken, made = _bytes(arguments[:1]), _bytes([found])
        weights = sum(weight.nbytes for weight in module.parameters())
        timeline.at(Place("forward", part, layer)).num_bytes += taken + made + weights
        # Backward reads the output's gradient, input and weights and writes the gradients of both.
        timeline.at(Place("backward", part, layer)).num_bytes += made + 2 * taken + 2 * weights

    return before, after


def _mark(timeline: Timeline, x: Any, place: Place) -> None:
    """Time goes to `place` when backward reaches what made `x`; the first mark of a node stays."""
    node: Any = x.grad_fn if isinstance(x, Tensor) else None
    if node is not None and "surefoot.place" not in node.metadata:
        node.metadata["surefoot.place"] = place
        node.register_prehook(lambda _gradients: timeline.enter(place))


def _bytes(those: Iterable[Any]) -> int:
    return sum(x.nbytes for x in those if isinstance(x, Tensor))


def measure_bandwidth(device: torch.device) -> float:
    """Bytes a second of a copy too large for caches, read and written: the best of five."""
    source = torch.ones(1 << (28 if device.type == "cuda" else 26), device=device)
    target, best = torch.empty_like(source), float("inf")
    for _ in range(5):
        started = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2 * source.nbytes / best


def optimizer_bytes(params: list[Param], optimizer: Optimizer) -> int:
    """Bytes that an update must move: weights and state read and written, gradients read."""
    state = [tensor.nbytes for moments in optimizer.state().values() for tensor in moments.values()]
    gradients = sum(param.tensor.grad.nbytes for param in params if param.tensor.grad is not None)
    return 2 * sum(param.tensor.nbytes for param in params) + gradients + 2 * sum(state)


def flops_by_part(run: Run) -> dict[tuple[str, int | None], float]:
    """Causal FLOPs of a step on one rank; recomputation is no work that a model needs and is not counted."""
    model, length = build_meta(run.model), run.data.sequence_length
    flops: dict[tuple[str, int | None], float] = {("head", None): model.head.flops()}
    for index, layer in enumerate(model._layers()):
        if layer.mixer is not None:
            flops["mixer", index] = layer.mixer.flops(length, causal=True)
        if layer.ffn is not None:
            flops["ffn", index] = layer.ffn.flops()
    times = 3 * run.train.batch * length / run.plan.num_ranks
    return {place: times * each for place, each in flops.items()}


def check_profile(run: Run, num_steps: int) -> None:
    """`ConfigError` where it cannot be profiled; needs no process group."""
    if num_steps < 1:
        raise ConfigError("--steps", num_steps, "must be at least 1")
    if run.plan.pipeline > 1:
        raise ConfigError(
            "plan.pipeline", run.plan.pipeline, "is not profiled: passes of stages interleave; use pipeline=1"
        )
    check(run.plan, run.model, run.data.sequence_length, run.precision)


def profile(
    run: Run,
    num_steps: int,
    *,
    rank: int = 0,
    heartbeat: Heartbeat | None = None,
    trace: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Profile:
    """`num_steps` steps of the run timed whole, as many by part, and with `trace` one more into a Chrome trace file.

    As in training, every rank calls it; what comes back is this rank's.
    """
    check_profile(run, num_steps)
    total = WARM_UP + 2 * num_steps + (trace is not None)
    if total > run.train.num_steps:
        run = override(run, [f"train.num_steps={total}"])
    phases = _Phases(heartbeat or Heartbeat())
    session = _Session(run, rank, phases, say)
    with session.clock, session.loader:
        say(f"{WARM_UP} steps to warm up, {num_steps} timed whole, {num_steps} timed by part")
        session.steps(WARM_UP)
        whole = session.steps(num_steps)
        say(f"{whole:.3g} s a step; now by part")
        timeline = Timeline(session.device, session.clock)
        with watched(session.laid, timeline):
            phases.timeline = timeline
            hooked = session.steps(num_steps)
            phases.timeline = None
        if trace is not None:
            say(f"one step into {trace}")
            session.trace(trace)
    for each in timeline.spent.values():
        each.seconds, each.waited, each.num_bytes = (
            value / num_steps for value in (each.seconds, each.waited, each.num_bytes)
        )
    timeline.at(Place("optimizer")).num_bytes = optimizer_bytes(session.params, session.optimizer)
    rate = run.train.batch * run.data.sequence_length / whole
    causal = flops_per_token(build_meta(run.model), run.data.sequence_length)["causal"]
    return Profile(
        whole,
        hooked,
        rate,
        rate * causal / run.plan.num_ranks,
        timeline.spent,
        flops_by_part(run),
        *session.peak,
        session.bandwidth,
        session.params,
    )


class _Session:
    """A run set up as `Trainer` does, without a folder; steps are taken as it takes them."""

    def __init__(self, run: Run, rank: int, phases: _Phases, say: Callable[[str], None]) -> None:
        self.run, self.phases, self.clock = run, phases, WaitClock()
        say("reading the data and measuring the machine")
        ready = get_ready(run, rank, phases, say)
        self.device, self.ranks, self.laid, self.params = ready.device, ready.ranks, ready.laid, ready.params
        self.peak = peak_flops(self.device, run.precision.compute_dtype)
        self.bandwidth = measure_bandwidth(self.device)
        self.optimizer = ready.optimizer
        self.meter = UpdateMeter(self.params, group=self.ranks.group)
        self.loader = Loader(ready.dataset, run.train.batch, 0, self.ranks.own(run.train.batch))
        self.step = 0

    def steps(self, count: int) -> float:
        """Take so many steps; the mean seconds of one."""
        started = time.perf_counter()
        for _ in range(count):
            self._take()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return (time.perf_counter() - started) / count

    def trace(self, file: Path) -> None:
        """One step as a Chrome trace, with a range for every stay in a place."""
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])]
        timeline = Timeline(self.device, self.clock)
        timeline.labels = True
        with torch.profiler.profile(activities=activities) as profiler, watched(self.laid, timeline):
            self.phases.timeline = timeline
            self._take()
            self.phases.timeline = None
        if self.ranks.is_first:
            profiler.export_chrome_trace(str(file))

    def _take(self) -> None:
        run, timeline = self.run, self.phases.timeline
        self.phases.enter("data", self.step + 1)
        batch = next(self.loader)
        facts = self.ranks.facts(batch, is_stopping=False, is_writing=False)
        if timeline is not None:
            timeline.enter(Place("recording"))
        self.meter.before()
        result = take_step(
            self.laid,
            self.ranks,
            self.params,
            self.optimizer,
            batch,
            num_tokens=facts.num_tokens,
            scale=run.schedule(progress_of(self.step, run.train.num_steps)),
            micro_batch=run.micro_batch,
            max_gradient_norm=run.train.max_gradient_norm,
            device=self.device,
            dtype=run.precision.compute_dtype,
        )
        if not result.is_finite:
            raise ConfigError("RECIPE", run.name, f"has a loss that is not finite in step {self.step + 1}")
        if timeline is not None:
            timeline.enter(Place("recording"))
        self.meter.after()
        if timeline is not None:
            timeline.enter(None)
        self.step += 1
