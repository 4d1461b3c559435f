"""The plan of a run: what each rank and each round will cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcfed import config as configuration
from hpcfed.config import RunConfig
from hpcfed.errors import ConfigError
from hpcfed.planning.network import Layout, Network
from hpcfed.planning.profile import Profile
from hpcfed.planning.rehearsal import Rehearsed, rehearse

# Clients that are built to find out what one costs.
BUILT = 2


@dataclass(frozen=True)
class Plan:
    """What a run will cost.

    Attributes
    ----------
    nodes, ranks, clients, rounds : the run. A rank has at most ``clients_a_rank`` of its clients in a round.
    memory : bytes of a rank at its peak; of a node that is ``memory_node`` of ``memory_available``.
    bytes_up, bytes_down : of a round, over all ranks, as the run's ledger will count them.
    compute : seconds a round of the clients' work.
    overhead : seconds a round of coding and adding up messages, and of what every rank computes alike.
    network : seconds a round in which messages are under way.
    by_call : the part of ``network`` of each kind of call.
    notes : what was assumed.
    """

    nodes: int
    ranks: int
    clients: int
    rounds: int
    clients_a_rank: int
    memory: int
    memory_node: int
    memory_available: int
    bytes_up: int
    bytes_down: int
    compute: float
    overhead: float
    network: float
    by_call: Mapping[str, float]
    notes: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Of a round."""
        return self.compute + self.overhead + self.network


def make(config: RunConfig, nodes: int, ranks: int | None, profile: Profile) -> Plan:
    """The plan of a run on so many nodes of a machine; as many ranks as cores, but no more than clients, by default.

    Raises
    ------
    ConfigError
        If there are fewer ranks than nodes, or more than clients.
    """
    clients = config.workload.options.clients
    ranks = ranks or min(clients, nodes * profile.cores)
    configuration.refuse_ranks(config, ranks, tolerant=True)
    if ranks < nodes:
        raise ConfigError(f"--nodes {nodes} for {ranks} ranks: every node needs one: give at most {ranks} nodes")
    layout = Layout(nodes, ranks)
    link = profile.between.rank_speed if profile.between and nodes > 1 else None
    share = -(-clients // ranks)
    plays = [rehearse(config, layout, built, link) for built in range(1, min(BUILT, share, clients // ranks) + 1)]
    return assess(config, layout, profile, plays)


def assess(config: RunConfig, layout: Layout, profile: Profile, plays: list[Rehearsed]) -> Plan:
    """The plan from what rehearsals with one, two ... clients of a rank found."""
    clients = config.workload.options.clients
    share, network, last = -(-clients // layout.ranks), Network(layout, profile), plays[-1]
    by_call: dict[str, float] = {}
    for call in last.calls:
        by_call[call.kind] = by_call.get(call.kind, 0.0) + network.seconds(call)
    # Ranks that share a core take turns.
    turns = max(1.0, layout.crowd / profile.cores)
    each = max(0, last.held - plays[0].held)
    memory = max(play.resident for play in plays) + last.held + (share - len(plays)) * each
    participants = getattr(config.algorithm.options, "participants", None) or clients
    own = -(-participants // layout.ranks)
    return Plan(
        nodes=layout.nodes,
        ranks=layout.ranks,
        clients=clients,
        rounds=config.run.rounds,
        clients_a_rank=own,
        memory=memory,
        memory_node=memory * layout.crowd,
        memory_available=profile.memory,
        bytes_up=last.traffic["wire_bytes_up"] * participants // last.messages,
        bytes_down=last.traffic["wire_bytes_down"] * layout.ranks,
        compute=last.clients * turns,
        overhead=last.rest * turns,
        network=sum(by_call.values()),
        by_call=by_call,
        notes=_notes(layout, profile, len(plays), share),
    )


def _notes(layout: Layout, profile: Profile, built: int, share: int) -> tuple[str, ...]:
    notes = []
    if layout.crowd > 1 and profile.within is None:
        notes.append("messages within a node were not measured: hpcfed launch doctor --measure does")
    if layout.nodes > 1 and profile.between is None:
        notes.append("messages between nodes were not measured, a network of 25 Gbit/s is assumed")
    if share > built:
        notes.append(f"{built} of {share} clients of a rank were built, the others cost as much")
    if layout.crowd > profile.cores:
        notes.append(f"{layout.crowd} ranks of a node share {profile.cores} cores")
    return tuple(notes)


def facts(plan: Plan) -> dict[str, Any]:
    """The plan as one JSON object."""
    return {**dataclasses.asdict(plan), "seconds": plan.seconds, "total_seconds": plan.seconds * plan.rounds}


def table(plan: Plan) -> str:
    """The plan for a reader."""
    from hpcfed.doctor.system import human_size, plural
    from hpcfed.run.recorder import clock

    room = plan.memory_available
    fits = "" if plan.memory_node <= room else ": TOO MUCH"
    rows = [
        ("run", f"{plural(plan.clients, 'client')} on {plural(plan.ranks, 'rank')} of {plural(plan.nodes, 'node')}"),
        ("memory", f"{human_size(plan.memory)} a rank"),
        ("", f"{human_size(plan.memory_node)} of {human_size(room)} a node{fits}"),
        ("bytes up", f"{plan.bytes_up:,} a round"),
        ("bytes down", f"{plan.bytes_down:,} a round"),
        ("compute", f"{plan.compute:.3g} s a round, {plural(plan.clients_a_rank, 'client')} a rank"),
        ("overhead", f"{plan.overhead:.3g} s a round: coding and adding up messages, what all ranks do alike"),
        ("network", f"{plan.network:.3g} s a round: " + _calls(plan)),
        ("round", f"{plan.seconds:.3g} s; {plural(plan.rounds, 'round')} take {clock(plan.seconds * plan.rounds)}"),
        *(("note", note) for note in plan.notes),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {text}" for name, text in rows)


def _calls(plan: Plan) -> str:
    return ", ".join(f"{kind} {seconds:.3g} s" for kind, seconds in plan.by_call.items() if seconds > 0) or "none"
