"""A safetensors file that is written whole or not at all, and closed by a checksum of every byte before it.

What the header's JSON object and the tensors mean is the caller's business.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import stat
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from rapid.errors import SessionError

if TYPE_CHECKING:
    import torch

# The first bytes of the JSON that a safetensors file begins with, after the eight of its length.
_START = b'{"__metadata__":{"rapid_session":'
_KEY = "rapid_session"
# The last tensor: CRC-32 of the file up to it. It finds damage, not forgery, at the speed of memory.
_SEAL = "crc32"
_SEAL_BYTES = 4
_BLOCK = 2**22
# A temporary file that nobody has written to for so long was left by a process that was killed.
_ABANDONED_S = 3600.0


class Sealed:
    """An open file: its `header`, and its `tensors`, which are read when asked for."""

    def __init__(self, path: Path, file: BinaryIO, handle: Any) -> None:
        self._path = path
        self._file = file
        try:
            self.header: dict[str, Any] = json.loads((handle.metadata() or {})[_KEY])
            if not isinstance(self.header, dict):
                raise ValueError("no JSON object")
        except (KeyError, ValueError) as error:
            raise damaged(path) from error
        self.tensors: Mapping[str, torch.Tensor] = _Tensors(handle)

    def verify(self) -> None:
        """Raise `SessionError` unless the checksum is right: to be called before a tensor is used."""
        left, crc = os.fstat(self._file.fileno()).st_size - _SEAL_BYTES, 0
        self._file.seek(0)
        while left > 0 and (block := self._file.read(min(left, _BLOCK))):
            crc = zlib.crc32(block, crc)
            left -= len(block)
        if left or self._file.read() != crc.to_bytes(_SEAL_BYTES, "little"):
            raise damaged(self._path)


class _Tensors(Mapping[str, "torch.Tensor"]):
    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._names = [name for name in handle.keys() if name != _SEAL]  # noqa: SIM118  # a handle is no mapping

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: torch.Tensor = self._handle.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def damaged(path: Path) -> SessionError:
    """The error for a file that is not what was written."""
    return SessionError(f"session {path} is damaged or no saved session; delete it and save it again")


def check_destination(path: Path) -> None:
    """Raise `SessionError` where nothing should be written: not a file, a link, or somebody's other file."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        if path.name and path.parent.is_dir():
            return
        raise SessionError(f"session {path} cannot be saved: {path.parent} is no directory; create it") from None
    except (OSError, ValueError) as error:
        raise _failure(path, "saved", error) from error
    if stat.S_ISLNK(status.st_mode):
        raise SessionError(f"session {path} cannot be saved: it is a symbolic link; name the file it leads to")
    if not stat.S_ISREG(status.st_mode):
        what = "a directory" if stat.S_ISDIR(status.st_mode) else "no regular file"
        raise SessionError(f"session {path} cannot be saved: it is {what}; give the name of a file")
    try:
        with path.open("rb") as file:
            foreign = status.st_size and not _begins_like_ours(file)
    except OSError as error:
        raise _failure(path, "saved", error) from error
    if foreign:
        raise SessionError(f"{path} exists and is no saved session, so it is left alone; give another name")


def write(
    path: Path,
    header: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    cast: torch.dtype | None = None,
    *,
    durable: bool = True,
) -> None:
    """Write `tensors`, one after the other (no copy of all of them), floating-point ones in dtype `cast` if given.

    A process killed at any moment leaves the old file whole; `durable` extends that to a machine that loses power.
    Raises `SessionError` where the disk is full or the place cannot be written, and leaves nothing behind.
    """
    import torch

    names = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.uint8: "U8"}
    table: dict[str, Any] = {"__metadata__": {_KEY: json.dumps(header)}}
    stored = {name: cast if cast and t.is_floating_point() else t.dtype for name, t in tensors.items()}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * stored[name].itemsize
        table[name] = {"dtype": names[stored[name]], "shape": list(tensor.shape), "data_offsets": [start, end]}
    table[_SEAL] = {"dtype": "U8", "shape": [_SEAL_BYTES], "data_offsets": [end, end + _SEAL_BYTES]}
    packed = json.dumps(table, separators=(",", ":")).encode()
    packed += b" " * (-len(packed) % 8)

    def parts() -> Iterator[Any]:
        yield len(packed).to_bytes(8, "little") + packed
        for name, tensor in tensors.items():
            yield tensor.detach().to("cpu", stored[name]).contiguous().view(-1).view(torch.uint8).numpy()

    crc = 0
    try:
        with _replacing(path, durable) as file:
            for part in parts():
                crc = zlib.crc32(part, crc)
                file.write(part)
            file.write(crc.to_bytes(_SEAL_BYTES, "little"))
    except OSError as error:
        size = (len(packed) + end) / 2**20
        raise _failure(path, "saved", error, f" ({size:.0f} MiB are needed)") from error


@contextlib.contextmanager
def reading(path: Path) -> Iterator[Sealed]:
    """Open a file. Raises `SessionError` for what cannot be read or is no saved session."""
    from safetensors import SafetensorError, safe_open

    _require_file(path)
    try:
        with path.open("rb") as file:
            if not _begins_like_ours(file):
                raise damaged(path)
            # The library opens by name, more than once: let it be this very file, though it may be replaced meanwhile.
            # Where there are no such names (Windows), an open file cannot be replaced.
            name = f"/dev/fd/{file.fileno()}" if os.path.isdir("/dev/fd") else path
            with safe_open(name, framework="pt") as handle:
                yield Sealed(path, file, handle)
    except SafetensorError as error:
        raise damaged(path) from error
    except OSError as error:
        raise _failure(path, "read", error) from error


@contextlib.contextmanager
def _replacing(path: Path, durable: bool) -> Iterator[BinaryIO]:
    """A temporary file beside `path`, which becomes `path` when all went well and is removed when not. Only its
    owner may read it: it holds the documents."""
    prefix = f".{path.name[:100]}."
    for abandoned in path.parent.glob(f"{glob.escape(prefix)}*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - abandoned.stat().st_mtime > _ABANDONED_S:
                abandoned.unlink()
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=prefix, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _begins_like_ours(file: BinaryIO) -> bool:
    return file.read(8 + len(_START))[8:] == _START


def _require_file(path: Path) -> None:
    try:
        status = path.stat()
    except FileNotFoundError:
        raise SessionError(f"session {path} does not exist; save one first, or name the documents") from None
    except (OSError, ValueError) as error:
        raise _failure(path, "read", error) from error
    if not stat.S_ISREG(status.st_mode):
        raise SessionError(f"session {path} is no file; give the name of a saved session")


def _failure(path: Path, done: str, error: OSError | ValueError, more: str = "") -> SessionError:
    reason = getattr(error, "strerror", None) or str(error)
    return SessionError(f"session {path} cannot be {done}: {reason}{more}; make room, or choose another place")
