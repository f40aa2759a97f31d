"""`Trainer`: load, then for each batch: step, hooks, save."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import numpy as np
import torch

from surefoot.checkpoint.load import latest
from surefoot.checkpoint.saver import Mode, Saver
from surefoot.config import RunError, fingerprint
from surefoot.data.loader import Loader
from surefoot.dist.heartbeat import Heartbeat
from surefoot.dist.startup import peak_memory
from surefoot.dist.waiting import WaitClock
from surefoot.models.routing import routers
from surefoot.observe.folder import RunFolder
from surefoot.observe.schema import Hook, ProductReport, RunStart, SampleReport, StepReport
from surefoot.ops.native.build import library, status
from surefoot.optim.base import Group
from surefoot.optim.schedule import progress_of
from surefoot.optim.update import UpdateMeter
from surefoot.precision.meter import worst_of
from surefoot.train.agree import StepFacts
from surefoot.train.copies import CopyCheck
from surefoot.train.evaluate import bits_per_byte, evaluate
from surefoot.train.facts import gather, peak_flops, weights_hash
from surefoot.train.pace import Pace
from surefoot.train.ready import get_ready
from surefoot.train.run import Run
from surefoot.train.state import Progress, compare_machines, parts_of, restore, states_of
from surefoot.train.step import StepResult, take_step

Complete = Callable[[Any, Sequence[int], int, torch.dtype], list[int]]
"""(model, prompt ids, number of new tokens, compute dtype) to new ids: generation is the caller's, see `infer`."""


