"""Scans in every layout: made files hold one object's line integrals in closed form, real ones hold real scans."""

from __future__ import annotations

import pickle
import sys

import astra
import h5py
import numpy as np
import pytest
import scipy.io
import tifffile

from hpcfed.errors import ConfigError, DataError
from hpcfed.scans import READERS, find_axis, open_scan

VIEWS, ROWS, COLUMNS = 24, 5, 40
DEGREES = np.linspace(0, 360, VIEWS, endpoint=False)
SOURCE, DETECTOR, PIXEL = 60.0, 40.0, (0.5, 0.4)  # mm
VOXEL = PIXEL[0] * SOURCE / (SOURCE + DETECTOR)
# centre and radius of a ball in mm; attenuation per mm
BALL, RADIUS, DENSITY = np.array([1.6, -0.9, 0.15]), 2.2, 0.2


def cone_vectors(degrees=DEGREES, shift=(0.0, 0.0), rows=ROWS):
    """ASTRA's own poses of a circular cone beam, in mm; the detector shifted by some pixels."""
    geometry = astra.create_proj_geom("cone", *PIXEL, rows, COLUMNS, np.deg2rad(degrees), SOURCE, DETECTOR)
    vectors = astra.geom_2vec(geometry)["Vectors"].copy()
    vectors[:, 3:6] += shift[0] * vectors[:, 6:9] + shift[1] * vectors[:, 9:12]
    return vectors


def ball(vectors, rows=ROWS, centre=BALL):
    """Line integrals through the ball, (views, rows, columns): chords by the distance between ray and centre."""
    source, middle, u, v = vectors.reshape(-1, 4, 1, 1, 3).transpose(1, 0, 2, 3, 4)
    row = np.arange(rows)[:, None, None] - (rows - 1) / 2
    column = np.arange(COLUMNS)[:, None] - (COLUMNS - 1) / 2
    ray = middle + row * v + column * u - source
    ray = ray / np.linalg.norm(ray, axis=-1, keepdims=True)
    distance = np.linalg.norm(np.cross(centre - source, ray), axis=-1)
    return 2 * DENSITY * np.sqrt(np.maximum(RADIUS**2 - distance**2, 0))


def flat_and_dark():
    """Uneven fields, (frames, rows, columns)."""
    flat = 5000 + 900 * np.sin(np.arange(COLUMNS) / 5) * np.linspace(0.5, 1, ROWS)[:, None]
    return np.stack([flat + 10, flat - 10]), np.full((3, ROWS, COLUMNS), 95.0)


INTEGRALS = ball(cone_vectors())


def counts(integrals=INTEGRALS):
    flats, darks = flat_and_dark()
    return darks[0] + (flats.mean(axis=0) - darks[0]) * np.exp(-integrals)


# ---- one scan in all layouts


def write_toml(path, **keys):
    def text(value):
        if isinstance(value, dict):
            return "{ " + ", ".join(f"{name} = {text(item)}" for name, item in value.items()) + " }"
        if isinstance(value, list | np.ndarray):
            return "[" + ", ".join(map(text, value)) + "]"
        return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else f"{value}"

    path.write_text("".join(f"{name} = {text(value)}\n" for name, value in keys.items()))
    return path


LENGTHS = {"source_distance": SOURCE, "detector_distance": DETECTOR, "pixel_size": np.array(PIXEL)}


def as_npz(folder, save=np.savez, **replaced):
    flats, darks = flat_and_dark()
    arrays = {"projections": counts(), "angles": DEGREES, "unit": "degrees", "flats": flats, "darks": darks, **LENGTHS}
    arrays = {name: value for name, value in {**arrays, **replaced}.items() if value is not None}
    save(folder / "scan.npz", **arrays)
    return folder / "scan.npz"


def as_compressed_npz(folder):
    return as_npz(folder, np.savez_compressed)


def as_posed_npz(folder):
    return as_npz(folder, angles=None, unit=None, vectors=cone_vectors(), **dict.fromkeys(LENGTHS))


