"""Messages between the parent and a worker: one JSON header, then the bytes of its arrays, over a socket of their own.

May touch: sockets; never JAX, never pickle (a worker runs foreign code, and the parent must not run what it sends).
Tests: tests/conformance/test_channel.py.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from collections.abc import Mapping
from typing import Any

import ml_dtypes  # noqa: F401  # registers bfloat16 under its name with NumPy
import numpy as np

_LENGTH = struct.Struct("<Q")
# A header names phases, cases, exceptions and a few dozen arrays. What claims more is not one of ours.
_MAX_HEADER_BYTES = 1 << 24

Message = dict[str, Any]
Arrays = dict[str, np.ndarray]


class ChannelClosed(Exception):
    """The other side is gone."""


class ChannelGarbled(Exception):
    """What came is no message, or ends halfway: somebody else wrote to the socket, or its writer was stopped."""


class Channel:
    """One end of a socket that carries messages with arrays; used by one thread at a time."""

    def __init__(self, end: socket.socket, stalled_after: float | None = None) -> None:
        """`stalled_after`: seconds without a byte after which a message that has begun is given up (None: never)."""
        end.settimeout(stalled_after)
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
            ChannelGarbled: what came is no message.
        """
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > _MAX_HEADER_BYTES:
            raise ChannelGarbled(f"a header of {length} bytes")
        try:
            header = json.loads(self._read(length))
            arrays = {name: self._read_array(*described) for name, described in header["arrays"].items()}
            return dict(header["message"]), arrays
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ChannelGarbled(str(error)) from error

    def close(self) -> None:
        """Closes this end."""
        self._socket.close()

    def _read_array(self, dtype_name: str, shape: list[int]) -> np.ndarray:
        dtype = np.dtype(dtype_name)
        if any(length < 0 for length in shape):
            raise ValueError(f"a shape of {shape}")
        size = math.prod(shape) * dtype.itemsize
        return np.frombuffer(self._read(size), dtype).reshape(shape)

    def _read(self, size: int) -> bytes:
        received = bytearray()
        while len(received) < size:
            try:
                part = self._socket.recv(min(size - len(received), 1 << 20))
            except TimeoutError as error:
                raise ChannelGarbled("a message that ends halfway") from error
            except OSError as error:
                raise ChannelClosed from error
            if not part:
                raise ChannelClosed
            received += part
        return bytes(received)
