"""Round frames: tensor metadata in bulk, frames to arrays and back, and the fold (docs/wire.md §6).

A frame is written, or copied out of, in one pass over its tensors, the MAC in step with it. Arrays that are float32,
native and C-contiguous are reached through their own memory; any other layout goes through ``numpy.copyto``.
"""

import os

import numpy as np

__all__ = [
    "RoundMeter",
    "TensorLayout",
    "add_tensors",
    "arrays_of",
    "decode_round",
    "encode_round",
    "first_nonfinite",
    "fold_kernel",
    "scale_tensors",
    "sum_tensors",
]

cimport numpy as cnp
from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc
from cpython.memoryview cimport PyMemoryView_FromObject
from cpython.object cimport PyObject, PyTypeObject
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_GET_ITEM
from libc.math cimport isfinite
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

from flodl_fast._codec cimport FrameCodec, Input, Output, is_strict
from flodl_fast._wire cimport *

from flodl_fast._codec import plain_number
from flodl_fast.errors import (
    AuthenticationError,
    BadMagicError,
    EncodeError,
    LimitError,
    TensorError,
    TrailingDataError,
    TruncatedError,
    UnknownKindError,
)
from flodl_fast.protocol import DTYPE_BF16, DTYPE_F32, MAGIC_ROUND, RoundKind

cdef extern from "_native/fold.h" nogil:
    void ff_fold_f32(float* out, const uint8_t** inputs, size_t frames, size_t n, int scaled, float scale)
    void ff_add_f32(float* sums, const uint8_t* values, size_t n)
    void ff_copy_scaled_f32(uint8_t* to, const uint8_t* values, size_t n, float scale)
    void ff_scale_f32(float* values, size_t n, float scale)
    size_t ff_first_nonfinite_f32(const uint8_t* data, size_t n)
    void ff_copy(void* to, const void* source, size_t length)
    void ff_swap32(uint8_t* to, const uint8_t* source, size_t n)
    const char* ff_fold_kernels()
    const char* ff_fold_kernel()
    int ff_fold_use(const char* name)

cdef extern from "numpy/arrayobject.h":
    # steals the reference to the dtype
    object PyArray_NewFromDescr(PyTypeObject* cls, cnp.PyArray_Descr* dtype, int ndim, const cnp.npy_intp* dims,
                                const cnp.npy_intp* strides, void* data, int flags, PyObject* like)

cdef extern from *:
    """
    #if defined(__linux__)
    #include <sys/mman.h>
    /* Ask for huge pages under a large fresh block: touching it costs a fifth of what small pages cost. */
    static void ff_advise(char *start, size_t length) {
        uintptr_t first = ((uintptr_t)start + 4095) & ~(uintptr_t)4095;
        uintptr_t last = ((uintptr_t)start + length) & ~(uintptr_t)4095;
        if (length >= (4u << 20)) madvise((void *)first, last - first, MADV_HUGEPAGE);
    }
    #else
    static void ff_advise(char *start, size_t length) { (void)start; (void)length; }
    #endif

    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    #define FF_COPY_F32(to, from, n) ff_swap32((uint8_t *)(to), (const uint8_t *)(from), (n) / 4)
    #define FF_COPY_F32_COLD FF_COPY_F32
    #else
    #define FF_COPY_F32(to, from, n) memcpy(to, from, n)
    #define FF_COPY_F32_COLD(to, from, n) ff_copy(to, from, n)
    #endif
    """
    void ff_advise(char* start, size_t length) nogil
    # float32 values between native memory and the wire; COLD: what is written is not read again at once
    void copy_f32 "FF_COPY_F32"(void* to, const void* source, Py_ssize_t n) nogil
    void copy_f32_cold "FF_COPY_F32_COLD"(void* to, const void* source, Py_ssize_t n) nogil

cnp.import_array()

DEF HEAD = 17               # magic, tensor count, kind, weight
DEF TAG = 8
DEF F32 = 0
DEF QUIET = 16384           # bytes from which on the GIL is released
DEF BLOCK = 32768           # bytes copied before they are hashed: they are still in the cache
DEF MOST = 1 << 62          # bytes that no frame reaches
DEF APART = 65536           # bytes from which on a tensor is hashed, or sent, by itself

cdef uint32_t ROUND_MAGIC = MAGIC_ROUND
cdef object WIRE_F32 = np.dtype("<f4")
cdef bint WIRE_IS_NATIVE = WIRE_F32.isnative
cdef dict DTYPE_NAMES = {DTYPE_F32: "float32", DTYPE_BF16: "bfloat16"}


# A tensor of a frame. Its header (dtype, ndim, dims, nbytes) is in the layout's own copy, or in the frame at hand.
cdef struct Tensor:
    const uint8_t* head
    Py_ssize_t data         # where its data starts in the frame, right after its header
    Py_ssize_t nbytes


cdef inline Py_ssize_t head_size(const uint8_t* head) noexcept nogil:
    return 10 + 4 * <Py_ssize_t>head[1]