def as_mat(folder, **replaced):
    flats, darks = flat_and_dark()
    arrays = {"projections": counts(), "flats": flats, "darks": darks, "angles": DEGREES, "unit": "degrees", **LENGTHS}
    arrays = {name: value for name, value in {**arrays, **replaced}.items() if value is not None}
    scipy.io.savemat(folder / "scan.mat", arrays)
    return folder / "scan.mat"


def as_posed_mat(folder):
    return as_mat(folder, angles=None, vectors=cone_vectors())


def as_new_mat(folder):
    """Version 7.3 as MATLAB writes it: HDF5 behind 512 bytes, column by column, texts as numbers."""
    path = folder / "scan.mat"
    flats, darks = flat_and_dark()
    with h5py.File(path, "w", userblock_size=512) as file:
        arrays = {"projections": counts(), "angles": DEGREES[:, None], "flats": flats, "darks": darks, **LENGTHS}
        for name, array in arrays.items():
            file[name] = np.asarray(array, float).T if np.ndim(array) else np.array([[float(array)]])
        file["unit"] = np.array([[ord(letter)] for letter in "degrees"], np.uint16)
        file["unit"].attrs["MATLAB_class"] = b"char"
    with path.open("r+b") as file:
        file.write(b"MATLAB 7.3 MAT-file".ljust(512))
    return path


def write_images(folder, name, images):
    for number, image in enumerate(images):
        tifffile.imwrite(folder / f"{name}{number}.tif", image)


def as_tiff_files(folder):
    flats, darks = flat_and_dark()
    write_images(folder, "scan_", counts())
    write_images(folder, "flat_", flats)
    write_images(folder, "dark_", darks)
    write_toml(
        folder / "geometry.toml",
        projections="scan_*.tif",
        flats="flat_*.tif",
        darks="dark_*.tif",
        angles={"first": 0, "step": 15.0},
        unit="degrees",
        **LENGTHS,
    )
    return folder


def as_tiff_pages(folder):
    """Images lie on their side and upside down; the TOML is told by the image's name."""
    stored = np.exp(-INTEGRALS)[:, ::-1].transpose(0, 2, 1)
    tifffile.imwrite(folder / "scan.tif", stored, photometric="minisblack")
    np.savetxt(folder / "poses.geom", cone_vectors())
    look = {"transpose": True, "flip": ["rows"]}
    write_toml(folder / "scan.toml", projections="scan.tif", values="transmission", vectors="poses.geom", **look)
    return folder / "scan.tif"


@pytest.mark.parametrize(
    "write",
    [as_npz, as_compressed_npz, as_posed_npz, as_mat, as_posed_mat, as_new_mat, as_tiff_files, as_tiff_pages],
    ids=lambda write: write.__name__[3:],
)
def test_a_cone_beam_scan_reads_alike_from_every_layout(tmp_path, write):
    scan = pickle.loads(pickle.dumps(open_scan(str(write(tmp_path)))))
    assert (scan.num_views, scan.num_rows, scan.num_columns) == (VIEWS, ROWS, COLUMNS)
    np.testing.assert_allclose(scan.angles, np.deg2rad(DEGREES), atol=1e-7)
    assert scan.voxel == pytest.approx(VOXEL, rel=1e-6)
    views = np.array([7, 0, 23])
    integrals = scan.read(views, slice(1, 4))
    assert integrals.dtype == np.float32
    assert integrals.flags.c_contiguous
    np.testing.assert_allclose(integrals, INTEGRALS[views, 1:4].transpose(0, 2, 1), atol=3e-6)
    np.testing.assert_allclose(scan.poses(views), cone_vectors()[views] / VOXEL, atol=1e-6)
    assert scan.beam.magnification == pytest.approx((SOURCE + DETECTOR) / SOURCE)
    with pytest.raises(DataError, match="geometry"):
        find_axis(scan)


def test_axis_and_level_shift_the_detector(tmp_path):
    shifted = cone_vectors(shift=(1.25, -0.5))
    path = as_npz(tmp_path, axis=(COLUMNS - 1) / 2 - 1.25, middle=(ROWS - 1) / 2 + 0.5, voxel_size=0.1)
    scan = open_scan(path)
    assert not any("axis" in note or "middle" in note for note in scan.notes)
    np.testing.assert_allclose(scan.poses(range(VIEWS)), shifted / 0.1, atol=1e-6)


