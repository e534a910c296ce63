"""Messages over a socket: what is sent arrives bit by bit, and what is no message is refused."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from conformance.channel import Channel, ChannelClosed, ChannelGarbled


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A pair of connected sockets."""
    pair = socket.socketpair()
    yield pair
    for end in pair:
        end.close()


def _sent_and_received(ends: tuple[socket.socket, socket.socket], message: dict, arrays: dict) -> tuple[dict, dict]:
    sender = threading.Thread(target=Channel(ends[0]).send, args=(message, arrays))
    sender.start()
    received = Channel(ends[1]).receive()
    sender.join()
    return received


@pytest.mark.parametrize(
    "array",
    [
        np.array([1.0, -0.0, np.nan, -np.inf], np.float32),
        np.arange(12, dtype=np.float64).reshape(3, 4).T,
        np.array([[1, -2], [3, 2**31 - 1]], np.int32)[:, ::-1],
        np.array([1.5, np.inf, -3.0], ml_dtypes.bfloat16),
        np.array(7.0, np.float32),
        np.zeros((0, 3), np.float32),
        np.ones(3_000_000, np.float32),
    ],
    ids=["not finite", "transposed", "reversed", "bfloat16", "no axis", "empty", "larger than a socket's buffer"],
)
def test_an_array_arrives_with_every_bit_its_dtype_and_its_shape(
    ends: tuple[socket.socket, socket.socket], array: np.ndarray
) -> None:
    message, arrays = _sent_and_received(ends, {"result": {}}, {"out": array})
    received = arrays["out"]
    assert message == {"result": {}}, "the message beside the arrays"
    assert (received.dtype, received.shape) == (array.dtype, array.shape), "dtype and shape"
    assert received.tobytes() == array.tobytes(), "bits"


def test_messages_arrive_in_order_each_with_its_own_arrays(ends: tuple[socket.socket, socket.socket]) -> None:
    here, there = map(Channel, ends)
    here.send({"phase": "first"}, {"a": np.array([1]), "b": np.array([2])})
    here.send({"phase": "second"})
    first, arrays = there.receive()
    assert (first, arrays["a"].tolist(), arrays["b"].tolist()) == ({"phase": "first"}, [1], [2]), "the first message"
    assert there.receive() == ({"phase": "second"}, {}), "the second message has no arrays"


def test_the_other_side_gone_is_told_when_sending_and_when_receiving(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    channel = Channel(ends[0])
    ends[1].close()
    with pytest.raises(ChannelClosed):
        channel.receive()
    with pytest.raises(ChannelClosed):
        channel.send({"do": "execute"}, {"x": np.zeros(1 << 20)})


def test_a_message_cut_off_by_the_end_of_its_sender_is_a_closed_channel(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ends[0].sendall(struct.pack("<Q", 100) + b'{"message"')
    ends[0].close()
    with pytest.raises(ChannelClosed):
        Channel(ends[1]).receive()


def _framed(header: object) -> bytes:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(content)) + content


@pytest.mark.parametrize(
    "sent",
    [
        b"a line that a target printed to the wrong descriptor\n",
        _framed(b"\xff\xfe no text"),
        _framed(b"{not json"),
        _framed([1, 2]),
        _framed({"message": {}}),
        _framed({"message": 3, "arrays": {}}),
        _framed({"message": {}, "arrays": {"x": ["no_such_dtype", [1]]}}),
        _framed({"message": {}, "arrays": {"x": ["float32", [-1]]}}),
        _framed({"message": {}, "arrays": {"x": ["object", [1]]}}) + bytes(8),
    ],
    ids=["text", "bytes", "no JSON", "a list", "no arrays", "no message", "dtype", "negative shape", "objects"],
)
def test_what_is_no_message_is_refused_rather_than_believed(
    ends: tuple[socket.socket, socket.socket], sent: bytes
) -> None:
    ends[0].sendall(sent)
    with pytest.raises(ChannelGarbled):
        Channel(ends[1], stalled_after=5).receive()


def test_a_message_that_stops_halfway_does_not_block_for_ever(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].sendall(_framed({"message": {}, "arrays": {"x": ["float32", [1000]]}}) + bytes(100))
    with pytest.raises(ChannelGarbled):
        Channel(ends[1], stalled_after=0.1).receive()
