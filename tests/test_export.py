"""Exported volumes, read back by the libraries of their formats."""

from __future__ import annotations

import json
import sys

import h5py
import nibabel
import numpy as np
import pydicom
import pytest
import SimpleITK
import tifffile
import zarr
from click.testing import CliRunner

from hpcfed.cli import outcomes
from hpcfed.data.volumes import read_volume
from hpcfed.errors import ConfigError, DataError
from hpcfed.export import FORMATS, export
from hpcfed.run.run_folder import RunFolder

SHAPE = 5, 7, 4  # y, x, z
VOXEL = 0.25
COMMAND = "hpcfed ct --shape 5,7,4 --mu 0.3"
DIGEST = "0123456789abcdef" * 4


@pytest.fixture
def array():
    """A volume without any symmetry, partly negative."""
    return np.random.default_rng(3).uniform(-0.1, 1.2, SHAPE).astype(np.float32)


@pytest.fixture
def folder(tmp_path, array):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.config.write_text('[workload]\nname = "ct"\n')
    write_result(folder, array)
    return folder


def write_result(folder, array):
    with h5py.File(folder.result, "w") as file:
        file.attrs.update(workload="ct", algorithm="fpdfp", clients=17, rounds=200, digest=DIGEST)
        file["volume"] = array
        file["volume"].attrs["unit"] = "attenuation"
        file["reference"] = array[::-1]
        file["dual"] = np.zeros((3, *SHAPE))
        file.create_group("provenance").attrs.update(command=COMMAND, date="2026-03-01T12:00:00+01:00")


def exported(folder, to, **options):
    return export(folder, to, voxel=VOXEL, **options)


def known_to(path):
    """An image as SimpleITK reads it."""
    if path.is_dir():
        return SimpleITK.ReadImage(SimpleITK.ImageSeriesReader.GetGDCMSeriesFileNames(str(path)))
    return SimpleITK.ReadImage(str(path))


@pytest.mark.parametrize("to", ["nifti", "nrrd", "mha", "dicom"])
def test_every_voxel_is_where_it_should_be(folder, array, to):
    """An independent reader finds each voxel's value at its place in space: x right, y front, z head, middle 0."""
    image = known_to(exported(folder, to))
    assert image.GetSpacing() == pytest.approx((VOXEL,) * 3)
    tolerance = 1.4 / 65535 if to == "dicom" else 0
    for i, k, level in np.ndindex(SHAPE):
        right, front, head = (k - 3) * VOXEL, (2 - i) * VOXEL, (level - 1.5) * VOXEL
        index = image.TransformPhysicalPointToIndex((-right, -front, head))
        assert image.GetPixel(index) == pytest.approx(array[i, k, level], abs=tolerance)


def test_tiff(folder, array):
    path = exported(folder, "tiff")
    np.testing.assert_array_equal(tifffile.imread(path), array.transpose(2, 0, 1))
    with tifffile.TiffFile(path) as file:
        assert len(file.pages) == SHAPE[2]
        about = tifffile.xml2dict(file.ome_metadata)["OME"]["Image"]
    assert about["Pixels"]["PhysicalSizeZ"] == VOXEL
    assert about["Pixels"]["PhysicalSizeXUnit"] == "mm"
    assert json.loads(about["Description"])["digest"] == DIGEST
    np.testing.assert_allclose(read_volume(path, SHAPE), array.clip(0) / array.max(), rtol=1e-6)


def test_nifti(folder, array):
    path = exported(folder, "nifti")
    image = nibabel.load(path)
    assert nibabel.aff2axcodes(image.affine) == ("R", "P", "S")
    assert image.header.get_zooms() == (VOXEL,) * 3
    assert image.header.get_xyzt_units()[0] == "mm"
    np.testing.assert_array_equal(image.get_fdata(dtype=np.float32), array.transpose(1, 0, 2))
    assert json.loads(image.header.extensions[0].get_content())["command"] == COMMAND
    # a phantom that was read from NIfTI comes back as it was
    np.testing.assert_allclose(read_volume(path, SHAPE), array.clip(0) / array.max(), rtol=1e-6)


@pytest.mark.parametrize("to", ["nrrd", "mha"])
def test_nrrd_and_mha(folder, array, to):
    image = known_to(exported(folder, to))
    np.testing.assert_array_equal(SimpleITK.GetArrayFromImage(image), array.transpose(2, 0, 1))
    assert image.GetMetaData("hpcfed_command") == COMMAND
    assert image.GetMetaData("hpcfed_digest") == DIGEST


