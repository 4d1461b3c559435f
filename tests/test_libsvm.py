"""LIBSVM text: what is written is read, and what is broken is refused with the line it is in."""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression

from hpcfed.data.libsvm import LabelledData, embedded, read_libsvm
from hpcfed.errors import DataError

GOOD = "+1 1:0.5 3:-2\n-1 2:1e-3\n+1\n"
COMPRESS = {"": bytes, ".bz2": bz2.compress, ".gz": gzip.compress, ".xz": lzma.compress}


def write(path: Path, text: str) -> Path:
    path.write_bytes(COMPRESS[path.suffix if path.suffix in COMPRESS else ""](text.encode()))
    return path


def complaint(path: Path, **options: int) -> str:
    with pytest.raises(DataError) as caught:
        read_libsvm(path, **options)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message.removeprefix(str(path))


# -- good files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", COMPRESS)
def test_every_kind_of_file_gives_the_same_data(tmp_path, ending):
    data = read_libsvm(write(tmp_path / f"good{ending}", GOOD))
    np.testing.assert_array_equal(data.features.toarray(), [[0.5, 0, -2], [0, 1e-3, 0], [0, 0, 0]])
    np.testing.assert_array_equal(data.labels, [1, -1, 1])
    assert data.features.format == "csr"
    assert data.features.dtype == data.labels.dtype == np.float64
    assert data.features.indices.dtype == np.int32
    assert data.notes == ()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(
    rows=st.lists(
        st.dictionaries(st.integers(1, 300), st.floats(allow_nan=False, allow_infinity=False), max_size=6), min_size=2
    ),
    encoding=st.sampled_from([(0, 1), (1, 2), (-1, 1)]),
    data=st.data(),
)
def test_what_is_written_is_read(tmp_path, rows, encoding, data):
    rows[0][7] = 1.5  # one feature at least
    labels = [0, 1, *data.draw(st.lists(st.integers(0, 1), min_size=len(rows) - 2, max_size=len(rows) - 2))]
    dense = np.zeros((len(rows), 300))
    for row, entries in enumerate(rows):
        for index, value in entries.items():
            dense[row, index - 1] = value
    lines = [
        " ".join([str(encoding[label]), *(f"{index}:{value!r}" for index, value in sorted(entries.items()))])
        for label, entries in zip(labels, rows, strict=True)
    ]
    read = read_libsvm(write(tmp_path / "set", "\n".join(lines) + "\n"), num_features=300)
    np.testing.assert_array_equal(read.features.toarray(), dense)
    np.testing.assert_array_equal(read.labels, 2 * np.array(labels) - 1)
    assert np.count_nonzero(read.features.data) == read.features.nnz


@pytest.mark.parametrize("pair", [("0", "1"), ("1", "2"), ("1.0", "2.0"), ("-1", "+1"), ("-1", "1")])
def test_encodings_of_labels(tmp_path, pair):
    low, high = pair
    data = read_libsvm(write(tmp_path / "set", f"{high} 1:1\n{low} 1:1\n{high} 1:1\n"))
    np.testing.assert_array_equal(data.labels, [1, -1, 1])
    assert bool(data.notes) == (low != "-1")


def test_number_of_features_can_be_given(tmp_path):
    assert read_libsvm(write(tmp_path / "set", GOOD), num_features=10).features.shape == (3, 10)


def test_empty_lines_comments_and_queries_are_skipped(tmp_path):
    path = write(tmp_path / "set", "# my_set\n\n+1 qid:4 1:1 # a_b\r\n   \n-1 2:1\n")
    np.testing.assert_array_equal(read_libsvm(path).features.toarray(), [[1, 0], [0, 1]])


def test_a_last_line_without_newline_is_noted(tmp_path):
    data = read_libsvm(write(tmp_path / "set", GOOD + "-1 3:1"))
    assert data.features.shape == (4, 3)
    (note,) = data.notes
    assert "cut short" in note


# -- broken files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("+1 2:x", "'x'"),
        ("+1 2:", "''"),
        ("+1 2:1:3", "'1:3'"),
        ("+1 2:nan", "'nan'"),
        ("+1 2:-inf", "'-inf'"),
        ("+1 2:1e999", "'1e999'"),
        ("+1 2:1_0", "'1_0'"),
        ("+1 1_0:1", "'1_0'"),
        ("+1 2 3:1", "'2' has no colon"),
        ("+1 2 : 1", "'2' has no colon"),
        ("+1 3:1 2:1", "index 2 follows 3"),
        ("+1 3:1 3:1", "index 3 follows 3"),
        ("+1 0:1 2:1", "'0:1' has index 0"),
        ("+1 -2:1", "'-2'"),
        ("+1 x:1", "'x'"),
        ("+1 2.0:1", "'2.0'"),
        ("+1 99999999999999999999999:1", "highest possible"),
        ("+1 4294967297:1", "highest possible"),
        ("nan 2:1", "label 'nan'"),
        ("1_0 2:1", "label '1_0'"),
        ("yes 2:1", "label 'yes'"),
        ("2:1 3:1", "label '2:1'"),
        ("+1,2:1", "label '+1,2:1'"),
        ("<!DOCTYPE html>", "label '<!DOCTYPE'"),
        ("+1 \x00:1", "index"),
        ("+1 2:1\xa0", "value"),
    ],
)
@pytest.mark.parametrize("ending", ["", ".bz2"])
def test_a_broken_line_is_named(tmp_path, ending, line, says):
    path = write(tmp_path / f"bad{ending}", f"+1 1:1 # fine\n\n-1 qid:1 2:1\n{line}\n+1 2:1\n")
    message = complaint(path)
    assert message.startswith(", line 4: ")
    assert says in message


