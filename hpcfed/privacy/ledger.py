"""What one client has spent: an append-only table of its epochs, part of a run's state and so of its checkpoints."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcfed.errors import ConfigError, DataError
from hpcfed.privacy.accountant import ADJACENCY, Epoch
from hpcfed.privacy.calibration import check_delta, epsilon_of_rho, gaussian_epsilon, mu_of_rho
from hpcfed.privacy.certify import Certificate

FORMAT = 1
ENTRY = np.dtype(
    [
        ("round", np.int64),
        ("private_steps", np.int64),
        ("public_steps", np.int64),
        ("batch", np.int64),
        ("clip", np.float64),
        ("noise", np.float64),
        ("public_noise", np.float64),
        ("hidden", np.bool_),
        ("contractive", np.bool_),
        ("rho", np.float64),
    ]
)


@dataclass(frozen=True)
class PrivacyLedger:
    """The epochs that a client was charged for. `charge` returns a new ledger; no entry is ever changed or removed.

    A charge comes before the release that it pays for. An epoch that is repeated with fresh noise, after a crash say,
    is another release and is charged again, whatever its round; one that is repeated bit by bit is the same release.

    Attributes
    ----------
    entries : one row of type `ENTRY` for each charge: facts of the epoch, and ``rho``, what they cost.
    """

    entries: NDArray[Any] = field(default_factory=lambda: np.empty(0, ENTRY))

    def charge(self, round: int, epoch: Epoch) -> PrivacyLedger:
        """The ledger after one more epoch; also an epoch that costs nothing is entered."""
        entry = np.array([_row(round, epoch)], ENTRY)
        return PrivacyLedger(np.concatenate([self.entries, entry]))

    @property
    def rho(self) -> float:
        """What all charges cost together: zCDP adds up under adaptive composition."""
        return math.fsum(self.entries["rho"].tolist())

    def epsilon(self, delta: float) -> float:
        """The epsilon of all charges together, by the closed form."""
        return epsilon_of_rho(self.rho, delta)

    def would_exceed(self, epoch: Epoch, epsilon: float, delta: float) -> bool:
        """Whether one more epoch would take the client past a budget."""
        return epsilon_of_rho(math.fsum([*self.entries["rho"].tolist(), epoch.cost().rho]), delta) > epsilon

    def curve(self, delta: float) -> NDArray[np.float64]:
        """The epsilon after each entry."""
        check_delta(delta)
        rho = np.cumsum(self.entries["rho"])
        return np.asarray(rho + 2 * np.sqrt(-rho * math.log(delta)))

    @property
    def amplified(self) -> NDArray[np.bool_]:
        """For each entry, whether it costs less than it would if all its iterates were released."""
        private = self.entries["private_steps"] > 0
        noise = np.where(private, self.entries["noise"], 1.0)
        unamplified = 2 * np.square(self.entries["clip"] / self.entries["batch"] / noise)
        return np.asarray(private & (self.entries["rho"] < unamplified * (1 - 1e-9)))

    def gaussian_epsilon(self, delta: float) -> float | None:
        """The exact epsilon, where no entry is amplified: together they are one Gaussian mechanism. Otherwise None."""
        return None if self.amplified.any() else gaussian_epsilon(mu_of_rho(self.rho), delta)

    # -- what leaves the program -----------------------------------------------------------------------------------

    def to_json(self) -> str:
        """All entries as JSON."""
        entries = [dict(zip(self.entries.dtype.names or (), row.tolist(), strict=True)) for row in self.entries]
        return json.dumps(
            {"format": FORMAT, "adjacency": ADJACENCY, "rho": self.rho, "entries": entries}, allow_nan=False
        )

    @staticmethod
    def from_json(text: str) -> PrivacyLedger:
        """The ledger that `to_json` wrote; what every entry costs is worked out anew.

        Raises
        ------
        DataError
            If this is no ledger, or an entry claims another cost than its facts have.
        """
        try:
            content = json.loads(text)
            known = isinstance(content, Mapping) and content.get("format") == FORMAT
            rows = [tuple(entry[name] for name in ENTRY.names or ()) for entry in content["entries"]] if known else []
            entries = np.array(rows, ENTRY)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"privacy ledger cannot be read: {type(error).__name__}: {error}") from error
        if not known or content.get("adjacency") != ADJACENCY:
            raise DataError(f"privacy ledger is not of format {FORMAT} with adjacency {ADJACENCY!r}: not written here")
        for place, entry in enumerate(entries):
            cost = _epoch(entry).cost().rho
            if not math.isclose(float(entry["rho"]), cost, rel_tol=1e-9, abs_tol=0.0):
                raise DataError(
                    f"privacy ledger, entry {place}: rho is {entry['rho']:.6g}, but its facts cost {cost:.6g}"
                )
        return PrivacyLedger(entries)

    def to_dp_event(self) -> Any:
        """The charges as an event of the package dp-accounting.

        An unamplified epoch is ``GaussianDpEvent(sigma b / (2 clip))``: the factor 2 of replaced records is in the
        event, so an accountant must be given its default neighbouring relation (dp-accounting 0.6's RDP does not double
        the sensitivity for replaced records). An amplified epoch is ``ZCDpEvent(rho)``, which only RDP can compose.

        Raises
        ------
        ConfigError
            If dp-accounting is not installed.
        """
        try:
            import dp_accounting
        except ImportError as error:
            raise ConfigError("events need dp-accounting, which is not installed: pip install dp-accounting") from error
        events = []
        kinds = zip(self.entries["rho"].tolist(), self.amplified.tolist(), strict=True)
        for (rho, amplified), same in itertools.groupby(kind for kind in kinds if kind[0]):
            one = dp_accounting.ZCDpEvent(rho) if amplified else dp_accounting.GaussianDpEvent(1 / mu_of_rho(rho))
            events.append(dp_accounting.SelfComposedDpEvent(one, len(list(same))))
        return dp_accounting.ComposedDpEvent(events) if events else dp_accounting.NoOpDpEvent()


def _row(round: int, epoch: Epoch) -> tuple[Any, ...]:
    facts = (epoch.private_steps, epoch.public_steps, epoch.batch, epoch.clip or 0.0, epoch.noise, epoch.public_noise)
    return (round, *facts, epoch.hidden, bool(epoch.certificate), epoch.cost().rho)


def _epoch(entry: Any) -> Epoch:
    """The epoch that an entry is of."""
    return Epoch(
        private_steps=int(entry["private_steps"]),
        public_steps=int(entry["public_steps"]),
        clip=float(entry["clip"]) or None,
        noise=float(entry["noise"]),
        public_noise=float(entry["public_noise"]),
        batch=int(entry["batch"]),
        hidden=bool(entry["hidden"]),
        certificate=Certificate(bool(entry["contractive"]), "steps were not certified when the epoch was charged"),
    )
