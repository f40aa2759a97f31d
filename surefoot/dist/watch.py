"""A watch over the ranks of a run: no rank waits longer than the timeout, and what held it up is named.

Beside each rank's main thread a second one looks at its heartbeat and a third carries signs of life to the store that the
ranks share. Where a phase of a step takes longer than the timeout, or a collective fails, the rank writes where all its
threads are, calls the others, which do the same, and one of them judges. Then all end with exit code `LOST`, for a
launcher to start them again. A rank that holds the interpreter lock for ever is ended by `faulthandler`, whose thread
needs none; one that is stopped is killed by a rank on its machine.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from surefoot.dist.blame import Collective, Sign, Verdict, judge
from surefoot.dist.heartbeat import Heartbeat

LOST = 75
"""Exit code of a rank that lost others: sysexits.h's EX_TEMPFAIL, try again."""

CONSEQUENCES = ("Connection closed", "Connection reset", "Broken pipe", "Timed out", "timed out", "pair closure")
"""Marks of an error that says that a peer went away or is late: not the cause."""

MARGIN = 5.0
"""Seconds by which the timeout of collectives should be above the watch's."""

PATIENCE = 2.0
"""Seconds that the ranks get to report once one of them has called."""


def is_consequence(error: BaseException) -> bool:
    """Whether an error comes from another rank's."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(mark in str(error) for mark in CONSEQUENCES)
    )


class Watch:
    """Context around a rank's work; its process group is there. Reports go to `file`, the verdict to stderr too.

    It leaves by `os._exit(LOST)` when other ranks are lost, and lets an error of this rank's own pass.
    """

    def __init__(self, heartbeat: Heartbeat, timeout: float, file: Path) -> None:
        self._heartbeat, self._timeout, self._path = heartbeat, timeout, file
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._tick = min(1.0, timeout / 20)
        # Connections of their own: the main thread may sit in a call on its one, and so may the carrier.
        store: Any = distributed_c10d._get_default_store()
        self._carried, self._store = store.clone(), store.clone()
        self._carried.set_timeout(timedelta(seconds=timeout))
        self._store.set_timeout(timedelta(seconds=PATIENCE))
        self._closing, self._ended = threading.Event(), threading.Event()
        self._failure = self._alarm = ""
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._guard, self._carry)]

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.is_file():  # of an earlier life
            names = (self._path.with_name(f"{self._path.name}.{number}") for number in itertools.count(1))
            self._path.rename(next(name for name in names if not name.exists()))
        self._file = self._path.open("w", encoding="utf-8")
        self._carried.set(f"watch/rank/{self._rank}", self._sign("runs", 0).text())
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None and is_consequence(error):
            sys.stdout.flush()
            self._failure = f"{type(error).__name__}: {_line(error)}"
            self._threads[0].join()  # which ends the process
        self._ended.set()
        self._threads[0].join()
        if error is None:
            self._heartbeat.enter("end")
        own = isinstance(error, Exception)
        self._within(
            PATIENCE, self._publish, self._sign("failed" if own else "ended", 0, _line(error) if own else None)
        )
        self._file.close()
        if self._path.stat().st_size == 0:
            self._path.unlink()

    # -- while all is well ---------------------------------------------------------------------------------------------

    def _guard(self) -> None:
        while not self._ended.wait(self._tick):
            # Armed anew at every look: it goes off only when this thread cannot run.
            faulthandler.dump_traceback_later(self._timeout, exit=True, file=self._file)
            beat = self._heartbeat.beat
            seconds = time.monotonic() - beat.since
            if self._failure:
                self._close(self._failure, self._failure)
            elif self._alarm:
                self._close(self._alarm, None)
            elif seconds > self._timeout and beat.phase != "start":
                # Preparing data may take long; what the others wait for there is bounded by their collectives.
                self._close(f"no progress for {seconds:.0f} s", None)
        faulthandler.cancel_dump_traceback_later()

    def _carry(self) -> None:
        ticks = 0
        # Without a store there is nothing to carry: its host is gone, and the next collective will say so.
        with contextlib.suppress(dist.DistError, RuntimeError):
            while not (self._ended.wait(self._tick) or self._closing.is_set()):
                ticks += 1
                self._carried.set(f"watch/rank/{self._rank}", self._sign("runs", ticks).text())
                if self._carried.check(["watch/alarm"]):
                    self._alarm = self._carried.get("watch/alarm").decode()

    def _sign(self, status: Any, ticks: int, error: str | None = None, collective: Collective | None = None) -> Sign:
        beat = self._heartbeat.beat
        seconds = time.monotonic() - beat.since
        place = (status, beat.number, beat.step, beat.phase, seconds)
        return Sign(self._rank, *place, os.getpid(), _machine(), ticks, collective, error)

    def _publish(self, sign: Sign) -> None:
        self._store.set(f"watch/end/{self._rank}", sign.text())
        self._store.add("watch/ends", 1)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _close(self, reason: str, error: str | None) -> None:
        self._closing.set()
        faulthandler.dump_traceback_later(6 * PATIENCE, exit=True, file=self._file)
        collective = last_collective()
        sign = self._sign("closing", 0, error, collective)
        last = "none" if collective is None else f"{collective.describe(self._num_ranks)}, {collective.state}"
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._write(f"== {stamp} rank {self._rank}, life {life}, {sign.place} for {sign.seconds:.0f} s: {reason}")
        self._write(f"last collective: {last}")
        faulthandler.dump_traceback(self._file, all_threads=True)

        found = None
        if self._within(PATIENCE, self._call, sign, reason):
            found = self._within(3 * PATIENCE, self._verdict, sign)
        if found is None:
            # torchrun keeps the store in a process of its own; else rank 0 does.
            host = "the launcher" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
            self._say(f"{host} is gone or stopped: the store that it keeps does not answer{_stack(self._path)}")
        else:
            self._write(found["text"])
            for process, machine in found["silent"]:
                if machine == _machine():
                    with contextlib.suppress(OSError):
                        os.kill(process, signal.SIGKILL)
        self._within(PATIENCE, sys.stdout.flush)
        self._file.flush()
        os._exit(LOST)

    def _call(self, sign: Sign, reason: str) -> bool:
        """Tell the others, unless one of them did."""
        self._publish(sign)
        if not self._store.check(["watch/alarm"]):
            self._store.set("watch/alarm", f"called by rank {self._rank}: {reason}")
        return True

    def _verdict(self, own: Sign) -> dict[str, Any]:
        """One rank judges, rank 0 if it is there, and the others take its verdict."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and self._store.add("watch/ends", 0) < self._num_ranks:
            time.sleep(0.05)
        deadline = time.monotonic() + PATIENCE
        while self._rank > 0 and time.monotonic() < deadline and not self._store.check(["watch/verdict"]):
            time.sleep(0.05)
        if self._store.compare_set("watch/judge", "", str(self._rank)).decode() == str(self._rank):
            verdict, silent = self._judge(own)
            self._say(verdict.text + _stack(self._path, verdict.ranks))
            text = json.dumps({"text": verdict.text, "silent": [(sign.process, sign.machine) for sign in silent]})
            self._store.set("watch/verdict", text)
            if self._rank == 0:
                time.sleep(0.5)  # the others read it from a store that may end with this process
        found: dict[str, Any] = json.loads(self._store.get("watch/verdict"))
        return found

    def _judge(self, own: Sign) -> tuple[Verdict, list[Sign]]:
        signs = {own.rank: own}
        silent: dict[int, str] = {}
        for rank in range(self._num_ranks):
            for kind in ("end", "rank"):
                if rank not in signs and self._store.check([f"watch/{kind}/{rank}"]):
                    signs[rank] = Sign.read(self._store.get(f"watch/{kind}/{rank}"))
            if rank not in signs or signs[rank].status == "runs":
                silent[rank] = _condition(signs.get(rank), self._path.with_name(f"rank-{rank}.fault"))
        return judge(signs, silent, self._timeout), [signs[rank] for rank in silent if rank in signs]

    def _within(self, seconds: float, call: Callable[..., Any], *arguments: Any) -> Any:
        """What a call returns, or None where it fails or is not done in time."""
        results = []

        def run() -> None:
            with contextlib.suppress(Exception):
                results.append(call(*arguments))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(seconds)
        return results[0] if results else None

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._file.write(text + "\n")
            self._file.flush()

    def _say(self, text: str) -> None:
        self._write(text)
        # Past Python's buffers, whose locks the main thread may hold.
        os.write(2, f"surefoot: {text}\n".encode())


