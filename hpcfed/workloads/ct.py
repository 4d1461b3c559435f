"""3D computed tomography with total variation, the views split over the clients."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Ge
from numpy.typing import NDArray

from hpcfed import devices
from hpcfed.capabilities import Array, LinearComposite, Smooth
from hpcfed.errors import ConfigError, DataError
from hpcfed.federation import Federation
from hpcfed.options import option
from hpcfed.streams import Purpose

logger = logging.getLogger(__name__)

Size = Annotated[int, Ge(1)]
SSIM_WINDOW = 7
# So many clients compare their share of the slices with the reference: the library that does it takes each rank a fifth
# of a second to load.
NUM_JUDGES = 4
# Weight of the total variation for each view: near the best for the default phantom and noise at three sizes.
MU_FOR_A_VIEW = 0.015


@dataclass(frozen=True)
class Ct:
    """Reconstruct a 3D volume x from X-ray projections b, with isotropic total variation.

    Minimizes ``1/2 |A x - b|^2 + mu sum_voxels |grad x|`` (problem (25) of Zhu, Liang, Zhang: Federated primal dual
    fixed point algorithm). The views are dealt to the N clients by a random permutation; client i's objective is
    ``f_i(x) = N/2 |A_i x - b_i|^2``, so that the clients' mean is the data misfit.

    Units: voxels and detector pixels have size 1; attenuations are scaled so that the phantom's maximum (for a scan,
    that of its filtered back-projection) is 1. If the attenuations are multiplied by c, mu must be, too. With twice the
    views the misfit doubles, so the same smoothing needs twice the mu.
    """

    explanation: ClassVar[str] = (
        "Reconstruct a 3D volume from X-ray projections, the views split over the clients.\n\n"
        "Minimizes 1/2 |Ax - b|^2 + mu sum |grad x| (isotropic 3D total variation) in parallel-beam geometry. Voxels "
        "and detector pixels have size 1, attenuations are scaled to a maximum of 1. The default is a simulated scan "
        "of a 3D Shepp-Logan phantom; --phantom takes a volume of your own, --projections a measured scan."
    )
    offers: ClassVar[tuple[type, ...]] = (Smooth, LinearComposite)
    defaults: ClassVar[Mapping[str, Any]] = {
        "algorithm": "fpdfp",
        "compressor": "qsgd",
        "rounds": 200,
        "record_every": 5,
        "step": "1.9/L",
    }
    pictures: ClassVar[tuple[str, ...]] = ("convergence", "slices")
    compiled: ClassVar[tuple[str, ...]] = (
        "hpcfed.operators.parallel_beam_kernels",
        "hpcfed.operators.total_variation_kernels",
    )

    clients: Size = option(17, "number of clients N")
    shape: tuple[Size, Size, Size] | None = option(
        None, "volume: rows, columns, slices  [default: 256,256,64; of a scan: from its detector]", metavar="NY,NX,NZ"
    )
    views: Size | None = option(None, "views over 180 degrees  [default: 668; of a scan: all]")
    detector: Size | None = option(None, "detector columns  [default: 512; of a scan: its own]", metavar="COLUMNS")
    phantom: str = option("shepp-logan", "shepp-logan or a volume: .npy .npz .nii .nii.gz .tif", metavar="NAME|FILE")
    projections: str | None = option(None, "a measured scan, HDF5 in the DXchange layout", metavar="FILE.h5")
    axis: float | None = option(None, "detector column of the rotation axis  [default: found]", metavar="COLUMN")
    noise: Annotated[float, Ge(0)] = option(0.02, "variance of the Gaussian noise in simulated projections")
    mu: Annotated[float, Ge(0)] | None = option(
        None, "weight of the total variation  [default: 0.015 for each view, 10 for 668]"
    )
    nonnegative: bool = option(False, "constrain the attenuation to be nonnegative")
    projector: Literal["joseph", "astra"] = option(
        "joseph", "on a CPU; joseph: compiled loops; astra: the sparse matrix of ASTRA's linear projector"
    )
    start: Literal["fbp", "zero"] = option(
        "fbp", "starting volume; fbp: the mean of the clients' filtered back-projections, one exchange"
    )

    def __post_init__(self) -> None:
        if self.projections is not None and self.phantom != "shepp-logan":
            raise ConfigError(f"--projections {self.projections} and --phantom {self.phantom}: give one of them")
        if self.projections is None and self.axis is not None:
            raise ConfigError(f"--axis {self.axis}: a simulated scan has its axis in the middle: leave it out")
        if self.projections is None:
            # All is known now, so that the configuration that is written to the run folder is complete.
            sizes: dict[str, Any] = {"shape": (256, 256, 64), "views": 668, "detector": 512}
            sizes |= {name: given for name in sizes if (given := getattr(self, name)) is not None}
            mu = MU_FOR_A_VIEW * sizes["views"] if self.mu is None else self.mu
            for name, value in {**sizes, "mu": mu}.items():
                object.__setattr__(self, name, value)
            if sizes["views"] < self.clients:
                raise ConfigError(f"--views {self.views} for --clients {self.clients}: every client needs a view")

    def build(self, fed: Federation) -> CtProblem:
        return self._simulate(fed) if self.projections is None else self._read_scan(fed, self.projections)

    def _simulate(self, fed: Federation) -> CtProblem:
        """Project a phantom; each client projects its own views and adds its own noise."""
        shape, views, columns, mu = self.shape, self.views, self.detector, self.mu
        assert shape is not None and views is not None and columns is not None and mu is not None  # noqa: PT018
        truth = fed.once(lambda: self.reference(shape))
        angles = np.linspace(0, np.pi, views, endpoint=False, dtype=np.float64)
        dealt = _deal(views, fed)
        judges = min(NUM_JUDGES, fed.num_clients)

        def client(number: int, rng: np.random.Generator) -> CtClient:
            projector = self._projector(fed.device, shape, angles[dealt[number]], columns, None)
            projections = projector.forward(fed.device.put(truth))
            noise = rng.standard_normal(tuple(projections.shape), dtype=np.float32)
            projections += fed.device.put(noise * np.float32(np.sqrt(self.noise)))
            reference = {z: truth[:, :, z].copy() for z in range(shape[2]) if z % judges == number}
            regularizer = self._regularizer(shape, mu)
            return CtClient(number, fed.num_clients, projector, projections, regularizer, reference)

        return CtProblem(self, fed.build(client), shape, mu, Geometry(angles, columns, (columns - 1) / 2))

    def _read_scan(self, fed: Federation, path: str) -> CtProblem:
        """Read a measured scan; each client reads its own views."""
        from hpcfed.data import scans

        scan = fed.once(lambda: scans.open_dxchange(Path(path)))
        shape = self.shape or (scan.num_columns, scan.num_columns, scan.num_rows)
        if shape[2] > scan.num_rows:
            raise ConfigError(
                f"--shape {','.join(map(str, shape))}: {path} has {scan.num_rows} detector rows, one a slice"
            ).on_all_ranks()
        if self.detector not in (None, scan.num_columns):
            raise ConfigError(
                f"--detector {self.detector}: {path} has {scan.num_columns} columns: leave it out"
            ).on_all_ranks()
        num_views = self.views or scan.num_views
        if not self.clients <= num_views <= scan.num_views:
            raise ConfigError(
                f"--views {num_views}: {path} has {scan.num_views} views, and each of {self.clients} clients needs one"
            ).on_all_ranks()
        axis = self.axis if self.axis is not None else fed.once(lambda: scans.find_axis(scan))
        kept = np.linspace(0, scan.num_views - 1, num_views).round().astype(int)
        first_row = (scan.num_rows - shape[2]) // 2
        rows = slice(first_row, first_row + shape[2])
        dealt = _deal(num_views, fed)
        mu = MU_FOR_A_VIEW * num_views if self.mu is None else self.mu

        def client(number: int, rng: np.random.Generator) -> CtClient:
            views = kept[dealt[number]]
            projector = self._projector(fed.device, shape, scan.angles[views], scan.num_columns, axis)
            projections = fed.device.put(scan.read(views, rows))
            return CtClient(number, fed.num_clients, projector, projections, self._regularizer(shape, mu), {})

        built = fed.build(client)
        scale = _typical_maximum(built)
        for own in built.clients.values():
            own.projections[:] = own.projections / scale
        for note in (*scan.notes, f"rotation axis at detector column {axis:.2f}", f"attenuation scale {scale:.5g}"):
            logger.info("%s: %s", path, note)
        return CtProblem(self, built, shape, mu, Geometry(scan.angles[kept], scan.num_columns, axis, scale))

    def _projector(
        self,
        device: devices.Device,
        shape: tuple[int, int, int],
        angles: NDArray[np.float64],
        columns: int,
        axis: float | None,
    ) -> Any:
        """A client's projector. Another geometry takes its place here."""
        if device.is_gpu:
            from hpcfed.operators.parallel_beam_cuda import CudaParallelBeam

            return CudaParallelBeam(shape, angles, columns, axis, device=device.index, memory=device.memory)
        if self.projector == "astra":
            from hpcfed.operators.parallel_beam_astra import AstraParallelBeam

            return AstraParallelBeam(shape, angles, columns, axis)
        from hpcfed.operators.parallel_beam import ParallelBeam

        return ParallelBeam(shape, angles, columns, axis)

    def _regularizer(self, shape: tuple[int, int, int], mu: float) -> Any:
        from hpcfed.operators.total_variation import TotalVariation

        return TotalVariation(shape, mu, self.nonnegative)

    def reference(self, shape: tuple[int, int, int]) -> NDArray[np.float32]:
        """The phantom, with maximum 1."""
        if self.phantom == "shepp-logan":
            from hpcfed.data.phantoms import shepp_logan

            return shepp_logan(shape)
        from hpcfed.data.volumes import read_volume

        return read_volume(Path(self.phantom), shape)