def test_without_lengths_the_beam_is_parallel(tmp_path):
    centres = 19.0 + 6 * np.cos(np.deg2rad(DEGREES))
    chords = np.sqrt(np.maximum(36 - (np.arange(COLUMNS) - centres[:, None]) ** 2, 0))
    dropped = dict.fromkeys([*LENGTHS, "flats", "darks"])
    scan = open_scan(as_npz(tmp_path, projections=chords, values="integrals", axis=19.0, **dropped))
    assert scan.beam is None
    assert scan.axis == 19.0
    assert scan.read(range(VIEWS)).shape == (VIEWS, COLUMNS, 1)
    assert find_axis(scan) == pytest.approx(19.0, abs=0.1)
    assert any("integrals" in note for note in scan.notes)


def test_radians_when_the_file_says_so(tmp_path):
    scan = open_scan(as_npz(tmp_path, angles=np.deg2rad(DEGREES), unit="radians"))
    np.testing.assert_allclose(scan.angles, np.deg2rad(DEGREES))
    scan = open_scan(as_npz(tmp_path, angles=np.linspace(0, np.pi, VIEWS), unit="degrees"))
    assert "are they radians" in scan.notes[0]


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"projections": None}, "holds no array projections but"),
        ({"projections": counts()[0, 0]}, r"projections has shape \(40,\)"),
        ({"projections": counts().astype(complex)}, "projections holds complex128"),
        ({"projections": np.asfortranarray(counts())}, "ascontiguousarray"),
        ({"angles": None}, "neither angles nor vectors"),
        ({"angles": DEGREES[1:]}, "23 angles in angles for 24 views"),
        ({"angles": DEGREES * 0}, "every angle of angles is 0"),
        ({"angles": np.where(DEGREES == 30, np.nan, DEGREES)}, "angle 2 of angles is not finite"),
        ({"unit": "radians"}, "345 radians, 54.9 turns: degrees"),
        ({"unit": "gon"}, "'gon', an unknown unit"),
        ({"unit": None, "angles": np.deg2rad(DEGREES)}, "unnamed unit, perhaps radians; add unit"),
        ({"flats": None, "darks": None}, "has no flat fields.*add flats, or values: transmission or integrals"),
        ({"flats": np.ones((2, ROWS, 7))}, r"frames of flats are \(5, 7\), those of projections \(5, 40\)"),
        ({"flats": np.full((1, ROWS, COLUMNS), 5000 + 1j)}, "flats are of type complex128; write real numbers"),
        ({"flats": np.full((1, ROWS, COLUMNS), np.nan)}, "flats is not finite in row 0, column 0"),
        ({"values": "integrals"}, "needs no flat and dark fields"),
        ({"values": "photons"}, "values is 'photons'"),
        ({"detector_distance": None}, "detector_distance is missing; a fan or cone beam needs"),
        ({"pixel_size": None}, "pixel_size is missing"),
        ({"pixel_size": -1.0}, "pixel_size is -1; give a positive length"),
        ({"source_distance": np.ones(3)}, "source_distance is .*; give one number"),
        ({"vectors": np.ones((VIEWS, 11))}, r"vectors have shape \(24, 11\)"),
        ({"vectors": cone_vectors()[1:]}, "23 rows of vectors for 24 views"),
        ({"vectors": cone_vectors() * np.repeat([0, 1], [3, 9])}, "in view 0 the source is on the rotation axis"),
    ],
)
def test_unsound_arrays_are_refused(tmp_path, replaced, message):
    path = as_npz(tmp_path, **replaced)
    with pytest.raises(DataError, match=message) as caught:
        open_scan(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_views_are_named_when_they_are_read(tmp_path):
    values = INTEGRALS + np.random.default_rng(0).normal(0, 0.01, INTEGRALS.shape)
    values[5, 2, 3] = np.inf
    values[9] = 0.7
    dropped = dict.fromkeys(["flats", "darks"])
    scan = open_scan(as_npz(tmp_path, projections=values, values="integrals", **dropped))
    with pytest.raises(DataError, match=r"view 5 has 1 values that are not finite.*row 2, column 3"):
        scan.read([4, 5])
    with pytest.raises(DataError, match=r"view 9 is dead, every value is 0\.7"):
        scan.read([9])
    scan.read([4, 6])


@pytest.mark.parametrize("write", [as_npz, as_compressed_npz, as_mat, as_new_mat])
def test_truncated_and_foreign_files_are_refused(tmp_path, write):
    path = write(tmp_path)
    content = path.read_bytes()
    for damaged in (content[:7], content[:300], content[: len(content) // 2], b"", b"not a scan\n" * 99):
        path.write_bytes(damaged)
        with pytest.raises(DataError) as caught:
            open_scan(path).read([VIEWS - 1])
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="no such file"):
        open_scan(tmp_path / "absent.npz")


# ---- NXtomo


def as_nxtomo(folder, keys=None, units="degree", angles=DEGREES, entry="entry0000"):
    flats, darks = flat_and_dark()
    frames = np.concatenate([darks, counts()[:10], flats, counts()[10:], counts()[:1] * 0])
    keys = np.repeat([2, 0, 1, 0, 3], [3, 10, 2, 14, 1]) if keys is None else keys
    theta = np.zeros(len(frames))
    theta[keys == 0] = angles
    with h5py.File(folder / "scan.nx", "w") as file:
        detector = file.create_group(f"{entry}/instrument/detector")
        detector["data"] = frames
        detector["image_key"] = keys
        detector["x_pixel_size"] = 2e-6
        detector["x_pixel_size"].attrs["units"] = "m"
        file[f"{entry}/sample/rotation_angle"] = theta
        if units:
            file[f"{entry}/sample/rotation_angle"].attrs["units"] = units
        # links that programs for viewing look for, first in the alphabet
        file[f"{entry}/data/data"] = detector["data"]
        file[f"{entry}/data/image_key"] = detector["image_key"]
    return folder / "scan.nx"


@pytest.mark.parametrize("entry", ["entry0000", "entry1/tomo_entry"])
def test_nxtomo_sorts_frames_by_their_keys(tmp_path, entry):
    scan = open_scan(as_nxtomo(tmp_path, entry=entry))
    assert (scan.num_views, scan.num_rows, scan.num_columns) == (VIEWS, ROWS, COLUMNS)
    np.testing.assert_allclose(scan.angles, np.deg2rad(DEGREES))
    assert scan.voxel == pytest.approx(2e-3)
    assert scan.beam is None
    np.testing.assert_allclose(scan.read([9, 10, 23]), INTEGRALS[[9, 10, 23]].transpose(0, 2, 1), atol=3e-6)
    assert any("1 frames that image_key marks as invalid" in note for note in scan.notes)


def test_unsound_nxtomo_is_refused(tmp_path):
    keys = np.repeat([2, 0, 1, 0, 3], [3, 10, 2, 14, 1])
    with pytest.raises(DataError, match=r"has no flat fields.*record frames with image_key 1"):
        open_scan(as_nxtomo(tmp_path, np.where(keys == 1, 3, keys)))
    with pytest.raises(DataError, match="no frame is a projection"):
        open_scan(as_nxtomo(tmp_path, np.where(keys == 0, 3, keys), angles=()))
    path = as_nxtomo(tmp_path)
    with h5py.File(path, "r+") as file:
        del file["entry0000/instrument/detector/image_key"]
        file["entry0000/instrument/detector/image_key"] = keys[1:]
    with pytest.raises(DataError, match="29 numbers in image_key for 30 frames"):
        open_scan(path)
    with pytest.raises(DataError, match="perhaps radians; set its attribute units"):
        open_scan(as_nxtomo(tmp_path, units=None, angles=np.deg2rad(DEGREES)))
    path = as_nxtomo(tmp_path)
    with h5py.File(path, "r+") as file:
        del file["entry0000/sample/rotation_angle"]
    with pytest.raises(DataError, match="sample/rotation_angle is missing"):
        open_scan(path)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(DataError, match="cannot be read as HDF5"):
        open_scan(path)


# ---- TIFF


def test_unsound_descriptions_of_images_are_refused(tmp_path):
    write_images(tmp_path, "scan_", np.exp(-INTEGRALS[:12]))
    sound = {"projections": "scan_*.tif", "angles": {"first": 0, "step": 15}, "unit": "degrees"}
    for keys, message in (
        ({}, "has no flat fields.*name flats, or write values"),
        ({"values": "transmission", "angles": [1.0, 2.0]}, "2 angles in angles for 12 views"),
        ({"values": "transmission", "angles": "twelve"}, "twelve: there is no such file"),
        ({"values": "transmission", "angles": True}, "angles is True; give first and step"),
        ({"flats": "white*.tif"}, r"no file white\*\.tif in"),
        ({"speed": 3}, "speed is unknown; there are projections, flats"),
        ({"flip": ["up"]}, "flip is .*; it lists"),
    ):
        path = write_toml(tmp_path / "g.toml", **{**sound, **keys})
        with pytest.raises(DataError, match=message) as caught:
            open_scan(tmp_path)
        assert "\n" not in str(caught.value)
    path.write_text("projections = ")
    with pytest.raises(DataError, match="is no TOML"):
        open_scan(path)
    write_toml(path, **sound, values="transmission")
    image = tmp_path / "scan_3.tif"
    image.write_bytes(image.read_bytes()[:200])
    with pytest.raises(DataError, match=r"scan_3\.tif: cannot be read as TIFF"):
        open_scan(path).read([3])
    tifffile.imwrite(image, np.zeros((3, 4, 3), np.uint8))
    with pytest.raises(DataError, match="images need grey levels"):
        open_scan(path).read([3])
    tifffile.imwrite(image, np.ones((ROWS, COLUMNS + 1)))
    with pytest.raises(DataError, match=r"view 3 has \(5, 41\) rows and columns instead of \(5, 40\)"):
        open_scan(path).read([3])
    path.unlink()
    with pytest.raises(DataError, match=r"write scan_1\.toml beside it"):
        open_scan(tmp_path / "scan_1.tif")
    with pytest.raises(DataError, match=r"needs one \.toml or \.xtekct"):
        open_scan(tmp_path)


def test_a_missing_library_names_the_remedy(tmp_path, monkeypatch):
    folder = as_tiff_files(tmp_path)
    monkeypatch.setitem(sys.modules, "tifffile", None)
    with pytest.raises(ConfigError, match="pip install tifffile"):
        open_scan(folder)


# ---- Nikon


def as_nikon(folder, offset=0.0, **replaced):
    """The poses of a Nikon scan as its makers count them, and the files of the scan."""
    first, step = 30.0, 7.5
    turn = np.deg2rad(first - 180 + step * np.arange(VIEWS))  # of source and detector about the object
    poses = [[offset, -SOURCE, 0], [offset, DETECTOR, 0], [-PIXEL[0], 0, 0], [0, 0, -PIXEL[1]]]
    rotation = np.zeros((VIEWS, 3, 3))
    rotation[:, 0, 0] = rotation[:, 1, 1] = np.cos(turn)
    rotation[:, 1, 0], rotation[:, 0, 1], rotation[:, 2, 2] = np.sin(turn), -np.sin(turn), 1
    vectors = np.einsum("vij,kj->vki", rotation, np.array(poses)).reshape(VIEWS, 12)
    keys = {
        "Name": "nut",
        "InputFolderName": "images",
        "Projections": VIEWS,
        "DetectorPixelsX": COLUMNS,
        "DetectorPixelsY": ROWS,
        "DetectorPixelSizeX": PIXEL[0],
        "DetectorPixelSizeY": PIXEL[1],
        "SrcToObject": SOURCE,
        "SrcToDetector": SOURCE + DETECTOR,
        "InitialAngle": first,
        "AngularStep": step,
        "WhiteLevel": 60000,
        "ObjectOffsetX": offset,
        **replaced,
    }
    (folder / "images").mkdir(exist_ok=True)
    for number, image in enumerate(60000 * np.exp(-ball(vectors)), start=1):
        tifffile.imwrite(folder / "images" / f"nut_{number:04}.tif", np.round(image).astype(np.uint16))
    lines = [f"{name}={value}\n" for name, value in keys.items() if value is not None]
    (folder / "nut.xtekct").write_text("[XTekCT]\r\n" + "".join(lines), newline="\r\n")
    return vectors


@pytest.mark.parametrize("offset", [0.0, 0.8])
def test_nikon_shows_the_object_turned_but_not_mirrored(tmp_path, offset):
    vectors = as_nikon(tmp_path, offset)
    scan = open_scan(tmp_path)
    np.testing.assert_allclose(scan.read([3, 23]), ball(vectors)[[3, 23]].transpose(0, 2, 1), atol=2e-4)
    # half a turn about the y axis: a rotation of the object, so the volume is no mirror image
    turned = (vectors.reshape(-1, 4, 3) * [-1, 1, -1]).reshape(-1, 12)
    np.testing.assert_allclose(scan.poses(range(VIEWS)), turned / scan.voxel, atol=1e-9)
    assert any("WhiteLevel 60000 everywhere" in note for note in scan.notes)


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"SrcToObject": None}, "SrcToObject is missing; it must be a number"),
        ({"AngularStep": "fast"}, "AngularStep is 'fast'"),
        ({"Projections": 25}, "24 images in .* for Projections=25"),
        ({"DetectorPixelsX": 41}, r"images are \(5, 40\), the file says \(5, 41\)"),
        ({"InputFolderName": "lost"}, r"no file nut\*\.tif in"),
        ({"WhiteLevel": 0}, "WhiteLevel is 0"),
        ({"SrcToDetector": SOURCE}, "detector_distance is 0; give a positive length"),
    ],
)
def test_unsound_nikon_is_refused(tmp_path, replaced, message):
    as_nikon(tmp_path, **replaced)
    with pytest.raises(DataError, match=message):
        open_scan(tmp_path / "nut.xtekct")