def test_the_first_of_several_broken_lines_is_named(tmp_path):
    path = write(tmp_path / "set", "+1 1:1\n-1 2:inf\n+1 oh:dear\n")
    assert complaint(path).startswith(", line 2: the value 'inf' of feature 2")


def test_a_feature_beyond_their_number_is_named(tmp_path):
    path = write(tmp_path / "set", "+1 1:1\n\n-1 2:1 124:1\n+1 125:1\n")
    assert complaint(path, num_features=123).startswith(", line 3: feature 124 is beyond the 123 features")
    assert read_libsvm(path, num_features=125).features.shape == (3, 125)


def test_other_labels_are_named(tmp_path):
    assert "labels are 0, 1, 7;" in complaint(write(tmp_path / "a", "0 1:1\n1 1:1\n7 1:1\n"))
    assert "labels are -1, 0;" in complaint(write(tmp_path / "b", "0 1:1\n-1 1:1\n"))
    assert "0, 1, 2, 3, 4, 5 and 4 more;" in complaint(
        write(tmp_path / "c", "".join(f"{label} 1:1\n" for label in range(10)))
    )


def test_one_class_is_not_enough(tmp_path):
    assert "every label is 1;" in complaint(write(tmp_path / "set", "+1 1:1\n1 1:1\n"))


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize("text", ["", "\n\n# nothing\n"])
def test_an_empty_file(tmp_path, ending, text):
    assert "no samples" in complaint(write(tmp_path / f"set{ending}", text))


def test_no_features_at_all(tmp_path):
    assert "no line has a feature" in complaint(write(tmp_path / "set", "+1\n-1\n"))


@pytest.mark.parametrize("ending", [".bz2", ".gz", ".xz"])
def test_a_truncated_compressed_file(tmp_path, ending):
    lines = [f"{(-1) ** number} {number % 9 + 1}:{number / 7} 99:{number**5}\n" for number in range(5000)]
    path = write(tmp_path / f"set{ending}", "".join(lines))
    whole = path.read_bytes()
    for kept in (11, len(whole) // 3, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:kept])
        assert "cut short" in complaint(path)


@pytest.mark.parametrize("ending", [".bz2", ".gz", ".xz"])
def test_a_damaged_compressed_file(tmp_path, ending):
    path = write(tmp_path / f"set{ending}", GOOD * 1000)
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    path.write_bytes(damaged)
    assert re.search("cut short or damaged|cannot be read", complaint(path))
    path.write_text(GOOD)  # not compressed at all
    assert "cannot be read" in complaint(path)


def test_missing_files_and_folders(tmp_path):
    assert "no such file" in complaint(tmp_path / "none.bz2")
    assert "no such file" in complaint(tmp_path)


# -- real sets ---------------------------------------------------------------------------------------------------------


def accuracy(train: LabelledData, test: LabelledData) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = LogisticRegression(max_iter=100).fit(train.features, train.labels)
    return float(model.score(test.features, test.labels))


def test_the_embedded_set():
    data = embedded()
    assert data.features.shape == (569, 30)
    # counts published by UCI: 212 malignant, 357 benign
    assert np.count_nonzero(data.labels == 1) == 212
    assert np.count_nonzero(data.labels == -1) == 357
    dense = data.features.toarray()
    np.testing.assert_allclose(dense.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(dense.std(axis=0), 1)
    # malignant cells are larger
    assert dense[data.labels == 1, 0].mean() > dense[data.labels == -1, 0].mean()
    assert accuracy(data, data) > 0.97


@pytest.mark.parametrize(
    ("name", "shape", "positives"),
    [
        ("a9a", (32_561, 123), 7_841),
        ("w8a", (49_749, 300), 1_479),
        ("ijcnn1", (49_990, 22), 4_853),
        ("covtype.binary.sample", (92_962, 54), 45_328),
    ],
)
def test_published_counts(shared_data, name, shape, positives):
    data = read_libsvm(shared_data / "libsvm" / f"{name}.bz2")
    assert data.features.shape == shape
    assert np.count_nonzero(data.labels == 1) == positives
    assert np.count_nonzero(data.labels == -1) == shape[0] - positives


def test_published_accuracy(shared_data):
    train = read_libsvm(shared_data / "libsvm" / "a9a.bz2")
    test = read_libsvm(shared_data / "libsvm" / "a9a.t.bz2", num_features=123)
    assert accuracy(train, test) == pytest.approx(0.8495, abs=0.001)