# How far a frame has been walked.
cdef struct Walk:
    uint32_t tensors        # in the whole frame
    uint32_t next           # the tensor to walk next
    Py_ssize_t at           # where it starts; after the last: where the footer starts
    uint64_t data           # tensor bytes so far


# One array's memory; NULL where numpy.copyto must do it.
cdef struct Piece:
    char* data
    Py_ssize_t nbytes


cdef int walk(FrameCodec codec, const uint8_t* p, Py_ssize_t n, Walk* w, TensorLayout into) except -1:
    """Go on through a frame of which n bytes are there, in the order of checks of docs/wire.md §6.

    Returns 1 where the whole frame is there, else 0; ``into`` takes down the tensors, unless it is None.
    """
    cdef uint64_t nbytes
    cdef Py_ssize_t head
    cdef double weight
    if w.at == 0:
        if n < 8:
            return 0
        if ff_load32(p) != ROUND_MAGIC:
            raise BadMagicError(f"expected a round frame's magic {ROUND_MAGIC:#x}, got {ff_load32(p):#x}")
        w.tensors = ff_load32(p + 4)
        if w.tensors > <uint64_t>codec.max_tensors:
            raise LimitError(f"a round frame of {w.tensors} tensors is above the limit of {codec.max_tensors} "
                             "(max_tensors)")
        if n < 9:
            return 0
        if p[8] > 1:
            raise UnknownKindError(f"round frame kind {p[8]}, known are 0 (Model) and 1 (Control)")
        if n < HEAD:
            return 0
        weight = ff_load_f64(p + 9)
        if not (isfinite(weight) and weight >= 0):
            raise TensorError(f"a round frame's weight must be finite and not negative, got {weight}")
        w.at = HEAD
    while w.next < w.tensors:
        if n - w.at < 2:
            return 0
        head = head_size(p + w.at)
        if n - w.at < head:
            return 0
        nbytes = ff_load64(p + w.at + head - 8)
        if nbytes > <uint64_t>codec.frame_ceiling - w.data:
            raise LimitError(f"tensor {w.next}: with its {nbytes} bytes the frame is above the limit of "
                             f"{codec.frame_ceiling} (frame_ceiling)")
        if into is not None:
            into.append(p + w.at, w.at + head, nbytes)
        w.data += nbytes
        w.at += head + <Py_ssize_t>min(nbytes, MOST)    # more is never there, and must not wrap
        w.next += 1
    return n - w.at >= TAG


cdef class RoundMeter:
    """Finds the end of a round frame that arrives piece by piece, looking at each byte of metadata once."""

    cdef FrameCodec codec
    cdef Walk seen

    def __cinit__(self, FrameCodec codec not None):
        self.codec = codec

    def measure(self, buffer, Py_ssize_t offset=0):
        """The size of the frame that starts at the offset, None while it is not all there.

        Raises:
            BadMagicError, LimitError, UnknownKindError, TensorError: as soon as the bytes that say so are there.
        """
        cdef Input source = Input(buffer)
        cdef Py_ssize_t size
        source.skip(offset)
        if not walk(self.codec, source.data, source.n, &self.seen, None):
            return None
        size = self.seen.at + TAG
        self.seen = Walk(0, 0, 0, 0)
        return size


cdef object shape_at(const uint8_t* head):
    """The shape that a tensor's header gives."""
    return tuple([ff_load32(head + 2 + 4 * i) for i in range(head[1])])


