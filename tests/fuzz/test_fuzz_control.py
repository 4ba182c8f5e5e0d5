"""Messages and frames under invented input: nothing but the errors that are promised, and the oracle's values.

Every run draws the same input. FLODL_FAST_FUZZ=20 draws twenty times as much, and other input each time.
"""

from __future__ import annotations

import dataclasses
import math
import os
import random

import numpy as np
import reference as ref
from conftest import SALT, same
from generate import damage, mutated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import CODEC, KIND_OF, NUMBER_OF, codec_at, drawn, oracle_form, signed_frame, signed_record

import flodl_fast as ff

TIMES = int(os.environ.get("FLODL_FAST_FUZZ", "0"))


def fuzz(examples):
    return settings(
        max_examples=max(TIMES, 1) * examples, derandomize=not TIMES, deadline=None, database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def of_type(of):
    """Values of one of the oracle's types."""
    match of:
        case "i32":
            return st.integers(-(2**31), 2**31 - 1)
        case "f64":
            return st.floats()
        case "f32":
            return st.floats(width=32)
        case "text":
            return st.text(max_size=300)
        case str():
            return st.integers(0, ref.LIMITS[of] - 1)
        case ref.Opt(inner):
            return st.none() | of_type(inner)
        case ref.Vec("u8"):
            return st.binary(max_size=300).map(list)
        case ref.Vec(inner):
            return st.lists(of_type(inner), max_size=6)
        case ref.Map(inner):
            return st.dictionaries(st.text(max_size=50), of_type(inner), max_size=6)
        case ref.Array("u8", size):
            return st.binary(min_size=size, max_size=size).map(list)
        case ref.Tuple(inner):
            return st.tuples(*map(of_type, inner)).map(list)
        case ref.Enum(variants):
            return st.one_of(*(
                st.just(name) if inner == ref.UNIT else of_type(inner).map(lambda value, name=name: {name: value})
                for name, inner in variants.items()
            ))
        case _:
            return st.fixed_dictionaries({name: of_type(inner) for name, inner in of.items()})


values = st.one_of(*(st.tuples(st.just(kind), of_type(of)) for kind, of in ref.SCHEMA.items()))

# Anything that a caller could put into a field.
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(exclude_categories=()), max_size=20),
    st.binary(max_size=40), st.complex_numbers(), st.sampled_from([*ff.IntentKind, *ff.RendezvousRole, *ff.MsgKind]),
    st.sampled_from([np.int8(-3), np.uint64(2**64 - 1), np.float16(0.5), np.bool_(True), np.array(3), np.array([1.0])]),
    st.sampled_from([ff.EpochPlan(1, 2, 3), ff.ResourceSample(), ff.GpuSnapshot(0, ""), ff.EpochMetrics(0),
                     ff.SyncNow()]),
)
junk = st.recursive(leaves, lambda inner: st.one_of(
    st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple),
    st.dictionaries(st.text(max_size=3), inner, max_size=3),
), max_leaves=8)


def outcome(call, *args, **options):
    """What a call gives, or the class of the DecodeError that it raises. Any other error is a fault."""
    try:
        return call(*args, **options)
    except ff.DecodeError as error:
        return type(error)


def is_refused(result):
    return isinstance(result, type) and issubclass(result, ff.DecodeError)


def form(message):
    return (message.kind, message.payload) if isinstance(message, ff.Reserved) else oracle_form(message)


def oracle_decode(kind, payload):
    """The oracle's value of a payload and the bytes it takes; None where the oracle refuses it."""
    try:
        return ref.decode_payload(kind, payload)
    except ref.WireError:
        return None


@fuzz(200)
@given(values)
def test_any_message_goes_both_ways(pair):
    kind, value = pair
    payload = ref.encode_payload(kind, value)
    message = ff.from_json(kind, value)
    assert CODEC.encode_payload(message) == payload
    decoded = CODEC.decode_payload(kind, payload, trailing="error")
    assert same(oracle_form(decoded), (kind, value))
    assert same(ff.to_json(decoded), ref.to_json(value))
    assert CODEC.encode_payload(decoded) == payload