# ---- the Helsinki Tomography Challenge


def as_ctdata(folder, **replaced):
    vectors = cone_vectors(rows=1)
    parameters = {
        "distanceSourceOrigin": SOURCE,
        "distanceSourceDetector": SOURCE + DETECTOR,
        "pixelSize": PIXEL[0] / 4,
        "pixelSizePost": PIXEL[0],
        "angles": DEGREES,
    }
    parameters = {name: value for name, value in {**parameters, **replaced}.items() if value is not None}
    content = {"type": "2D", "sinogram": ball(vectors, 1)[:, 0], "parameters": parameters}
    scipy.io.savemat(folder / "scan.mat", {"CtDataFull": content})
    return folder / "scan.mat"


def test_the_challenges_layout(tmp_path):
    scan = open_scan(as_ctdata(tmp_path))
    vectors = cone_vectors(rows=1)
    np.testing.assert_allclose(scan.read([5])[0, :, 0], ball(vectors, 1)[5, 0], atol=1e-6)
    np.testing.assert_allclose(scan.poses([5])[0, :9], vectors[5, :9] / VOXEL, atol=1e-9)
    for replaced, message in (
        ({"angles": None}, "the field angles is missing"),
        ({"angles": DEGREES[2:]}, "22 angles in CtDataFull.parameters.angles for 24 views"),
        ({"distanceSourceOrigin": -3}, "source_distance is -3"),
    ):
        with pytest.raises(DataError, match=message):
            open_scan(as_ctdata(tmp_path, **replaced))


