"""What counts as a tensor: every layout, byte order and source of memory, to encode from and to decode into."""

from __future__ import annotations

import array
import ctypes
from itertools import count

import ml_dtypes
import numpy as np
import pytest
from round_support import CODEC, noise, numbers, wire, words

import flodl_fast as ff

VALUES = noise(7, 4, 6)


def optional(name):
    return pytest.importorskip(name, reason=f"{name} is not installed")


class Producer:
    """An array of another library: DLPack and nothing else."""

    def __init__(self, held):
        self.held = held

    def __dlpack__(self, **options):
        return self.held.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.held.__dlpack_device__()


class DLTensor(ctypes.Structure):
    """DLManagedTensor of DLPack before 1.0, which says nothing about writing."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64), ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


ALIVE = []  # Consumers read a DLTensor until they are done, and nothing here hears of that.


class OldProducer:
    """A producer of such tensors: on the CPU, a C-order float32, unless fields say otherwise."""

    def __init__(self, held, *, shape=None, strides=None, device=1, **fields):
        shape = (ctypes.c_int64 * held.ndim)(*(shape or held.shape))
        steps = strides and (ctypes.c_int64 * held.ndim)(*strides)
        layout = {"code": 2, "bits": 32, "lanes": 1, "ndim": held.ndim, **fields}
        self.tensor = DLTensor(held.ctypes.data, (device, 0), shape=shape, strides=steps, **layout)
        self.held = held
        ALIVE.append((self.tensor, held))

    def __dlpack__(self, stream=None):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self.tensor), b"dltensor", None)

    def __dlpack_device__(self):
        return tuple(self.tensor.device)


class Exporter(array.array):
    """An exporter of the buffer protocol that is a class of its own."""


class Subclass(np.ndarray):
    """An array class that answers NumPy's functions itself, with nothing but refusals."""

    def __array_function__(self, function, types, args, kwargs):
        raise RuntimeError(f"{function.__name__} is not for this class")


def structured(dtype, values=VALUES):
    record = np.zeros(values.shape, dtype)
    record["x"] = values
    return record


def field_of_arrays(values):
    record = np.zeros(len(values), [("tag", "u1"), ("x", "<f4", values.shape[1:])])
    record["x"] = values
    return record["x"]


def in_memory(values, dtype=np.float32, offset=0, strides=None, fill=0xEE):
    """The same values at an offset in fresh memory, strided as asked, with other bytes between and around."""
    strides = strides or np.zeros(values.shape, dtype).strides
    reach = sum((n - 1) * abs(step) for n, step in zip(values.shape, strides, strict=True))
    first = offset + sum((n - 1) * -step for n, step in zip(values.shape, strides, strict=True) if step < 0)
    memory = np.full(offset + reach + 8, fill, np.uint8)
    placed = np.ndarray(values.shape, dtype, memory, first, strides)
    placed[...] = values
    return placed


def c_array(values, kind=ctypes.c_float):
    made = kind
    for n in reversed(values.shape):
        made = made * n
    return made.from_buffer_copy(values.astype(np.dtype(kind)).tobytes())


def memmapped(folder, values, mode="r+"):
    path = folder / "values"
    path.write_bytes(words(values))
    return np.memmap(path, "<f4", mode, shape=values.shape)


PACKED, BIG = np.dtype([("tag", "u1"), ("x", "<f4")]), np.dtype([("x", ">f4"), ("y", "<f8")])
ALIGNED = np.dtype([("tag", "u1"), ("x", "<f4")], align=True)

