"""The tree of errors: where each comes from, what its text says, and what it never says."""

from __future__ import annotations

import copy
import pickle
import random
import re
import struct

import numpy as np
import pytest
import reference as ref
from conftest import SALT
from generate import damage
from support import CODEC, one_of_each, signed_frame, signed_record

import flodl_fast as ff

HEARTBEAT = ff.Heartbeat(3, 1000)
FRAME = CODEC.encode(HEARTBEAT)
RECORD = CODEC.encode_mux(ff.MuxRecord(ff.MuxKind.DATA, 3, b"hi"))
ROUND = CODEC.encode_round(ff.RoundFrame([np.ones(2, np.float32)], weight=1.0))

TREE = {
    ff.FlodlError: (Exception,), ff.EncodeError: (ff.FlodlError, ValueError),
    ff.DecodeError: (ff.FlodlError, ValueError),
    ff.TruncatedError: (ff.DecodeError,), ff.BadMagicError: (ff.DecodeError,),
    ff.VersionMismatchError: (ff.DecodeError,),
    ff.UnknownKindError: (ff.DecodeError,), ff.AuthenticationError: (ff.DecodeError,), ff.LimitError: (ff.DecodeError,),
    ff.PayloadError: (ff.DecodeError,), ff.TrailingDataError: (ff.DecodeError,), ff.TensorError: (ff.DecodeError,),
    ff.ReservedTargetError: (ff.FlodlError, ValueError), ff.ChannelError: (ff.FlodlError, OSError),
    ff.ChannelClosed: (ff.ChannelError,), ff.HandshakeError: (ff.ChannelError,),
}


def flip(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1:]


