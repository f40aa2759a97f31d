"""Compiling `kernels.c` for this machine, once, and loading it.

A C compiler takes about a second; the library is kept under the cache directory by a hash of source, compiler, flags and
processor. Without a compiler, or with SUREFOOT_NATIVE=0, operations run as chains of PyTorch's own: `status` says which.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

# The object is compiled with OpenMP but linked without it: its calls then bind to the OpenMP library that PyTorch has
# loaded, whose threads are the ones that the rest of a step uses. A second library would bring threads of its own.
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fPIC")


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels, or None where they cannot be had."""
    return _load()[0]


def status() -> str:
    """What elementwise passes run on a CPU, for the record."""
    return _load()[1]


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get("SUREFOOT_NATIVE") == "0":
        return None, "PyTorch's (SUREFOOT_NATIVE=0)"
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if compiler is None or platform.system() != "Linux":
        return None, "PyTorch's (no C compiler)" if compiler is None else "PyTorch's (not on Linux)"
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
        found = ctypes.CDLL(str(_compiled(compiler, version)))
        _declare(found)
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        text = getattr(error, "stderr", None) or str(error)
        line = (text.strip().splitlines() or [type(error).__name__])[0]
        return None, f"PyTorch's ({Path(compiler).name} failed: {line[:200]})"
    return found, f"compiled by {version.splitlines()[0]}"


def _compiled(compiler: str, version: str) -> Path:
    source = Path(__file__).with_name("kernels.c")
    parts = (source.read_text(encoding="utf-8"), version, " ".join(_FLAGS), torch.__version__, _processor())
    key = _digest("\0".join(parts).encode())
    root = _cache() / "kernels"
    # The name says what the file must hold: loading one that was cut short would end the process.
    for made in root.glob(f"{key}-*.so"):
        if made.stem == f"{key}-{_digest(made.read_bytes())}":
            return made
        made.unlink()
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as folder:
        compiled, linked = Path(folder, "kernels.o"), Path(folder, "kernels.so")
        for command in (
            [compiler, *_FLAGS, "-c", str(source), "-o", str(compiled)],
            [compiler, "-shared", str(compiled), "-o", str(linked)],
        ):
            subprocess.run(command, capture_output=True, text=True, check=True)
        target = root / f"{key}-{_digest(linked.read_bytes())}.so"
        linked.replace(target)  # whole or absent, also when several processes compile at once
    return target


def _cache() -> Path:
    """That of `data.cache`, which this room does not see."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("SUREFOOT_CACHE") or Path(base, "surefoot")).expanduser()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(("model name", "flags", "Features"))))


def _declare(found: ctypes.CDLL) -> None:
    count, pointer, number = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
    signatures = {
        "rms_norm_forward": [count, count, pointer, pointer, number, pointer, pointer],
        "rms_norm_backward": [count, count, count, *[pointer] * 6],
        "swiglu_forward": [count, *[pointer] * 3],
        "swiglu_backward": [count, *[pointer] * 5],
        "sum_rows": [count, count, count, *[pointer] * 4],
        "spread_rows": [count, count, count, *[pointer] * 6],
        "cross_entropy": [count, count, pointer, pointer, number, count, pointer, pointer],
        "rotate": [*[count] * 4, pointer, count, count, pointer, pointer, count, number, pointer],
    }
    for name, arguments in signatures.items():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, None
