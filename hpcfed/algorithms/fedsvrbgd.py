"""FedSVRBGD-FO: the penalty form of a bilevel problem by recursive estimates, without smoothing."""

from __future__ import annotations

from dataclasses import dataclass

from hpcfed.algorithms.bilevel import CommonRates


@dataclass(frozen=True)
class FedSvrbgd(CommonRates):
    """Minimize ``f_rho(x, y, z) = f(x, y) + (g(x, y) - g(x, z)) / rho`` over x and y, maximize over z.

    FedSVRBGD-FO (Zhang et al., IJCAI 2025). A step of client i, with STORM estimates (theta = beta eta^2) as in `FedDs`
    without smoothing:

        ``x <- x - alpha_x eta (u1 + (u2 - u3)/rho)``,  ``y <- y - alpha_y eta (v1 + v2/rho)``,
        ``z <- z - alpha_z eta w/rho``;

    after ``local_steps`` steps everything is averaged. It is FedDS-BVRFO with gamma1 = gamma2 = 0 and steps of ``alpha
    rho``: hence the default of rho for the alphas. Theory wants ``alpha_x`` smaller than the others by the square of
    the condition number of the lower level.

    UNVERIFIED: the paper's text was not at hand. The directions are those of related code by its authors; that the
    estimates are averaged, and by component, is assumed.
    """

    def weights(self) -> tuple[float, float]:
        return 1.0, 1 / self.penalty

    def steps(self) -> tuple[float, float, float]:
        x, y, z = self.multiples(self.penalty)
        return x, y, z / self.penalty
