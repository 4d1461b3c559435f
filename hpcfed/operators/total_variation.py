"""Isotropic total variation in three dimensions, by the pieces that primal-dual methods use.

``g(Bx) = weight * sum over voxels of sqrt(dy^2 + dx^2 + dz^2)``: ``B`` takes the forward differences of a volume
(ny, nx, nz) along each axis, zero at the axis's last index, and ``g`` is ``weight`` times the sum of the lengths of the
voxels' 3-vectors. Fields ``Bx`` and duals ``v`` have the shape (3, ny, nx, nz), components in the order (y, x, z).

NumPy float32 arrays are handled by compiled loops, arrays of any other kind (torch tensors on a GPU) by the array API
functions at the end of this file.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcfed.errors import ConfigError, DataError
from hpcfed.operators.parallel_beam import check_array, check_shape, output

Array = Any  # a NumPy array, or a tensor of a library that the Python array API standard covers


class TotalVariation:
    """The regularizer ``g(Bx)``, with a constraint set if asked for.

    Parameters
    ----------
    shape : (ny, nx, nz) of the volume.
    weight : factor of the total variation, at least 0.
    nonnegative : whether `step` keeps the volume at or above zero.
    inside : bool (ny, nx); where it is False, `step` keeps all slices at zero. None: nowhere.

    Attributes
    ----------
    norm_bound : upper bound of ``rho_max(B B^T)``: 4 for each axis longer than 1.
    unit : rows that are best treated together, where ranks share them out.
    """

    unit = 8

    def __init__(
        self,
        shape: tuple[int, int, int],
        weight: float,
        nonnegative: bool = False,
        inside: NDArray[np.bool_] | None = None,
    ) -> None:
        self.shape = check_shape(shape)
        if inside is not None and (inside.shape != self.shape[:2] or inside.dtype != np.bool_):
            raise DataError(
                f"inside is {inside.dtype} {inside.shape}: give bool {self.shape[:2]}, as the volume's rows"
            )
        if not (np.isfinite(weight) and weight >= 0):
            raise ConfigError(f"weight = {weight} of the total variation: give a finite number, at least 0")
        self.weight = float(weight)
        self.nonnegative = bool(nonnegative)
        self.inside = None if inside is None else np.ascontiguousarray(inside)
        self.identity = False
        self.norm_bound = 4.0 * sum(size > 1 for size in self.shape)

    def apply(self, x: Array, out: Array | None = None) -> Array:
        """``B x``, of shape (3, ny, nx, nz)."""
        if not isinstance(x, np.ndarray):
            return _into(out, differences(x))
        from hpcfed.operators import total_variation_kernels as kernels

        check_array(x, self.shape, "volume")
        out = output(out, (3, *self.shape), "dual")
        kernels.differences(x, *out)
        return out

    def adjoint(self, v: Array, out: Array | None = None, rows: slice = slice(None)) -> Array:
        """``B^T v``, of shape (ny, nx, nz), or some of its rows y."""
        if not isinstance(v, np.ndarray):
            return _into(out, differences_adjoint(v)[rows])
        from hpcfed.operators import total_variation_kernels as kernels

        check_array(v, (3, *self.shape), "dual")
        first, stop, _ = rows.indices(self.shape[0])
        out = output(out, (stop - first, *self.shape[1:]), "volume")
        kernels.adjoint(v, first, out)
        return out

    def dual_prox(self, v: Array) -> Array:
        """``prox_{s g*}(v)``, the projection of each voxel's 3-vector on the ball of radius ``weight``, for any s."""
        if not isinstance(v, np.ndarray):
            return project(v, self.weight)
        from hpcfed.operators import total_variation_kernels as kernels

        check_array(v, (3, *self.shape), "dual")
        out = np.empty_like(v)
        kernels.project(v, self.weight, out)
        return out

    def dual_step(self, v: Array, x: Array, lam: float, rows: slice = slice(None)) -> Array:
        """``prox_{lam g*}(v + lam B x)``, or some of its rows y."""
        if not isinstance(x, np.ndarray):
            return project(v + lam * differences(x), self.weight)[:, rows]
        from hpcfed.operators import total_variation_kernels as kernels

        check_array(v, (3, *self.shape), "dual")
        check_array(x, self.shape, "volume")
        first, stop, _ = rows.indices(self.shape[0])
        out = np.empty((3, stop - first, *self.shape[1:]), np.float32)
        kernels.dual_step(v, x, lam, self.weight, first, out)
        return out

    def value(self, x: Array, first: int = 0, last: int | None = None) -> float:
        """``g(Bx)`` over the image rows ``first <= y < last``, summed in double precision.

        The rows' values add up to that of the whole volume. Of the other rows, ``last`` alone is read.
        """
        ny = self.shape[0]
        last = ny if last is None else last
        if not 0 <= first <= last <= ny:
            raise DataError(f"rows {first} to {last} of a volume with {ny}: give 0 <= first <= last <= {ny}")
        if not isinstance(x, np.ndarray):
            return self.weight * total_length(x, first, last)
        from hpcfed.operators import total_variation_kernels as kernels

        check_array(x, self.shape, "volume")
        return self.weight * float(kernels.value(x, first, last))

    def step(self, x: Array, v: Array, gradient: Array, gamma: float, lam: float) -> tuple[Array, Array]:
        """A client's step of the primal-dual fixed-point method, from the volume x and the dual v.

        With ``P`` the projection on the constraint set, or the identity without one::

            y    = P(x - gamma gradient - gamma B^T v)
            dual = dual_prox(lam/gamma B y + v)
            x'   = P(x - gamma gradient - gamma B^T dual)

        The method converges for ``0 < gamma < 2/L`` and ``0 < lam <= 1/rho_max(B B^T)``, L the Lipschitz constant of
        the gradient. Sources: Chen, Huang, Zhang, "A primal-dual fixed point algorithm for convex separable
        minimization with applications to image restoration", Inverse Problems 29, 2013; with the constraint, the same
        authors, "A primal-dual fixed point algorithm for minimization of the sum of three convex separable functions",
        Fixed Point Theory and Applications, 2016.

        Returns
        -------
        difference : ``x' - x``, a new array.
        dual : a new array.
        """
        if not isinstance(x, np.ndarray):
            return self._array_step(x, v, gradient, gamma, lam)
        from hpcfed.operators import total_variation_kernels as kernels

        check_array(x, self.shape, "volume")
        check_array(v, (3, *self.shape), "dual")
        check_array(gradient, self.shape, "gradient")
        difference, dual = np.empty_like(x), np.empty_like(v)
        lowest = 0.0 if self.nonnegative else -np.inf
        inside = np.ones(self.shape[:2], np.bool_) if self.inside is None else self.inside
        kernels.step(x, v, gradient, gamma, lam, self.weight, lowest, inside, difference, dual)
        return difference, dual

    def _array_step(self, x: Array, v: Array, gradient: Array, gamma: float, lam: float) -> tuple[Array, Array]:
        target = x - gamma * gradient
        predicted = self.project(target - gamma * differences_adjoint(v))
        dual = project((lam / gamma) * differences(predicted) + v, self.weight)
        return self.project(target - gamma * differences_adjoint(dual)) - x, dual

    def project(self, x: Array) -> Array:
        """The nearest volume of the constraint set: x clipped at zero and cleared outside; x itself without one."""
        if self.nonnegative:
            x = _namespace(x).clip(x, min=0)
        if self.inside is None:
            return x
        xp = _namespace(x)
        return xp.where(xp.asarray(self.inside[:, :, None], device=_device(x)), x, xp.zeros_like(x))