# NumPy's ways to hold VALUES, each as a function of the values; all of them writable.
LAYOUTS = {
    "C order": np.array,
    "Fortran order": lambda v: np.array(v, order="F"),
    "negative strides": lambda v: in_memory(v, strides=(-24, -4)),
    "one negative stride": lambda v: in_memory(v, strides=(-24, 4)),
    "every other element": lambda v: in_memory(v, strides=(48, 8)),
    "padded rows": lambda v: in_memory(v, strides=(40, 4)),
    "odd strides": lambda v: in_memory(v, strides=(31, 5)),
    "unaligned": lambda v: in_memory(v, offset=1),
    "unaligned Fortran order": lambda v: in_memory(v, offset=3, strides=(4, 16)),
    "big-endian": lambda v: v.astype(">f4"),
    "big-endian Fortran order": lambda v: v.astype(">f4", order="F"),
    "big-endian unaligned": lambda v: in_memory(v, ">f4", offset=1),
    "big-endian negative strides": lambda v: in_memory(v, ">f4", strides=(-24, -4)),
    "sub-view": lambda v: np.pad(v, 3)[3:-3, 3:-3],
    "transposed axes": lambda v: np.array(v.reshape(4, 3, 2).transpose(2, 0, 1)).transpose(1, 2, 0).reshape(4, 6),
    "packed field": lambda v: structured(PACKED, v)["x"],
    "aligned field": lambda v: structured(ALIGNED, v)["x"],
    "big-endian field": lambda v: structured(BIG, v)["x"],
    "field of arrays": field_of_arrays,
    "record array": lambda v: structured(PACKED, v).view(np.recarray).x,
    "subclass": lambda v: np.array(v).view(Subclass),
    "strided subclass": lambda v: np.array(v, order="F").view(Subclass),
    "big-endian subclass": lambda v: v.astype(">f4").view(Subclass),
}
GUARDED = {name: LAYOUTS[name] for name in (
    "negative strides", "one negative stride", "every other element", "padded rows", "odd strides", "unaligned",
    "unaligned Fortran order", "big-endian unaligned", "big-endian negative strides", "sub-view",
)}

# Other sources of memory.
SOURCES = {
    "buffer exporter": lambda v: memoryview(Exporter("f", words(v))).cast("B").cast("f", v.shape),
    "memoryview": lambda v: memoryview(bytearray(words(v))).cast("f", v.shape),
    "ctypes": c_array,
    "big-endian ctypes": lambda v: c_array(v, ctypes.c_float.__ctype_be__),
    "little-endian ctypes": lambda v: c_array(v, ctypes.c_float.__ctype_le__),
}
# NumPy before 2.1 takes all of DLPack's memory as read-only.
DLPACK_WRITES = np.lib.NumpyVersion(np.__version__) >= "2.1.0"
DLPACK = {
    "DLPack": lambda v: Producer(np.array(v)),
    "DLPack, strided": lambda v: Producer(np.array(v, order="F")),
    "DLPack, every other": lambda v: Producer(in_memory(v, strides=(48, 8))),
    "torch": lambda v: optional("torch").from_numpy(v.copy()),
    "torch, transposed": lambda v: optional("torch").from_numpy(v.T.copy()).T,
    "torch, sliced": lambda v: optional("torch").from_numpy(np.repeat(v, 2, axis=1))[:, ::2],
}
READ_ONLY = {
    "read-only": lambda v: frozen(v.copy()),
    "read-only Fortran order": lambda v: frozen(np.array(v, order="F")),
    "of bytes": lambda v: np.frombuffer(words(v), "<f4").reshape(v.shape),
    "memoryview of bytes": lambda v: memoryview(words(v)).cast("f", v.shape),
    "DLPack before 1.0": lambda v: OldProducer(np.array(v)),
    "DLPack before 1.0, transposed": lambda v: OldProducer(v.T.copy(), shape=v.shape, strides=(1, 4)),
    "DLPack before 1.0, at an offset": lambda v: OldProducer(
        np.pad(v, ((1, 0), (0, 0))), shape=v.shape, byte_offset=24
    ),
    "jax": lambda v: optional("jax.numpy").asarray(v),
}
(SOURCES if DLPACK_WRITES else READ_ONLY).update(DLPACK)


def frozen(values):
    values.flags.writeable = False
    return values


def params(*tables):
    return [pytest.param(make, id=name) for table in tables for name, make in table.items()]


# Encode --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", params(LAYOUTS, SOURCES, READ_ONLY))
def test_encode_takes_the_values_in_logical_order(make):
    tensor, expected = make(VALUES), wire([VALUES, numbers(3)])
    frame = ff.RoundFrame([tensor, numbers(3)])
    assert frame.tensors[0].shape == (4, 6)
    assert CODEC.encode_round(frame) == expected
    room = bytearray(len(expected))
    assert CODEC.encode_round_into(frame, room) == len(room)
    assert room == expected
    layout = ff.TensorLayout.of([tensor, numbers(3)])
    assert layout == ff.TensorLayout.of([VALUES, numbers(3)])
    assert layout.encode(CODEC, [tensor, numbers(3)], 0, 0.0) == expected