cdef class TensorLayout:
    """The metadata of a frame's tensors, kept between rounds so that a later round need only compare it.

    Its columns ``dtype``, ``ndim``, ``shape``, ``nbytes`` and ``offset`` have an entry for each tensor. Layouts are
    equal where dtypes and shapes are.
    """

    cdef Tensor* tensors
    cdef Py_ssize_t count, room
    cdef Py_ssize_t size                # of the whole frame, in bytes
    cdef bytes heads                    # the tensors' headers, one after the other

    def __cinit__(self):
        self.size = HEAD + TAG
        self.heads = b""

    def __dealloc__(self):
        PyMem_Free(self.tensors)

    cdef int append(self, const uint8_t* head, Py_ssize_t data, Py_ssize_t nbytes) except -1:
        cdef void* grown
        if self.count == self.room:
            grown = PyMem_Realloc(self.tensors, (2 * self.room + 64) * sizeof(Tensor))
            if grown is NULL:
                raise MemoryError()
            self.tensors = <Tensor*>grown
            self.room = 2 * self.room + 64
        self.tensors[self.count] = Tensor(head, data, nbytes)
        self.count += 1
        self.size = data + nbytes + TAG
        return 0

    @staticmethod
    def of(arrays):
        """The layout of these arrays in a frame.

        Args:
            arrays: float32 arrays by buffer protocol or DLPack.

        Raises:
            TypeError: an array of another dtype.
            EncodeError: a dimension above 2**32 - 1.
        """
        return layout_of(arrays_of(arrays))

    @staticmethod
    def from_frame(FrameCodec codec not None, buffer, *, trailing="ignore"):
        """The layout of a frame's tensors, the MAC checked first.

        Args:
            codec: the Codec.
            buffer: any contiguous buffer that starts with the frame.
            trailing: as ``Codec.decode``.

        Raises:
            DecodeError: as ``Codec.decode_round``.
        """
        cdef Input source = Input(buffer)
        cdef TensorLayout layout = read_layout(codec, source, is_strict(trailing))
        cdef Py_ssize_t i
        cdef uint8_t* p
        layout.heads = PyBytes_FromStringAndSize(NULL, layout.heads_size())
        p = <uint8_t*>PyBytes_AS_STRING(layout.heads)
        for i in range(layout.count):
            memcpy(p, layout.tensors[i].head, head_size(layout.tensors[i].head))
            layout.tensors[i].head = p
            p += head_size(p)
        return layout

    cdef Py_ssize_t heads_size(self) noexcept:
        """The bytes that the headers take together."""
        cdef Py_ssize_t i, total = self.size - HEAD - TAG
        for i in range(self.count):
            total -= self.tensors[i].nbytes
        return total

    def __len__(self):
        return self.count

    def __eq__(self, other):
        if not isinstance(other, TensorLayout):
            return NotImplemented
        return self.count == len(other) and self.heads == (<TensorLayout>other).heads

    __hash__ = None

    def __repr__(self):
        return f"TensorLayout({self.count} tensors, a frame of {self.size} bytes)"

    @property
    def frame_size(self):
        """The size of the whole frame, in bytes."""
        return self.size

    @property
    def dtype(self):
        """The wire's code of each tensor's dtype (docs/wire.md §6), uint8 of shape (tensors,); 0 is float32."""
        return np.array([self.tensors[i].head[0] for i in range(self.count)], np.uint8)

    @property
    def ndim(self):
        """The number of dimensions of each tensor, uint8 of shape (tensors,)."""
        return np.array([self.tensors[i].head[1] for i in range(self.count)], np.uint8)

    @property
    def nbytes(self):
        """The bytes of each tensor's data, int64 of shape (tensors,)."""
        return np.array([self.tensors[i].nbytes for i in range(self.count)], np.int64)

    @property
    def offset(self):
        """Where each tensor's data starts in the frame, in bytes, int64 of shape (tensors,)."""
        return np.array([self.tensors[i].data for i in range(self.count)], np.int64)

    @property
    def shape(self):
        """The shape of each tensor, a row filled up with 1, uint32 of shape (tensors, most dimensions)."""
        shape = np.ones((self.count, self.ndim.max(initial=0)), np.uint32)
        for i in range(self.count):
            dims = shape_at(self.tensors[i].head)
            shape[i, :len(dims)] = dims
        return shape

    def encode(self, FrameCodec codec not None, arrays, kind, weight, out=None, *, scale=None):
        """Encode the frame of these arrays, which have this layout.

        Args:
            codec: the Codec.
            arrays: float32 arrays of the layout's shapes, by buffer protocol or DLPack.
            kind: a RoundKind.
            weight: the frame's weight, finite and not negative.
            out: a writable buffer for the frame, from its first byte on; nothing is written unless all of it fits.
            scale: what every value is multiplied by on its way into the frame, rounded to float32 first: a rank's mass.

        Returns:
            The frame as bytes, or, with ``out``, the number of bytes written.

        Raises:
            TensorError: the arrays have another layout; the message names the tensor and both shapes.
            EncodeError: weight, sizes or ``out`` out of range.
            TypeError: an array of another dtype, or ``out`` is read-only.
        """
        return write_round(codec, self, arrays_of(arrays), kind, weight, out, 0, scale)

    def parts(self, FrameCodec codec not None, arrays, kind, weight):
        """The frame of these arrays as a list of buffers to send one after the other, with ``sendmsg`` for instance.

        Large tensors are not copied: their buffers are the arrays' own memory, which must stay as it is until all is
        sent. What is between them is joined.

        Args:
            codec: the Codec.
            arrays: as ``encode``.
            kind: as ``encode``.
            weight: as ``encode``.

        Raises:
            TensorError, EncodeError, TypeError: as ``encode``.
        """
        cdef tuple held = arrays_of(arrays)
        cdef double mass = check_weight(weight)
        cdef uint8_t kind_byte = check_kind(kind)
        cdef Piece* pieces
        cdef Py_ssize_t i, n, small = HEAD + TAG + len(self.heads), at = HEAD, start = 0
        cdef const Tensor* t
        cdef uint8_t* p
        cdef ff_mac_stream stream
        cdef list buffers = []
        check_limits(codec, self)
        pieces = <Piece*>PyMem_Malloc((self.count or 1) * sizeof(Piece))
        if pieces is NULL:
            raise MemoryError()
        try:
            locate(self, held, pieces, NULL, False)
            for i in range(self.count):
                if not stands_apart(&pieces[i]):
                    small += pieces[i].nbytes
            joined = bytearray(small)
            whole = memoryview(joined)
            p = <uint8_t*>PyByteArray_AS_STRING(joined)
            write_head(p, self, kind_byte, mass)
            codec.mac_begin(&stream)
            for i in range(self.count):
                t = &self.tensors[i]
                n = head_size(t.head)
                memcpy(p + at, t.head, n)
                at += n
                if stands_apart(&pieces[i]):
                    buffers.append(whole[start:at])
                    buffers.append(memoryview(held[i]).cast("B"))
                    with nogil:
                        codec.mac_update(&stream, p + start, at - start)
                        codec.mac_update(&stream, <const uint8_t*>pieces[i].data, t.nbytes)
                    start = at
                else:
                    fill(t, &pieces[i], held[i], p + at)
                    at += t.nbytes
            codec.mac_update(&stream, p + start, at - start)
            codec.mac_end(&stream, p + at)
            buffers.append(whole[start:])
        finally:
            PyMem_Free(pieces)
        return buffers

    def decode_into(self, FrameCodec codec not None, buffer, arrays, *, trailing="ignore"):
        """Decode a frame of this layout into these arrays; on any error they are as they were.

        Args:
            codec: the Codec.
            buffer: any contiguous buffer that starts with the frame.
            arrays: writable float32 arrays of the layout's shapes.
            trailing: as ``Codec.decode``.

        Returns:
            (RoundKind, weight).

        Raises:
            DecodeError: as ``Codec.decode_round``; TensorError where the frame or the arrays have another layout.
            TypeError, ValueError: an array of another dtype, or one that is read-only.
        """
        cdef Input source = Input(buffer)
        cdef tuple targets = arrays_of(arrays)
        cdef bint same = self.fits(codec, source)
        cdef TensorLayout found
        if same:
            check_round_mac(codec, source, self.size, is_strict(trailing))
        else:
            found = read_layout(codec, source, is_strict(trailing))
            self.refuse(found)
        read_into(self, source.data, targets)
        return RoundKind(source.data[8]), ff_load_f64(source.data + 9)

    cdef bint fits(self, FrameCodec codec, Input source) except -1:
        """Whether a whole frame with just these tensor headers stands in the buffer."""
        cdef const Tensor* t = self.tensors
        cdef Walk start = Walk(0, 0, 0, 0)
        cdef Py_ssize_t i, size
        if source.n < self.size or self.size - HEAD - TAG - len(self.heads) > codec.frame_ceiling:
            return False
        walk(codec, source.data, HEAD, &start, None)    # the checks of the first bytes
        if start.tensors != <uint64_t>self.count:
            return False
        for i in range(self.count):
            size = head_size(t[i].head)
            if memcmp(source.data + t[i].data - size, t[i].head, size):
                return False
        return True

    cdef int refuse(self, TensorLayout found) except -1:
        """Say where the layout found in a frame differs from this one."""
        cdef Py_ssize_t i
        if found.count != self.count:
            raise TensorError(f"the frame has {found.count} tensors, the layout {self.count}")
        for i in range(self.count):
            if shape_at(found.tensors[i].head) != shape_at(self.tensors[i].head):
                raise TensorError(f"tensor {i}: the frame has shape {shape_at(found.tensors[i].head)}, "
                                  f"the layout {shape_at(self.tensors[i].head)}")
        return 0


