"""``--tune``: short runs before the first round, one for each candidate; the best one becomes the configuration."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from hpcfed.config import RunConfig, candidates
from hpcfed.errors import DivergedError
from hpcfed.lipschitz import norm
from hpcfed.run.recorder import strict
from hpcfed.run.run_folder import RunFolder

logger = logging.getLogger(__name__)


def search(
    config: RunConfig,
    problem: Any,
    folder: RunFolder,
    method: Callable[[RunConfig], Any],
    pause: Callable[[], None],
) -> RunConfig:
    """The configuration with the values of ``--tune`` that lower the objective most, and nothing left to tune.

    Each candidate does the first rounds of its own run: from the same start, with the streams that the run itself will
    use. The last objective decides; a candidate whose solution is no longer finite is out, and among equals the first
    one wins. What was tried is written to ``tuning.json``. Every rank must call it.

    Parameters
    ----------
    method : the algorithm of a configuration.
    pause : called after every round; it may raise to end the search.

    Raises
    ------
    DivergedError
        If no candidate stays finite.
    """
    rounds, grid = config.tune_rounds(), candidates(config)
    start = problem.start()
    objectives: list[float] = []
    for place, values in enumerate(grid, start=1):
        objective = _last_objective(method(config.with_options(values)), problem, start, rounds, pause)
        objectives.append(objective if math.isfinite(objective) else math.inf)
        logger.info("tuning %d of %d: %s: objective %.6g", place, len(grid), _shown(values), objective)
    least = min(objectives)
    if least == math.inf:
        raise DivergedError(
            f"--tune {config.run.tune}: every candidate diverged within {rounds} rounds: give smaller steps"
        ).on_all_ranks()
    chosen = grid[objectives.index(least)]
    logger.info("tuned by the objective after %d rounds: %s", rounds, _shown(chosen))
    if problem.fed.writes:
        tried = [{**values, "objective": value} for values, value in zip(grid, map(strict, objectives), strict=True)]
        report = {"tune": config.run.tune, "rounds": rounds, "tried": tried, "chosen": chosen}
        (folder.path / "tuning.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return config.with_options(chosen).without_tuning()


def _last_objective(method: Any, problem: Any, start: Any, rounds: int, pause: Callable[[], None]) -> float:
    """The objective after so many rounds; NaN as soon as the solution is not finite."""
    state = method.init(problem.fed.at(0), start)
    for number in range(1, rounds + 1):
        state = method.round(state, problem.fed.at(number))
        pause()
        if not math.isfinite(norm(method.solution(state))):
            return math.nan
    metrics: Mapping[str, float] = problem.metrics(method.solution(state), problem.fed.beside(rounds))
    return metrics["objective"]


def _shown(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values.items())