class Trainer:
    """Trains one run, as one of its ranks. `fit` returns whether the run reached its end.

    With a plan of several ranks, torch's process group is there already; only rank 0 writes to the folder.
    """

    def __init__(
        self,
        run: Run,
        folder: RunFolder,
        hooks: Sequence[Hook] = (),
        complete: Complete | None = None,
        rank: int = 0,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self.heartbeat = heartbeat or Heartbeat()
        self.run, self.folder, self.rank = run, folder, rank
        self.hooks = [folder, *hooks] if rank == 0 else []
        self.complete = complete
        self.dtype = run.precision.compute_dtype
        self.clock = WaitClock()
        self.pace = Pace(self.clock)
        self.stop_signal: int | None = None
        self.agreed_to_stop = False
        self.is_written = False

    def fit(self) -> bool:
        """Train from the newest complete checkpoint, or from the start, to the last step or a signal to stop."""
        try:
            self._set_up()
            with self.saver:
                with self._signals(), self._loader() as loader, self.clock:
                    self._announce_start()
                    while self.progress.step < self.run.train.num_steps and not self._stops:
                        self._step(loader)
                        self._after_step()
                return self._finish()
        finally:
            for hook in self.hooks:
                hook.close()

    @property
    def _stops(self) -> bool:
        """One process stops when it is told to; several when they have agreed on the step."""
        return self.agreed_to_stop or (self.ranks.group is None and self.stop_signal is not None)

    # -- before the first step -----------------------------------------------------------------------------------------

    def _set_up(self) -> None:
        run = self.run
        ready = get_ready(run, self.rank, self.heartbeat, self._say)
        self.device, self.ranks, self.dataset = ready.device, ready.ranks, ready.dataset
        self.laid, self.params = ready.laid, ready.params
        self.states = states_of(self.laid.model, self.laid.mesh)
        self.optimizer = ready.optimizer
        self.update_meter = UpdateMeter(self.params, group=self.ranks.group)
        self.peak = peak_flops(self.device, self.dtype)
        self.facts = gather(run, self.dataset, self.device, self.peak)
        self.flops_per_token: float = self.facts["flops_per_token"]["causal"]
        self.saver = Saver(self.folder.checkpoints, run.checkpoint, self.ranks.group, self._say)
        self.progress = self._resume()
        self.copies = CopyCheck(self.laid.data_parallel, self.params, self.optimizer, self.ranks, self.folder.path)
        self.copies.agreed_step = self.progress.step

    def _resume(self) -> Progress:
        checkpoint = latest(self.folder.checkpoints, announce=self._say, group=self.ranks.group)
        saved_facts = self.folder.read_json("facts.json")
        if checkpoint is None:
            if saved_facts:
                self._say("no complete checkpoint: starting again from step 0")
            progress = Progress()
        else:
            progress = restore(checkpoint, self.params + self.states, self.optimizer, self.ranks)
            self.laid.after_step()
            if self.laid.meter is not None:
                self.laid.meter.restore(checkpoint.state.get("scales", {}))
            self._say(f"resuming from {checkpoint.path} at step {progress.step}")
            for line in compare_machines(saved_facts, self.facts) if saved_facts else []:
                self._say(line)
        if self.ranks.is_first:
            self.folder.rewind(progress.step)
            self.folder.write_json("facts.json", self.facts)
        return progress

    def _loader(self) -> Loader:
        batch = self.run.train.batch
        return Loader(self.dataset, batch, self.progress.samples, self.ranks.own(batch))

    def _announce_start(self) -> None:
        start = RunStart(self.run.name, str(self.folder.path), self.run.train.num_steps, self.progress.step, self.facts)
        counts, plan = self.facts["parameters"], self.facts["plan"]
        self._say(
            f"{counts['total']:,} parameters, {plan['tokens']:,} tokens ({plan['epochs']:.2f} epochs), "
            f"{self.flops_per_token * plan['tokens']:.2e} FLOPs, {self.run.precision.compute} on {self.device}"
        )
        if self.run.plan.num_ranks > 1:
            self._say(f"layout: {self.run.plan.describe()} ({self.run.plan.num_ranks} ranks)")
        ahead = sorted({type(router).__name__ for router in routers(self.laid.model) if router.looks_ahead})
        if ahead:
            self._say(
                f"WARNING: {', '.join(ahead)} looks ahead: in training its choices depend on later tokens and on the rest of the "
                "micro-batch, so the training loss is not that of a causal model"
            )
        if self.device.type == "cpu" and self.dtype is torch.bfloat16 and library() is None:
            self._say(f"elementwise passes are {status()}, which is slower")
        if self.run.precision.is_narrow:
            for roles, words in self.run.precision.describe().items():
                self._say(f"  {roles}: {words}")
        for group in self.facts["optimizer"]:
            self._say(f"  {Group(**group)}")
        self._say(f"first batch: {self._first_words()!r}")
        for hook in self.hooks:
            hook.on_start(start)

    def _first_words(self) -> str:
        """The start of the next batch, decoded, so that a wrong tokenizer is seen before the first step."""
        batch = self.dataset.batch(self.progress.samples, 1)
        return self.dataset.tokenizer.decode(batch.tokens_BL[0, :48])

    # -- a step --------------------------------------------------------------------------------------------------------

    def _step(self, loader: Loader) -> None:
        run, started = self.run, time.perf_counter()
        self.heartbeat.enter("data", self.progress.step + 1)
        self.pace.begin()
        batch = next(loader)
        data_seconds = time.perf_counter() - started
        factor = run.schedule(progress_of(self.progress.step, run.train.num_steps))
        facts = self.ranks.facts(
            batch,
            is_stopping=self.stop_signal is not None,
            is_writing=self.saver.is_writing,
            seconds=self.pace.own_seconds,
        )
        self.is_written = not facts.is_writing
        self.update_meter.before()
        result = take_step(
            self.laid,
            self.ranks,
            self.params,
            self.optimizer,
            batch,
            num_tokens=facts.num_tokens,
            scale=factor,
            micro_batch=run.micro_batch,
            max_gradient_norm=run.train.max_gradient_norm,
            device=self.device,
            dtype=self.dtype,
        )
        if not result.is_finite:
            raise self._not_finite(result)
        ratios = self.update_meter.after()
        self.pace.end()
        seconds = time.perf_counter() - started
        self.progress.count(
            facts,
            run.train.batch,
            run.data.sequence_length,
            self.flops_per_token,
            clipped=result.clip_coefficient < 1,
            seconds=seconds,
        )
        if facts.is_stopping:
            self.agreed_to_stop = True
            self.stop_signal = self.stop_signal or signal.SIGTERM  # some rank was told to: all stop after the same step
        # On a GPU work and wait look alike to the process.
        if self.device.type == "cpu" and (line := self.pace.compare(facts.rank_seconds)) is not None:
            self._say(line)
        self._note_measured()
        report = self._report(facts, result, factor, ratios, seconds, data_seconds)
        for hook in self.hooks:
            hook.on_step(report)
        self._report_products(result.products)

    def _report_products(self, products: dict[str, dict[str, float]]) -> None:
        every, step = self.run.observe.products_every, self.progress.step
        if not products or not (step == 1 or (every is not None and step % every == 0)):
            return
        if step == 1 and self.laid.meter is not None:
            for line in self.laid.meter.describe(products):
                self._say(line)
        for hook in self.hooks:
            hook.on_products(ProductReport(step, products))

    def _note_measured(self) -> None:
        """Once what the compiler made of layers, or what recomputed ones keep, is known: say it and add it to the facts."""
        for name, part in (("compilation", self.laid.compilation), ("recomputation", self.laid.recomputation)):
            if part is None or name in self.facts or (found := part.facts()) is None:
                continue
            self.facts[name] = found
            self._say(part.describe())
            if self.ranks.is_first:
                self.folder.write_json("facts.json", self.facts)

    def _report(
        self,
        facts: StepFacts,
        result: StepResult,
        factor: float,
        ratios: dict[str, float],
        seconds: float,
        data_seconds: float,
    ) -> StepReport:
        progress, num_tokens = self.progress, max(1, result.num_tokens)
        rate = self.run.train.batch * self.run.data.sequence_length / seconds
        achieved = rate * self.flops_per_token / self.run.plan.num_ranks
        return StepReport(
            step=progress.step,
            loss=result.nll / num_tokens,
            bits_per_byte=bits_per_byte(result.nll, facts.num_bytes),
            z_loss=self.run.model.z_loss * result.z / num_tokens,
            learning_rate=factor * self.run.optim.lr,
            gradient_norm=result.gradient_norm,
            clip_coefficient=result.clip_coefficient,
            clip_fraction=progress.clipped_steps / progress.step,
            update_ratio=ratios,
            tokens_per_second=rate,
            mfu=None if self.peak[0] is None else achieved / max(achieved, self.peak[0]),
            memory_bytes=peak_memory(self.device),
            tokens=progress.tokens,
            flops=progress.flops,
            samples=progress.samples,
            step_seconds=seconds,
            data_seconds=data_seconds,
            seconds=progress.seconds,
            token_hash=progress.token_hash[:16],
            time=time.time(),
            slowest_rank=None if self.pace.slowest is None else self.pace.slowest[0],
            slowest_ratio=None if self.pace.slowest is None else self.pace.slowest[1],
            router=result.router,
            products=worst_of(result.products),
        )

    def _after_step(self) -> None:
        step, observe = self.progress.step, self.run.observe
        if observe.fingerprint_every is not None and step % observe.fingerprint_every == 0:
            self.copies.check(step)
        if self.is_written:  # by all ranks, as they have agreed in this step
            self.saver.settle()
        if step == self.run.train.num_steps:
            return
        if observe.evaluate_every is not None and step % observe.evaluate_every == 0:
            self._evaluate(observe.evaluate_batches)
        if observe.sample_every is not None and step % observe.sample_every == 0:
            self._sample()
        every = self.run.checkpoint.every
        if every is not None and step % every == 0:
            self._save(self.run.checkpoint.mode)

    # -- what happens between steps ------------------------------------------------------------------------------------

    def _evaluate(self, max_batches: int | None) -> float | None:
        run = self.run
        size = run.micro_batch * run.plan.num_data_ranks
        report = evaluate(
            self.laid,
            self.ranks,
            self.dataset.heldout(size),
            step=self.progress.step,
            max_batches=max_batches,
            batch=size,
            micro_batch=run.micro_batch,
            device=self.device,
            dtype=self.dtype,
        )
        for hook in self.hooks:
            hook.on_evaluation(report)
        return report.bits_per_byte

    def _sample(self) -> None:
        observe = self.run.observe
        if self.complete is None or not observe.prompts:
            return
        if self.run.plan.num_ranks > 1:
            self._say(f"no samples: they need a model in one piece; surefoot generate {self.folder.path} makes them")
            return
        tokenizer, completions = self.dataset.tokenizer, []
        for prompt in observe.prompts:
            ids = [tokenizer.document, *tokenizer.encode_batch([prompt])[0].tolist()]
            new = self.complete(self.laid.model, ids, observe.sample_tokens, self.dtype)
            completions.append({"prompt": prompt, "text": tokenizer.decode(np.array(new))})
        for hook in self.hooks:
            hook.on_samples(SampleReport(self.progress.step, completions))

    def _save(self, mode: Mode) -> None:
        if self.run.observe.fingerprint_every is not None:
            self.copies.check(self.progress.step)  # no checkpoint is made of copies that differ
        self.heartbeat.enter("save")
        state = {"progress": dict(vars(self.progress)), "configuration": fingerprint(self.run)}
        if self.laid.meter is not None:
            state["scales"] = self.laid.meter.state()
        self.saver.save(
            self.progress.step, parts_of(self.params + self.states, self.optimizer, self.ranks), state, mode
        )

    def _finish(self) -> bool:
        self._save("blocking")
        if self.stop_signal is not None and self.progress.step < self.run.train.num_steps:
            self._say(
                f"stopped by {signal.Signals(self.stop_signal).name} after step {self.progress.step}; "
                f"continue with: surefoot train --resume {self.folder.path}"
            )
            return False
        heldout = self._evaluate(None if self.run.observe.evaluate_whole else self.run.observe.evaluate_batches)
        self._sample()
        weights = weights_hash(self.ranks.weights(self.params + self.states))
        if not self.ranks.is_first:
            return True
        self.folder.write_json("data.json", self.dataset.audit(self.progress.samples))
        self.facts["result"] = {
            "heldout_bits_per_byte": heldout,
            "seconds": self.progress.seconds,
            "tokens": self.progress.tokens,
            "token_hash": self.progress.token_hash,
            "weights_sha256": weights,
        }
        self.folder.write_json("facts.json", self.facts)
        return True

    def _not_finite(self, result: StepResult) -> RunError:
        """Keep what is needed to look into a loss that is not a number, and say where."""
        step = self.progress.step + 1
        place = self.folder.path / "evidence" / f"step-{step:08d}"
        norms = self.ranks.norms(self.params)
        self._save("blocking")
        if not self.ranks.is_first:
            return RunError(f"step {step}: a loss or gradient norm is not finite; rank 0 says more")
        batch = self.dataset.batch(self.progress.samples, self.run.train.batch)
        place.mkdir(parents=True, exist_ok=True)
        np.savez(place / "batch.npz", tokens=batch.tokens_BL, targets=batch.targets_BL, documents=batch.documents_BL)
        numbers = range(self.progress.samples, self.progress.samples + len(batch.tokens_BL))
        documents = [name for number in numbers for name, _, _ in self.dataset.locate(number).documents]
        documents = list(dict.fromkeys(documents))
        evidence = {
            "step": step,
            "loss": str(result.nll / max(1, result.num_tokens)),
            "gradient_norm": str(result.gradient_norm),
            "gradient_norms": {name: str(norm) for name, norm in norms.items()},
            "samples": [numbers.start, numbers.stop],
            "documents": documents,
        }
        (place / "evidence.json").write_text(json.dumps(evidence, indent=2) + "\n", encoding="utf-8")
        what = "loss" if not math.isfinite(result.nll) else "gradient norm"
        value = result.nll if what == "loss" else result.gradient_norm
        shown = ", ".join(documents[:3]) + (", …" if len(documents) > 3 else "")
        return RunError(
            f"step {step}: {what} is {value}; the weights of step {step - 1} are saved, the batch (documents {shown}) and "
            f"gradient norms are in {place}; lower optim.lr or look into the batch"
        )

    # -- signals and messages ------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        for hook in self.hooks:
            hook.on_message(text)

    def _signals(self) -> _Signals:
        return _Signals(self)


class _Signals:
    """The first SIGINT or SIGTERM ends the run after the step it is in; the second acts at once.

    Except for SIGTERM to a rank that was launched: a scheduler signals every process of a job and the launcher passes the
    signal on, so the second is the same order. It would hit the last checkpoint.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._trainer.stop_signal = number
        if number == signal.SIGTERM and "LOCAL_WORLD_SIZE" in os.environ:
            self._previous[number] = signal.SIG_IGN
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