# ------------------------------------------------------------------------------------------------------------ arrays


cpdef tuple arrays_of(tensors):
    """The float32 arrays that share their memory with these tensors.

    Args:
        tensors: NumPy arrays, or anything that exports its memory by the buffer protocol or DLPack.

    Raises:
        TypeError: another dtype, a masked array, or no exported memory; nothing is converted. Also one tensor alone,
            whose rows nobody means to send.
    """
    if hasattr(tensors, "__dlpack__"):
        raise TypeError(f"expected several tensors, got one {type(tensors).__name__}")
    cdef list arrays = list(tensors)
    cdef Py_ssize_t i
    for i in range(len(arrays)):
        tensor = arrays[i]
        if not (cnp.PyArray_CheckExact(tensor) and cnp.PyArray_TYPE(tensor) == cnp.NPY_FLOAT):
            arrays[i] = array_of(tensor, f"tensor {i}")
    return tuple(arrays)


cdef object array_of(tensor, str where):
    if isinstance(tensor, np.ma.MaskedArray):
        raise TypeError(f"{where}: a masked array's mask has no place on the wire")
    try:
        if isinstance(tensor, np.ndarray):
            array = np.asarray(tensor)      # a subclass has ways of its own
        elif hasattr(tensor, "__dlpack__"):
            array = np.from_dlpack(tensor)
        else:
            array = np.asarray(memoryview(tensor))
    except Exception as error:
        raise TypeError(f"{where}: {type(tensor).__name__} gives no memory by buffer protocol or DLPack ({error})") from None
    if array.dtype.kind != "f" or array.dtype.itemsize != 4:
        raise TypeError(f"{where}: expected float32, got {array.dtype}")
    return array