@dataclass(frozen=True)
class Geometry:
    """What the projections mean: angles in radians, detector columns, the axis' column, the attenuations' scale."""

    angles: NDArray[np.float64]
    columns: int
    axis: float
    scale: float = 1.0

    def attributes(self) -> dict[str, Any]:
        """For ``result.h5``."""
        return {
            "geometry": "parallel beam, rotation axis parallel to the slices' axis",
            "detector_columns": self.columns,
            "rotation_axis": self.axis,
            "voxel_size": 1.0,
            "detector_pixel_size": 1.0,
            "attenuation_scale": self.scale,
        }


@dataclass(frozen=True)
class CtClient:
    """One client's views and what can be computed from them; ``f_i(x) = N/2 |A_i x - b_i|^2``.

    ``reference`` holds, by their place z, the slices (ny, nx) of the true volume that this client compares with.
    """

    number: int
    num_clients: int
    projector: Any
    projections: Array
    regularizer: Any
    reference: Mapping[int, NDArray[np.float32]]

    def value(self, x: Array) -> float:
        return float(self.num_clients * self.projector.misfit(x, self.projections))

    def gradient(self, x: Array, rng: np.random.Generator | None = None, batch: int | None = None) -> Array:
        total = self.projector.num_views
        if batch is None or batch >= total:
            return self.projector.gradient(x, self.projections, float(self.num_clients))
        if rng is None:
            raise ValueError("a gradient from a batch of views needs a stream")
        views = np.sort(rng.choice(total, size=batch, replace=False))
        return self.projector.gradient(x, self.projections, self.num_clients * total / batch, views=views)

    def curvature(self, direction: Array) -> Array:
        return self.num_clients * self.projector.normal(direction)

    def filtered_backprojection(self, rng: np.random.Generator) -> Array:
        """The whole volume as this client's views alone show it."""
        return self.projector.filtered_backprojection(self.projections, "ramp")

    def measure(self, rng: np.random.Generator, x: Array) -> NDArray[np.float64]:
        """This client's share of misfit and penalty, and of squared error and SSIM summed over slices."""
        rows = x.shape[0]
        first, last = rows * self.number // self.num_clients, rows * (self.number + 1) // self.num_clients
        penalty = self.regularizer.value(x, first, last)
        misfit = self.projector.misfit(x, self.projections)
        if not self.reference:
            return np.array([misfit, penalty, 0.0, 0.0])
        from skimage.metrics import structural_similarity

        squared, similarity = 0.0, 0.0
        for z, truth in self.reference.items():
            own = devices.to_host(x[:, :, z])
            squared += float(np.sum((own - truth) ** 2, dtype=np.float64))
            if min(truth.shape) >= SSIM_WINDOW:
                similarity += structural_similarity(truth, own, data_range=1.0, win_size=SSIM_WINDOW)
        return np.array([misfit, penalty, squared, similarity])