@pytest.mark.parametrize("make", params(LAYOUTS, SOURCES, READ_ONLY))
def test_sums_take_the_values_in_logical_order(make):
    plain = numbers(4, 6)
    total = ff.sum_frames([ff.RoundFrame([make(plain)]), ff.RoundFrame([plain]), ff.RoundFrame([make(-plain)])])
    assert words(total.tensors[0]) == words(plain)
    assert total.tensors[0].flags.c_contiguous
    assert total.tensors[0].dtype.isnative
    with pytest.raises(ff.TensorError, match="frame 0, tensor 0: nan at element 8"):
        ff.sum_frames([ff.RoundFrame([make(np.where(plain == 9, np.float32(np.nan), plain))])], finite=True)


@pytest.mark.parametrize("make", params(LAYOUTS, SOURCES))
def test_a_round_frame_shares_the_memory_of_its_source(make):
    tensor = make(np.zeros((4, 6), np.float32))
    frame = ff.RoundFrame([tensor])
    CODEC.decode_round(wire([VALUES]), out=[tensor])
    assert CODEC.encode_round(frame) == wire([VALUES])


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_encode_from_a_memmap(tmp_path, mode):
    mapped = memmapped(tmp_path, VALUES, mode)
    assert CODEC.encode_round(ff.RoundFrame([mapped, mapped.T])) == wire([VALUES, VALUES.T])


def test_broadcast_arrays():
    row, column = VALUES[1], VALUES[:, :1]
    tensors = [np.broadcast_to(row, (4, 6)), np.broadcast_to(column, (4, 6)), np.broadcast_to(VALUES[0, 0], (2, 3))]
    expected = [np.array([row] * 4), np.repeat(column, 6, 1), np.full((2, 3), VALUES[0, 0])]
    assert CODEC.encode_round(ff.RoundFrame(tensors)) == wire(expected)


@pytest.mark.parametrize("scalar", [
    np.array(2.5, np.float32), np.array(2.5, ">f4"), np.float32(2.5), ctypes.c_float(2.5),
    numbers(1).sum() * np.float32(2.5), in_memory(np.array(2.5, np.float32), offset=1),
    frozen(np.array(2.5, np.float32)),
], ids=["0-d", "big-endian 0-d", "NumPy scalar", "ctypes", "result of a sum", "unaligned 0-d", "read-only 0-d"])
def test_0_d_stays_0_d(scalar):
    frame = ff.RoundFrame([scalar])
    assert CODEC.encode_round(frame) == wire([np.array(2.5, np.float32)])
    for decoded in (CODEC.decode_round(CODEC.encode_round(frame)), ff.sum_frames([frame])):
        assert decoded.tensors[0].shape == ()
        assert type(decoded.tensors[0]) is np.ndarray
        assert decoded.tensors[0] == 2.5


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4), (0, 0)])
def test_empty_arrays_keep_their_shape(shape):
    for tensor in (np.zeros(shape, np.float32), np.zeros(shape, ">f4"), np.zeros(shape[::-1], np.float32).T,
                   frozen(np.zeros(shape, np.float32)), Producer(np.zeros(shape, np.float32))):
        raw = CODEC.encode_round(ff.RoundFrame([tensor]))
        assert raw == wire([np.zeros(shape, np.float32)])
        assert CODEC.decode_round(raw, out=[np.zeros(shape, np.float32)]).tensors[0].shape == shape
        assert CODEC.decode_round(raw, copy=False).tensors[0].shape == shape


def test_flat_sources():
    plain, backwards, spread = (array.array("f", values) for values in ([1, 2, 3], [3, 2, 1], [1, 0, 2, 0, 3, 0]))
    for tensor in (plain, memoryview(backwards)[::-1], memoryview(spread)[::2], (ctypes.c_float * 3)(1, 2, 3),
                   Exporter("f", [1, 2, 3])):
        assert CODEC.encode_round(ff.RoundFrame([tensor])) == wire([numbers(3)])


def test_no_tensors():
    for tensors in ([], (), iter([])):
        raw = CODEC.encode_round(ff.RoundFrame(tensors))
        assert raw == wire([])
        assert CODEC.decode_round(raw).tensors == []
        assert CODEC.decode_round(raw, copy=False).tensors == []
        assert CODEC.decode_round(raw, out=[]).tensors == []