@fuzz(1000)
@given(st.sampled_from(list(ref.SCHEMA)), st.binary(max_size=200), st.lists(st.integers(0, 19), max_size=4).map(bytes))
def test_any_payload_is_read_as_the_oracle_reads_it(kind, tail, start):
    payload = start + tail
    expected = oracle_decode(kind, payload)
    result = outcome(CODEC.decode_payload, kind, payload)
    if expected is None:
        assert result is ff.PayloadError
        return
    value, used = expected
    assert same(oracle_form(result), (kind, value))
    assert len(CODEC.encode_payload(result)) <= used
    strict = outcome(CODEC.decode_payload, kind, payload, trailing="error")
    assert (strict is ff.TrailingDataError) if used < len(payload) else same(oracle_form(strict), (kind, value))


@fuzz(500)
@given(st.binary(max_size=120), st.sampled_from([b"", ref.CONTROL_FRAME.to_bytes(4, "little") + b"\2\0\0\0",
                                                 ref.MUX_RECORD.to_bytes(4, "little") + b"\1\0\0\0"]))
def test_any_bytes_are_refused_in_order(tail, start):
    data = start + tail
    for call in (
        CODEC.decode, CODEC.decode_mux, CODEC.decode_round, CODEC.check_control_ack, CODEC.check_data_ack,
        CODEC.measure_frame, CODEC.measure_record, lambda data: CODEC.check_control_hello(data, 3),
        lambda data: CODEC.decode_many(data, prefixed=True), lambda data: CODEC.timing_columns(data, prefixed=True),
        CODEC.decode_many, CODEC.timing_columns,
    ):
        result = outcome(call, data)
        assert not isinstance(result, (ff.MuxRecord, ff.RoundFrame))  # no MAC of these can hold by chance
    for kind in ("control", "round", "mux"):
        reader = ff.FrameReader(CODEC, kind)
        outcome(reader.feed, data)
        assert outcome(reader.next) is None or is_refused(outcome(reader.next))


@fuzz(400)
@given(st.sampled_from(list(KIND_OF)), st.data())
def test_any_field_is_encoded_or_refused_by_name(cls, data):
    names = [field.name for field in dataclasses.fields(cls)]
    message = cls(*(data.draw(junk, label=name) for name in names))
    payload, text, codec = None, "", codec_at("0.8")
    try:
        payload = codec.encode_payload(message)
    except (ff.EncodeError, TypeError) as error:
        text = str(error)
    if payload is None:
        assert text.startswith(cls.__name__ + ".")
    else:
        decoded = codec.decode_payload(KIND_OF[cls], payload, trailing="error")
        assert type(decoded) is cls
        assert codec.encode_payload(decoded) == payload


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4), max_leaves=10,
)


@fuzz(300)
@given(values, json_values, st.data())
def test_any_json_is_read_or_refused(pair, strange, data):
    """A message's own JSON with one value in it replaced."""
    kind, value = pair

    def replace(value):
        if isinstance(value, (dict, list)) and value and data.draw(st.integers(0, 3)):
            key = data.draw(st.sampled_from(list(value) if isinstance(value, dict) else range(len(value))))
            copied = value.copy()
            copied[key] = replace(value[key])
            return copied
        return strange

    changed = replace(value)
    try:
        message = ff.from_json(kind, changed)
    except ff.EncodeError:
        return
    assert KIND_OF[type(message)] == kind
    payload = CODEC.encode_payload(message)
    assert CODEC.encode_payload(ff.from_json(kind, oracle_form(message)[1])) == payload


