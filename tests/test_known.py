"""Known sets: their names, and whether a file at hand is whole."""

from __future__ import annotations

import bz2

import pytest

from hpcfed.data.known import KNOWN, SITE, check, table
from hpcfed.errors import DataError


def write_like(path, rows, positives, features):
    """A file with these counts."""
    lines = [f"{1 if row < positives else -1} {row % features + 1}:1\n" for row in range(rows)]
    path.write_text("".join(lines))
    return path


def test_the_table_lists_all_sets_and_where_they_are():
    text = table()
    for each in KNOWN:
        assert f"{each.rows:,}" in text
        assert each.file in text
    assert SITE in text
    assert len({each.name for each in KNOWN}) == len(KNOWN)


def test_training_and_test_files_of_a_set_add_up():
    # totals published by UCI: Adult 48,842 with 11,687 positive; IJCNN 2001 141,691 in all
    sets = {each.name: each for each in KNOWN}
    assert sets["a9a"].rows + sets["a9a.t"].rows == 48_842
    assert sets["a9a"].positives + sets["a9a.t"].positives == 11_687
    assert sets["ijcnn1"].rows + sets["ijcnn1.t"].rows == 141_691
    assert sets["ijcnn1.tr"].rows + sets["ijcnn1.val"].rows == sets["ijcnn1"].rows


@pytest.mark.parametrize("name", ["a9a", "A9A.txt", "a9a.train", "a9a_1"])
def test_a_whole_file_is_complete(tmp_path, name):
    path = write_like(tmp_path / name, 32_561, 7_841, 123)
    assert check(path) == f"{path}: a9a, complete: 32,561 rows x 123 features, 7,841 positive"


@pytest.mark.parametrize(
    ("rows", "positives", "features"), [(32_560, 7_841, 123), (32_561, 7_840, 123), (32_561, 7_841, 124)]
)
def test_a_file_with_other_counts_is_not(tmp_path, rows, positives, features):
    text = check(write_like(tmp_path / "a9a", rows, positives, features))
    assert "not the complete a9a" in text
    assert f"{rows:,} rows x {features} features, {positives:,} positive, but published are 32,561 rows" in text


def test_a_test_file_may_lack_the_last_feature(tmp_path):
    assert "a9a.t, complete" in check(write_like(tmp_path / "a9a.t", 16_281, 3_846, 122))


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("covtype", "covtype.libsvm.binary:"),
        ("covtype.binary.scale.bz2", "covtype.libsvm.binary.scale:"),
        ("covtype.libsvm.binary.scale", "covtype.libsvm.binary.scale:"),
        ("covtype.binary.sample", "covtype.libsvm.binary:"),
        ("ijcnn1.t", "ijcnn1.t:"),
        ("ijcnn1.test", "ijcnn1:"),
    ],
)
def test_the_longest_name_that_fits_counts(tmp_path, name, known):
    path = write_like(tmp_path / "file", 4, 2, 3)
    if name.endswith(".bz2"):
        path.write_bytes(bz2.compress(path.read_bytes()))
    assert f"not the complete {known}" in check(path.rename(tmp_path / name))


def test_an_unknown_name(tmp_path):
    path = write_like(tmp_path / "a9ab", 4, 2, 3)
    assert check(path) == f"{path}: no set of this name is known; 4 rows x 3 features, 2 positive"
    assert "it has the counts of a9a.t;" in check(write_like(tmp_path / "adult-test", 16_281, 3_846, 122))


def test_a_broken_file_is_reported_and_the_next_still_checked(tmp_path):
    broken = tmp_path / "a9a"
    broken.write_text("+1 1:1\n-1 oops\n")
    cut = tmp_path / "w8a.bz2"
    cut.write_bytes(bz2.compress(b"+1 1:1\n-1 1:1\n")[:20])
    first, second, third = table([broken, cut, write_like(tmp_path / "mine", 4, 2, 3)]).splitlines()
    assert first.startswith(f"{broken}, line 2: ")
    assert first.endswith("; a whole a9a has 32,561 rows x 123 features, 7,841 positive")
    assert "cut short" in second
    assert "4 rows" in third


def test_a_missing_file(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        check(tmp_path / "a9a")


@pytest.mark.parametrize("name", ["a9a", "a9a.t", "w8a", "ijcnn1", "ijcnn1.t"])
def test_real_files_are_complete(shared_data, name):
    assert f": {name}, complete" in check(shared_data / "libsvm" / f"{name}.bz2")


def test_a_real_sample_is_not(shared_data):
    text = check(shared_data / "libsvm" / "covtype.binary.sample.bz2")
    assert "not the complete covtype.libsvm.binary: 92,962 rows" in text