@pytest.mark.parametrize("size", [4095, 4096, 8191, 8192, 8193, 20_000])
@pytest.mark.parametrize("make", [np.array, lambda v: v.astype(">f4"), lambda v: in_memory(v, strides=(8,)),
                                  lambda v: in_memory(v, strides=(-4,)), lambda v: in_memory(v, offset=1)],
                         ids=["plain", "big-endian", "strided", "backwards", "unaligned"])
def test_around_the_blocks_that_are_copied_and_signed_at_once(size, make):
    values, into = noise(size, size), make(np.zeros(size, np.float32))
    raw = wire([numbers(3), values, numbers(2)])
    assert CODEC.encode_round(ff.RoundFrame([numbers(3), make(values), numbers(2)])) == raw
    CODEC.decode_round(raw, out=[np.zeros(3, np.float32), into, np.zeros(2, np.float32)])
    assert words(into) == words(values)


# Decode into ---------------------------------------------------------------------------------------------


def read_back(target):
    """A target's values, whatever holds them."""
    if hasattr(target, "__dlpack__") and not isinstance(target, np.ndarray):
        return words(np.from_dlpack(target))
    return words(np.asarray(target).view(np.ndarray))


@pytest.mark.parametrize("make", params(LAYOUTS, SOURCES))
def test_decode_into(make):
    raw, plain = wire([VALUES, numbers(3)]), np.zeros(3, np.float32)
    target = make(np.zeros((4, 6), np.float32))
    CODEC.decode_round(raw, out=[target, plain])
    assert read_back(target) == words(VALUES)
    target = make(np.zeros((4, 6), np.float32))
    ff.TensorLayout.of([target, plain]).decode_into(CODEC, raw, [target, plain])
    assert read_back(target) == words(VALUES)
    assert words(plain) == words(numbers(3))


@pytest.mark.parametrize("make", params(LAYOUTS, SOURCES))
def test_decode_into_leaves_everything_untouched_on_failure(make):
    raw, good = bytearray(wire([VALUES, VALUES, numbers(3)])), numbers(4, 6)
    target, first = make(good), good.copy()
    layout = ff.TensorLayout.of([first, target, numbers(3)])
    for last, error in ((np.zeros(4, np.float32), ff.TensorError), (frozen(np.zeros(3, np.float32)), ValueError),
                        (np.zeros(3), TypeError)):
        with pytest.raises(error, match="tensor 2"):
            CODEC.decode_round(raw, out=[first, target, last])
        with pytest.raises(error, match="tensor 2"):
            layout.decode_into(CODEC, raw, [first, target, last])
    raw[-1] ^= 1
    last = np.zeros(3, np.float32)
    with pytest.raises(ff.AuthenticationError):
        CODEC.decode_round(raw, out=[first, target, last])
    with pytest.raises(ff.AuthenticationError):
        layout.decode_into(CODEC, raw, [first, target, last])
    assert [read_back(first), read_back(target), words(last)] == [words(good), words(good), bytes(12)]


@pytest.mark.parametrize("make", params(GUARDED))
def test_decode_into_leaves_what_lies_around_alone(make):
    target = make(np.zeros((4, 6), np.float32))
    memory = target
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    memory = memory.reshape(-1).view(np.uint8)
    before = memory.copy()
    CODEC.decode_round(wire([VALUES]), out=[target])
    assert words(target) == words(VALUES)
    target[...] = 0
    assert (memory == before).all()


def test_decode_into_one_field_leaves_the_others_alone():
    record = structured(PACKED, np.zeros((4, 6), np.float32))
    record["tag"] = np.arange(24).reshape(4, 6)
    CODEC.decode_round(wire([VALUES]), out=[record["x"]])
    assert words(record["x"]) == words(VALUES)
    assert (record["tag"] == np.arange(24).reshape(4, 6)).all()


def test_decode_into_parts_of_one_array():
    whole = np.full(24 + 3, 7, np.float32)
    CODEC.decode_round(wire([VALUES, numbers(2)]), out=[whole[:24].reshape(4, 6), whole[25:]])
    assert words(whole) == words(VALUES) + words(np.float32(7)) + words(numbers(2))


