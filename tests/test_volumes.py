from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from skimage.transform import resize

from hpcfed.data.volumes import read_volume
from hpcfed.errors import ConfigError, DataError

nibabel = pytest.importorskip("nibabel")
tifffile = pytest.importorskip("tifffile")


@pytest.fixture
def stack():
    """A (z, y, x) volume between 0 and 2 that is not symmetric in any way."""
    return np.random.default_rng(1).uniform(0, 2, (4, 5, 6)).astype(np.float32)


def write(path, stack):
    if path.suffix == ".npy":
        np.save(path, stack)
    elif path.suffix == ".npz":
        np.savez(path, anything=stack, spacing_mm=np.ones(3))
    elif path.suffix.startswith(".tif"):
        tifffile.imwrite(path, stack, photometric="minisblack")
    else:  # the affine of a scanner: x to the right, y to the front, z up
        nibabel.save(nibabel.Nifti1Image(stack[:, ::-1].transpose(2, 1, 0), np.diag([1.0, 1.0, 2.5, 1.0])), path)
    return path


@pytest.mark.parametrize("name", ["v.npy", "v.npz", "v.tif", "v.tiff", "v.TIF", "v.nii", "v.nii.gz"])
def test_every_kind_of_file_gives_the_same_volume(tmp_path, stack, name):
    volume = read_volume(write(tmp_path / name.lower(), stack).rename(tmp_path / name), (5, 6, 4))
    np.testing.assert_allclose(volume, stack.transpose(1, 2, 0) / stack.max(), rtol=1e-6)
    assert volume.dtype == np.float32
    assert volume.flags.c_contiguous
    assert volume.max() == 1


def test_nifti_is_turned_by_its_affine(tmp_path, stack):
    image = nibabel.Nifti1Image(stack.transpose(2, 1, 0), np.diag([1.0, -1.0, 1.0, 1.0]))  # y stored downwards
    nibabel.save(image, tmp_path / "v.nii")
    np.testing.assert_allclose(
        read_volume(tmp_path / "v.nii", (5, 6, 4)), stack.transpose(1, 2, 0) / stack.max(), rtol=1e-6
    )


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.float16, np.float64])
def test_number_types(tmp_path, dtype):
    stack = np.arange(24).reshape(2, 3, 4).astype(dtype)
    np.save(tmp_path / "v.npy", stack)
    np.testing.assert_allclose(
        read_volume(tmp_path / "v.npy", (3, 4, 2)), np.arange(24).reshape(2, 3, 4).transpose(1, 2, 0) / 23, rtol=1e-6
    )


def test_hounsfield_units_become_attenuation(tmp_path):
    np.savez(tmp_path / "v.npz", hu=np.array([[[-2000, -1000, -500, 0, 1000]]], np.int16))
    # air and less is nothing, water is half of a material with twice its attenuation
    np.testing.assert_allclose(read_volume(tmp_path / "v.npz", (1, 5, 1)).ravel(), [0, 0, 0.25, 0.5, 1], rtol=1e-6)


def test_negative_values_become_zero(tmp_path):
    np.save(tmp_path / "v.npy", np.array([[[-3.0, 1.0, 2.0]]]))
    np.testing.assert_array_equal(read_volume(tmp_path / "v.npy", (1, 3, 1)).ravel(), [0, 0.5, 1])


def test_npz_prefers_the_known_names_in_order(tmp_path, stack):
    np.savez(tmp_path / "v.npz", labels=stack > 1, data=stack**2, image=stack, other=stack + 1)
    np.testing.assert_allclose(
        read_volume(tmp_path / "v.npz", (5, 6, 4)), stack.transpose(1, 2, 0) / stack.max(), rtol=1e-6
    )


@pytest.mark.parametrize("shape", [(5, 6, 4), (20, 18, 12), (9, 7, 12), (9, 30, 3), (1, 1, 1)])
def test_resampling_is_that_of_scikit_image(tmp_path, shape):
    stack = np.random.default_rng(2).uniform(0, 2, (12, 20, 18)).astype(np.float32)
    np.save(tmp_path / "v.npy", stack)
    expected = resize(stack.transpose(1, 2, 0), shape, order=1, mode="edge", anti_aliasing=True)
    np.testing.assert_allclose(read_volume(tmp_path / "v.npy", shape), expected / expected.max(), atol=2e-6)


def test_enlarging_keeps_a_ramp_a_ramp(tmp_path):
    x = (np.arange(8) + 0.5) / 8
    np.save(tmp_path / "v.npy", np.broadcast_to(x, (2, 3, 8)))
    volume = read_volume(tmp_path / "v.npy", (3, 32, 2))
    inner = (np.arange(32) + 0.5) / 32
    np.testing.assert_allclose(volume[1, 2:-2, 1], inner[2:-2] / x.max(), rtol=1e-5)