cdef TensorLayout layout_of(tuple arrays):
    cdef TensorLayout layout = TensorLayout()
    cdef Py_ssize_t i, size = 0, at = HEAD, nbytes
    cdef int j
    cdef cnp.ndarray array
    cdef uint8_t* p
    for array in arrays:
        size += 10 + 4 * cnp.PyArray_NDIM(array)
    layout.heads = PyBytes_FromStringAndSize(NULL, size)
    p = <uint8_t*>PyBytes_AS_STRING(layout.heads)
    for i in range(len(arrays)):
        array = arrays[i]
        p[0] = F32
        p[1] = <uint8_t>cnp.PyArray_NDIM(array)
        for j in range(p[1]):
            if <uint64_t>cnp.PyArray_DIM(array, j) > 0xFFFFFFFFu:
                raise EncodeError(f"tensor {i}: dimension {j} of {cnp.PyArray_DIM(array, j)} does not fit in 32 bits")
            ff_store32(p + 2 + 4 * j, <uint32_t>cnp.PyArray_DIM(array, j))
        size = head_size(p)
        if cnp.PyArray_SIZE(array) > (MOST - at - size) // 4:
            raise EncodeError(f"tensor {i}: {cnp.PyArray_SIZE(array)} values more are above any frame's size")
        nbytes = cnp.PyArray_SIZE(array) * 4
        ff_store64(p + size - 8, nbytes)
        layout.append(p, at + size, nbytes)
        at += size + nbytes
        p += size
    return layout


cdef int locate(TensorLayout layout, tuple arrays, Piece* pieces, const uint8_t* frame, bint writable) except -1:
    """Check the arrays against the layout and find their memory, which must lie apart from the frame's, if there is one.

    What is written in ``frame`` comes from the arrays, or, where they are ``writable``, goes there.
    """
    cdef str name = "out" if writable else "the array"
    cdef const uint8_t* head
    cdef Py_ssize_t i
    cdef int j
    cdef cnp.ndarray array
    cdef bint same
    if len(arrays) != layout.count:
        raise TensorError(f"{layout.count} tensors expected, got {len(arrays)} arrays")
    for i in range(layout.count):
        array = arrays[i]
        head = layout.tensors[i].head
        same = cnp.PyArray_NDIM(array) == head[1]
        for j in range(head[1] if same else 0):
            same = same and <uint64_t>cnp.PyArray_DIM(array, j) == ff_load32(head + 2 + 4 * j)
        if not same:
            raise TensorError(f"tensor {i}: expected shape {shape_at(head)}, {name} has {(<object>array).shape}")
        if writable and not cnp.PyArray_ISWRITEABLE(array):
            raise ValueError(f"tensor {i}: {name} is read-only")
        pieces[i].nbytes = layout.tensors[i].nbytes
        pieces[i].data = cnp.PyArray_BYTES(array) if cnp.PyArray_ISCARRAY_RO(array) else NULL
        if frame is not NULL and overlap(layout, array, &pieces[i], frame):
            raise ValueError(f"tensor {i}: {name} lies in the frame's own buffer")
    return 0


cdef bint overlap(TensorLayout layout, array, const Piece* piece, const uint8_t* frame) except -1:
    """Whether an array may share memory with a frame."""
    cdef const uint8_t* data = <const uint8_t*>piece.data
    if data is not NULL:
        return piece.nbytes and data < frame + layout.size and frame < data + piece.nbytes
    return np.may_share_memory(array, <const uint8_t[:layout.size]>frame)


cdef object wire_array(const uint8_t* head, const void* data, bint writable):
    """A tensor's wire bytes as an array on the same memory, at whatever alignment; its owner must be held."""
    cdef cnp.npy_intp dims[255]
    cdef int i
    for i in range(head[1]):
        dims[i] = ff_load32(head + 2 + 4 * i)
    Py_INCREF(WIRE_F32)
    return PyArray_NewFromDescr(<PyTypeObject*>np.ndarray, <cnp.PyArray_Descr*>WIRE_F32, head[1], dims, NULL,
                                <void*>data, cnp.NPY_ARRAY_WRITEABLE if writable else 0, NULL)


# ----------------------------------------------------------------------------------------------------------- encode


def encode_round(FrameCodec codec not None, tensors, kind, weight, out=None, Py_ssize_t offset=0):
    """The frame of these float32 arrays as bytes, or its size where it went into ``out`` at the offset."""
    cdef tuple arrays = arrays_of(tensors)
    return write_round(codec, layout_of(arrays), arrays, kind, weight, out, offset, None)


cdef double check_weight(weight) except -1:
    cdef object plain = plain_number(weight, False)
    if plain is None:
        raise TypeError(f"weight: expected a float, got {type(weight).__name__}")
    if not (isfinite(<double>plain) and <double>plain >= 0):
        raise EncodeError(f"weight must be finite and not negative, got {weight}")
    return plain


cdef int check_kind(kind) except -1:
    if isinstance(kind, bool) or kind not in (0, 1):
        raise EncodeError(f"kind must be a RoundKind, got {kind!r}")
    return kind


cdef int check_limits(FrameCodec codec, TensorLayout layout) except -1:
    if layout.count > codec.max_tensors:
        raise EncodeError(f"{layout.count} tensors are above the limit of {codec.max_tensors} (max_tensors)")
    data = layout.size - HEAD - TAG - len(layout.heads)
    if data > codec.frame_ceiling:
        raise EncodeError(f"{data} tensor bytes are above the limit of "
                          f"{codec.frame_ceiling} (frame_ceiling)")
    return 0


