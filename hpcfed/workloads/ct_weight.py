"""``hpcfed ct --mu auto``: the weight of the total variation that predicts projections best which it has not seen.

Every client sets a fifth of its views aside. For a few weights, a factor of two apart, the problem is solved without
them, and the misfit of those set aside is measured; a parabola through the lowest three, over log mu, says where the
least is. Nothing need be known of the noise, and what the model cannot explain counts alike for every weight. With 4/5
of the views the misfit is 4/5, and so is the mu of the same solution.

Weights are tried from a large one downwards, and each solution is where the next one starts: what the views do not tell
is settled by the total variation alone, quickly while its weight is large, and takes hundreds of rounds from a start
with streaks. Steps and metric do not depend on mu and are found once.

That is done on the middle slices of a parallel or fan beam, whose problem is the whole one on fewer slices. A cone beam
has no such part: there voxels and pixels have twice the edge, and mu is a quarter (`hpcfed.workloads.ct_levels`). Such
voxels show less of the noise, so that the weight comes out low where there is little of it: of a parallel beam, a chest
in slices of 128 x 128, 15 times too low.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcfed.algorithms.vm_pdfp import VmPdfp
from hpcfed.capabilities import Array
from hpcfed.errors import ConfigError
from hpcfed.federation import Federation, PerClient
from hpcfed.workloads.ct import CtProblem
from hpcfed.workloads.ct_client import CtClient
from hpcfed.workloads.ct_geometry import deal
from hpcfed.workloads.ct_levels import MU_RATIO, coarser, settled

logger = logging.getLogger(__name__)

# So many slices show what the whole volume is like.
SLICES = 8
# One of so many views is set aside.
FOLDS = 5
# Weights are tried from so many doublings of the usual one on, up to so many doublings or halvings away from it.
HIGHEST, FARTHEST = 4, 8
# Rounds for a weight, twice as many for the first, unless the optimality conditions hold before to this residual.
ROUNDS, TOLERANCE = 30, 0.1


def with_best_mu(problem: CtProblem) -> CtProblem:
    """The problem with the mu that is found, starting from its own; what was tried is in the run's journal.

    Raises
    ------
    ConfigError
        On all ranks, if clients have too few views to set one aside.
    """
    fed, usual = problem.fed, problem.workload.known("mu")
    with fed.ledger.uncounted():
        small, ratio = _smaller(problem)
        seeing, unseen, share = _set_aside(small)
        method, rounds, errors, before = VmPdfp(), 0, dict[int, float](), HIGHEST
        state = method.init(seeing.fed.at(0), seeing.plain_start())
        while (place := _next(errors)) is not None:
            trial = weighted(seeing, ratio * share * usual * 2.0**place)
            state = replace(state, v=2.0 ** (place - before) * state.v)
            state, done = settled(trial, state, ROUNDS if errors else 2 * ROUNDS, TOLERANCE)
            rounds, before = rounds + done, place
            errors[place] = float(unseen.total(unseen.map(_misfit, method.solution(state))))
            logger.info("mu %.4g: misfit of unseen views %.6g", usual * 2.0**place, errors[place])
    mu = float(f"{usual * 2 ** _lowest(errors):.3g}")
    places = sorted(errors)
    logger.info("mu %g predicts unseen views best: %d weights tried in %d rounds", mu, len(places), rounds)
    fed.note(
        {"mu": [usual * 2.0**each for each in places], "unseen": [errors[each] for each in places], "found": mu}, 0
    )
    return weighted(problem, mu)


def weighted(problem: CtProblem, mu: float) -> CtProblem:
    """The problem with another mu."""
    workload = replace(problem.workload, mu=mu)
    shared = workload.regularizer()
    clients = {number: replace(client, regularizer=shared) for number, client in problem.fed.clients.items()}
    return replace(problem, workload=workload, fed=replace(problem.fed, clients=PerClient(clients)))


def tried(entries: list[dict[str, Any]]) -> dict[str, tuple[Array, Mapping[str, Any]]]:
    """What the journal of a run knows of its search, for ``result.h5``: rows of mu and misfit."""
    found = [entry for entry in entries if "unseen" in entry]
    if not found:
        return {}
    rows = np.stack([found[-1]["mu"], found[-1]["unseen"]], axis=1)
    return {"mu": (rows, {"columns": "mu, misfit of the views set aside", "found": found[-1]["found"]})}


def _next(errors: Mapping[int, float]) -> int | None:
    """The next power of two to try: downwards until both neighbours of the lowest are known, or from farther up."""
    if not errors:
        return HIGHEST
    best, top = min(errors, key=lambda each: errors[each]), max(errors)
    if best == -FARTHEST or best - 1 in errors:
        if best == FARTHEST or best + 1 in errors:
            return None
        if best == top:
            return min(top + HIGHEST, FARTHEST)
    return next(place for place in range(top, -FARTHEST - 1, -1) if place not in errors)


def _lowest(errors: Mapping[int, float]) -> float:
    """Where the parabola through the lowest error and its neighbours is least."""
    best = min(errors, key=lambda each: errors[each])
    if best - 1 not in errors or best + 1 not in errors:
        return best
    below, here, above = (errors[each] for each in (best - 1, best, best + 1))
    bend = below - 2 * here + above
    return best + (below - above) / (2 * bend) if bend > 0 else best


def _smaller(problem: CtProblem) -> tuple[CtProblem, float]:
    """A problem that costs less to solve, and its mu over that of the whole one."""
    if problem.geometry.kind == "cone":
        return coarser(problem), MU_RATIO
    ny, nx, nz = problem.workload.known("shape")
    if nz <= SLICES:
        return problem, 1.0
    first = (nz - SLICES) // 2
    workload = replace(problem.workload, shape=(ny, nx, SLICES))
    small = replace(problem, workload=workload, geometry=replace(problem.geometry, rows=SLICES))
    every = [np.arange(len(views)) for views in deal(len(problem.geometry.angles), problem.fed)]
    built = _with_views(small, problem.fed, every, slice(first, first + SLICES))
    return replace(small, fed=built), 1.0


def _set_aside(problem: CtProblem) -> tuple[CtProblem, Federation, float]:
    """The problem with the views that clients see, the views set aside, and the part of all views that are seen."""
    own = [np.arange(len(views)) for views in deal(len(problem.geometry.angles), problem.fed)]
    unseen = [views[views % FOLDS == FOLDS // 2] for views in own]
    seen = [views[views % FOLDS != FOLDS // 2] for views in own]
    total, aside = sum(map(len, own)), sum(map(len, unseen))
    if not aside:
        least = FOLDS // 2 + 1
        raise ConfigError(
            f"--mu auto: {total} views for {len(own)} clients: a client needs {least} to set one aside: give a number"
        ).on_all_ranks()
    seeing = replace(problem, fed=_with_views(problem, problem.fed, seen), filtered_backprojection=None)
    return seeing, _with_views(problem, problem.fed, unseen), 1 - aside / total


def _with_views(
    problem: CtProblem, fed: Federation, places: list[NDArray[np.int64]], rows: slice = slice(None)
) -> Federation:
    """Clients with some of their views, by their places, and some detector rows; None for one without a view."""
    geometry, workload = problem.geometry, problem.workload
    dealt = deal(len(geometry.angles), fed)
    shared = workload.regularizer()

    def client(number: int, rng: np.random.Generator) -> CtClient | None:
        chosen = places[number]
        if not len(chosen):
            return None
        projector = geometry.projector(workload.known("shape"), dealt[number][chosen], fed.device, workload.projector)
        own = fed.clients[number].projections[chosen.tolist()][:, :, rows]
        own = np.ascontiguousarray(own) if isinstance(own, np.ndarray) else own.contiguous()
        return CtClient(number, fed.num_clients, geometry, projector, own, shared, {}, fed.ledger.count)

    return replace(fed, compressor=None).build(client)


def _misfit(client: CtClient | None, rng: np.random.Generator, x: Array) -> float:
    return 0.0 if client is None else float(client.projector.misfit(x, client.projections))