def test_shrinking_removes_what_the_grid_cannot_show(tmp_path):
    stripes = np.broadcast_to(np.tile([0.0, 1.0], 64), (2, 2, 128))
    np.save(tmp_path / "v.npy", stripes)
    volume = read_volume(tmp_path / "v.npy", (2, 25, 2))
    # sampled without smoothing, the stripes would alias over the whole range; the ends are cut off stripes
    assert np.ptp(volume[:, 2:-2]) < 0.02


def bad_arrays():
    good = np.arange(24.0).reshape(2, 3, 4)
    two_bad = good.copy()
    two_bad[1, 0, 2], two_bad[1, 2, 3] = np.nan, np.inf
    return {
        "plane": (good[0], r"shape \(3, 4\)"),
        "colour": (good[..., None], r"shape \(2, 3, 4, 1\)"),
        "empty": (good[:0], r"shape \(0, 3, 4\)"),
        "not finite": (two_bad, r"2 of 24 values are not finite \(the first at \(1, 0, 2\)"),
        "too large": (good * 1e300, "not finite"),
        "zero": (good * 0, "every value is 0"),
        "constant": (good * 0 + 7, "every value is 7"),
        "negative": (-good - 1, "positive"),
        "complex": (good * 1j, "complex128"),
        "text": (good.astype(str), "type <U"),
        "pickled": (good.astype(object), "[Oo]bject"),
    }


@pytest.mark.parametrize("case", bad_arrays())
@pytest.mark.parametrize("ending", [".npy", ".npz"])
def test_bad_arrays_are_refused(tmp_path, case, ending):
    array, message = bad_arrays()[case]
    path = tmp_path / f"v{ending}"
    if ending == ".npy":
        np.save(path, array, allow_pickle=True)
    else:
        np.savez(path, volume=array)
        if array.ndim != 3:
            message = "no three-dimensional array"
    with pytest.raises(DataError, match=message) as caught:
        read_volume(path, (3, 4, 2))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["v.npy", "v.npz", "v.tif", "v.nii", "v.nii.gz"])
def test_damaged_files_are_refused(tmp_path, stack, name):
    path = tmp_path / name
    with pytest.raises(DataError, match="no such file"):
        read_volume(path, (5, 6, 4))
    write(path, stack)
    content = path.read_bytes()
    for keep in (1, 7, 30, len(content) // 3, len(content) // 2, len(content) - 40):
        path.write_bytes(content[:keep])
        with pytest.raises(DataError) as caught:
            read_volume(path, (5, 6, 4))
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    path.write_bytes(b"")
    with pytest.raises(DataError, match="empty"):
        read_volume(path, (5, 6, 4))
    path.write_bytes(b"this is not a volume\n" * 50)
    with pytest.raises(DataError, match="cannot be read"):
        read_volume(path, (5, 6, 4))
    path.unlink()
    path.mkdir()
    with pytest.raises(DataError):
        read_volume(path, (5, 6, 4))


def test_several_unnamed_volumes_are_listed(tmp_path, stack):
    np.savez(tmp_path / "v.npz", before=stack, after=stack, weights=np.ones(3))
    with pytest.raises(DataError, match=r"before, after.*volume or image or hu or data"):
        read_volume(tmp_path / "v.npz", (5, 6, 4))


def test_unknown_extension_names_the_known_ones(tmp_path):
    (tmp_path / "v.dcm").write_bytes(b"0")
    with pytest.raises(DataError, match=r"\.npy, \.npz, \.nii, \.nii\.gz, \.tif, \.tiff"):
        read_volume(tmp_path / "v.dcm", (5, 6, 4))


@pytest.mark.parametrize(("name", "module"), [("v.nii", "nibabel"), ("v.tif", "tifffile")])
def test_missing_library_names_the_remedy(tmp_path, stack, monkeypatch, name, module):
    path = write(tmp_path / name, stack)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"pip install {module}"):
        read_volume(path, (5, 6, 4))


def test_real_chest(tmp_path):
    data = Path(os.environ.get("HPCFED_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))
    path = data / "ct" / "ct_chest_133x256x256.npz"
    if not path.is_file():
        pytest.skip(f"{path} is missing; HPCFED_TEST_DATA names the folder of the real data")
    volume = read_volume(path, (64, 64, 32))
    assert volume.shape == (64, 64, 32)
    assert volume.min() >= 0
    assert volume.max() == 1
    assert volume[:3, :3].mean() < 0.05 < volume[24:40, 24:40].mean()  # air around the body