def test_the_real_challenge_scan_fits_its_published_segmentation(shared_data):
    """Projected along the poses that were read, the published segmentation correlates with the sinogram."""
    from matplotlib.image import imread

    scan = open_scan(shared_data / "ct" / "htc2022_ta_sparse_example.mat")
    assert (scan.num_views, scan.num_rows, scan.num_columns) == (121, 1, 560)
    assert scan.voxel == pytest.approx(0.14832, abs=1e-5)
    assert np.rad2deg(scan.angles[[0, -1]]) == pytest.approx([0, 60])
    truth = imread(shared_data / "ct" / "htc2022_ta_full_recon_fbp_seg.png").astype(np.float32)
    truth = truth.reshape(512, 512, -1)[:, :, 0]
    some = np.arange(0, 121, 5)
    sinogram = scan.read(some)[:, :, 0]
    volume = astra.create_vol_geom(512, 512)

    def correlation(poses):
        geometry = astra.create_proj_geom("fanflat_vec", 560, poses[:, [0, 1, 3, 4, 6, 7]])
        projector = astra.create_projector("line_fanflat", geometry, volume)
        number, projected = astra.create_sino(truth, projector)
        astra.data2d.delete(number)
        astra.projector.delete(projector)
        return np.corrcoef(projected.ravel(), sinogram.ravel())[0, 1]

    assert correlation(scan.poses(some)) > 0.995
    backwards = scan.beam.poses(-scan.angles[some], 560, 1)
    assert correlation(backwards) < correlation(scan.poses(some)) - 0.005


