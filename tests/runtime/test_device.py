"""Facts are measured once and come from the cache afterwards."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from fusewright.errors import UnsupportedError
from fusewright.runtime import device
from fusewright.runtime.device import DeviceFacts, device_facts

CPU = torch.device("cpu")
KNOWN = DeviceFacts("known", 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    calls: list[str] = []

    def measure(name: str, where: torch.device) -> DeviceFacts:
        calls.append(name)
        return dataclasses.replace(KNOWN, name=name)

    monkeypatch.setattr(device, "_measured", measure)
    monkeypatch.setattr(device, "cache_directory", lambda: tmp_path)
    device_facts.cache_clear()
    yield calls
    device_facts.cache_clear()


def test_measured_once_then_read(measured: list[str], tmp_path: Path) -> None:
    first = device_facts(CPU)
    assert device_facts(CPU) is first and len(measured) == 1
    device_facts.cache_clear()
    assert device_facts(CPU) == first and len(measured) == 1
    assert len(list(tmp_path.glob("device-*.json"))) == 1


NO_RATES = json.dumps(dataclasses.asdict(KNOWN) | {"conv": "fast"})
NOTHING_PER_SECOND = json.dumps(dataclasses.asdict(KNOWN) | {"memory": 0.0})


@pytest.mark.parametrize(
    "text", ["", "{}", '{"name": "x"}', "[1, 2]", '{"name": "x", "other": 1}', NO_RATES, NOTHING_PER_SECOND]
)
def test_a_spoilt_file_is_written_anew(measured: list[str], tmp_path: Path, text: str) -> None:
    facts = device_facts(CPU)
    (path,) = tmp_path.glob("device-*.json")
    path.write_text(text)
    device_facts.cache_clear()
    assert device_facts(CPU) == facts and len(measured) == 2
    assert json.loads(path.read_text()) == dataclasses.asdict(facts)


def test_other_threads_are_another_device(measured: list[str], tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        device_facts(CPU)
        torch.set_num_threads(before + 1)
        device_facts.cache_clear()
        device_facts(CPU)
    finally:
        torch.set_num_threads(before)
    assert len(measured) == 2 and len(list(tmp_path.iterdir())) == 2


def test_without_a_safe_cache(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def unsafe() -> Path:
        raise UnsupportedError("somebody else's directory")

    monkeypatch.setattr(device, "cache_directory", unsafe)
    assert device_facts(CPU).conv == 1.0 and measured


def test_a_disk_that_takes_nothing(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(device, "write_atomic", full)
    assert device_facts(CPU).conv == 1.0 and measured


def test_this_machine_has_positive_rates() -> None:
    facts = dataclasses.asdict(device._measured(device.device_name(CPU), CPU))
    assert facts.pop("name").endswith("cpu")
    assert all(0 < rate < 1e16 for rate in facts.values()) and facts["launch"] < 1e-3
