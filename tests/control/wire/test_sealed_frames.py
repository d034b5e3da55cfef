"""The wire: honest frames pass, everything else ends the session with a reason and changes nothing."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eep.control.wire.messages import FromPeer, FromSupervisor, Register, SaySettled, SaySuspect, TellAnswer, TellView
from eep.control.wire.sealed_frames import (
    KEY_BYTES,
    MAX_PAYLOAD,
    ReceivedMessage,
    SealedChannel,
    SessionEnd,
    WireError,
    new_key,
)

KEY = new_key()


def session(
    client_key: bytes = KEY, server_key: bytes = KEY
) -> tuple[SealedChannel[FromSupervisor], SealedChannel[FromPeer]]:
    client: SealedChannel[FromSupervisor] = SealedChannel(client_key, SessionEnd.CLIENT, FromSupervisor)
    server: SealedChannel[FromPeer] = SealedChannel(server_key, SessionEnd.SERVER, FromPeer)
    client.feed(server.greeting())
    server.feed(client.greeting())
    return client, server


def rejected(channel: SealedChannel[FromPeer], data: bytes) -> str:
    with pytest.raises(WireError) as caught:
        channel.feed(data)
    assert str(caught.value), "an error must say what is wrong"
    return caught.value.kind


def test_messages_pass_both_ways_in_order() -> None:
    client, server = session()
    sent = [Register(3, 1), SaySettled(), SaySuspect((1, 2), "1 s")]
    frames = b"".join(client.seal(message, epoch) for epoch, message in enumerate(sent))
    assert server.feed(frames) == [ReceivedMessage(message, epoch) for epoch, message in enumerate(sent)]
    view = TellView((0, 1), (0, 4), "run")
    assert client.feed(server.seal(view, 9)) == [ReceivedMessage(view, 9)]


def test_frames_may_arrive_byte_by_byte() -> None:
    client, server = session()
    got = [one for byte in client.seal(Register(1, 0)) for one in server.feed(bytes([byte]))]
    assert got == [ReceivedMessage(Register(1, 0), 0)]


def test_nothing_is_sealed_before_the_greeting() -> None:
    with pytest.raises(WireError, match="has not greeted"):
        SealedChannel(KEY, SessionEnd.CLIENT, FromSupervisor).seal(Register(0, 0))


@pytest.mark.parametrize("size", [0, 16, KEY_BYTES - 1, KEY_BYTES + 1])
def test_a_key_of_the_wrong_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="job key"):
        SealedChannel(bytes(size), SessionEnd.CLIENT, FromSupervisor)


def test_a_wrong_key_is_found_out() -> None:
    client, server = session(client_key=new_key())
    assert rejected(server, client.seal(Register(0, 0))) == "bad-seal"


def test_a_replayed_frame_is_found_out() -> None:
    client, server = session()
    frame = client.seal(Register(0, 0))
    server.feed(frame)
    assert rejected(server, frame) == "replayed"


def test_a_frame_of_another_session_is_found_out() -> None:
    client, _ = session()
    _, other = session()
    assert rejected(other, client.seal(Register(0, 0))) == "bad-seal"


def test_a_reflected_frame_is_found_out() -> None:
    _, server = session()
    assert rejected(server, server.seal(TellAnswer(True, ""))) == "bad-seal"


def test_a_reflected_greeting_is_found_out() -> None:
    server: SealedChannel[FromPeer] = SealedChannel(KEY, SessionEnd.SERVER, FromPeer)
    assert rejected(server, server.greeting()) == "reflected"


def test_an_epoch_that_falls_is_found_out() -> None:
    client, server = session()
    server.feed(client.seal(SaySettled(), 5))
    assert rejected(server, client.seal(SaySettled(), 4)) == "stale-epoch"


def test_a_frame_that_announces_too_much_is_not_waited_for() -> None:
    _, server = session()
    assert rejected(server, (MAX_PAYLOAD + 1).to_bytes(4, "big") + bytes(16)) == "too-large"


def test_a_message_that_is_too_large_is_not_sent() -> None:
    client, _ = session()
    with pytest.raises(WireError, match="over the limit"):
        client.seal(TellAnswer(True, "x" * (MAX_PAYLOAD + 1)))


def test_a_stranger_is_found_out_at_the_first_bytes() -> None:
    server: SealedChannel[FromPeer] = SealedChannel(KEY, SessionEnd.SERVER, FromPeer)
    assert rejected(server, b"GET / HTTP/1.1\r\n") == "bad-greeting"


@pytest.mark.parametrize(
    "message",
    [
        Register(-1, 0),
        Register(1 << 20, 0),
        Register(0, -7),
        SaySuspect(()),
        SaySuspect((1,), "x" * 2000),
        TellAnswer(True, ""),
    ],
    ids=["negative rank", "huge rank", "bad incarnation", "no suspect", "long evidence", "wrong direction"],
)
def test_sealed_nonsense_is_found_out(message: FromPeer) -> None:
    client, server = session()
    assert rejected(server, client.seal(message)) == "bad-message"


@settings(max_examples=300)
@given(noise=st.binary(max_size=200), cut=st.integers(0, 300))
def test_noise_never_becomes_a_message(noise: bytes, cut: int) -> None:
    client, server = session()
    honest = client.seal(Register(0, 0))
    try:
        got = server.feed(honest[:cut] + noise)
    except WireError:
        return
    assert got in ([], [ReceivedMessage(Register(0, 0), 0)])


@settings(max_examples=300)
@given(data=st.data())
def test_a_flipped_bit_never_passes(data: st.DataObject) -> None:
    client, server = session()
    frame = bytearray(client.seal(SaySuspect((1, 2), "evidence"), 7))
    bit = data.draw(st.integers(0, len(frame) * 8 - 1))
    frame[bit // 8] ^= 1 << bit % 8
    try:
        assert server.feed(bytes(frame)) == [], "a damaged frame was believed"
    except WireError:
        pass


@settings(max_examples=300)
@given(payload=st.binary(max_size=300))
@example(payload=b"\x82\xa4type\xa8Register\xa4\x00\x00\x00\x80\x01")  # the name of a field that is no text
def test_any_sealed_payload_is_a_message_or_an_error(payload: bytes) -> None:
    """Even a peer with the key can only say what the schema allows."""
    client, server = session()
    client._encoder = Raw()  # type: ignore[assignment]
    frame = client.seal(payload)  # type: ignore[arg-type]
    try:
        got = server.feed(frame)
    except WireError as error:
        kinds = {error.kind}
    else:
        kinds = {"message" for one in got if isinstance(one.message, msgspec.Struct)}
    assert kinds in ({"bad-message"}, {"message"})


class Raw:
    """An encoder that lets any bytes through."""

    def encode(self, payload: bytes) -> bytes:
        return payload