def test_decode_into_a_memmap(tmp_path):
    mapped = memmapped(tmp_path, np.zeros((4, 6), np.float32))
    CODEC.decode_round(wire([VALUES]), out=[mapped])
    mapped.flush()
    assert (tmp_path / "values").read_bytes() == words(VALUES)
    with pytest.raises(ValueError, match=r"tensor 0: .*read-only"):
        CODEC.decode_round(wire([VALUES]), out=[np.memmap(tmp_path / "values", "<f4", "r", shape=(4, 6))])
    private = np.memmap(tmp_path / "values", "<f4", "c", shape=(4, 6))
    CODEC.decode_round(wire([numbers(4, 6)]), out=[private])
    assert words(private) == words(numbers(4, 6))
    assert (tmp_path / "values").read_bytes() == words(VALUES)


@pytest.mark.parametrize("make", params(READ_ONLY))
def test_decode_into_read_only_memory_is_refused(make):
    target, first = make(VALUES), np.zeros(3, np.float32)
    for decode in (lambda: CODEC.decode_round(wire([numbers(3), numbers(4, 6)]), out=[first, target]),
                   lambda: ff.TensorLayout.of([first, target]).decode_into(
                       CODEC, wire([numbers(3), numbers(4, 6)]), [first, target])):
        with pytest.raises(ValueError, match=r"tensor 1: .*read-only"):
            decode()
    assert read_back(target) == read_back(make(VALUES))
    assert not first.any()


@pytest.mark.parametrize("at", [3, 27, 31, 35])
def test_decode_into_the_buffer_that_is_read(at):
    values = noise(3, 40_000)
    raw = wire([values], weight=1.0)
    room = bytearray(raw + bytes(4))
    target = np.frombuffer(room, "<f4", 40_000, at)
    try:
        frame = CODEC.decode_round(room, out=[target])
    except ValueError:
        assert room == raw + bytes(4)
    else:
        assert (frame.kind, frame.weight, words(target)) == (ff.RoundKind.MODEL, 1.0, words(values))


# Refusals ------------------------------------------------------------------------------------------------


class ArrayOnly:
    """Something that NumPy could turn into a float32 array, but not without its own code making one."""

    def __array__(self, dtype=None, copy=None):
        return np.zeros(3, np.float32)


class Failing:
    def __dlpack__(self, **options):
        raise RuntimeError("no more tensors")

    def __dlpack_device__(self):
        return (1, 0)


def torch_tensor(**options):
    return optional("torch").zeros(3, **options)


REFUSED = {
    **{name: (lambda name=name: np.zeros(3, name)) for name in (
        "float64", "float16", "longdouble", "complex64", "int32", "uint32", "int8", "bool", "object", "S4", "U1",
        "M8[s]",
    )},
    "structured": lambda: structured(PACKED),
    "one field": lambda: np.zeros(3, [("x", "<f4")]),
    "void": lambda: np.zeros(3, "V4"),
    "masked": lambda: np.ma.masked_array(np.zeros(3, np.float32), [0, 1, 0]),
    "masked without mask": lambda: np.ma.masked_array(np.zeros(3, np.float32)),
    "bytes": lambda: bytes(12),
    "bytearray": lambda: bytearray(12),
    "memoryview of bytes": lambda: memoryview(bytes(12)),
    "array of doubles": lambda: array.array("d", [1.0]),
    "array of ints": lambda: array.array("i", [1]),
    "ctypes double": lambda: (ctypes.c_double * 3)(),
    "float": lambda: 1.0,
    "int": lambda: 1,
    "NumPy double": lambda: np.float64(1.0),
    "list": lambda: [1.0, 2.0],
    "text": lambda: "1.0",
    "None": lambda: None,
    "array interface only": ArrayOnly,
    "frame": lambda: ff.RoundFrame([]),
    "DLPack double": lambda: Producer(np.zeros(3)),
    "DLPack on another device": lambda: OldProducer(np.zeros(3, np.float32), device=2),
    "DLPack float of 16 bits": lambda: OldProducer(np.zeros(3, np.float32), code=2, bits=16),
    "DLPack bfloat of 8 bits": lambda: OldProducer(np.zeros(3, np.float32), code=4, bits=8),
    "DLPack vectors of bfloat16": lambda: OldProducer(np.zeros(3, np.float32), code=4, bits=16, lanes=2),
    "DLPack bfloat16 on another device": lambda: OldProducer(np.zeros(3, np.float32), code=4, bits=16, device=2),
    "DLPack of vectors": lambda: OldProducer(np.zeros(3, np.float32), lanes=4),
    "DLPack that fails": Failing,
    "torch double": lambda: torch_tensor(dtype=optional("torch").float64),
    "torch that requires grad": lambda: torch_tensor(requires_grad=True),
    "torch meta": lambda: torch_tensor(device="meta"),
    "jax int": lambda: optional("jax.numpy").zeros(3, "int32"),
    "another dtype of the same package": lambda: np.zeros(3, ml_dtypes.float8_e5m2),
    "elided": lambda: np.array(ff.Elided((3,)), object),
}


