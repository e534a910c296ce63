"""Messages between the parent and a worker: one JSON header, then the bytes of its arrays, over a socket of their own.

May touch: sockets; never JAX, never pickle (a worker runs foreign code, and the parent must not run what it sends).
Tests: tests/conformance/test_channel.py.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

import ml_dtypes  # noqa: F401  # registers bfloat16 under its name with NumPy
import numpy as np

_LENGTH = struct.Struct("<Q")

Message = dict[str, Any]
Arrays = dict[str, np.ndarray]


class ChannelClosed(Exception):
    """The other side is gone."""


class Channel:
    """One end of a socket that carries messages with arrays; used by one thread at a time."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._socket.fileno()

    def send(self, message: Message, arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Sends one message; `arrays` may be of any shape and of any dtype that has a name.

        Raises:
            ChannelClosed: the other side is gone.
        """
        parts = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
        described = {name: [array.dtype.name, list(np.shape(arrays[name]))] for name, array in parts.items()}  # type: ignore[index]  # parts come from arrays
        header = json.dumps({"message": message, "arrays": described}).encode()
        try:
            self._socket.sendall(_LENGTH.pack(len(header)) + header)
            for array in parts.values():
                self._socket.sendall(array.tobytes())
        except OSError as error:
            raise ChannelClosed from error

    def receive(self) -> tuple[Message, Arrays]:
        """The next message and its arrays; blocks.

        Raises:
            ChannelClosed: the other side is gone.
        """
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        header = json.loads(self._read(length))
        arrays: Arrays = {}
        for name, (dtype_name, shape) in header["arrays"].items():
            dtype = np.dtype(dtype_name)
            size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            arrays[name] = np.frombuffer(self._read(size), dtype).reshape(shape)
        return header["message"], arrays

    def close(self) -> None:
        """Closes this end."""
        self._socket.close()

    def _read(self, size: int) -> bytes:
        received = bytearray()
        while len(received) < size:
            try:
                part = self._socket.recv(min(size - len(received), 1 << 20))
            except OSError as error:
                raise ChannelClosed from error
            if not part:
                raise ChannelClosed
            received += part
        return bytes(received)
