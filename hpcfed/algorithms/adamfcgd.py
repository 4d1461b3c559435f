"""AdaMFCGD: MFCGD with steps scaled by a matrix that the averages of the slopes make."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Lt

from hpcfed.algorithms.mfcgd import Mfcgd, MfcgdState, each
from hpcfed.capabilities import Array
from hpcfed.federation import Federation
from hpcfed.lipschitz import norm
from hpcfed.options import option


@dataclass(frozen=True)
class AdaMfcgd(Mfcgd):
    """Minimize ``(1/M) sum_m f_m(g_m(x))`` by `Mfcgd` with ``A_t^{-1} w`` in the place of w (ibid., Alg. 1 and eq. 6).

    Once a round, from the average ``w`` of the clients' slopes and before the step that uses it,

    - ``matrix="adam"``: ``a <- vartheta a + (1 - vartheta) w^2`` elementwise, ``A = diag(sqrt(a) + rho)``;
    - ``matrix="norm"``: ``a <- vartheta a + (1 - vartheta) |w|``, ``A = (a + rho) I``,

    with a = 0 at first, vartheta = ``matrix_memory`` and rho = ``matrix_floor``. Clients keep A until the next
    average. The paper leaves the first A open: it comes from the average of the first slopes, one exchange of d reals
    more, or is the identity (``first_matrix``).

    Steps have the size of the rate, not of the slope; and as the average of the slopes vanishes while those of unequal
    clients do not, A falls to rho and local steps grow to ``gamma eta_t / rho`` times a slope. So ``rate`` is by
    default such that no step is longer than one of MFCGD. A round costs a client 2d reals up and 2d down (model and
    matrix, or the averages that both are made of).
    """

    title: ClassVar[str] = "AdaMFCGD"
    sends_matrix: ClassVar[bool] = True

    matrix: Literal["adam", "norm"] = option("adam", "adam: scale each coordinate; norm: all by one number")
    matrix_memory: Annotated[float, Ge(0), Lt(1)] = option(0.9, "vartheta, what the matrix keeps of itself in a round")
    matrix_floor: Annotated[float, Gt(0)] = option(0.1, "rho, what is added to the matrix")
    first_matrix: Literal["allreduce", "identity"] = option(
        "allreduce", "the matrix before the first average: of the average of the first slopes, or the identity"
    )

    @property
    def first_rate(self) -> float:
        return self.rate or 0.05 * self.matrix_floor

    def init(self, fed: Federation, start: Array) -> MfcgdState:
        state = super().init(fed, start)
        if self.first_matrix == "identity":
            return state
        return replace(state, a=self.refreshed(None, fed.mean(each("w", state.estimates))))

    def scaled(self, w: Array, a: Array | float | None) -> Array:
        if a is None:
            return w
        return w / ((a**0.5 if self.matrix == "adam" else a) + self.matrix_floor)

    def refreshed(self, a: Array | float | None, slope: Array) -> Array | float:
        fresh = (1 - self.matrix_memory) * (slope**2 if self.matrix == "adam" else norm(slope))
        return fresh if a is None else self.matrix_memory * a + fresh