@pytest.mark.parametrize("make", params(REFUSED))
def test_other_dtypes_and_things_without_memory_are_type_errors(make):
    bad, good = make(), np.zeros(3, np.float32)
    raw = wire([numbers(3), numbers(3)])
    frame = ff.RoundFrame([good])
    frame.tensors.append(bad)
    for call in (
        lambda: ff.RoundFrame([good, bad]),
        lambda: CODEC.encode_round(frame),
        lambda: ff.TensorLayout.of([good, bad]),
        lambda: ff.TensorLayout.of([good, good]).encode(CODEC, [good, bad], 0, 1.0),
        lambda: CODEC.decode_round(raw, out=[good, bad]),
        lambda: ff.TensorLayout.of([good, good]).decode_into(CODEC, raw, [good, bad]),
        lambda: ff.sum_frames([frame]),
    ):
        with pytest.raises(TypeError, match="tensor 1: "):
            call()
    assert not good.any()


@pytest.mark.parametrize(("make", "name"), [
    (REFUSED["float64"], "float64"), (REFUSED["int32"], "int32"), (REFUSED["masked"], "masked"),
    (REFUSED["list"], "list"), (REFUSED["None"], "NoneType"), (REFUSED["DLPack double"], "float64"),
    (REFUSED["bytes"], "uint8"), (REFUSED["array of doubles"], "float64"),
    (lambda: np.zeros(3, np.uint16), r"uint16 \(bits of bfloat16 .*view\(ml_dtypes.bfloat16\)"),
])
def test_a_refusal_says_what_came(make, name):
    with pytest.raises(TypeError, match=f"tensor 0: .*{name}"):
        ff.RoundFrame([make()])


# Other libraries -----------------------------------------------------------------------------------------


def test_torch_takes_what_is_decoded():
    torch = optional("torch")
    tensor = torch.from_numpy(CODEC.decode_round(wire([numbers(2, 3)])).tensors[0])  # A warning would be an error.
    assert tensor.tolist() == [[1, 2, 3], [4, 5, 6]]
    tensor += 1
    assert CODEC.encode_round(ff.RoundFrame([tensor])) == wire([numbers(2, 3, start=2)])


@pytest.mark.skipif(not DLPACK_WRITES, reason="NumPy before 2.1 takes all of DLPack's memory as read-only")
def test_torch_parameters_are_decoded_into_in_place():
    torch = optional("torch")
    layer = torch.nn.Linear(3, 2)
    state = [parameter.detach() for parameter in layer.parameters()]
    CODEC.decode_round(wire([numbers(2, 3), numbers(2)]), out=state)
    assert layer.weight.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert layer.bias.tolist() == [1, 2]


def test_jax_takes_what_is_decoded():
    jnp = optional("jax.numpy")
    array = jnp.asarray(CODEC.decode_round(wire([numbers(2, 3)])).tensors[0])
    assert CODEC.encode_round(ff.RoundFrame([array + 1])) == wire([numbers(2, 3, start=2)])


def test_a_producer_is_asked_once_a_call():
    calls = count()

    class Counting(Producer):
        def __dlpack__(self, **options):
            next(calls)
            return super().__dlpack__(**options)

    frame = ff.RoundFrame([Counting(VALUES.copy())])
    assert next(calls) == 1
    assert CODEC.encode_round(frame) == CODEC.encode_round(frame) == wire([VALUES])
    assert next(calls) == 2
