"""Which layers go to which devices, and which memory may hold their weights."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from pyggmlkv.backend.placement import cpu_buft_list, place_layers
from pyggmlkv.backend.select import select_devices
from pyggmlkv.binding.device import cpu_device
from pyggmlkv.errors import BackendError, DeviceNotFoundError


@dataclass(frozen=True)
class FakeDevice:
    """Looks like a Device to the placement, which only asks for names, memory and buffer types."""

    name: str
    free: int = 8
    type: str = "gpu"
    host_buffer_type: str | None = None
    extra_buffer_types: tuple[str, ...] = field(default=())

    @property
    def buffer_type(self) -> str:
        return f"{self.name}-memory"

    @property
    def memory(self) -> tuple[int, int]:
        return self.free, self.free


def names(placement) -> str:
    return " ".join(d.name for d in (*placement.layer_devices, placement.output_device))


def test_without_devices_all_is_on_the_cpu_with_repacked_memory_first():
    p = place_layers(3)
    assert names(p) == "CPU CPU CPU CPU"
    assert p.n_gpu_layers == 0
    assert p.input_bufts == p.output_bufts == p.layer_bufts(2) == cpu_buft_list()
    cpu = cpu_device()
    assert [b for _, b in p.input_bufts] == [*cpu.extra_buffer_types, cpu.buffer_type]


def test_repacked_memory_can_be_left_out():
    cpu = cpu_device()
    assert place_layers(1, use_extra_bufts=False).layer_bufts(0) == ((cpu, cpu.buffer_type),)


@pytest.mark.parametrize(
    "n, expected",
    [
        (None, "G G G G G"),
        (99, "G G G G G"),
        (5, "G G G G G"),
        (4, "CPU G G G G"),
        (1, "CPU CPU CPU CPU G"),
        (0, "CPU CPU CPU CPU CPU"),
    ],
)
def test_the_last_layers_go_to_the_device_and_the_output_counts_as_one(n, expected):
    assert names(place_layers(4, [FakeDevice("G")], n)) == expected


def test_the_input_stays_on_the_cpu_and_the_device_falls_back_to_it():
    g = FakeDevice("G", host_buffer_type="pinned", extra_buffer_types=("G-extra",))
    p = place_layers(1, [g])
    cpu_list = cpu_buft_list([g])
    assert (g, "pinned") in p.input_bufts
    assert p.input_bufts == cpu_list
    assert p.layer_bufts(0) == ((g, "G-memory"), (g, "G-extra"), *cpu_list)


@pytest.mark.parametrize(
    "split, expected",
    [
        (None, "A A B B B B B B"),
        ([1, 1], "A A A A B B B B"),
        ([3, 1], "A A A A A A B B"),
        ([0, 1], "B B B B B B B B"),
        ([0, 0], "A A B B B B B B"),
    ],
)
def test_several_devices_share_by_free_memory_or_by_the_weights_given(split, expected):
    devices = [FakeDevice("A", 10), FakeDevice("B", 30)]
    assert names(place_layers(7, devices, tensor_split=split)) == expected


def test_a_device_that_reports_no_memory_counts_as_large_as_the_hosts():
    p = place_layers(7, [FakeDevice("A", 0), FakeDevice("B", 0)])
    assert names(p) == "A A A A B B B B"


@pytest.mark.parametrize("split", [[1.0], [1.0, 2.0, 3.0], [-1.0, 2.0]])
def test_weights_that_do_not_fit_the_devices_are_refused(split):
    with pytest.raises(BackendError, match="tensor_split"):
        place_layers(4, [FakeDevice("A"), FakeDevice("B")], tensor_split=split)


@pytest.mark.parametrize("n", [-1, 513, 2**32 - 1])
def test_more_layers_than_any_model_has_are_refused_at_once(n):
    with pytest.raises(BackendError, match="layers"):
        place_layers(n)


def test_naming_the_cpu_selects_no_device():
    assert select_devices(["cpu"]) == ()
    assert select_devices([cpu_device()]) == ()
    assert select_devices([]) == ()


def test_an_unknown_device_is_refused_with_those_there_are():
    with pytest.raises(DeviceNotFoundError, match="CPU"):
        select_devices(["Quantum0"])