# Each error, how to get it, and what its text says: what, where, expected, found.
RAISED = [
    (ff.EncodeError, lambda: CODEC.encode(ff.Heartbeat(1, -1)),
     r"Heartbeat\.step_count: expected an integer from 0 to 18446744073709551615, got -1"),
    (ff.EncodeError, lambda: CODEC.encode_into(HEARTBEAT, bytearray(9)),
     r"takes 29 bytes at offset 0, the buffer has 9"),
    (ff.EncodeError, lambda: CODEC.encode_mux(ff.MuxRecord(ff.MuxKind.BROADCAST, 4, b"")),
     r"MuxRecord\.rank of a BROADCAST record: expected an integer from 0 to 0, got 4"),
    (ff.EncodeError, lambda: CODEC.encode(ff.Reserved(ff.MsgKind.TIMING, b"")),
     r"Reserved\.kind: expected an integer from 4 to 5, got 2"),
    (ff.EncodeError, lambda: CODEC.data_hello(-1, 3), r"rank: expected an integer from 0 to 4294967295, got -1"),
    (ff.EncodeError, lambda: ff.from_json("Timing", {"Heartbeat": {"rank": -1, "step_count": 0}}),
     r"Heartbeat\.rank: expected an integer from 0 to 18446744073709551615, got -1"),
    (ff.TruncatedError, lambda: CODEC.decode(b""), r"control frame's header takes 24 bytes, got 0"),
    (ff.TruncatedError, lambda: CODEC.decode(FRAME[:-2]), r"control frame of 29 bytes ends after 27"),
    (ff.TruncatedError, lambda: CODEC.decode_mux(RECORD[:24]), r"mux record's header takes 25 bytes, got 24"),
    (ff.TruncatedError, lambda: CODEC.decode_mux(RECORD[:-1]), r"mux record of 27 bytes ends after 26"),
    (ff.TruncatedError, lambda: CODEC.check_data_ack(b"1234567"), r"data ack has 8 bytes, got 7"),
    (ff.BadMagicError, lambda: CODEC.decode(RECORD), r"control frame's magic 0xf10d17c4, got 0xf10d17d0"),
    (ff.BadMagicError, lambda: CODEC.decode_mux(FRAME), r"mux record's magic 0xf10d17d0, got 0xf10d17c4"),
    (ff.BadMagicError, lambda: CODEC.check_control_hello(b"x" * 24, 3), r"hello's magic 0xf10d17c2, got 0x78787878"),
    (ff.VersionMismatchError, lambda: CODEC.decode(FRAME[:4] + b"\4" + FRAME[5:]),
     r"control frame version 4 \(of 0\.8\), revision 0\.6 has 2"),
    (ff.VersionMismatchError, lambda: CODEC.decode_mux(RECORD[:4] + b"\2" + RECORD[5:]),
     r"mux record version 2 \(of no known revision\), revision 0\.6 has 1"),
    (ff.VersionMismatchError, lambda: CODEC.check_data_ack(ref.data_ack()[:4] + b"\3\0\0\0"),
     r"data ack version 3.* 2"),
    (ff.UnknownKindError, lambda: CODEC.decode(FRAME[:16] + b"\x09" + FRAME[17:]), r"kind 9, known are 1 to 7"),
    (ff.UnknownKindError, lambda: CODEC.decode_mux(signed_record(7, b"")), r"mux record kind 7, known are 1 to 4"),
    (ff.UnknownKindError, lambda: CODEC.decode_payload("Nothing", b""), r"unknown kind 'Nothing'.*Timing"),
    (ff.LimitError, lambda: CODEC.decode(FRAME[:20] + b"\1\0\0\1"), r"16777217 bytes.*16777216 \(max_payload\)"),
    (ff.AuthenticationError, lambda: CODEC.decode(flip(FRAME, 28)), r"MAC of a Timing frame does not hold"),
    (ff.AuthenticationError, lambda: CODEC.decode_mux(flip(RECORD, 9)), r"MAC of a mux record does not hold"),
    (ff.AuthenticationError, lambda: CODEC.check_control_ack(flip(CODEC.control_ack(), 15)), r"MAC of a control ack"),
    (ff.PayloadError, lambda: CODEC.decode(signed_frame(2, b"\5\3\xff")),
     r"Heartbeat\.step_count: integer lead byte 0xff is not one of a u64 \(payload byte 2\)"),
    (ff.PayloadError, lambda: CODEC.decode(signed_frame(6, b"\1\2")),
     r"RendezvousRoleMsg\.role: unknown variant 2 of RendezvousRole.* 0 to 1 \(payload byte 1\)"),
    (ff.TrailingDataError, lambda: CODEC.decode(FRAME + b"xyz", trailing="error"),
     r"3 extra bytes after a control frame of 29"),
    (ff.TrailingDataError, lambda: CODEC.decode(signed_frame(2, FRAME[24:] + b"xy"), trailing="error"),
     r"Heartbeat ends at payload byte 5, 2 extra bytes of 7"),
    (ff.TrailingDataError, lambda: CODEC.check_data_ack(ref.data_ack() + b"x"), r"1 extra bytes after a data ack of 8"),
    (ff.TensorError, lambda: CODEC.decode_round(signed_round(ROUND[:9] + struct.pack("<d", -1.0) + ROUND[17:-8])),
     r"weight must be finite and not negative, got -1\.0"),
    (ff.ReservedTargetError, lambda: ff.control_wire_to_msg(ff.SaveConsensusModel(2**64 - 1)),
     r"SaveConsensusModel\.target_rank is 2\*\*64 - 1, which flodl reserves"),
    (ff.HandshakeError, lambda: CODEC.check_data_hello(ref.data_hello(1, 3), 2),
     r"rank 1 .*world of 3 ranks, this one has 2"),
]


def signed_round(body):
    return body + ref.mac8(SALT, body)


@pytest.mark.parametrize("cls", TREE, ids=lambda cls: cls.__name__)
def test_the_tree(cls):
    assert cls.__bases__ == TREE[cls]
    assert cls.__name__ in ff.__all__
    assert cls.__doc__


@pytest.mark.parametrize(("error", "call", "text"), RAISED)
def test_each_error_says_what_where_expected_and_found(error, call, text):
    with pytest.raises(error, match=text) as caught:
        call()
    assert caught.type is error


def test_every_error_of_the_codec_is_met_above():
    others = {ff.FlodlError, ff.DecodeError, ff.ChannelError, ff.ChannelClosed}
    assert {error for error, _, _ in RAISED} == set(TREE) - others


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
def test_errors_can_be_sent_elsewhere(again):
    with pytest.raises(ff.AuthenticationError) as caught:
        CODEC.decode_many(FRAME * 2 + flip(FRAME, 20)[:20] + FRAME[20:24] + b"\0\0\0\0\0")
    error = again(caught.value)
    assert type(error) is ff.AuthenticationError
    assert str(error) == str(caught.value)
    assert (error.offset, error.decoded) == (2 * len(FRAME), [HEARTBEAT] * 2)


# ---------------------------------------------------------------------------------------------- what is never said


