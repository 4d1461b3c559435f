"""The toy with ranks that die: ``HPCFED_TEST_LOSE="1@round:3 0@writing:4"`` names ranks, as launched, and where.

``build``, ``init``, ``round:N`` (before round N), ``sent:N`` (its mean is
known), ``recording:N``, ``writing:N`` (its files of the checkpoint of round N are written), ``completing:N`` (rank 0 is
about to give that checkpoint its name), ``result`` (rank 0 is about to write the result). With ``HPCFED_TEST_ALONE`` no
rank sees another's process, as if each were on a node of its own.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import toy

from hpcfed.options import option
from hpcfed.ranks import faults
from hpcfed.run import checkpoint, result

_DEATHS = os.environ.get("HPCFED_TEST_LOSE", "").split()
_RANK = os.environ.get("OMPI_COMM_WORLD_RANK", "0")


def here(place: str) -> None:
    """Die, if this is where."""
    for death in _DEATHS:
        if death == f"{_RANK}@{place}":
            os.kill(os.getpid(), getattr(signal, os.environ.get("HPCFED_TEST_SIGNAL", "SIGKILL")))
            time.sleep(60)  # who was stopped must not go on before it is ended


def _dying(function: Any, place: Any, after: bool = False) -> Any:
    def replaced(*args: Any, **options: Any) -> Any:
        if not after:
            here(place(*args))
        done = function(*args, **options)
        if after:
            here(place(*args))
        return done

    return replaced


if _DEATHS:
    checkpoint._write_files = _dying(
        checkpoint._write_files, lambda final, *_: f"writing:{checkpoint.round_of(final)}", after=True
    )
    checkpoint.os.replace = _dying(os.replace, lambda _, final: f"completing:{str(final)[-1:]}")
    result.write = _dying(result.write, lambda *_: "result")


def _alone(watch: Any) -> Any:
    def replaced(neighbours: Any) -> None:
        neighbours._files = {int(_RANK): neighbours._files[int(_RANK)]}
        watch(neighbours)

    return replaced


if "HPCFED_TEST_ALONE" in os.environ:
    faults.Neighbours.watch = _alone(faults.Neighbours.watch)


@dataclass(frozen=True)
class Quadratics(toy.Quadratics):
    """Those of the toy."""

    def build(self, fed: Any) -> Any:
        here("build")
        return Problem(super().build(fed).fed, self.size)


class Problem(toy.Problem):
    def metrics(self, solution: Any, fed: Any) -> dict[str, float]:
        here(f"recording:{fed.round}")
        return super().metrics(solution, fed)


class _Dying:
    def init(self, fed: Any, start: Any) -> Any:
        here("init")
        return super().init(fed, start)  # type: ignore[misc]

    def round(self, state: Any, fed: Any) -> Any:
        here(f"round:{fed.round}")
        time.sleep(self.pause)  # type: ignore[attr-defined]
        after = super().round(state, fed)  # type: ignore[misc]
        here(f"sent:{fed.round}")
        return after


@dataclass(frozen=True)
class Momentum(_Dying, toy.Momentum):
    """Clients keep their momentum."""

    pause: float = option(0.0, "seconds before a round")


@dataclass(frozen=True)
class Descent(_Dying, toy.Descent):
    """Clients keep nothing."""

    pause: float = option(0.0, "seconds before a round")


@dataclass(frozen=True)
class Forgetful(Momentum):
    """Clients keep their momentum, of which the server keeps nothing."""

    def forget(self, state: Any, fed: Any) -> Any:
        return state