def differences(x: Array) -> Array:
    """``B x`` of any array API array."""
    field = _namespace(x).zeros((3, *x.shape), dtype=x.dtype, device=_device(x))
    field[0, :-1, :, :] = x[1:, :, :] - x[:-1, :, :]
    field[1, :, :-1, :] = x[:, 1:, :] - x[:, :-1, :]
    field[2, :, :, :-1] = x[:, :, 1:] - x[:, :, :-1]
    return field


def differences_adjoint(v: Array) -> Array:
    """``B^T v`` of any array API array."""
    out = _namespace(v).zeros(v.shape[1:], dtype=v.dtype, device=_device(v))
    out[1:, :, :] += v[0, :-1, :, :]
    out[:-1, :, :] -= v[0, :-1, :, :]
    out[:, 1:, :] += v[1, :, :-1, :]
    out[:, :-1, :] -= v[1, :, :-1, :]
    out[:, :, 1:] += v[2, :, :, :-1]
    out[:, :, :-1] -= v[2, :, :, :-1]
    return out


def project(v: Array, radius: float) -> Array:
    """Each voxel's 3-vector of any array API array, projected on the ball of this radius."""
    xp = _namespace(v)
    lengths = _lengths(v)
    outside = lengths > radius
    return v * xp.where(outside, radius / xp.where(outside, lengths, xp.ones_like(lengths)), xp.ones_like(lengths))


def total_length(x: Array, first: int, last: int) -> float:
    """Sum of the length of the gradient of any array API array over the rows ``first <= y < last``."""
    xp = _namespace(x)
    return float(xp.sum(_lengths(differences(x[first : last + 1, :, :])[:, : last - first, :, :]), dtype=xp.float64))


def _lengths(v: Array) -> Array:
    xp = _namespace(v)
    return xp.sqrt(xp.sum(v * v, axis=0))


def _into(out: Array | None, result: Array) -> Array:
    if out is None:
        return result
    out[...] = result
    return out


def _namespace(array: Array) -> Any:
    from array_api_compat import array_namespace

    return array_namespace(array)


def _device(array: Array) -> Any:
    from array_api_compat import device

    return device(array)
