"""Finding a recipe: a shipped name, `file.py:function`, a saved run.json or a run folder."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import surefoot.recipes
from surefoot.config import ConfigError, load_json
from surefoot.train.run import Run

Recipe = Callable[[], Run]


def shipped() -> dict[str, Recipe]:
    """Every function of `surefoot/recipes/*.py` that returns a `Run`, by its name with dashes."""
    found: dict[str, Recipe] = {}
    for module_info in pkgutil.iter_modules(surefoot.recipes.__path__):
        if module_info.name == "find":
            continue
        module = importlib.import_module(f"surefoot.recipes.{module_info.name}")
        for name, function in vars(module).items():
            is_recipe = (
                inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
            )
            if is_recipe and inspect.signature(function).return_annotation in (Run, "Run"):
                found[name.replace("_", "-")] = function
    return dict(sorted(found.items()))


def find_recipe(text: str, allow: Iterable[str] = ()) -> Run:
    """The run that `text` names; `ConfigError` says what is wrong with it."""
    path = Path(text)
    if path.is_dir():
        return load_json(path / "run.json", Run, allow=allow)
    if path.suffix == ".json":
        return load_json(path, Run, allow=allow)
    file, colon, name = text.rpartition(":")
    if colon and file.endswith(".py"):
        return _from_file(Path(file), name)
    recipes = shipped()
    if text not in recipes:
        near = difflib.get_close_matches(text, recipes, n=1, cutoff=0.4)
        hint = (
            f"did you mean {near[0]}?"
            if near
            else f"choose one of {', '.join(recipes)}, or file.py:function, or a run folder"
        )
        raise ConfigError("RECIPE", text, f"is not a recipe; {hint}")
    return recipes[text]()


def _from_file(file: Path, name: str) -> Run:
    if not file.is_file():
        raise ConfigError("RECIPE", str(file), "there is no such file")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ConfigError("RECIPE", str(file), "is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, ImportError) as error:
        raise ConfigError("RECIPE", str(file), f"cannot be imported ({error})") from None
    function = getattr(module, name, None)
    if not callable(function):
        names = [
            key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == file.stem
        ]
        raise ConfigError(
            "RECIPE", f"{file}:{name}", f"there is no such function; the file defines {', '.join(names) or 'none'}"
        )
    run = function()
    if not isinstance(run, Run):
        raise ConfigError("RECIPE", f"{file}:{name}", f"must return a surefoot.train.run.Run, not {type(run).__name__}")
    return run