@fuzz(300)
@given(st.lists(st.integers(0, 48), max_size=40), st.booleans(), st.randoms(use_true_random=False), st.booleans())
def test_any_stream_ends_as_its_frames_do(picks, prefixed, rng, broken):
    """decode_many, a reader in any pieces, and the frames one by one agree, whole or with one frame damaged."""
    frames = [CODEC.encode(MESSAGES[i % len(MESSAGES)]) for i in picks]
    if broken and frames:
        at = rng.randrange(len(frames))
        head, payload = frames[at][:24], frames[at][24:]
        damaged = damage(rng, payload or b"?")
        same_size = damaged[:len(payload)].ljust(len(payload), b"\0")
        frames[at] = signed_frame(head[16], damaged) if rng.random() < 0.5 else head + same_size
    # Each frame by itself, as far as the first that is refused.
    expected, error = [], None
    for frame in frames:
        result = outcome(CODEC.decode, frame)
        if is_refused(result):
            error = result
            break
        expected.append(form(result))
    data = b"".join(ref.add_prefix(frame) if prefixed else frame for frame in frames)
    try:
        messages, consumed = CODEC.decode_many(data, prefixed=prefixed)
        got, failed = messages, None
        assert consumed == len(data)
    except ff.DecodeError as fault:
        got, failed = fault.decoded, type(fault)
    assert same([form(message) for message in got], expected)
    assert failed is error
    reader, taken, stopped = ff.FrameReader(CODEC, "control", prefixed=prefixed), [], None
    try:
        while data:
            size = rng.choice((1, 5, 24, 100, 5000))
            reader.feed(data[:size])
            data = data[size:]
            taken += reader
        reader.eof()
    except ff.DecodeError as fault:
        stopped = type(fault)
    assert same([form(message) for message in taken], expected)
    assert stopped is error


MESSAGES = [message for message in drawn(81, 200, kinds=tuple(ref.SCHEMA)) if KIND_OF[type(message)] != "Relay"]


def test_mutations():
    """Payloads with bytes changed, cut, doubled, moved and spliced, under a MAC that holds."""
    rng = random.Random(None if TIMES else 82)
    seeds = [(KIND_OF[type(m)], CODEC.encode_payload(m)[:400]) for m in drawn(82, 500, kinds=tuple(ref.SCHEMA))]
    met = set()
    for _ in range(max(TIMES, 1) * 8000):
        kind, payload = rng.choice(seeds)
        for _ in range(rng.choice((1, 1, 2, 4))):
            payload = mutated(rng, payload, rng.choice(seeds)[1])
        expected = oracle_decode(kind, payload)
        result = outcome(CODEC.decode_payload, kind, payload)
        if expected is None:
            assert result is ff.PayloadError
        else:
            assert same(oracle_form(result), (kind, expected[0]))
        met.add((kind, expected is None))
        if kind == "Relay":
            record = outcome(CODEC.decode_mux, signed_record(2, payload))
            assert record is ff.PayloadError if expected is None else record.payload == result
            continue
        frame = signed_frame(NUMBER_OF[kind], payload)
        assert outcome(CODEC.decode, frame) is ff.PayloadError or expected is not None
        columns = outcome(CODEC.timing_columns, frame)
        if kind == "Timing":
            assert is_refused(columns) == (expected is None)
    assert met == {(kind, refused) for kind in ref.SCHEMA for refused in (False, True)}


def test_floats_of_every_class_keep_their_bits():
    rng = random.Random(None if TIMES else 83)
    for _ in range(3000):
        bits = rng.getrandbits(64) | (0x7FF << 52 if rng.random() < 0.3 else 0)
        raw = b"\3\0" + bits.to_bytes(8, "little")
        message = CODEC.decode_payload("Timing", raw)
        assert CODEC.encode_payload(message) == raw
        assert math.isnan(message.lr) == ((bits >> 52 & 0x7FF) == 0x7FF and bits % 2**52 != 0)
        assert CODEC.timing_columns(ref.encode_frame(SALT, "Timing", {"LrUpdate": {"rank": 0, "lr": message.lr}}))[
            "LrUpdate"]["lr"].tobytes() == np.array([message.lr]).tobytes()
