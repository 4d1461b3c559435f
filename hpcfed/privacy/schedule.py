"""The four methods as schedules: how many private and public records an epoch sees, and which steps carry noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hpcfed.errors import ConfigError
from hpcfed.privacy.accountant import Cost, Epoch
from hpcfed.privacy.calibration import noise_of_epsilon
from hpcfed.privacy.certify import Certificate

Method = Literal["dp-shuffle", "priv-pub", "pub-priv", "interleaved"]
METHODS: tuple[str, ...] = get_args(Method)


@dataclass(frozen=True)
class Schedule:
    """What the K epochs of a method see (Jiang, Sharma, Wu, Joshi, arXiv 2502.03652).

    ============  ==========================================  =============  ======================
    method        epoch k sees                                 noise in       private epochs T
    ============  ==========================================  =============  ======================
    dp-shuffle    all n private records                        every step     K
    priv-pub      private ones up to k = S, then public ones   private steps  S
    pub-priv      public ones up to k = S, then private ones   private steps  K - S
    interleaved   n_d private ones, then n - n_d public ones   every step     K
    ============  ==========================================  =============  ======================

    Attributes
    ----------
    method : its name.
    epochs : K.
    samples : n, the records that an epoch sees. None is enough for the cost of a method that does not mix them.
    private_samples : n_d of interleaved.
    switch : S of priv-pub and pub-priv.
    batch : records in a step.

    Raises
    ------
    ConfigError
        If a method lacks what it needs, or no epoch would see a private record.
    """

    method: str
    epochs: int
    samples: int | None = None
    private_samples: int | None = None
    switch: int | None = None
    batch: int = 1

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"method {self.method!r} is unknown: use one of {', '.join(METHODS)}")
        for name in ("epochs", "samples", "batch"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: at least 1 is needed")
        takes_switch, takes_split = self.method in ("priv-pub", "pub-priv"), self.method == "interleaved"
        for name, taken in (("switch", takes_switch), ("private_samples", takes_split)):
            if not taken and getattr(self, name) is not None:
                raise ConfigError(f"{_flag(name)} means nothing to {self.method}: leave it out")
        if takes_switch:
            self._check_switch()
        if takes_split:
            self._check_split()

    def _check_switch(self) -> None:
        low, high = (1, self.epochs) if self.method == "priv-pub" else (0, self.epochs - 1)
        if self.switch is None:
            raise ConfigError(f"{self.method} needs --switch, the last epoch before it changes sides: {low} to {high}")
        if not low <= self.switch <= high:
            raise ConfigError(
                f"--switch {self.switch} of {self.epochs} epochs: {self.method} needs {low} to {high}, "
                "so that some epoch sees private records"
            )

    def _check_split(self) -> None:
        if self.samples is None or self.private_samples is None:
            raise ConfigError("interleaved needs --samples, those of an epoch, and --private-samples, those among them")
        if not 1 <= self.private_samples <= self.samples:
            raise ConfigError(
                f"--private-samples {self.private_samples} of --samples {self.samples}: interleaved needs "
                f"1 to {self.samples}; with none there is nothing to protect"
            )

    @property
    def private_epochs(self) -> int:
        """T, how many epochs see private records."""
        return sum(self.sees_private(number) for number in range(1, self.epochs + 1))

    def sees_private(self, number: int) -> bool:
        """Whether epoch ``number``, counted from 1, sees private records."""
        if self.switch is None:
            return True
        return (number <= self.switch) == (self.method == "priv-pub")

    def split(self, number: int) -> tuple[int, int]:
        """How many private and public records epoch ``number`` sees, in this order."""
        samples = self.samples or 1
        if not self.sees_private(number):
            return 0, samples
        private = samples if self.private_samples is None else self.private_samples
        return private, samples - private

    def epoch(
        self, number: int, clip: float | None, noise: float, *, hidden: bool = True, certificate: Certificate
    ) -> Epoch:
        """Epoch ``number`` for the accountant, with standard deviation ``noise`` in the steps that carry noise."""
        private, public = self.split(number)
        return Epoch(
            private_steps=-(-private // self.batch),
            public_steps=-(-public // self.batch),
            clip=clip,
            noise=noise if private else 0.0,
            public_noise=noise if private and public else 0.0,
            batch=self.batch,
            hidden=hidden,
            certificate=certificate,
        )

    def cost(self, clip: float | None, noise: float, *, hidden: bool = True, certificate: Certificate) -> Cost:
        """What a private epoch costs; all private epochs of a method cost the same."""
        first = next(number for number in range(1, self.epochs + 1) if self.sees_private(number))
        return self.epoch(first, clip, noise, hidden=hidden, certificate=certificate).cost()

    def noise(
        self, epsilon: float, delta: float, clip: float | None, *, hidden: bool = True, certificate: Certificate
    ) -> float:
        """The ``sigma`` with which all epochs together are ``(epsilon, delta)``-private."""
        share = self.cost(clip, 1.0, hidden=hidden, certificate=certificate).amplification
        return noise_of_epsilon(epsilon, delta, clip, self.private_epochs, amplification=share, batch=self.batch)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
