"""3D computed tomography with total variation, the views split over the clients."""

from __future__ import annotations

import importlib
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Ge
from numpy.typing import NDArray

from hpcfed import devices, memory
from hpcfed.capabilities import Array, BoundedCurvature, LinearComposite, Preconditioned, Smooth
from hpcfed.errors import ConfigError, DataError
from hpcfed.federation import Federation, PerClient
from hpcfed.options import option
from hpcfed.workloads.ct_client import SSIM_WINDOW, CtClient
from hpcfed.workloads.ct_geometry import Geometry, deal, inscribed
from hpcfed.workloads.ct_options import ScanOptions, Size, usual_mu

logger = logging.getLogger(__name__)

# So many clients compare their share of the slices with the reference: the library that does it takes each rank a fifth
# of a second to load.
NUM_JUDGES = 4
# Bytes of a rank that has no arrays yet.
RESIDENT = 190 << 20


@dataclass(frozen=True)
class Ct(ScanOptions):
    """Reconstruct a 3D volume x from X-ray projections b, with isotropic total variation.

    Minimizes ``1/2 |A x - b|^2 + mu sum_voxels |grad x|`` (problem (25) of Zhu, Liang, Zhang: Federated primal dual
    fixed point algorithm). The views are dealt to the N clients by a random permutation; client i's objective is
    ``f_i(x) = N/2 |A_i x - b_i|^2``, so that the clients' mean is the data misfit.

    Units: voxels have size 1, as have the pixels of a parallel beam's detector; attenuations are scaled so that the
    phantom's maximum (for a scan, that of its filtered back-projection) is 1. If the attenuations are multiplied by c,
    mu must be, too. With twice the views the misfit doubles, so the same smoothing needs twice the mu.

    Beams are parallel, a fan in every slice, or a cone. The source of a fan or cone is level with the volume's middle,
    the detector upright and opposite. Of a parallel or fan beam each slice has its own detector row.
    """

    explanation: ClassVar[str] = (
        "Reconstruct a 3D volume from X-ray projections, the views split over the clients.\n\n"
        "Minimizes 1/2 |Ax - b|^2 + mu sum |grad x| (isotropic 3D total variation); beams are parallel, fans or cones. "
        "Voxels have size 1, lengths are in voxels, attenuations are scaled to a maximum of 1. The default is a "
        "simulated scan of a 3D Shepp-Logan phantom; --phantom takes a volume of your own, --projections a measured "
        "scan."
    )
    offers: ClassVar[tuple[type, ...]] = (Smooth, BoundedCurvature, LinearComposite, Preconditioned)
    defaults: ClassVar[Mapping[str, Any]] = {
        "algorithm": "vm-pdfp",
        "compressor": "qsgd",
        "rounds": 200,
        "record_every": 5,
    }
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "vm-pdfp": {"rounds": 40},
        "fpdfp": {"step": "1.9/L", "lam": 0.05},
    }
    pictures: ClassVar[tuple[str, ...]] = ("convergence", "slices", "mu")
    compiled: ClassVar[tuple[str, ...]] = ("hpcfed.operators.total_variation_kernels",)

    clients: Size = option(17, "number of clients N")
    phantom: str | None = option(
        None, "shepp-logan or a volume: .npy .npz .nii .nii.gz .tif  [default: shepp-logan]", metavar="NAME|FILE"
    )
    projections: str | None = option(
        None, "a measured scan: DXchange, NXtomo, Nikon, TIFF, .npz or .mat", metavar="FILE"
    )
    rings: bool = option(False, "correct the pixels of a measured scan that draw rings, by algotom, as it is read")
    axis: float | None = option(None, "detector column of the rotation axis  [default: found]", metavar="COLUMN")
    noise: Annotated[float, Ge(0)] | None = option(
        None, "variance of the Gaussian noise in simulated projections  [default: 0.02]"
    )
    mu: Annotated[float, Ge(0)] | Literal["auto"] | None = option(
        None,
        "weight of the total variation; scale it with views and attenuations; auto: what predicts views set aside best "
        " [default: 0.0075 times the views, of a fan also times the root of the rays of a view through a voxel; of a "
        "cone 0.06 times the root of the rays of all views through a voxel]",
        metavar="FLOAT|auto",
    )
    nonnegative: bool = option(False, "constrain the attenuation to be nonnegative")
    mask: Literal["cylinder", "none"] = option(
        "none", "cylinder: constrain the attenuation to be 0 outside the cylinder that touches the volume's sides"
    )
    projector: Literal["joseph", "astra"] = option(
        "joseph", "of a parallel beam on a CPU; joseph: compiled loops; astra: the matrix of ASTRA's linear projector"
    )
    start: Literal["fbp", "zero"] = option(
        "fbp", "starting volume; fbp: the mean of the clients' filtered back-projections, one exchange"
    )
    levels: Size = option(
        1, "start from the minimum on voxels and pixels of twice the edge, found likewise on one level less; 1: start"
    )

    def __post_init__(self) -> None:
        for name in ("phantom", "projections"):  # a path that holds from any folder
            if getattr(self, name) not in (None, "shepp-logan"):
                object.__setattr__(self, name, os.path.abspath(getattr(self, name)))
        if self.projections is not None:
            given = ("phantom", "noise", "source_distance", "detector_distance", "pixel_size")
            self.refuse_given(*given, because="--projections")
            return
        if self.rings:
            raise ConfigError("--rings: a simulated scan has none: leave it out")
        if self.axis is not None:
            raise ConfigError(f"--axis {self.axis}: a simulated scan has its axis in the middle: leave it out")
        # All is known now, so that the configuration that is written to the run folder is complete.
        self.fill(phantom="shepp-logan", noise=0.02)
        geometry = self.settle()
        self.fill(mu=usual_mu(geometry))
        self._check_projector(geometry)
        if self.known("views") < self.clients:
            raise ConfigError(f"--views {self.views} for --clients {self.clients}: every client needs a view")

    def _check_projector(self, geometry: Geometry) -> None:
        if self.projector == "astra" and geometry.kind != "parallel":
            raise ConfigError(
                f"--projector astra: there is none for a {geometry.kind} beam: leave it out"
            ).on_all_ranks()

    def refuse(self, name: str, algorithm: Any) -> None:
        """Refuse an algorithm whose options do not go with this problem.

        Raises
        ------
        ConfigError
        """
        lam = getattr(algorithm, "lam", None)
        if lam is not None and self.shape is not None:
            bound = 4 * sum(size > 1 for size in self.shape)
            if lam * bound > 1:
                raise ConfigError(f"--lam {lam:.6g} exceeds 1/rho_max(B B^T) = 1/{bound}: choose at most that")
        if (self.nonnegative or self.mask != "none") and LinearComposite not in algorithm.needs:
            given = "--nonnegative" if self.nonnegative else f"--mask {self.mask}"
            raise ConfigError(f"{given}: {name} keeps no constraint: leave it out or use fpdfp or vm-pdfp")

    def build(self, fed: Federation) -> CtProblem:
        if self.mu == "auto":
            from hpcfed.workloads import ct_weight

            return ct_weight.with_best_mu(replace(self, mu=None).build(fed))
        return self._simulate(fed) if self.projections is None else self._read_scan(fed, self.projections)

    def _simulate(self, fed: Federation) -> CtProblem:
        """Project a phantom; each client projects its own views and adds its own noise."""
        shape, noise, geometry = self.known("shape"), self.known("noise"), self.settle()
        dealt = self._prepare(fed, geometry)
        truth = fed.once(lambda: self.reference(shape))
        judges = min(NUM_JUDGES, fed.num_present)

        def client(number: int, rng: np.random.Generator) -> CtClient:
            projector = geometry.projector(shape, dealt[number], fed.device, self.projector)
            projections = projector.forward(fed.device.put(truth))
            errors = rng.standard_normal(tuple(projections.shape), dtype=np.float32)
            projections += fed.device.put(errors * np.float32(np.sqrt(noise)))
            reference = {z: truth[:, :, z].copy() for z in range(shape[2]) if z % judges == fed.place(number)}
            shared, count = self.regularizer(), fed.ledger.count
            return CtClient(number, fed.num_clients, geometry, projector, projections, shared, reference, count)

        built = fed.build(client)
        return CtProblem(self, built, geometry, truth=truth if fed.writes else None, hopeless=_hopeless(built))

    def _read_scan(self, fed: Federation, path: str) -> CtProblem:
        """Read a measured scan; each client reads its own views."""
        from hpcfed import scans
        from hpcfed.scans.rings import without_rings

        scan = fed.once(lambda: scans.open_scan(Path(path)))
        if self.rings:
            scan = fed.once(lambda: without_rings(scan))
        num_views = self.views or scan.num_views
        if not self.clients <= num_views <= scan.num_views:
            raise ConfigError(
                f"--views {num_views}: {path} has {scan.num_views} views, and each of {self.clients} clients needs one"
            ).on_all_ranks()
        kept = np.linspace(0, scan.num_views - 1, num_views).round().astype(int)
        axis = self.axis if self.axis is not None or scan.beam is not None else scan.axis
        if axis is None and scan.beam is None:
            axis = fed.once(lambda: scans.find_axis(scan))
        geometry, shape, rows = self.adopt(scan, kept, axis)
        self._check_projector(geometry)
        found = replace(
            self,
            shape=shape,
            geometry=geometry.kind,
            views=num_views,
            detector=f"{geometry.columns},{geometry.rows}" if geometry.kind == "cone" else geometry.columns,
            axis=self.axis if geometry.beam else geometry.axis,
        )
        found.fill(mu=usual_mu(geometry))
        dealt = found._prepare(fed, geometry)

        def client(number: int, rng: np.random.Generator) -> CtClient:
            projector = geometry.projector(shape, dealt[number], fed.device, self.projector)
            projections = fed.device.put(scan.read(kept[dealt[number]], rows))
            shared, count = found.regularizer(), fed.ledger.count
            return CtClient(number, fed.num_clients, geometry, projector, projections, shared, {}, count)

        built = fed.build(client)
        volume = built.mean(built.map(CtClient.filtered_backprojection))
        scale = _typical_maximum(volume)
        for own in built.clients.values():
            own.projections[:] = own.projections / scale
        for note in (*scan.notes, *geometry.notes(), f"attenuation scale {scale:.5g}"):
            logger.info("%s: %s", path, note)
        scaled, start = replace(geometry, scale=scale), volume / scale
        return CtProblem(found, built, scaled, filtered_backprojection=start, hopeless=_hopeless(built))

    def _prepare(self, fed: Federation, geometry: Geometry) -> list[NDArray[np.int64]]:
        """The views of each client, once there is memory for them, and the compiled projector."""
        dealt = deal(len(geometry.angles), fed)
        voxels = 4 * math.prod(self.known("shape"))
        own = [len(dealt[number]) for number in fed.local]
        view = 4 * geometry.columns * geometry.rows
        needs = {
            "volumes": (3 + len(own)) * voxels,
            "duals": 3 * (2 + len(own)) * voxels,
            "projections": (sum(own) + max(own)) * view,
            "NumPy, MPI and compiled code": RESIDENT,
        }
        remedy = "use fewer voxels, pixels or ranks on a node, or more nodes"
        memory.require(fed.communicator, fed.device, needs, remedy)
        if not fed.device.is_gpu:
            with fed.communicator.first_on_node():
                for module in geometry.compiled:
                    importlib.import_module(module)
        return dealt

    def regularizer(self) -> Any:
        """What all clients share: total variation, and the constraints."""
        from hpcfed.operators.total_variation import TotalVariation

        shape, weight = self.known("shape"), self.known("mu")
        return TotalVariation(shape, weight, self.nonnegative, inscribed(shape) if self.mask == "cylinder" else None)

    def reference(self, shape: tuple[int, int, int]) -> NDArray[np.float32]:
        """The phantom, with maximum 1."""
        if self.phantom == "shepp-logan":
            from hpcfed.data.phantoms import shepp_logan

            return shepp_logan(shape)
        from hpcfed.data.volumes import read_volume

        return read_volume(Path(self.known("phantom")), shape)


