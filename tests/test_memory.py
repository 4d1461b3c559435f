"""What does not fit is refused with its numbers, on every rank, before it is allocated."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hpcfed import memory
from hpcfed.devices import Device
from hpcfed.doctor.system import memory_headroom
from hpcfed.errors import ConfigError
from hpcfed.ranks.communicator import SerialCommunicator

GIBI = 1 << 30


def ranks(nodes, needs):
    """What rank 0 sees of ranks on these nodes with these needs."""
    return SimpleNamespace(size=len(nodes), nodes=lambda: nodes, gather=lambda own: [(need, own[1]) for need in needs])


def test_all_ranks_of_a_node_count(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 10 * GIBI)
    need = {"volumes": 3 * GIBI, "scratch": GIBI}
    memory.require(ranks([0, 0, 1, 1], [need] * 4), Device(), need, "shrink")
    with pytest.raises(ConfigError) as refused:
        memory.require(ranks([0, 0, 1, 0], [need] * 4), Device(), need, "shrink")
    assert refused.value.everywhere
    for words in ("12.0 GiB for 3 ranks on one node", "volumes 3.0 GiB, scratch 1.0 GiB", "10.0 GiB", "shrink"):
        assert words in str(refused.value)


def test_a_share_of_a_gpu_counts_alone(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 1)
    need = {"volumes": 3 * GIBI}
    memory.require(ranks([0, 0], [need] * 2), Device("cuda:0", 4 * GIBI), need, "shrink")
    with pytest.raises(ConfigError, match="on this GPU"):
        memory.require(ranks([0, 0], [need] * 2), Device("cuda:0", 2 * GIBI), need, "shrink")


def test_a_system_that_does_not_say_refuses_nothing(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 0)
    memory.require(SerialCommunicator(), Device(), {"volumes": 1 << 60}, "shrink")


def test_the_system_is_asked():
    assert 0 <= memory.available() < 1 << 50


@pytest.mark.parametrize(
    ("group", "base", "names", "room"),
    [
        ("0::/job/step", "", ("memory.max", "memory.current"), 500 - 300 + 40),
        ("4:memory:/job/step", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), 500 - 300 + 40),
    ],
)
def test_control_groups_leave_what_they_do_not_use(tmp_path, group, base, names, room):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(group + "\n")
    assert memory_headroom(tmp_path) is None
    for folder, limit in (("job", "1000"), ("job/step", "500")):
        place = tmp_path / "sys/fs/cgroup" / base / folder
        place.mkdir(parents=True)
        for name, text in zip((*names, "memory.stat"), (limit, "300", "anon 260\ninactive_file 40\n"), strict=True):
            (place / name).write_text(text)
    assert memory_headroom(tmp_path) == room
