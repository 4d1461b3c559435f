"""The engine as a mechanism for the audit: the steps that runs take, put into the game's surroundings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpcfed.privacy.audit import Numbers, Simulated
from hpcfed.privacy.engine import NoisySteps, run


@dataclass(frozen=True)
class Compiled:
    """`hpcfed.privacy.engine.run` with a record of least squares that pulls, and with public ones that do not.

    The record ``(1, y)`` has the gradient ``2 (x - y)``. Steps are so short that x stays where it is in comparison.
    """

    epochs: int
    public_steps: int
    clip: float
    noise: float
    step: float = 1e-6

    @staticmethod
    def like(simulated: Simulated) -> Compiled:
        """With the same claim."""
        return Compiled(simulated.epochs, simulated.public_steps, simulated.clip, simulated.noise)

    @property
    def _steps(self) -> NoisySteps:
        return NoisySteps(self.step, self.clip, self.noise)

    def ends(self, pull: float, runs: int, rng: np.random.Generator) -> Numbers:
        features, targets = np.array([[1.0], [0.0]]), np.array([-pull / 2, 0.0])
        order = np.tile([0, *[1] * self.public_steps], self.epochs)
        start, steps = np.zeros(1), self._steps
        ends = (run("least-squares", features, targets, start, order, steps, rng)[0] for _ in range(runs))
        return np.fromiter(ends, float, runs)

    def moves(self, runs: int, rng: np.random.Generator) -> Numbers:
        """An axis is a run here: without gradients the axes are independent.

        Where an epoch is after each of its steps is seen by going so far from the same state of the stream.
        """
        features, targets, start, steps = np.zeros((1, runs)), np.zeros(1), np.zeros(runs), self._steps
        count = 1 + self.public_steps
        places = np.zeros((self.epochs, count + 1, runs))
        for epoch in range(self.epochs):
            state = rng.bit_generator.state
            for step in range(count):
                rng.bit_generator.state = state
                order = np.zeros(step + 1, np.int64)
                places[epoch, step + 1] = run("least-squares", features, targets, start, order, steps, rng)
        return np.diff(places, axis=1).transpose(2, 0, 1)
