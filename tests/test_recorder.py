"""metrics.jsonl on a disk that has no room."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcfed.run.recorder import Recorder
from hpcfed.run.run_folder import RunFolder

RECORDS = [{"round": number, "objective": 1 / (number + 1)} for number in range(6)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that has no room")
def test_a_full_disk_is_one_warning(tmp_path, caplog):
    folder = RunFolder(tmp_path)
    folder.metrics.symlink_to("/dev/full")
    recorder = Recorder(folder, speaks=True)
    for record in RECORDS:
        recorder.write(record)
    recorder.close()
    (line,) = (record.getMessage() for record in caplog.records)
    assert "metrics.jsonl cannot be written: No space left on device; the run goes on" in line


class FillsUp:
    """A disk that takes 40 bytes, then nothing for a while."""

    def __init__(self, file):
        self.file, self.calls, self.name = file, 0, file.name

    def write(self, text):
        self.calls += 1
        if 2 <= self.calls <= 4:
            raise OSError(28, "No space left on device")
        return self.file.write(text[:40] if self.calls == 1 else text)

    def close(self):
        self.file.close()


def test_what_had_no_room_is_written_once_there_is_some(tmp_path):
    folder = RunFolder(tmp_path)
    recorder = Recorder(folder, speaks=True)
    recorder._file = FillsUp(recorder._file)
    for record in RECORDS:
        recorder.write(record)
    recorder.close()
    assert folder.history() == RECORDS
    assert folder.metrics.read_bytes().count(b"\n") == len(RECORDS)