def test_the_real_tooth_is_recognised(shared_data):
    scan = open_scan(shared_data / "ct" / "tomopy_tooth.h5")
    assert (scan.num_views, scan.num_rows, scan.num_columns) == (181, 2, 640)
    assert scan.beam is None


def test_an_unknown_file_names_the_layouts(tmp_path):
    (tmp_path / "scan.raw").write_bytes(bytes(1000))
    with pytest.raises(DataError, match=", ".join(READERS).replace("(", r"\(").replace(")", r"\)").replace(".", r"\.")):
        open_scan(tmp_path / "scan.raw")


# ---- rings


def as_ringed(folder, columns=120, views=90, rows=3):
    """A parallel-beam scan of two discs with noise, some pixels off by a constant, one dead, one that flickers."""
    rng = np.random.default_rng(4)
    angles = np.linspace(0, np.pi, views, endpoint=False)
    truth = np.zeros((views, rows, columns))
    for x, y, radius, density in ((3.0, -8.0, 45.0, 0.02), (-15.0, 12.0, 10.0, 0.03)):
        off = np.arange(columns) - 59.5 - (x * np.cos(angles) + y * np.sin(angles))[:, None]
        truth += 2 * density * np.sqrt(np.maximum(radius**2 - off**2, 0))[:, None]
    offsets = np.zeros((rows, columns))
    offsets[:, [20, 47, 48, 80, 101]] = 0.15, -0.2, -0.2, 0.25, -0.12
    measured = truth + offsets + rng.normal(0, 0.01, truth.shape)
    measured[:, 1, 64] = 0.4
    measured[:, 2, 35] = rng.uniform(0, 2, views)
    path = folder / "rings.npz"
    np.savez(path, projections=measured, angles=np.rad2deg(angles), unit="degrees", values="integrals")
    return open_scan(path), truth.transpose(0, 2, 1)


