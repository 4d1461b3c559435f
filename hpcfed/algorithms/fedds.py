"""FedDS-BVRFO: doubly smoothed, variance-reduced, first-order federated bilevel optimization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt

from hpcfed.algorithms.bilevel import CommonRates, Derivatives, Samples
from hpcfed.capabilities import Array
from hpcfed.options import option


@dataclass(frozen=True)
class FedDs(CommonRates):
    """Minimize ``f_rho(x, y, z) = f(x, y) + (g(x, y) - g(x, z)) / rho`` over x and y, maximize over z.

    FedDS-BVRFO works on rho times that, smoothed by points p, q and r that follow x, y and z:

        ``rho f_rho + gamma1/2 (|x - p|^2 + |y - q|^2) - gamma2/2 |z - r|^2``.

    A step of client i, from its STORM estimates (theta = beta eta^2) with ``u = rho u1 + u2 - u3``,
    ``v = rho v1 + v2``:

        ``x+ = x - alpha_x eta u``,         ``y+ = y - alpha_y eta v``,         ``z+ = z - alpha_z eta w``,
        ``p+ = p + alpha_p eta (x+ - p)``,  ``q+ = q + alpha_q eta (y+ - q)``,  ``r+ = r + alpha_r eta (z+ - r)``,
        ``u1: D_x f(x, y; xi)``,  ``v1: D_y f(x, y; xi)``,
        ``u2: D_x g(x, y; zeta) + gamma1 (x - p)``,  ``v2: D_y g(x, y; zeta) + gamma1 (y - q)``,
        ``u3: D_x g(x, z; zeta)``,  ``w: D_y g(x, z; zeta) + gamma2 (z - r)``

    with one xi and one zeta for the whole step, old point and new. After ``local_steps`` steps everything is averaged.
    The smoothing does not move the solution: there p = x, q = y and r = z. As rho multiplies f alone, all steps are of
    one magnitude, and x moves by ``alpha_x eta rho`` times a hypergradient. The theory's alpha_p, alpha_q and alpha_r
    (about 1e-6) would freeze p, q and r; y, z, q and r start where the workload's y does.

    *What is averaged.* The published rule averages u, v and w (``sync="combined"``), though the next u is made of the
    client's own u1, u2 and u3: for u and v the averaging lasts one step. The proofs use averaged components, which is
    the default. With unequal clients the difference is not small: the clients' own y and z drift apart, ``u2 - u3`` is
    then no difference of size rho, and x follows it at rate 1 although what it should follow is of size rho.

    With heterogeneous clients, several local steps and a constant step it stops O(step) away from the solution.
    """

    layout: ClassVar[str] = "xyyxyy"

    alpha_p: Annotated[float, Gt(0)] = option(0.1, "p follows x by alpha_p eta")
    alpha_q: Annotated[float, Gt(0)] = option(0.1, "q follows y by alpha_q eta")
    alpha_r: Annotated[float, Gt(0)] = option(0.1, "r follows z by alpha_r eta")
    smoothing: Annotated[float, Ge(0)] = option(
        1.0, "gamma1, weight of the smoothing of x and y; about 2 L_g", metavar="GAMMA1"
    )
    smoothing_z: Annotated[float, Ge(0)] | None = option(
        None, "gamma2, weight of the smoothing of z  [default: gamma1]", metavar="GAMMA2"
    )

    def weights(self) -> tuple[float, float]:
        return self.penalty, 1.0

    def steps(self) -> tuple[float, float, float]:
        return self.multiples(1.0)

    def first(self, x: Array, y: Array) -> list[Array]:
        return [x, y, y, x, y, y]

    def move(self, variables: list[Array], u: Array, v: Array, w: Array) -> list[Array]:
        moved = super().move(variables, u, v, w)
        alphas = (self.alpha_p, self.alpha_q, self.alpha_r)
        return moved + [
            anchor + alpha * self.common_step * (new - anchor)
            for anchor, alpha, new in zip(variables[3:], alphas, moved, strict=True)
        ]

    def derivatives(self, client: Any, samples: Samples, variables: list[Array]) -> Derivatives:
        plain = super().derivatives(client, samples, variables)
        x, y, z, p, q, r = variables
        gamma1 = self.smoothing
        gamma2 = gamma1 if self.smoothing_z is None else self.smoothing_z
        return plain._replace(
            u2=plain.u2 + gamma1 * (x - p),
            v2=plain.v2 + gamma1 * (y - q),
            w=plain.w + gamma2 * (z - r),
        )
