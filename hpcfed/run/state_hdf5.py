"""A state as a group of an HDF5 file, and back.

A state is a dataclass and becomes a group of its fields: an array is a dataset of its own type and shape, with the
attributes ``backend`` (``numpy`` or ``torch``) and ``number`` (whether it is a plain number); a nested dataclass is a
group; None an empty group with the attribute ``kind = "None"``; values that live with clients a group with
``kind = "PerClient"``, empty in ``state.h5``, with one member for each client, named by its id, in the other files.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Sequence
from typing import Any

import h5py
import numpy as np

from hpcfed import devices
from hpcfed.federation import PerClient

_CLIENTS = "PerClient"


def write(group: Any, name: str, value: Any, *, replicated: bool) -> None:
    """Write a state into a group: what is replicated, or what this rank's clients keep."""
    if dataclasses.is_dataclass(value):
        inner = group.require_group(name)
        for field in dataclasses.fields(value):
            write(inner, field.name, getattr(value, field.name), replicated=replicated)
    elif isinstance(value, PerClient):
        inner = group.require_group(name)
        inner.attrs["kind"] = _CLIENTS
        if not replicated:
            for client, own in value.items():
                write(inner, str(client), own, replicated=True)
    elif replicated and value is None:
        group.require_group(name).attrs["kind"] = "None"
    elif replicated:
        array = devices.to_host(value) if devices.backend(value) == "torch" else np.asarray(value)
        dataset = group.create_dataset(name, data=array)
        dataset.attrs["backend"] = devices.backend(value)
        dataset.attrs["number"] = not hasattr(value, "shape")


def read(group: Any, name: str, hint: Any, files: list[Any], own: Sequence[int], device: devices.Device) -> Any:
    """A state of type ``hint``, with the values of the clients ``own`` from the files of the clients.

    Raises
    ------
    KeyError, TypeError
        If the group holds another state.
    """
    item = group[name]
    kind = item.attrs.get("kind")
    if kind == "None":
        return None
    if kind == _CLIENTS:
        inner_hint = (*typing.get_args(hint), Any)[0]
        values = {}
        for client in own:
            holders = [file[item.name] for file in files if str(client) in file[item.name]]
            if holders:  # a client outside the cohort that left these values has none
                values[client] = read(holders[0], str(client), inner_hint, [], [], device)
        return PerClient(values)
    if isinstance(item, h5py.Group):
        state_type = _dataclass_of(hint)
        hints = typing.get_type_hints(state_type)
        if others := item.keys() - {field.name for field in dataclasses.fields(state_type)}:
            raise TypeError(f"it also has {', '.join(sorted(others))}")
        return state_type(
            **{
                field.name: read(item, field.name, hints[field.name], files, own, device)
                for field in dataclasses.fields(state_type)
            }
        )
    array = item[()]
    if item.attrs["number"]:
        return array.item()
    return devices.from_host(array, "torch", device) if item.attrs["backend"] == "torch" else np.asarray(array)


def _dataclass_of(hint: Any) -> Any:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(arg for arg in typing.get_args(hint) if arg is not types.NoneType)
    if not dataclasses.is_dataclass(hint):
        raise TypeError(f"{hint} is not a dataclass")
    return hint


def keeps_clients(state_type: type) -> bool:
    """Whether states of this type have values that live with their clients."""
    hints = typing.get_type_hints(state_type)
    return any(
        (typing.get_origin(hint) or hint) is PerClient
        or (isinstance(hint, type) and dataclasses.is_dataclass(hint) and keeps_clients(hint))
        for hint in (hints[field.name] for field in dataclasses.fields(state_type))
    )


def has_clients(state: Any) -> bool:
    """Whether a state has values that live with clients."""
    if not dataclasses.is_dataclass(state):
        return isinstance(state, PerClient)
    return any(has_clients(getattr(state, field.name)) for field in dataclasses.fields(state))


def keeps(value: Any) -> bool:
    """Whether the clients of this rank keep anything in this state: an empty array is nothing."""
    if dataclasses.is_dataclass(value):
        return any(keeps(getattr(value, field.name)) for field in dataclasses.fields(value))
    return isinstance(value, PerClient) and not all(map(_is_nothing, value.values()))


def _is_nothing(own: Any) -> bool:
    if dataclasses.is_dataclass(own):
        return all(_is_nothing(getattr(own, field.name)) for field in dataclasses.fields(own))
    return own is None or getattr(own, "size", 1) == 0 or getattr(own, "nbytes", 1) == 0


def size(value: Any) -> int:
    """The bytes of all arrays in a state."""
    if dataclasses.is_dataclass(value):
        return sum(size(getattr(value, field.name)) for field in dataclasses.fields(value))
    if isinstance(value, PerClient):
        return sum(size(own) for own in value.values())
    return int(getattr(value, "nbytes", 0))
