"""Configurations: round trip, overrides, differences, and one line for every mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, model_validator

from surefoot.config import (
    Config,
    ConfigError,
    FieldError,
    diff,
    fingerprint,
    from_dict,
    load_json,
    override,
    to_dict,
    to_json,
)


class Part(Config):
    size: int = Field(default=4, gt=0)

    def build(self) -> None: ...


class Fast(Part):
    rate: float = 0.5
    kind: str = "a"

    @model_validator(mode="after")
    def _rate_fits(self) -> Fast:
        if self.rate > self.size:
            raise FieldError("rate", self.rate, f"must be at most size {self.size}")
        return self


class Whole(Config):
    part: Part = Part()
    parts: tuple[Part, ...] = (Part(), Fast())
    maybe: Part | None = None
    pair: tuple[float, float] = (0.9, 0.95)
    path: Path = Path("a/b")

    def build(self) -> None: ...


KNOWN = {f"{__name__}.{cls.__qualname__}": cls for cls in (Part, Fast, Whole)}


def test_round_trip_keeps_classes() -> None:
    whole = Whole(part=Fast(rate=0.25), maybe=Part(size=9))
    again = from_dict(json.loads(to_json(whole)), Whole, known=KNOWN)
    assert again == whole
    assert type(again.part) is Fast
    assert fingerprint(again) == fingerprint(whole) != fingerprint(Whole())


@given(st.integers(1, 10**9), st.floats(-1e300, 1, allow_nan=False))
def test_round_trip_of_any_value(size: int, rate: float) -> None:
    whole = Whole(part=Fast(size=size, rate=rate))
    assert from_dict(json.loads(to_json(whole)), Whole, known=KNOWN) == whole


@pytest.mark.parametrize(
    ("assignment", "path", "value"),
    [
        ("part.size=7", "part.size", 7),
        ("parts.1.rate=3e-1", "parts.1.rate", 0.3),
        ("parts.1.kind=text", "parts.1.kind", "text"),
        ("maybe={}", "maybe.size", 4),
        ("pair=[0.5, 1]", "pair.1", 1),
        ("path=c/d", "path", "c/d"),
    ],
)
def test_override_sets_one_leaf(assignment: str, path: str, value: object) -> None:
    changed = override(Whole(), [assignment])
    assert (path, value) in [(name, new) for name, _, new in diff(Whole(), changed)]


def test_override_in_order_and_by_type() -> None:
    whole = override(Whole(parts=(Fast(), Part())), ["part.size=3", f"part.type={__name__}.Fast", "part.rate=1"])
    assert whole.part == Fast(rate=1.0)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("part.sise=3", "part.sise: 3: no such key in Part; did you mean part.size?"),
        ("prt.size=3", "prt: 3: no such key in Whole; did you mean part?"),
        ("part.size=0", "part.size: 0: must be greater than 0"),
        ("part.size=2.5", "part.size: 2.5: must be a whole number"),
        ("part.size=true", "part.size: True: must be a whole number"),
        ("part.size=four", "part.size: 'four': must be a whole number"),
        ("part.size=null", "part.size: None: must be a whole number"),
        ("part.size.deep=1", "part.size.deep: 1: part.size is 4, which has no fields"),
        ("part=3", "part: 3: must be an object"),
        ("parts.7.size=1", "parts.7: 1: there is no item 7; the list has 2 items"),
        ("parts.x=1", "parts.x: 1: there is no item x"),
        ("parts.1.rate=5", "parts.1.rate: 5.0: must be at most size 4"),
        ("parts.1.rate=NaN", "parts.1.rate: nan: must be a finite number"),
        ("parts.1.kind=3", "parts.1.kind: 3: must be text"),
        ("pair=[1]", "pair.1: None: is required"),
        ("part.type=os.system", "comes from 'os'"),
        ("part.type=surefoot.config.base.json", "is not a Config class"),
        ("part.type=4", "is not an import path"),
        ("maybe.size=3", "maybe.size: 3: maybe is None, which has no fields"),
        ("part.size", "is not an assignment"),
        ("=3", "is not an assignment"),
    ],
)
def test_a_bad_override_is_one_line(assignment: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        override(Whole(), [assignment])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_constructor_names_the_nearest_key() -> None:
    with pytest.raises(ConfigError, match=r"Part\.sise: 3: no such key in Part; did you mean Part\.size\?"):
        Part(sise=3)


def test_a_configuration_cannot_change() -> None:
    with pytest.raises(Exception, match="frozen"):
        Part().size = 3  # type: ignore[misc]


@pytest.mark.parametrize("text", ["", "{", '{"part": ', "[]", "3", "\x00", '{"part": {"size": 1}}x', "[" * 100_000])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_json(file, Whole)
    assert "\n" not in str(caught.value)


def test_a_missing_or_binary_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    for name in ("missing.json", "binary.json", "."):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_json(tmp_path / name, Whole)


def test_a_saved_run_imports_nothing_foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile run.json: its package would leave a mark when imported."""
    mark = tmp_path / "ran"
    (tmp_path / "hostile_package.py").write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n")
    monkeypatch.syspath_prepend(tmp_path)
    data = to_dict(Whole()) | {"part": {"type": "hostile_package.Part"}}
    with pytest.raises(ConfigError, match="add --allow hostile_package"):
        from_dict(data, Whole, known=KNOWN)
    assert not mark.exists()
    with pytest.raises(ConfigError, match="is not a Config class"):
        from_dict(data, Whole, known=KNOWN, allow=["hostile_package"])
    assert mark.exists()


@pytest.mark.parametrize(
    "tag",
    [
        "os.system",
        "builtins.eval",
        "surefoot.config.base.importlib",
        "surefoot.config.base.os.system",
        "..x",
        "surefoot",
        "",
    ],
)
def test_a_tag_that_is_no_config_class_is_refused(tag: str) -> None:
    with pytest.raises(ConfigError):
        from_dict({"type": tag}, Whole)


def test_an_abstract_class_needs_a_kind() -> None:
    from surefoot.optim.schedule import Schedule

    for data in ({}, {"type": "surefoot.optim.schedule.Schedule"}):
        with pytest.raises(ConfigError, match="name a class that is a kind of Schedule"):
            from_dict(data, Schedule)