cdef object write_round(FrameCodec codec, TensorLayout layout, tuple arrays, kind, weight, out, Py_ssize_t offset,
                        scale):
    cdef double mass = check_weight(weight)
    cdef bint scaled = scale is not None
    cdef float factor = <float><double>scale if scaled else 1
    cdef uint8_t kind_byte = check_kind(kind)
    cdef Piece* pieces
    cdef Output target = None
    cdef uint8_t* frame = NULL
    check_limits(codec, layout)
    if out is not None:
        target = Output(out)
        frame = target.room(offset, layout.size)
    pieces = <Piece*>PyMem_Malloc((layout.count or 1) * sizeof(Piece))
    if pieces is NULL:
        raise MemoryError()
    try:
        locate(layout, arrays, pieces, frame, False)
        result = layout.size
        if target is None:
            result = PyBytes_FromStringAndSize(NULL, layout.size)
            frame = <uint8_t*>PyBytes_AS_STRING(result)
            ff_advise(<char*>frame, layout.size)
        write_head(frame, layout, kind_byte, mass)
        if layout.size < QUIET:
            compose(codec, layout, arrays, pieces, frame, scaled, factor)
        else:
            with nogil:
                compose(codec, layout, arrays, pieces, frame, scaled, factor)
    finally:
        PyMem_Free(pieces)
    return result


cdef void write_head(uint8_t* frame, TensorLayout layout, uint8_t kind, double weight) noexcept:
    ff_store32(frame, ROUND_MAGIC)
    ff_store32(frame + 4, <uint32_t>layout.count)
    frame[8] = kind
    ff_store_f64(frame + 9, weight)


cdef inline bint stands_apart(const Piece* piece) noexcept nogil:
    """Whether a tensor's own memory holds its wire bytes, and is large enough to be treated alone."""
    return piece.data is not NULL and piece.nbytes >= APART and WIRE_IS_NATIVE


cdef int fill(const Tensor* t, const Piece* piece, array, uint8_t* to) except -1:
    """Write a tensor's values."""
    if piece.data is NULL:
        np.copyto(wire_array(t.head, to, True), array)
    else:
        copy_f32(to, piece.data, t.nbytes)
    return 0


