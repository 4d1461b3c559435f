"""What a run may say about privacy, and what it must not: a report as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcfed.privacy.accountant import ADJACENCY
from hpcfed.privacy.calibration import best_order, check_delta
from hpcfed.privacy.ledger import PrivacyLedger

THREAT_MODEL = (
    "record-level privacy of each client's records (inter-silo record-level DP): a record trusts its own client; "
    "the network, the server and all other clients see every message of the client"
)
PUBLIC_KNOWLEDGE = (
    "numbers of records, who holds which, the numbers of epochs and steps, step sizes, the clipping bound, sigma, and "
    "the order of the records"
)
NOT_CLAIMED = (
    "privacy of whole clients or persons: records of several clients add up, k of one may cost k^2 times as much",
    "anything for losses, accuracies, gradient norms, timings, or steps tuned on private data: they are in no ledger",
    "amplification by shuffling or sampling: the random order of records earns nothing",
    "a gain from averaging over clients: an Allreduce shows partial sums to other ranks, and is no secure aggregation",
    "protection from attacks on floating-point noise or on side channels",
    "privacy of private data that helped to choose the public data",
)
SEEDED = (
    "the seed is fixed and known, so the noise can be subtracted: this run has NO privacy, and is a simulation of one "
    "that would have what follows; --rng secure draws noise that cannot be repeated"
)
SECURE = "noise was drawn from the operating system's entropy; the run cannot be repeated bit by bit"


@dataclass(frozen=True)
class PrivacyReport:
    """The privacy of a run.

    Attributes
    ----------
    ledgers : what each client was charged, by client id.
    delta : at which epsilon is told.
    seeded : whether the noise came from a fixed seed.
    released : what left the clients, such as ``"each client's iterate at the end of each epoch"``.
    reasons : why costs are amplified, or why not, as the accountant said it.
    unaccounted : what the run published about private records without charging for it.
    """

    ledgers: Mapping[int, PrivacyLedger]
    delta: float
    seeded: bool
    released: Sequence[str]
    reasons: Sequence[str] = ()
    unaccounted: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_delta(self.delta)

    @property
    def rho(self) -> float:
        """The largest of a client: a record is at one client, so clients' costs do not add up."""
        return max((ledger.rho for ledger in self.ledgers.values()), default=0.0)

    @property
    def epsilon(self) -> float:
        """The largest of a client."""
        return max((ledger.epsilon(self.delta) for ledger in self.ledgers.values()), default=0.0)

    def facts(self) -> dict[str, Any]:
        """The report as a table that JSON can hold."""
        return {
            "private": not self.seeded,
            "noise": SEEDED if self.seeded else SECURE,
            "adjacency": ADJACENCY,
            "threat_model": THREAT_MODEL,
            "public_knowledge": PUBLIC_KNOWLEDGE,
            "delta": self.delta,
            "epsilon": self.epsilon,
            "rho": self.rho,
            "order": best_order(self.rho, self.delta) if self.rho else None,
            "clients": [
                {
                    "client": client,
                    "rho": ledger.rho,
                    "epsilon": ledger.epsilon(self.delta),
                    "epsilon_gaussian": ledger.gaussian_epsilon(self.delta),
                    "private_epochs": int((ledger.entries["rho"] > 0).sum()),
                    "amplified_epochs": int(ledger.amplified.sum()),
                }
                for client, ledger in sorted(self.ledgers.items())
            ],
            "amplification": list(self.reasons),
            "released": list(self.released),
            "unaccounted": list(self.unaccounted),
            "not_claimed": list(NOT_CLAIMED),
        }

    def json(self) -> str:
        """The facts as JSON."""
        return json.dumps(self.facts(), indent=2, allow_nan=False)

    def text(self) -> str:
        """The report in words; clients that were charged alike share a line."""
        known = self.facts()
        lines = [
            f"privacy: every record is ({self.epsilon:.6g}, {self.delta:g})-private at most, rho = {self.rho:.6g}",
            f"{'WARNING' if self.seeded else 'noise'}: {known['noise']}",
            f"neighbours: {ADJACENCY} of one client",
            f"threat model: {THREAT_MODEL}",
            f"public anyway: {PUBLIC_KNOWLEDGE}",
            *(f"amplification: {reason}" for reason in self.reasons),
            *(f"released: {each}" for each in self.released),
            *(f"released, NOT accounted for: {each}" for each in self.unaccounted),
            "client        epochs  amplified  rho          epsilon      epsilon, exact",
            *_rows(known["clients"]),
            *(f"not claimed: {each}" for each in NOT_CLAIMED),
        ]
        return "\n".join(lines)


def _rows(clients: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each group of clients with equal costs."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for facts in clients:
        groups.setdefault(tuple(value for name, value in facts.items() if name != "client"), []).append(facts["client"])
    lines = []
    for (rho, epsilon, exact, epochs, amplified), members in groups.items():
        consecutive = len(members) > 2 and members[-1] - members[0] == len(members) - 1
        who = f"{members[0]}-{members[-1]}" if consecutive else ",".join(map(str, members))
        told = "-" if exact is None else f"{exact:.6g}"
        lines.append(f"{who:12}  {epochs:6}  {amplified:9}  {rho:<11.6g}  {epsilon:<11.6g}  {told}")
    return lines