def test_dicom(folder, array):
    path = exported(folder, "dicom")
    slices = sorted((pydicom.dcmread(file) for file in path.iterdir()), key=lambda image: image.SliceLocation)
    assert len(slices) == SHAPE[2]
    for image, plane in zip(slices, array.transpose(2, 0, 1), strict=True):
        assert list(image.ImageType)[:2] == ["DERIVED", "SECONDARY"]
        assert image.ImageComments.startswith("NOT FOR DIAGNOSIS")
        assert "NOT FOR DIAGNOSIS" in image.SeriesDescription
        assert DIGEST in image.ImageComments
        assert COMMAND in image.DerivationDescription
        assert image.PixelSpacing == [VOXEL, VOXEL]
        grey = image.pixel_array * float(image.RescaleSlope) + float(image.RescaleIntercept)
        np.testing.assert_allclose(grey, plane, atol=float(image.RescaleSlope) * 0.5001)
    assert len({image.SOPInstanceUID for image in slices}) == SHAPE[2]
    assert len({image.SeriesInstanceUID for image in slices}) == 1
    again = pydicom.dcmread(next(exported(folder, "dicom", out=folder.path / "again").iterdir()))
    assert again.SeriesInstanceUID == slices[0].SeriesInstanceUID
    other = pydicom.dcmread(next(exported(folder, "dicom", dataset="reference").iterdir()))
    assert other.SeriesInstanceUID != slices[0].SeriesInstanceUID


def test_zarr(folder, array):
    group = zarr.open_group(exported(folder, "zarr"), mode="r")
    np.testing.assert_array_equal(group["0"][:], array.transpose(2, 0, 1))
    scales = group.attrs["ome"]["multiscales"][0]
    assert [axis["name"] for axis in scales["axes"]] == ["z", "y", "x"]
    assert scales["datasets"][0]["coordinateTransformations"][0]["scale"] == [VOXEL] * 3
    assert group.attrs["hpcfed"]["digest"] == DIGEST


def test_the_size_of_voxels_comes_from_the_result_unless_it_is_given(folder, array):
    assert (
        "taken as 1 mm"
        in json.loads(nibabel.load(export(folder, "nifti")).header.extensions[0].get_content())["voxel_size"]
    )
    with h5py.File(folder.result, "r+") as file:
        file["volume"].attrs["voxel_edge"] = 0.5
    image = nibabel.load(export(folder, "nifti"))
    assert image.header.get_zooms() == (0.5,) * 3
    assert "voxel_size" not in json.loads(image.header.extensions[0].get_content())
    assert nibabel.load(exported(folder, "nifti")).header.get_zooms() == (VOXEL,) * 3


def test_a_single_slice(folder, array):
    write_result(folder, array[:, :, :1])
    assert tifffile.imread(exported(folder, "tiff")).squeeze().shape == SHAPE[:2]
    assert known_to(exported(folder, "mha")).GetSize() == (7, 5, 1)
    assert len(list(exported(folder, "dicom").iterdir())) == 1


@pytest.mark.parametrize("to", FORMATS)
def test_a_missing_package_names_the_remedy(folder, monkeypatch, to):
    monkeypatch.setitem(sys.modules, FORMATS[to].package, None)
    with pytest.raises(ConfigError, match=f"--to {to} needs {FORMATS[to].package}: pip install"):
        export(folder, to)


@pytest.mark.parametrize("to", FORMATS)
def test_a_place_that_cannot_be_written_leaves_nothing(folder, tmp_path, to):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        export(folder, to, tmp_path / "file" / f"v{FORMATS[to].endings[0]}")
    full = tmp_path / f"full{FORMATS[to].endings[0]}"
    full.mkdir()
    (full / "something").write_text("")
    with pytest.raises(ConfigError, match="holds something"):
        export(folder, to, full)
    assert [file.name for file in full.iterdir()] == ["something"]
    assert not [file for file in tmp_path.rglob(".*") if file.name != "."]


def test_what_cannot_be_exported_is_refused(folder, tmp_path, array):
    with pytest.raises(ConfigError, match=r"--dataset dual: no volume .*there are reference, volume"):
        export(folder, "tiff", dataset="dual")
    with pytest.raises(ConfigError, match=r"files of nifti end in \.nii\.gz or \.nii"):
        export(folder, "nifti", tmp_path / "v.img")
    write_result(folder, array * np.nan)
    with pytest.raises(DataError, match="not finite"):
        export(folder, "tiff")
    write_result(folder, array * 0 + 2)
    with pytest.raises(DataError, match="volume is 2 everywhere"):
        export(folder, "dicom")
    folder.result.write_bytes(folder.result.read_bytes()[:900])
    with pytest.raises(DataError, match="is damaged"):
        export(folder, "tiff")
    folder.result.unlink()
    with pytest.raises(ConfigError, match="is not finished"):
        export(folder, "tiff")


def test_the_command(folder, tmp_path, array):
    out = tmp_path / "v.nrrd"
    arguments = [str(folder.path), "--to", "nrrd", "--out", str(out), "--dataset", "reference", "--voxel-size", "2"]
    outcome = CliRunner().invoke(outcomes.export, arguments)
    assert outcome.exit_code == 0, outcome.output
    assert outcome.output.strip() == str(out)
    image = known_to(out)
    assert image.GetSpacing() == (2.0,) * 3
    np.testing.assert_array_equal(SimpleITK.GetArrayFromImage(image), array[::-1].transpose(2, 0, 1))