def everything_said(error):
    """All text that an error and those behind it carry."""
    while error is not None:
        yield str(error)
        yield repr(error.args)
        yield repr(vars(error))
        error = error.__cause__ or error.__context__


def secrets_in(text, secrets):
    """Which of these byte strings a text gives away: in hex, as numbers of either byte order, or as bytes."""
    spaced = re.sub(r"[^0-9a-f]", "", text.lower())
    return [
        secret for secret in secrets
        if secret.hex() in spaced or secret[::-1].hex() in spaced or repr(secret)[2:-1] in text
        or str(int.from_bytes(secret, "little")) in text or str(int.from_bytes(secret, "big")) in text
    ]


def caught(call, *args, **options):
    try:
        call(*args, **options)
    except (ff.FlodlError, TypeError, ValueError) as error:
        return error
    return None


def test_no_error_holds_the_salt_or_a_computed_tag():
    rng = random.Random(61)
    met = set()
    for message in one_of_each(61) * 8:
        salt = rng.randbytes(16)
        codec = ff.Codec(salt)
        payload = codec.encode_payload(message)
        frames = [
            codec.encode_mux(ff.MuxRecord(ff.MuxKind.DATA, 1, payload)), codec.control_hello(1, 3), codec.control_ack(),
            codec.encode_round(ff.RoundFrame([np.arange(3, dtype=np.float32)])),
        ]
        if not isinstance(message, ff.RelayMsg.__args__):
            frames.append(codec.encode(message))
        for frame in frames:
            bad = damage(rng, frame)
            header = 16 if frame[0] == 0xC4 else 0
            tags = [ref.mac8(salt, part) for part in (bad[header:], bad[:-8], bad[:17] + bad[25:], b"")]
            for call in (
                codec.decode, codec.decode_many, codec.timing_columns, codec.decode_mux, codec.decode_round,
                codec.check_control_ack, lambda data, codec=codec: codec.check_control_hello(data, 3),
                lambda data, codec=codec: codec.decode(data, trailing="error"),
            ):
                error = caught(call, bad)
                if error is not None:
                    met.add(type(error))
                    for text in everything_said(error):
                        assert secrets_in(text, [salt, salt[:8], salt[8:], *tags]) == []
    assert met >= {ff.AuthenticationError, ff.TruncatedError, ff.BadMagicError}


def test_no_error_holds_the_tag_that_would_hold():
    """The tag expected is what a forger needs: for every kind of frame with only its MAC wrong."""
    cases = [
        (CODEC.decode, FRAME, 8), (CODEC.decode_many, FRAME, 8), (CODEC.timing_columns, FRAME, 8),
        (CODEC.decode_mux, RECORD, 17), (CODEC.decode_round, ROUND, len(ROUND) - 8),
        (lambda data: CODEC.check_control_hello(data, 3), CODEC.control_hello(1, 3), 16),
        (CODEC.check_control_ack, CODEC.control_ack(), 8),
    ]
    for call, good, at in cases:
        error = caught(call, good[:at] + bytes(8) + good[at + 8:])
        assert type(error) is ff.AuthenticationError
        for text in everything_said(error):
            assert secrets_in(text, [good[at:at + 8], good[at:at + 4], SALT]) == []


def test_the_salt_is_shown_nowhere():
    salt = random.Random(62).randbytes(16)
    codec = ff.Codec(salt)
    attributes = [getattr(codec, name) for name in dir(codec)]
    for text in (repr(codec), str(codec), repr(ff.FrameReader(codec, "control")), repr(attributes)):
        assert secrets_in(text, [salt, salt[:8]]) == []
    assert not hasattr(codec, "__dict__")
    with pytest.raises(TypeError):
        pickle.dumps(codec)
    with pytest.raises(TypeError):
        copy.copy(codec)


@pytest.mark.parametrize("wrong", [
    lambda salt: salt.hex()[:-1], lambda salt: salt.hex() + "0", lambda salt: salt.hex()[:-1] + "g",
    lambda salt: salt[:-1],
    lambda salt: salt + b"x", lambda salt: [*salt],
])
def test_a_salt_that_is_nearly_right_is_not_repeated(wrong):
    salt = random.Random(63).randbytes(16)
    error = caught(ff.Codec, wrong(salt))
    assert error is not None
    for text in everything_said(error):
        assert secrets_in(text, [salt[:8], salt[4:12]]) == []
        assert str(list(salt))[1:20] not in text
