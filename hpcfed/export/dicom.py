"""A DICOM series: a file a slice, 16-bit grey levels with a slope, marked as derived and not for diagnosis."""

from __future__ import annotations

import copy
import datetime
from pathlib import Path
from typing import Any

import numpy as np

from hpcfed import __version__
from hpcfed.errors import DataError
from hpcfed.export.volume import Volume

LEVELS = 2**16 - 1
WARNING = "NOT FOR DIAGNOSIS"


def write(volume: Volume, path: Path) -> None:
    """Write a folder of CT images, ``ImageType`` DERIVED and SECONDARY.

    Values are rounded to 65,536 levels between the volume's least and greatest. UIDs follow from the run's digest, the
    dataset and the size of voxels, so that the same volume has the same ones.

    Raises
    ------
    DataError
        If the volume is constant.
    """
    low, high = float(volume.array.min()), float(volume.array.max())
    if not high > low:
        raise DataError(f"{volume.name} is {low:g} everywhere: grey levels cannot show it")
    # a decimal string of DICOM has 16 characters: what is written must be what is used
    slope, intercept = _decimal((high - low) / LEVELS, up=True), _decimal(low)
    path.mkdir()
    common = _series(volume)
    common.RescaleSlope, common.RescaleIntercept = slope, intercept
    width = len(str(len(volume.stack)))
    for number, plane in enumerate(volume.stack, start=1):
        levels = np.clip(np.rint((plane.astype(np.float64) - float(intercept)) / float(slope)), 0, LEVELS)
        image = _image(common, volume, number)
        image.PixelData = levels.astype("<u2").tobytes()
        image.save_as(path / f"slice_{number:0{width}}.dcm", enforce_file_format=True)


def _series(volume: Volume) -> Any:
    """What all images have in common."""
    from pydicom.dataset import Dataset
    from pydicom.uid import CTImageStorage

    facts = volume.facts
    made = datetime.datetime.fromisoformat(facts.get("date", "1970-01-01T00:00:00"))
    data = Dataset()
    data.SpecificCharacterSet = "ISO_IR 192"
    data.SOPClassUID = CTImageStorage
    data.ImageType = ["DERIVED", "SECONDARY", "AXIAL"]
    data.StudyInstanceUID, data.SeriesInstanceUID = _uid(volume, "study"), _uid(volume, "series")
    data.FrameOfReferenceUID = _uid(volume, "frame")
    data.StudyDate = data.SeriesDate = data.ContentDate = made.strftime("%Y%m%d")
    data.StudyTime = data.SeriesTime = data.ContentTime = made.strftime("%H%M%S")
    data.Modality, data.BodyPartExamined, data.PatientPosition = "CT", "", "HFS"
    data.Manufacturer, data.ManufacturerModelName, data.SoftwareVersions = "hpcfed", facts["run"][:64], __version__
    data.PatientName, data.PatientID = "hpcfed^reconstruction", facts.get("digest", "")[:16]
    data.PatientBirthDate = data.PatientSex = data.ReferringPhysicianName = ""
    data.StudyID, data.AccessionNumber, data.PositionReferenceIndicator = "1", "", ""
    data.SeriesNumber, data.AcquisitionNumber, data.KVP = 1, 1, None
    data.StudyDescription = f"{WARNING}: computed by hpcfed"
    data.SeriesDescription = f"{WARNING}: {volume.name}"[:64]
    data.ImageComments = f"{WARNING}. {facts['software']}, digest {facts.get('digest', 'unknown')}"
    data.DerivationDescription = volume.description[:1024]
    data.BurnedInAnnotation, data.LossyImageCompression, data.RescaleType = "NO", "00", "US"
    data.SamplesPerPixel, data.PhotometricInterpretation, data.PixelRepresentation = 1, "MONOCHROME2", 0
    data.BitsAllocated, data.BitsStored, data.HighBit = 16, 16, 15
    data.Rows, data.Columns = volume.array.shape[:2]
    data.PixelSpacing = [_decimal(volume.voxel)] * 2
    data.SliceThickness = data.SpacingBetweenSlices = _decimal(volume.voxel)
    data.ImageOrientationPatient = [-1, 0, 0, 0, 1, 0]  # columns run to the patient's right, rows to the back
    return data


def _image(common: Any, volume: Volume, number: int) -> Any:
    """The dataset of the slice with this number, counted from 1, without its pixels."""
    from pydicom.dataset import FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian

    data = copy.deepcopy(common)
    data.SOPInstanceUID, data.InstanceNumber = _uid(volume, f"slice {number}"), number
    right, front, head = volume.corner
    height = head + (number - 1) * volume.voxel
    data.ImagePositionPatient = [_decimal(-right), _decimal(-front), _decimal(height)]
    data.SliceLocation = _decimal(height)
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = data.SOPClassUID, data.SOPInstanceUID
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    data.file_meta = meta
    return data


def _uid(volume: Volume, part: str) -> str:
    from pydicom.uid import generate_uid

    facts = volume.facts
    return str(generate_uid(entropy_srcs=[facts.get("digest", ""), volume.name, f"{volume.voxel!r}", part]))


def _decimal(number: float, up: bool = False) -> str:
    """At most 16 characters; ``up``: not less than the number."""
    text = f"{number:.9e}"
    return f"{number * (1 + 1e-8):.9e}" if up and float(text) < number else text
