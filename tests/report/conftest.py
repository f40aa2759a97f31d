"""A headless Chromium that opens a page and tells what became of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=10000",
)


@dataclass(frozen=True)
class Visit:
    """The document after its scripts ran, and what they wrote to the console (errors and policy violations too)."""

    dom: str
    console: list[str]

    def root(self, name: str) -> str | None:
        """A data attribute of the root element."""
        return _attribute(re.search(r"<html[^>]*>", self.dom), name)

    def plot(self, figure: str, name: str) -> str | None:
        """A data attribute of a chart."""
        return _attribute(re.search(rf'<div class="plot[^>]*id="plot-{figure}"[^>]*>', self.dom), name)

    def drawn(self, figure: str) -> list[str]:
        """For each trace drawn in a chart, its SVG."""
        part = self.dom.split(f'id="plot-{figure}"', 1)[1].split("</figure>", 1)[0]
        layer = part.split('<g class="scatterlayer', 1)[1].split("</svg>", 1)[0]
        return layer.split('<g class="trace scatter')[1:]


Browse = Callable[..., Visit]


@pytest.fixture(scope="session")
def browse(tmp_path_factory: pytest.TempPathFactory) -> Browse:
    """Opens a file in Chromium; skips where there is none, except in CI, where there must be one."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail("CI has no Chromium on its PATH: install the package chromium")
        pytest.skip("no Chromium on the PATH: install the package chromium to test the page in a browser")
    profile = tmp_path_factory.mktemp("chromium")

    def visit(page: Path, fragment: str = "") -> Visit:
        command = [program, *FLAGS, f"--user-data-dir={profile}", "--dump-dom", page.resolve().as_uri() + fragment]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return Visit(done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line])

    return visit


def _attribute(tag: re.Match[str] | None, name: str) -> str | None:
    found = re.search(rf'\sdata-{name}="([^"]*)"', tag[0]) if tag else None
    return found[1] if found else None