cdef int compose(FrameCodec codec, TensorLayout layout, tuple arrays, Piece* pieces, uint8_t* frame, bint scaled,
                 float factor) except -1 nogil:
    """Write the tensors behind the frame's first bytes and sign it, a block at a time."""
    cdef const Tensor* t
    cdef ff_mac_stream stream
    cdef Py_ssize_t i, n, done, signed_ = 0
    codec.mac_begin(&stream)
    for i in range(layout.count):
        t = &layout.tensors[i]
        n = head_size(t.head)
        memcpy(frame + t.data - n, t.head, n)
        if pieces[i].data is NULL:
            with gil:
                if scaled:
                    np.multiply(arrays[i], np.float32(factor), out=wire_array(t.head, frame + t.data, True))
                else:
                    np.copyto(wire_array(t.head, frame + t.data, True), arrays[i])
        if stands_apart(&pieces[i]) and not scaled:
            codec.mac_update(&stream, frame + signed_, t.data - signed_)
            codec.mac_update_copy(&stream, frame + t.data, <const uint8_t*>pieces[i].data, t.nbytes)
            signed_ = t.data + t.nbytes
            continue
        done = 0
        while done < t.nbytes:
            n = min(t.nbytes - done, <Py_ssize_t>BLOCK)
            if pieces[i].data is not NULL and scaled:
                ff_copy_scaled_f32(frame + t.data + done, <const uint8_t*>pieces[i].data + done, n // 4, factor)
            elif pieces[i].data is not NULL:
                copy_f32(frame + t.data + done, pieces[i].data + done, n)
            done += n
            if t.data + done - signed_ >= BLOCK:
                codec.mac_update(&stream, frame + signed_, t.data + done - signed_)
                signed_ = t.data + done
    codec.mac_update(&stream, frame + signed_, layout.size - TAG - signed_)
    codec.mac_end(&stream, frame + layout.size - TAG)
    return 0


# ----------------------------------------------------------------------------------------------------------- decode


cdef int check_round_mac(FrameCodec codec, Input source, Py_ssize_t size, bint strict) except -1:
    if not codec.holds(source.data, size - TAG, source.data + size - TAG):
        raise AuthenticationError("the MAC of a round frame does not hold: another salt, or changed bytes")
    if strict and source.n > size:
        raise TrailingDataError(f"{source.n - size} extra bytes after a round frame of {size}")
    return 0


cdef TensorLayout read_layout(FrameCodec codec, Input source, bint strict):
    """The layout of an authentic frame whose every tensor is one that this revision has."""
    cdef TensorLayout layout = TensorLayout()
    cdef Walk w = Walk(0, 0, 0, 0)
    cdef Py_ssize_t i
    cdef int j
    cdef const uint8_t* head
    cdef uint64_t values
    cdef bint fits
    if not walk(codec, source.data, source.n, &w, layout):
        if w.at == 0:
            raise TruncatedError(f"a round frame's header takes {HEAD} bytes, got {source.n}")
        if w.next < w.tensors:
            raise TruncatedError(f"a round frame of {w.tensors} tensors ends before tensor {w.next}, after {source.n} bytes")
        raise TruncatedError(f"a round frame of {layout.size} bytes ends in its footer, after {source.n}")
    check_round_mac(codec, source, layout.size, strict)
    for i in range(layout.count):
        head = layout.tensors[i].head
        if head[0] != F32:
            raise TensorError(f"tensor {i}: dtype {head[0]} ({DTYPE_NAMES.get(head[0], 'unknown')}) is not one of "
                              f"revision {codec.revision.value}, which has 0 (float32)")
        values, fits = 4, True
        for j in range(head[1]):
            if ff_load32(head + 2 + 4 * j) == 0:
                values, fits = 0, True
                break
            fits = fits and values <= 0xFFFFFFFFFFFFFFFFu // ff_load32(head + 2 + 4 * j)
            values *= ff_load32(head + 2 + 4 * j)
        if not fits or values != <uint64_t>layout.tensors[i].nbytes:
            expected = 4 * shape_size(shape_at(head))
            raise TensorError(f"tensor {i}: shape {shape_at(head)} takes {expected} bytes, the frame gives "
                              f"{layout.tensors[i].nbytes}")
    return layout


cdef object shape_size(tuple shape):
    size = 1
    for dim in shape:
        size *= dim
    return size


cdef int read_into(TensorLayout layout, const uint8_t* frame, tuple arrays) except -1:
    """Copy an authentic frame's tensors into these arrays, once all of them fit."""
    cdef Piece* pieces = <Piece*>PyMem_Malloc((layout.count or 1) * sizeof(Piece))
    if pieces is NULL:
        raise MemoryError()
    try:
        locate(layout, arrays, pieces, frame, True)
        if layout.size < QUIET:
            scatter(layout, frame, arrays, pieces)
        else:
            with nogil:
                scatter(layout, frame, arrays, pieces)
    finally:
        PyMem_Free(pieces)
    return 0


cdef int scatter(TensorLayout layout, const uint8_t* frame, tuple arrays, const Piece* pieces) except -1 nogil:
    cdef const Tensor* t
    cdef Py_ssize_t i
    for i in range(layout.count):
        t = &layout.tensors[i]
        if pieces[i].data is not NULL:
            copy_f32_cold(pieces[i].data, frame + t.data, t.nbytes)
        else:
            with gil:
                np.copyto(arrays[i], wire_array(t.head, frame + t.data, False))
    return 0


def decode_round(FrameCodec codec not None, buffer, bint copy, out, bint finite, trailing):
    """(tensors, kind, weight) of the round frame at the start of a buffer; ``Codec.decode_round`` says the rest."""
    cdef Input source = Input(buffer)
    cdef list given = None if out is None else list(out)
    cdef tuple targets = None if out is None else arrays_of(given)
    cdef TensorLayout layout = read_layout(codec, source, is_strict(trailing))
    cdef const uint8_t* p = source.data
    cdef Py_ssize_t i
    cdef size_t bad
    cdef list tensors
    if finite:
        for i in range(layout.count):
            bad = ff_first_nonfinite_f32(p + layout.tensors[i].data, layout.tensors[i].nbytes // 4)
            if bad < <size_t>layout.tensors[i].nbytes // 4:
                raise TensorError(f"tensor {i}: {ff_load_f32(p + layout.tensors[i].data + 4 * bad)} at element {bad}")
    if targets is None and not copy:
        return views(layout, p, PyMemoryView_FromObject(buffer)), RoundKind(p[8]), ff_load_f64(p + 9)
    tensors = fresh(layout) if targets is None else given
    read_into(layout, p, tuple(tensors) if targets is None else targets)
    return tensors, RoundKind(p[8]), ff_load_f64(p + 9)


cdef list views(TensorLayout layout, const uint8_t* frame, owner):
    """Read-only arrays on the frame's own bytes, which the owner keeps."""
    cdef list tensors = []
    cdef Py_ssize_t i
    for i in range(layout.count):
        try:
            array = wire_array(layout.tensors[i].head, frame + layout.tensors[i].data, False)
        except ValueError as error:
            raise too_much(i, layout.tensors[i].head, error) from None
        cnp.set_array_base(array, owner)
        tensors.append(array)
    return tensors


cdef list fresh(TensorLayout layout):
    """New arrays for the tensors of a layout."""
    cdef cnp.npy_intp dims[255]
    cdef list tensors = []
    cdef const uint8_t* head
    cdef Py_ssize_t i
    cdef int j
    for i in range(layout.count):
        head = layout.tensors[i].head
        for j in range(head[1]):
            dims[j] = ff_load32(head + 2 + 4 * j)
        try:
            tensors.append(cnp.PyArray_SimpleNew(head[1], dims, cnp.NPY_FLOAT))
        except ValueError as error:
            raise too_much(i, head, error) from None
    return tensors


cdef object too_much(Py_ssize_t i, const uint8_t* head, error):
    return TensorError(f"tensor {i}: NumPy has no array of {head[1]} dimensions {shape_at(head)}: {error}")


# ------------------------------------------------------------------------------------------------------------- fold


def sum_tensors(frames, ranks, scale):
    """The element-wise sum of several frames' tensors, in float32, from +0.0 on, frame by frame.

    Args:
        frames: a list of lists of arrays that agree in count and shapes.
        ranks: what to call each frame in an error.
        scale: a factor for each sum, rounded to float32 first; None for none.

    Raises:
        TensorError: the frames do not match; the message names frame, tensor and both shapes.
    """
    cdef list rows = [arrays_of(tensors) for tensors in frames]
    cdef Py_ssize_t i, j, count = len(rows[0]), k = len(rows)
    cdef const uint8_t** inputs
    cdef cnp.ndarray total, array
    cdef size_t n
    cdef float factor = 1.0 if scale is None else <float><double>scale
    cdef int scaled = scale is not None
    cdef list sums = []
    for j in range(1, k):
        check_match(rows[j], ranks[j], rows[0], ranks[0])
    inputs = <const uint8_t**>PyMem_Malloc(k * sizeof(uint8_t*))
    if inputs is NULL:
        raise MemoryError()
    try:
        for i in range(count):
            held = []
            for j in range(k):
                array = <object>PyTuple_GET_ITEM(rows[j], i)
                if not (WIRE_IS_NATIVE and cnp.PyArray_ISCARRAY_RO(array)):
                    array = np.asarray(array, WIRE_F32, order="C")
                    held.append(array)
                inputs[j] = <const uint8_t*>cnp.PyArray_BYTES(array)
            array = <object>PyTuple_GET_ITEM(rows[0], i)
            total = cnp.PyArray_SimpleNew(cnp.PyArray_NDIM(array), cnp.PyArray_DIMS(array), cnp.NPY_FLOAT)
            n = cnp.PyArray_SIZE(total)
            if n * 4 < QUIET:
                ff_fold_f32(<float*>cnp.PyArray_DATA(total), inputs, k, n, scaled, factor)
            else:
                with nogil:
                    ff_fold_f32(<float*>cnp.PyArray_DATA(total), inputs, k, n, scaled, factor)
            sums.append(total)
    finally:
        PyMem_Free(inputs)
    return sums


cdef int check_match(tuple arrays, name, tuple firsts, first_name) except -1:
    cdef Py_ssize_t i
    if len(arrays) != len(firsts):
        raise TensorError(f"frame {name} has {len(arrays)} tensors, frame {first_name} has {len(firsts)}")
    for i in range(len(arrays)):
        if not cnp.PyArray_SAMESHAPE(arrays[i], firsts[i]):
            raise TensorError(f"frame {name}, tensor {i}: shape {arrays[i].shape}, "
                              f"frame {first_name} has {firsts[i].shape}")
    return 0


def add_tensors(sums, tensors, names):
    """Add tensors to sums that ``sum_tensors`` made; nothing is added where they do not match.

    Raises:
        TensorError: as ``sum_tensors``; ``names`` says what to call the sums' first frame and this one.
    """
    cdef tuple totals = tuple(sums), arrays = arrays_of(tensors)
    cdef cnp.ndarray total, array
    cdef size_t n
    check_match(arrays, names[1], totals, names[0])
    for total, array in zip(totals, arrays):
        array = np.asarray(array, WIRE_F32, order="C")
        n = cnp.PyArray_SIZE(total)
        with nogil:
            ff_add_f32(<float*>cnp.PyArray_DATA(total), <const uint8_t*>cnp.PyArray_BYTES(array), n)


def scale_tensors(sums, double scale):
    """Multiply sums that ``sum_tensors`` made by a factor, rounded to float32 first."""
    cdef cnp.ndarray total
    cdef size_t n
    for total in sums:
        n = cnp.PyArray_SIZE(total)
        with nogil:
            ff_scale_f32(<float*>cnp.PyArray_DATA(total), n, <float>scale)


def first_nonfinite(array):
    """The flat C-order index of the first NaN or infinity of a float32 array, None if it has none."""
    cdef cnp.ndarray held = np.asarray(array, WIRE_F32, order="C")
    cdef size_t n = cnp.PyArray_SIZE(held), at
    at = ff_first_nonfinite_f32(<const uint8_t*>cnp.PyArray_BYTES(held), n)
    return None if at == n else at


# ---------------------------------------------------------------------------------------------------------- kernels

ff_fold_use(NULL)
cdef bytes choice = os.environ.get("FLODL_FAST_FOLD", "").encode()

if choice and ff_fold_use(choice):
    raise ImportError(f"FLODL_FAST_FOLD={choice.decode()!r} is not a fold kernel of this CPU; "
                      f"available: {ff_fold_kernels().decode()}")


def fold_kernel():
    """The fold kernel in use, and all that this CPU can run, best first."""
    return ff_fold_kernel().decode(), ff_fold_kernels().decode().split(",")