def last_collective() -> Collective | None:
    """The collective that this rank is in, else its newest, from torch's flight recorder."""
    dump = getattr(c10d, "_dump_fr_trace_json", None)
    entries = [] if dump is None else json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
    if not entries:
        return None
    active = [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]
    entry = active[0] if active else entries[-1]
    world = distributed_c10d._world
    names = {name: tuple(sorted(world.pg_group_ranks[group])) for group, name in world.pg_names.items()}
    return Collective(
        entry["profiling_name"].partition(":")[2],
        entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"],
        names.get(entry["process_group"][0], ()),
        "waits" if active else "done",
    )


def _machine() -> str:
    """Where process numbers mean the same."""
    space = Path("/proc/self/ns/pid")
    return platform.node() + (f" {space.readlink()}" if space.is_symlink() else "")


def _condition(sign: Sign | None, report: Path) -> str:
    """What is known of a rank that gives no answer."""
    if report.is_file() and report.stat().st_size:
        return "held the interpreter lock for longer than the timeout"  # so that faulthandler alone could write
    if sign is None or sign.machine != _machine():
        return "is gone or does not answer"
    status = Path(f"/proc/{sign.process}/stat")
    with contextlib.suppress(OSError, IndexError):
        state = status.read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        known = {"T": "is stopped (SIGSTOP), so it cannot show its stack", "Z": "is dead"}
        return known.get(state, "does not answer and was killed")
    return "is dead"


def _stack(own: Path, ranks: tuple[int, ...] = ()) -> str:
    """Which report to read: the first culprit's if it wrote one, else this rank's."""
    files = [own.with_name(f"rank-{rank}.fault") for rank in ranks]
    file = next((file for file in files if file.is_file() and file.stat().st_size), own)
    return f"; {'stack' if file in files else 'where this rank waited'} in {file}"


def _line(error: BaseException | None) -> str:
    return " ".join(str(error).split())[:500]