def test_rings_are_reduced_and_bad_pixels_bridged(tmp_path):
    pytest.importorskip("algotom")
    from hpcfed.scans.rings import without_rings

    scan, truth = as_ringed(tmp_path)
    views = np.arange(1, 90, 7)
    clean = pickle.loads(pickle.dumps(without_rings(scan)))

    def error(scan, columns, rows=slice(None)):
        """Root mean square of each pixel's own mean error, which is what a ring is made of."""
        return np.sqrt(np.mean((scan.read(views, rows) - truth[views][:, :, rows]).mean(axis=0)[columns] ** 2))

    off = [20, 47, 48, 80, 101]
    assert error(clean, off) < 0.35 * error(scan, off)
    good = np.setdiff1d(np.arange(5, 115), [*range(18, 23), *range(45, 51), *range(78, 83), *range(99, 104), 35, 64])
    assert error(clean, good) < 0.02
    assert np.isnan(clean.offsets[1, 64])
    assert np.isnan(clean.offsets[2, 35])
    assert error(clean, [64], slice(1, 2)) < 0.05 < error(scan, [64], slice(1, 2))
    assert error(clean, [35], slice(2, 3)) < 0.05
    np.testing.assert_array_equal(clean.read(views, slice(1, 3)), clean.read(views)[:, :, 1:])
    assert "rings" in clean.notes[-1]


def test_rings_need_the_library_and_enough_views(tmp_path, monkeypatch):
    from hpcfed.scans.rings import without_rings

    scan, _ = as_ringed(tmp_path, views=9)
    pytest.importorskip("algotom")
    with pytest.raises(DataError, match="9 views of 120 columns are too few"):
        without_rings(scan)
    monkeypatch.setitem(sys.modules, "algotom.prep.removal", None)
    with pytest.raises(ConfigError, match=r"pip install 'hpcfed\[rings\]'"):
        without_rings(scan)