@dataclass(frozen=True)
class CtProblem:
    """The scan in place: where to start, what to measure, what to keep."""

    workload: Ct
    fed: Federation
    shape: tuple[int, int, int]
    mu: float
    geometry: Geometry

    def start(self) -> Array:
        if self.workload.start == "zero":
            return self.fed.device.put(np.zeros(self.shape, np.float32))
        x = self.fed.mean(self.fed.map(CtClient.filtered_backprojection))
        return x.clip(0) if self.workload.nonnegative else x

    def metrics(self, solution: Array, fed: Federation) -> dict[str, float]:
        """Objective, misfit and total variation; PSNR (peak 1) and SSIM (mean over slices) of a simulated scan."""
        misfit, penalty, squared, similarity = fed.total(fed.map(CtClient.measure, solution)).tolist()
        numbers = {"objective": misfit + penalty, "misfit": misfit}
        if self.mu > 0:
            numbers["tv"] = penalty / self.mu
        if self.workload.projections is None:
            numbers["psnr"] = float(10 * np.log10(np.prod(self.shape) / squared)) if squared > 0 else float("inf")
            if min(self.shape[:2]) >= SSIM_WINDOW:
                numbers["ssim"] = similarity / self.shape[2]
        return numbers

    def results(self, solution: Array) -> Mapping[str, tuple[Array, Mapping[str, Any]]]:
        axes = {"axes": "y x z", "unit": "attenuation per voxel / attenuation_scale"}
        volumes = {"volume": (solution, {**axes, **self.geometry.attributes()})}
        if self.workload.projections is None:
            volumes["reference"] = (self.workload.reference(self.shape), axes)
        return {**volumes, "angles": (self.geometry.angles, {"unit": "radian"})}


def _deal(num_views: int, fed: Federation) -> list[NDArray[np.int64]]:
    """The views of each client, sorted: a random permutation cut into nearly equal parts, the first ones larger."""
    order = fed.streams.generator(Purpose.SPLIT).permutation(num_views)
    return [np.sort(part) for part in np.array_split(order, fed.num_clients)]


def _typical_maximum(fed: Federation) -> float:
    """The 99.9th percentile of the federated filtered back-projection, free of single outliers."""
    x = devices.to_host(fed.mean(fed.map(CtClient.filtered_backprojection)))
    scale = float(np.quantile(x, 0.999))
    if not (np.isfinite(scale) and scale > 0):
        raise DataError(
            f"the scan's back-projection has maximum {scale:.3g}: is it a transmission scan?"
        ).on_all_ranks()
    return scale