@dataclass(frozen=True)
class CtProblem:
    """The scan in place: where to start, what to measure, what to keep.

    ``truth`` is the phantom, on the rank that writes the result; ``filtered_backprojection`` the clients' mean, where
    a scan's scale was found from it. ``hopeless`` is ten times the objective of an empty volume.
    """

    workload: Ct
    fed: Federation
    geometry: Geometry
    truth: NDArray[np.float32] | None = None
    filtered_backprojection: Array | None = None
    hopeless: float = math.inf

    def start(self) -> Array:
        if self.workload.levels > 1:
            from hpcfed.workloads import ct_levels

            return ct_levels.start(self)
        return self.plain_start()

    def plain_start(self) -> Array:
        """The start on this level alone."""
        if self.workload.start == "zero":
            return self.fed.device.put(np.zeros(self.workload.known("shape"), np.float32))
        x = self.filtered_backprojection
        if x is None:
            x = self.fed.mean(self.fed.map(CtClient.filtered_backprojection))
        x = self.fed.any_client.regularizer.project(x)
        unseen = self.geometry.unseen(self.workload.known("shape"))
        if unseen is None:
            return x
        # What back-projection puts where some views see nothing is wrong, but may be better than nothing.
        cut = x * self.fed.device.put((~unseen[:, :, None]).astype(np.float32))
        return min(x, cut, key=self._misfit)

    def _misfit(self, x: Array) -> float:
        return float(self.fed.mean(self.fed.map(lambda client, rng: client.value(x))))

    def metrics(self, solution: Array, fed: Federation) -> dict[str, float]:
        """Objective, misfit and total variation; PSNR (peak 1) and SSIM (mean over slices) of a simulated scan."""
        parts = PerClient({client: (fed.place(client), fed.num_present) for client in fed.local})
        misfit, penalty, squared, similarity = fed.total(fed.map(CtClient.measure, solution, parts)).tolist()
        misfit *= fed.num_clients / fed.num_present  # a client's objective is N times its own misfit
        numbers = {"objective": misfit + penalty, "misfit": misfit}
        mu, shape = self.workload.known("mu"), self.workload.known("shape")
        if mu > 0:
            numbers["tv"] = penalty / mu
        if self.workload.projections is None:
            numbers["psnr"] = float(10 * np.log10(np.prod(shape) / squared)) if squared > 0 else float("inf")
            if min(shape[:2]) >= SSIM_WINDOW:
                numbers["ssim"] = similarity / shape[2]
        return numbers

    def results(self, solution: Array) -> Mapping[str, tuple[Array, Mapping[str, Any]]]:
        axes = {"axes": "y x z", "unit": "attenuation per voxel / attenuation_scale"}
        geometry = self.geometry.attributes()
        results: dict[str, tuple[Array, Mapping[str, Any]]] = {
            "volume": (solution, {**axes, **geometry}),
            "geometry": (self.geometry.angles, geometry),
        }
        if self.truth is not None:
            results["reference"] = (self.truth, axes)
        if self.fed.journal.entries:
            from hpcfed.workloads import ct_weight

            results |= ct_weight.tried(self.fed.journal.entries)
        return results


def _hopeless(fed: Federation) -> float:
    return 10 * float(fed.total(fed.map(CtClient.energy)))


def _typical_maximum(volume: Array) -> float:
    """The 99.9th percentile, free of single outliers."""
    scale = float(np.quantile(devices.to_host(volume), 0.999))
    if not (np.isfinite(scale) and scale > 0):
        raise DataError(
            f"the scan's back-projection has maximum {scale:.3g}: is it a transmission scan?"
        ).on_all_ranks()
    return scale
