"""Which device a rank takes."""

from __future__ import annotations

import pytest
import torch

from surefoot.dist.startup import choose_device


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


@pytest.mark.parametrize("name", ["cuda", "auto"])
@pytest.mark.usefixtures("two_devices")
def test_each_rank_of_a_machine_takes_its_own_device(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert choose_device(name) == torch.device("cuda")
    for rank in (0, 1):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert choose_device(name) == torch.device("cuda", rank)
    assert choose_device("cuda:0") == torch.device("cuda", 0)
    assert choose_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="there are 2 CUDA devices here and this is local rank 2"):
        choose_device(name)
