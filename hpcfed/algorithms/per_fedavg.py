"""Per-FedAvg: federated meta-learning by averaging models whose clients step on their adapted model's loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from hpcfed.algorithms.comfedl import ComFedL
from hpcfed.algorithms.composition import CompositionState
from hpcfed.capabilities import Array
from hpcfed.errors import ConfigError
from hpcfed.federation import Federation
from hpcfed.options import option


@dataclass(frozen=True)
class PerFedAvg(ComFedL):
    """Minimize ``(1/M) sum_m l_m(x - a grad l_m(x))`` (Fallah, Mokhtari, Ozdaglar: Personalized federated learning,
    NeurIPS 2020).

    With the adapted model ``g_m(x) = x - a grad l_m(x)`` for the inner map and ``f_m = l_m``, a client takes in a
    round ``local_steps`` steps

        ``x_m <- x_m - eta_k (I - a Hess l_m(x_m; zeta)) grad l_m(x_m - a grad l_m(x_m; zeta); xi)``,

    and the server adds the mean of their changes: LocalMOML without memory. In these terms it is ComFedL, defined for
    any composition. ``hessian="first_order"`` leaves out ``a Hess``, and so finds another point: with quadratic l_m, H
    their Hessian, the mean of the clients' minimizers with weights ``H (I - a H)`` instead of
    ``(I - a H) H (I - a H)``. It needs an inner map from R^d to R^d.

    Clients keep no state. A round costs a client d reals up and d down.
    """

    hessian: Literal["exact", "first_order"] = option(
        "exact", "first_order: as if the derivative of the adapted model were the identity"
    )

    def init(self, fed: Federation, start: Array) -> CompositionState:
        size, d = fed.any_client.inner_size, start.shape[0]
        if self.hessian == "first_order" and size != d:
            raise ConfigError(
                f"--hessian first_order takes the inner map for an adapted model, but this one maps {d} numbers to "
                f"{size}: use --hessian exact"
            ).on_all_ranks()
        state: CompositionState = super().init(fed, start)
        return state

    def inner(self, client: Any, x: Array, sample: Any) -> tuple[Array, Callable[[Array], Array]]:
        if self.hessian == "first_order":
            return client.inner(x, sample), _same
        return super().inner(client, x, sample)


def _same(v: Array) -> Array:
    return v
