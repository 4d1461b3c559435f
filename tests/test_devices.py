"""Which rank computes on which GPU, with devices that are not there."""

from __future__ import annotations

import sys
import types

import pytest

from hpcfed import devices
from hpcfed.doctor import world
from hpcfed.doctor.findings import attempt
from hpcfed.errors import ConfigError


@pytest.fixture
def gpus(monkeypatch):
    """``gpus(n)``: torch and ASTRA find n GPUs of 10 GB, 8 of them free."""

    def pretend(count: int) -> None:
        cuda = types.SimpleNamespace(
            is_available=lambda: count > 0,
            device_count=lambda: count,
            mem_get_info=lambda index: (8 * 10**9, 10 * 10**9),
            get_device_properties=lambda index: types.SimpleNamespace(uuid=f"gpu-{index}"),
        )
        monkeypatch.setattr(devices, "has_cuda_driver", lambda: True)
        monkeypatch.setitem(sys.modules, "astra", types.SimpleNamespace(use_cuda=lambda: count > 0))
        monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))

    return pretend


@pytest.mark.parametrize(("count", "ranks"), [(1, 3), (4, 4), (4, 10), (3, 2)])
def test_ranks_of_a_node_take_its_gpus_in_turn(gpus, count, ranks):
    gpus(count)
    chosen = [devices.choose("auto", rank) for rank in range(ranks)]
    assert [device.index for device in chosen] == [rank % count for rank in range(ranks)]
    assert len({device.identity for device in chosen}) == min(count, ranks)


def test_ranks_that_share_a_gpu_share_its_memory(gpus):
    gpus(1)
    device = devices.choose("cuda", 5)
    assert device.memory == int(devices.USABLE_SHARE * 8 * 10**9)
    assert device.shared_by(4).memory == device.memory // 4


def test_without_a_gpu_the_cpu_computes(gpus):
    gpus(0)
    assert not devices.choose("auto", 0).is_gpu
    assert not devices.choose("cpu", 0).is_gpu
    with pytest.raises(ConfigError, match="--device cuda"):
        devices.choose("cuda", 0)


def rank(core: int | frozenset[int], gpu: str = "", gpus: int = 0, host: str = "one") -> world.Rank:
    cores = core if isinstance(core, frozenset) else frozenset({core})
    return world.Rank(host, "", cores, True, 1, None, 1e-3, True, gpu=gpu, gpus=gpus, transport="ob1 self,sm")


def found(*ranks: world.Rank) -> list[tuple[str, str]]:
    return [(finding.mark, finding.what) for finding in attempt(world.places, world.World(ranks, {}))]


def test_each_rank_has_a_place():
    findings = attempt(world.places, world.World([rank(0), rank(frozenset({1, 2, 3, 8}), "0", 1), rank(4)], {}))
    assert [finding.what for finding in findings] == ["rank 0", "rank 1", "rank 2"]
    assert findings[1].found == "one: cores 1-3, 8, 1 thread, GPU 0, messages by ob1 self,sm"
    assert findings[0].found == "one: core 0, 1 thread, no GPU, messages by ob1 self,sm"


def test_ranks_in_a_row_are_one_line():
    both = frozenset({0, 1})
    assert found(*[rank(both)] * 2, *[rank(both, host="two")] * 2) == [("ok", "ranks 0-1"), ("ok", "ranks 2-3")]


@pytest.mark.parametrize(
    ("used", "there", "warned"), [(["0", "1"], 4, True), (["0", "1"], 2, False), (["", ""], 2, False)]
)
def test_gpus_without_a_rank_are_a_problem(used, there, warned):
    marks = found(*(rank(number, gpu, there) for number, gpu in enumerate(used)))
    assert (("!!", "GPUs") in marks) == warned


@pytest.mark.parametrize(
    ("cores", "warned"),
    [
        ([frozenset({0}), frozenset({0}), frozenset({1, 2, 3})], True),
        ([frozenset({0}), frozenset({1}), frozenset({2})], False),
        ([frozenset({0, 1, 2})] * 3, False),
        ([frozenset({0})] * 2, False),  # there is no other core, which the check of the cores tells
    ],
)
def test_ranks_bound_to_one_core_are_a_problem(cores, warned):
    assert (("!!", "binding") in found(*map(rank, cores))) == warned
