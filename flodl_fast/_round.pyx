"""Round frames: tensor metadata in bulk, frames to arrays and back, and the fold (docs/wire.md §6).

A frame is written, or copied out of, in one pass over its tensors, the MAC in step with it. Arrays that are native and
C-contiguous are reached through their own memory; any other layout goes through NumPy.
"""

import os

import ml_dtypes
import numpy as np

__all__ = [
    "Elided",
    "RoundMeter",
    "TensorLayout",
    "TensorSums",
    "arrays_of",
    "check_frame",
    "decode_round",
    "encode_round",
    "first_nonfinite",
    "fold_frames",
    "fold_kernel",
    "is_divided",
    "kind_of",
]

cimport cython
cimport numpy as cnp
from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc
from cpython.memoryview cimport PyMemoryView_FromObject
from cpython.object cimport PyObject, PyTypeObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_GET_ITEM
from libc.math cimport INFINITY, isfinite
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from flodl_fast._codec cimport FrameCodec, Input, Output, is_strict
from flodl_fast._wire cimport *

from flodl_fast._codec import plain_number, whole_number
from flodl_fast.display import layout_table
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
from flodl_fast.protocol import (
    BF16_SINCE,
    DTYPE_BF16,
    DTYPE_F32,
    ELISION_SINCE,
    MAGIC_MUX,
    MAGIC_ROUND,
    MuxKind,
    Revision,
    RoundKind,
    wrong_magic,
)

cdef extern from "_native/fold.h" nogil:
    void ff_fold_f32(float* out, const uint8_t** inputs, size_t frames, size_t n, int scaled, float scale)
    void ff_fold_bf16(uint8_t* out, const uint8_t** inputs, size_t frames, size_t n, int scaled, float scale)
    void ff_add_f32(float* sums, const uint8_t* values, size_t n, int first)
    void ff_add_bf16(float* sums, const uint8_t* values, size_t n, int first)
    void ff_copy_scaled_f32(uint8_t* to, const void* values, size_t n, float scale)
    void ff_scale_f32(float* values, size_t n, float scale)
    void ff_scale_bf16(uint8_t* to, const uint8_t* values, size_t n, float scale)
    void ff_widen_bf16(void* to, const uint8_t* values, size_t n)
    void ff_narrow_bf16(uint8_t* to, const void* values, size_t n, int scaled, float scale)
    size_t ff_first_nonfinite_f32(const uint8_t* data, size_t n)
    size_t ff_first_nonfinite_bf16(const uint8_t* data, size_t n)
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

    /* DLPack's tensor, and what a capsule holds: the tensor alone, or since DLPack 1.0 after a head. */
    typedef struct {
        void *data;
        int32_t device_type, device_id, ndim;
        uint8_t code, bits;
        uint16_t lanes;
    } ff_dl_tensor;
    typedef struct {
        uint32_t major, minor;
        void *context, *deleter;
        uint64_t flags;
        ff_dl_tensor tensor;
    } ff_dl_versioned;
    #define FF_DL_UINT 1
    #if defined(__GNUC__)
    #define FF_FETCH(p) __builtin_prefetch(p)
    #else
    #define FF_FETCH(p) ((void)(p))
    #endif

    #define FF_DL_BFLOAT 4

    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    #define FF_COPY(to, from, n) ff_swap32((uint8_t *)(to), (const uint8_t *)(from), (n) / 4)
    #define FF_COPY_COLD FF_COPY
    #else
    #define FF_COPY(to, from, n) memcpy(to, from, n)
    #define FF_COPY_COLD(to, from, n) ff_copy(to, from, n)
    #endif
    """
    void ff_advise(char* start, size_t length) nogil
    void fetch "FF_FETCH"(const void* p) nogil
    ctypedef struct ff_dl_tensor:
        uint8_t code, bits
        uint16_t lanes
    ctypedef struct ff_dl_versioned:
        ff_dl_tensor tensor
    const uint8_t FF_DL_UINT, FF_DL_BFLOAT
    # Values between native memory and the wire; COLD: what is written is not read again at once. Big-endian hosts
    # reach bfloat16 by NumPy only.
    void copy_wire "FF_COPY"(void* to, const void* source, Py_ssize_t n) nogil
    void copy_cold "FF_COPY_COLD"(void* to, const void* source, Py_ssize_t n) nogil

cnp.import_array()

DEF HEAD = 17               # magic, tensor count, kind, weight
DEF TAG = 8
DEF F32 = 0
DEF BF16 = 1
DEF QUIET = 16384           # bytes from which on the GIL is released
DEF BLOCK = 32768           # bytes copied before they are hashed: they are still in the cache
DEF MOST = 1 << 62          # bytes that no frame reaches
DEF APART = 65536           # bytes from which on a tensor is hashed, or sent, by itself
DEF STEP = 512              # bytes converted before they are hashed: the next are, while the hash waits for itself
DEF FEW = 256               # bytes up to which a tensor is copied without a call
DEF AHEAD = 8               # how many arrays ahead their memory is fetched
DEF RECORD = 17             # a mux record's header up to its MAC

cdef uint32_t ROUND_MAGIC = MAGIC_ROUND, MUX_MAGIC = MAGIC_MUX
cdef object WIRE_F32 = np.dtype("<f4")
cdef object WIRE_U16 = np.dtype("<u2")      # the bits of bfloat16, which NumPy knows by a package alone
cdef object BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
cdef object WIRE_BFLOAT16 = BFLOAT16.newbyteorder("<")
cdef int NPY_BFLOAT16 = BFLOAT16.num
cdef bint WIRE_IS_NATIVE = WIRE_F32.isnative
cdef dict DTYPE_NAMES = {DTYPE_F32: "float32", DTYPE_BF16: "bfloat16"}
cdef dict DTYPE_CODES = {"f32": F32, "bf16": BF16}
cdef tuple WITHOUT_BF16 = tuple([revision for revision in Revision if revision < BF16_SINCE])
cdef tuple WITHOUT_ELISION = tuple([revision for revision in Revision if revision < ELISION_SINCE])


# A tensor of a frame. Its header (dtype, ndim, dims, nbytes) is in the layout's own copy, or in the frame at hand.
cdef struct Tensor:
    const uint8_t* head
    Py_ssize_t data         # where its data starts in the frame, right after its header
    Py_ssize_t nbytes


cdef inline Py_ssize_t head_size(const uint8_t* head) noexcept nogil:
    return 10 + 4 * <Py_ssize_t>head[1]


cdef inline int width(int code) noexcept nogil:
    """The bytes of a value of that dtype."""
    return 2 if code == BF16 else 4


cdef bint whole_size(const uint8_t* head, uint64_t* size) noexcept nogil:
    """The bytes that the values of a tensor take; False where that does not fit in 64 bits."""
    cdef bint fits = True
    cdef int j
    cdef uint32_t dim
    size[0] = width(head[0])
    for j in range(head[1]):
        dim = ff_load32(head + 2 + 4 * j)
        if dim == 0:
            size[0] = 0
            return True
        fits = fits and size[0] <= 0xFFFFFFFFFFFFFFFFu // dim
        size[0] *= dim
    return fits


# How far a frame has been walked.
cdef struct Walk:
    uint32_t tensors        # in the whole frame
    uint32_t next           # the tensor to walk next
    Py_ssize_t at           # where it starts; after the last: where the footer starts
    uint64_t data           # tensor bytes so far


# One array's memory; NULL where NumPy must go through it.
cdef struct Piece:
    char* data
    Py_ssize_t nbytes
    bint converts           # its dtype is not the wire's


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
            raise BadMagicError(wrong_magic(ROUND_MAGIC, ff_load32(p)))
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
    cdef Py_ssize_t bf16, elided        # the first such tensor, -1 without one
    cdef uint64_t zeros                 # bytes that the elided tensors would take
    cdef bint narrows                   # float32 arrays were asked to go as bfloat16

    def __cinit__(self):
        self.size = HEAD + TAG
        self.heads = b""
        self.bf16 = self.elided = -1

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

    cdef int elide(self, Py_ssize_t i, uint64_t size) except -1:
        """Take down that a tensor of so many bytes, or of more where that is MOST, has no data."""
        if self.elided < 0:
            self.elided = i
        self.zeros = min(self.zeros + min(size, <uint64_t>MOST), <uint64_t>MOST)
        return 0

    @staticmethod
    def of(arrays, *, wire=None):
        """The layout of these arrays in a frame.

        Args:
            arrays: float32 or bfloat16 arrays by buffer protocol or DLPack, or Elided.
            wire: "bf16" for a frame of bfloat16 whatever the arrays are: float32 values are rounded to nearest, ties to
                even, as they are encoded (docs/wire.md §9). By default each tensor travels in the array's dtype.

        Raises:
            TypeError: an array of another dtype.
            EncodeError: a dimension above 2**32 - 1.
            ValueError: another ``wire``.
        """
        return layout_of(arrays_of(arrays, True), is_narrow(wire))

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
        cdef Framed source = Framed(buffer)
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

    def _repr_html_(self):
        return layout_table(self)

    @property
    def frame_size(self):
        """The size of the whole frame, in bytes."""
        return self.size

    @property
    def dtype(self):
        """The wire's code of each tensor's dtype (docs/wire.md §6), uint8 of shape (tensors,): 0 float32, 1 bfloat16."""
        return np.array([self.tensors[i].head[0] for i in range(self.count)], np.uint8)

    @property
    def ndim(self):
        """The number of dimensions of each tensor, uint8 of shape (tensors,)."""
        return np.array([self.tensors[i].head[1] for i in range(self.count)], np.uint8)

    @property
    def nbytes(self):
        """The bytes of each tensor's data, int64 of shape (tensors,); 0 where it is elided."""
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
            arrays: arrays of the layout's dtypes and shapes, by buffer protocol or DLPack; an Elided where the layout
                has one; float32 for bfloat16 only where the layout was made with ``wire="bf16"``.
            kind: a RoundKind.
            weight: the frame's weight, finite and not negative.
            out: a writable buffer for the frame, from its first byte on; nothing is written unless all of it fits.
            scale: what every value is multiplied by, in float32, on its way into the frame, rounded to float32 itself
                first: a rank's mass.

        Returns:
            The frame as bytes, or, with ``out``, the number of bytes written.

        Raises:
            TensorError: the arrays have another layout; the message names the tensor and both shapes.
            EncodeError: weight, sizes or ``out`` out of range, or the codec's revision lacks bfloat16 or elision.
            TypeError: an array of another dtype, or ``out`` is read-only.
        """
        return write_round(codec, self, arrays_of(arrays, True), kind, weight, out, 0, scale)

    def encode_record(self, FrameCodec codec not None, arrays, kind, weight, record, out, *, scale=None):
        """As ``encode``, but what goes into ``out`` is a whole mux record with the frame as its payload.

        Both are signed in one pass, which takes little longer than one of them.

        Args:
            codec: the Codec.
            arrays: as ``encode``.
            kind: as ``encode``.
            weight: as ``encode``.
            record: the MuxKind, HOST_FRAME or BROADCAST.
            out: a writable buffer for the record, from its first byte on.
            scale: as ``encode``.

        Returns:
            The number of bytes written.

        Raises:
            TensorError, EncodeError, TypeError: as ``encode``.
        """
        cdef int number = whole_number(record, "record", MuxKind.HOST_FRAME, MuxKind.BROADCAST)
        return write_round(codec, self, arrays_of(arrays, True), kind, weight, Output(out), 0, scale, number)

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
        cdef tuple held = arrays_of(arrays, True)
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
            locate(self, held, pieces, NULL, 0, False)
            for i in range(self.count):
                if not stands_apart(&pieces[i]):
                    small += self.tensors[i].nbytes
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
                    buffers.append(memory_of(held[i]))
                    with nogil:
                        codec.mac_update(&stream, p + start, at - start)
                        codec.mac_update(&stream, <const uint8_t*>pieces[i].data, t.nbytes)
                    start = at
                else:
                    if t.nbytes:
                        fill(t, &pieces[i], held[i], p + at)
                    at += t.nbytes
            codec.mac_update(&stream, p + start, at - start)
            codec.mac_end(&stream, p + at)
            buffers.append(whole[start:])
        finally:
            PyMem_Free(pieces)
        return buffers

    def decode_into(self, FrameCodec codec not None, buffer, arrays, *, record=None, trailing="ignore"):
        """Decode a frame of this layout into these arrays; on any error they are as they were.

        Args:
            codec: the Codec.
            buffer: any contiguous buffer that starts with the frame.
            arrays: writable arrays of the layout's dtypes and shapes, none on another's memory; float32 where it has
                bfloat16 takes that widened.
            record: as ``Codec.decode_round``.
            trailing: as ``Codec.decode``.

        Tensors that the frame elides become zeros.

        Returns:
            (RoundKind, weight).

        Raises:
            DecodeError: as ``Codec.decode_round``; TensorError where the frame or the arrays have another layout.
            TypeError, ValueError: an array of another dtype, or one that is read-only.
        """
        cdef Framed source = Framed(buffer)
        cdef tuple targets = arrays_of(arrays)
        cdef TensorLayout found = self
        source.enter(codec, record, is_strict(trailing))
        if self.fits(codec, source):
            check_round_mac(codec, source, self.size, is_strict(trailing))
        else:
            found = read_layout(codec, source, is_strict(trailing))
            self.refuse(found)
        read_into(found, source.data, targets)
        return RoundKind(source.data[8]), ff_load_f64(source.data + 9)

    cdef bint fits(self, FrameCodec codec, Input source) except -1:
        """Whether a whole frame with just these tensor headers stands in the buffer."""
        cdef const Tensor* t = self.tensors
        cdef Walk start = Walk(0, 0, 0, 0)
        cdef Py_ssize_t i, size
        cdef uint64_t data = self.size - HEAD - TAG - len(self.heads) + self.zeros
        if source.n < self.size or data > <uint64_t>codec.frame_ceiling:
            return False
        if (self.bf16 >= 0 or self.elided >= 0) and lacks(codec, self) is not None:
            return False
        walk(codec, source.data, HEAD, &start, None)    # the checks of the first bytes
        if start.tensors != <uint64_t>self.count:
            return False
        for i in range(self.count):
            size = head_size(t[i].head)
            if not ff_same_short(source.data + t[i].data - size, t[i].head, size):
                return False
        return True

    cdef int refuse(self, TensorLayout found) except -1:
        """Say where the layout found in a frame differs from this one, but for what is elided."""
        cdef Py_ssize_t i
        cdef const uint8_t* theirs
        cdef const uint8_t* ours
        if found.count != self.count:
            raise TensorError(f"the frame has {found.count} tensors, the layout {self.count}")
        for i in range(self.count):
            theirs, ours = found.tensors[i].head, self.tensors[i].head
            if theirs[1] != ours[1] or memcmp(theirs + 2, ours + 2, 4 * ours[1]):
                raise TensorError(f"tensor {i}: the frame has shape {shape_at(theirs)}, the layout {shape_at(ours)}")
            if theirs[0] != ours[0]:
                raise TensorError(f"tensor {i}: the frame has {DTYPE_NAMES[theirs[0]]}, "
                                  f"the layout {DTYPE_NAMES[ours[0]]}")
        return 0


# ------------------------------------------------------------------------------------------------------------ arrays


cdef class Elided:
    """A tensor of zeros that travels as its shape alone, without data (docs/wire.md §9; from 0.8 on).

    Attributes:
        shape: a tuple of at most 255 dimensions below 2**32.
        dtype: "f32" or "bf16".

    Raises:
        ValueError: dimensions that no frame can give, or another dtype.
        TypeError: a shape that is no sequence of integers; a bool is none.
    """

    cdef readonly tuple shape
    cdef readonly str dtype
    cdef int code

    def __cinit__(self, shape, dtype="f32"):
        self.shape = tuple([whole_number(dim, f"dimension {i}", 0, 0xFFFFFFFF) for i, dim in enumerate(shape)])
        if len(self.shape) > 255:
            raise ValueError(f"a frame gives at most 255 dimensions, got {len(self.shape)}")
        if dtype not in DTYPE_CODES:
            raise ValueError(f'the dtype of an elided tensor is "f32" or "bf16", got {dtype!r}')
        self.dtype, self.code = dtype, DTYPE_CODES[dtype]

    def __eq__(self, other):
        if not isinstance(other, Elided):
            return NotImplemented
        return self.code == (<Elided>other).code and self.shape == (<Elided>other).shape

    def __hash__(self):
        return hash((self.shape, self.code))

    def __reduce__(self):
        return Elided, (self.shape, self.dtype)

    def __repr__(self):
        return f"Elided({self.shape}, {self.dtype!r})"


cpdef tuple arrays_of(tensors, bint elided=False):
    """The float32 and bfloat16 arrays that share their memory with these tensors.

    Args:
        tensors: NumPy arrays, or anything that exports its memory by the buffer protocol or DLPack.
        elided: let an Elided be one of them, and stand in the result as it is.

    Raises:
        TypeError: another dtype, a masked array, or no exported memory; nothing is converted. Also one tensor alone,
            whose rows nobody means to send.
    """
    cdef tuple given
    cdef list arrays = None
    cdef Py_ssize_t i, n
    if type(tensors) is not list and hasattr(tensors, "__dlpack__"):
        raise TypeError(f"expected several tensors, got one {type(tensors).__name__}")
    if isinstance(tensors, dict):
        raise TypeError("expected several tensors, got a dict of them: give its values()")
    given = tuple(tensors)
    n = len(given)
    for i in range(n):
        if i + AHEAD < n:
            fetch(<void*>PyTuple_GET_ITEM(given, i + AHEAD))
        tensor = <object>PyTuple_GET_ITEM(given, i)
        if cnp.PyArray_CheckExact(tensor) and is_value(cnp.PyArray_TYPE(<cnp.ndarray>tensor)):
            continue
        if not (elided and type(tensor) is Elided):
            arrays = list(given) if arrays is None else arrays
            arrays[i] = array_of(tensor, f"tensor {i}")
    return given if arrays is None else tuple(arrays)


cdef inline bint is_value(int type_number) noexcept nogil:
    """Whether the wire has a dtype for arrays of this type."""
    return type_number == cnp.NPY_FLOAT or type_number == NPY_BFLOAT16


cdef inline int code_of(tensor) noexcept:
    """The wire's dtype of one of those that arrays_of gives."""
    if type(tensor) is Elided:
        return (<Elided>tensor).code
    return F32 if cnp.PyArray_TYPE(<cnp.ndarray>tensor) == cnp.NPY_FLOAT else BF16


cdef object array_of(tensor, str where):
    cdef Lender lender
    if isinstance(tensor, np.ma.MaskedArray):
        raise TypeError(f"{where}: a masked array's mask has no place on the wire")
    try:
        if isinstance(tensor, np.ndarray):
            array = np.asarray(tensor)      # a subclass has ways of its own
        elif isinstance(tensor, np.generic):
            array = np.asarray(tensor)
            array.flags.writeable = False   # for it is a copy
        elif hasattr(tensor, "__dlpack__"):
            lender = Lender(tensor)
            array = lender.array()
        else:
            array = np.asarray(memoryview(tensor))
    except Exception as error:
        raise TypeError(f"{where}: {type(tensor).__name__} gives no memory by buffer protocol or DLPack ({error})") from None
    if not is_value(cnp.PyArray_TYPE(array)):
        hint = " (bits of bfloat16 are named so by array.view(ml_dtypes.bfloat16))" if array.dtype == np.uint16 else ""
        raise TypeError(f"{where}: expected float32 or bfloat16, got {array.dtype}{hint}")
    return array


cdef class Lender:
    """Stands before a tensor while NumPy takes its memory by DLPack, and calls bfloat16, which NumPy refuses, uint16."""

    cdef object tensor, capsule
    cdef ff_dl_tensor* renamed

    def __cinit__(self, tensor):
        self.tensor = tensor

    cdef object array(self):
        try:
            array = np.from_dlpack(self)
        finally:
            if self.renamed is not NULL:    # the capsule keeps it, or else the array
                self.renamed.code = FF_DL_BFLOAT
        return array if self.renamed is NULL else array.view(BFLOAT16)

    def __dlpack__(self, **options):
        cdef ff_dl_tensor* lent = NULL
        self.capsule = capsule = self.tensor.__dlpack__(**options)
        if PyCapsule_IsValid(capsule, "dltensor_versioned"):
            lent = &(<ff_dl_versioned*>PyCapsule_GetPointer(capsule, "dltensor_versioned")).tensor
        elif PyCapsule_IsValid(capsule, "dltensor"):
            lent = <ff_dl_tensor*>PyCapsule_GetPointer(capsule, "dltensor")
        if lent is not NULL and lent.code == FF_DL_BFLOAT and lent.bits == 16 and lent.lanes == 1:
            lent.code = FF_DL_UINT
            self.renamed = lent
        return capsule

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


cdef object bits_of(array):
    """A bfloat16 array's memory as integers of its byte order, any other array itself."""
    return array.view(np.dtype(np.uint16).newbyteorder(array.dtype.byteorder)) if code_of(array) == BF16 else array


cdef object memory_of(array):
    """The bytes of a C-contiguous array."""
    return memoryview(bits_of(array)).cast("B")


cdef bint is_narrow(wire) except -1:
    if wire is not None and wire != "bf16":
        raise ValueError(f'wire must be "bf16" or None, got {wire!r}')
    return wire is not None


cdef tuple elide_zeros(tuple tensors):
    """The tensors with an Elided for each array whose values are all +0.0."""
    cdef list kept = list(tensors)
    cdef Py_ssize_t i, n
    cdef const char* data
    for i in range(len(kept)):
        if type(kept[i]) is Elided:
            continue
        n = cnp.PyArray_NBYTES(kept[i])
        if cnp.PyArray_ISCARRAY_RO(kept[i]):
            data = cnp.PyArray_BYTES(kept[i])
            # Equal to itself one byte on: each byte is like the first.
            zero = n > 0 and data[0] == 0 and memcmp(data, data + 1, n - 1) == 0
        else:
            zero = n > 0 and not np.any(kept[i].view(f"u{kept[i].itemsize}"))
        if zero:
            kept[i] = Elided(kept[i].shape, "f32" if code_of(kept[i]) == F32 else "bf16")
    return tuple(kept)


cdef TensorLayout layout_of(tuple tensors, bint narrow):
    cdef TensorLayout layout = TensorLayout()
    cdef Py_ssize_t i, size = 0, at = HEAD, nbytes
    cdef uint64_t whole
    cdef int j
    cdef uint8_t* p
    for tensor in tensors:
        size += 10 + 4 * (len((<Elided>tensor).shape) if type(tensor) is Elided else cnp.PyArray_NDIM(tensor))
    layout.heads = PyBytes_FromStringAndSize(NULL, size)
    layout.narrows = narrow
    p = <uint8_t*>PyBytes_AS_STRING(layout.heads)
    for i in range(len(tensors)):
        tensor = tensors[i]
        p[0] = BF16 if narrow else code_of(tensor)
        if type(tensor) is Elided:
            p[1] = <uint8_t>len((<Elided>tensor).shape)
            for j in range(p[1]):
                ff_store32(p + 2 + 4 * j, (<Elided>tensor).shape[j])
            size = head_size(p)
            nbytes = 0
            if not whole_size(p, &whole):
                whole = MOST
            if whole:
                layout.elide(i, whole)
        else:
            p[1] = <uint8_t>cnp.PyArray_NDIM(tensor)
            for j in range(p[1]):
                if <uint64_t>cnp.PyArray_DIM(tensor, j) > 0xFFFFFFFFu:
                    raise EncodeError(f"tensor {i}: dimension {j} of {cnp.PyArray_DIM(tensor, j)} "
                                      "does not fit in 32 bits")
                ff_store32(p + 2 + 4 * j, <uint32_t>cnp.PyArray_DIM(tensor, j))
            size = head_size(p)
            if cnp.PyArray_SIZE(tensor) > (MOST - at - size) // 4:
                raise EncodeError(f"tensor {i}: {cnp.PyArray_SIZE(tensor)} values more are above any frame's size")
            nbytes = cnp.PyArray_SIZE(tensor) * width(p[0])
        if p[0] == BF16 and layout.bf16 < 0:
            layout.bf16 = i
        ff_store64(p + size - 8, nbytes)
        layout.append(p, at + size, nbytes)
        at += size + nbytes
        p += size
    return layout


cdef inline bint is_elided(const Tensor* t) noexcept nogil:
    """Whether a tensor has values and no data."""
    cdef uint64_t whole
    return t.nbytes == 0 and not (whole_size(t.head, &whole) and whole == 0)


cdef int locate(TensorLayout layout, tuple arrays, Piece* pieces, const uint8_t* buffer, Py_ssize_t size,
                bint writable) except -1:
    """Check the arrays against the layout and find their memory, which must lie apart from the buffer, if there is one.

    What is written in the buffer comes from the arrays, or, where they are ``writable``, goes there.
    """
    cdef str name = "out" if writable else "the array"
    cdef const uint8_t* head
    cdef const Tensor* t
    cdef Py_ssize_t i
    cdef int j, code
    cdef bint same
    cdef cnp.ndarray array
    if len(arrays) != layout.count:
        raise TensorError(f"{layout.count} tensors expected, got {len(arrays)} arrays")
    for i in range(layout.count):
        if i + AHEAD < layout.count and cnp.PyArray_CheckExact(<object>PyTuple_GET_ITEM(arrays, i + AHEAD)):
            array = <cnp.ndarray><object>PyTuple_GET_ITEM(arrays, i + AHEAD)
            fetch(cnp.PyArray_DIMS(array))
            fetch(cnp.PyArray_DATA(array))
        item = <object>PyTuple_GET_ITEM(arrays, i)
        t = &layout.tensors[i]
        head = t.head
        code = code_of(item)
        if type(item) is Elided:
            same = (<Elided>item).shape == shape_at(head)
        else:
            array = <cnp.ndarray>item
            same = cnp.PyArray_NDIM(array) == head[1]
            for j in range(head[1] if same else 0):
                same = same and <uint64_t>cnp.PyArray_DIM(array, j) == ff_load32(head + 2 + 4 * j)
        if not same:
            raise TensorError(f"tensor {i}: expected shape {shape_at(head)}, {name} has {item.shape}")
        if code != head[0] and not (code == F32 and (writable or layout.narrows)):
            raise TensorError(f"tensor {i}: expected {DTYPE_NAMES[head[0]]}, {name} has {DTYPE_NAMES[code]}")
        if type(item) is Elided:
            if t.nbytes:
                raise TensorError(f"tensor {i}: the layout has data of it, got {item}")
            pieces[i].data, pieces[i].nbytes, pieces[i].converts = NULL, 0, False
            continue
        if not writable and layout.elided >= 0 and is_elided(t):
            raise TensorError(f"tensor {i}: the layout elides it, got an array")
        if writable and not cnp.PyArray_ISWRITEABLE(array):
            raise ValueError(f"tensor {i}: {name} is read-only")
        pieces[i].data = cnp.PyArray_BYTES(array) if reachable(array) else NULL
        pieces[i].nbytes = cnp.PyArray_NBYTES(array)
        pieces[i].converts = code != head[0]
        if buffer is not NULL and overlap(array, &pieces[i], buffer, size):
            raise ValueError(f"tensor {i}: {name} lies in the frame's own buffer")
    return 0


cdef inline bint reachable(cnp.ndarray array) noexcept:
    """Whether the kernels can go through an array by themselves."""
    return cnp.PyArray_ISCARRAY_RO(array) and (WIRE_IS_NATIVE or cnp.PyArray_TYPE(array) == cnp.NPY_FLOAT)


cdef bint overlap(cnp.ndarray array, const Piece* piece, const uint8_t* buffer, Py_ssize_t size) except -1:
    """Whether an array may share memory with these bytes."""
    cdef const uint8_t* data = <const uint8_t*>piece.data
    if data is not NULL:
        return piece.nbytes and data < buffer + size and buffer < data + piece.nbytes
    return np.may_share_memory(array, <const uint8_t[:size]>buffer)


cdef object wire_array(const uint8_t* head, const void* data, bint writable):
    """A tensor's wire bytes as an array on the same memory, at whatever alignment; its owner must be held.

    Values of bfloat16 are there as their bits, integers.
    """
    cdef cnp.npy_intp dims[255]
    cdef int i
    dtype = WIRE_U16 if head[0] == BF16 else WIRE_F32
    for i in range(head[1]):
        dims[i] = ff_load32(head + 2 + 4 * i)
    Py_INCREF(dtype)
    return PyArray_NewFromDescr(<PyTypeObject*>np.ndarray, <cnp.PyArray_Descr*>dtype, head[1], dims, NULL,
                                <void*>data, cnp.NPY_ARRAY_WRITEABLE if writable else 0, NULL)


cdef object in_blocks(array, str access):
    """Goes through an array of any layout in C order, in contiguous pieces that are read or written.

    Those of float32 are native, those of bfloat16 the wire's bits.
    """
    dtype = WIRE_U16 if code_of(array) == BF16 else np.dtype(np.float32)
    return np.nditer(bits_of(array), ["external_loop", "buffered", "zerosize_ok"], [[access, "contig", "aligned"]],
                     [dtype], "C", "equiv")


# ----------------------------------------------------------------------------------------------------------- encode


def encode_round(FrameCodec codec not None, tensors, kind, weight, wire=None, bint elide=False, out=None,
                 Py_ssize_t offset=0):
    """The frame of these tensors as bytes, or its size where it went into ``out`` at the offset."""
    cdef tuple arrays = arrays_of(tensors, True)
    cdef bint narrow = is_narrow(wire)
    if elide:
        if codec.revision in WITHOUT_ELISION:
            raise EncodeError(f"revision {codec.revision.value} cannot elide zero tensors")
        arrays = elide_zeros(arrays)
    return write_round(codec, layout_of(arrays, narrow), arrays, kind, weight, out, offset, None)


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


cdef str lacks(FrameCodec codec, TensorLayout layout):
    """What of a layout the codec's revision does not have; None where it has all."""
    if layout.bf16 >= 0 and codec.revision in WITHOUT_BF16:
        return f"tensor {layout.bf16}: revision {codec.revision.value} has no bfloat16"
    if layout.elided >= 0 and codec.revision in WITHOUT_ELISION:
        return f"tensor {layout.elided}: revision {codec.revision.value} cannot elide zero tensors"
    return None


cdef int check_limits(FrameCodec codec, TensorLayout layout) except -1:
    cdef str lack = lacks(codec, layout)
    cdef uint64_t data = layout.size - HEAD - TAG - len(layout.heads) + layout.zeros
    if lack is not None:
        raise EncodeError(lack)
    if layout.count > codec.max_tensors:
        raise EncodeError(f"{layout.count} tensors are above the limit of {codec.max_tensors} (max_tensors)")
    if data > <uint64_t>codec.frame_ceiling:
        raise EncodeError(f"{data} tensor bytes are above the limit of "
                          f"{codec.frame_ceiling} (frame_ceiling)")
    return 0


cdef object write_round(FrameCodec codec, TensorLayout layout, tuple arrays, kind, weight, out, Py_ssize_t offset,
                        scale, int record=0):
    cdef double mass = check_weight(weight)
    cdef bint scaled = scale is not None
    cdef float factor = <float><double>scale if scaled else 1
    cdef uint8_t kind_byte = check_kind(kind)
    cdef Piece* pieces
    cdef Output target = None
    cdef uint8_t* start = NULL      # of what is written
    cdef uint8_t* frame = NULL
    cdef uint8_t* whole = NULL      # a mux record around the frame, if there is one
    cdef Py_ssize_t size = layout.size + (RECORD + TAG if record else 0)
    check_limits(codec, layout)
    if out is not None:
        target = out if type(out) is Output else Output(out)
        start = frame = target.room(offset, size)
    if record:
        if layout.size > min(<uint64_t>codec.frame_ceiling, 0xFFFFFFFFu):
            raise EncodeError(f"a round frame of {layout.size} bytes is above the limit of "
                              f"{codec.frame_ceiling} (frame_ceiling) in a mux record")
        whole = frame
        frame += RECORD + TAG
    pieces = <Piece*>PyMem_Malloc((layout.count or 1) * sizeof(Piece))
    if pieces is NULL:
        raise MemoryError()
    try:
        locate(layout, arrays, pieces, start, size, False)
        result = size
        if target is None:
            result = PyBytes_FromStringAndSize(NULL, layout.size)
            frame = <uint8_t*>PyBytes_AS_STRING(result)
            ff_advise(<char*>frame, layout.size)
        write_head(frame, layout, kind_byte, mass)
        if whole is not NULL:
            ff_store32(whole, MUX_MAGIC)
            ff_store32(whole + 4, codec.mux_version)
            whole[8] = <uint8_t>record
            ff_store32(whole + 9, 0)
            ff_store32(whole + 13, <uint32_t>layout.size)
        if layout.size < QUIET:
            compose(codec, layout, arrays, pieces, frame, scaled, factor, whole)
        else:
            with nogil:
                compose(codec, layout, arrays, pieces, frame, scaled, factor, whole)
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
    return piece.data is not NULL and piece.nbytes >= APART and WIRE_IS_NATIVE and not piece.converts


cdef void put(const Tensor* t, const Piece* piece, uint8_t* to, Py_ssize_t done, Py_ssize_t n, bint scaled,
              float factor) noexcept nogil:
    """Write n of the wire bytes of a tensor whose memory is at hand, from byte ``done`` on."""
    if piece.converts:
        ff_narrow_bf16(to, piece.data + 2 * done, n // 2, scaled, factor)
    elif not scaled:
        copy_wire(to, piece.data + done, n)
    elif t.head[0] == BF16:
        ff_scale_bf16(to, <const uint8_t*>piece.data + done, n // 2, factor)
    else:
        ff_copy_scaled_f32(to, piece.data + done, n // 4, factor)


cdef int fill(const Tensor* t, const Piece* piece, array, uint8_t* to, bint scaled=False, float factor=1) except -1:
    """Write a tensor's values, whatever the array's layout."""
    cdef cnp.ndarray block
    cdef Piece part = piece[0]
    if piece.data is not NULL:
        put(t, piece, to, 0, t.nbytes, scaled, factor)
    elif not (scaled or piece.converts):
        np.copyto(wire_array(t.head, to, True), bits_of(array))
    else:
        for block in in_blocks(array, "readonly"):
            part.data = cnp.PyArray_BYTES(block)
            put(t, &part, to, 0, cnp.PyArray_SIZE(block) * width(t.head[0]), scaled, factor)
            to += cnp.PyArray_SIZE(block) * width(t.head[0])
    return 0


cdef inline void sign(FrameCodec codec, ff_mac_stream* stream, ff_mac_stream* outer, const uint8_t* data,
                      Py_ssize_t n) noexcept nogil:
    if outer is NULL:
        codec.mac_update(stream, data, n)
    else:
        codec.mac_update_pair(stream, outer, data, n)


cdef int compose(FrameCodec codec, TensorLayout layout, tuple arrays, Piece* pieces, uint8_t* frame, bint scaled,
                 float factor, uint8_t* whole) except -1 nogil:
    """Write the tensors behind the frame's first bytes and sign it, a block at a time; and so the record around it."""
    cdef const Tensor* t
    cdef ff_mac_stream stream, record
    cdef ff_mac_stream* outer = NULL
    cdef Py_ssize_t i, n, done, step, signed_ = 0
    codec.mac_begin(&stream)
    if whole is not NULL:
        outer = &record
        codec.mac_begin(outer)
        codec.mac_update(outer, whole, RECORD)
    for i in range(layout.count):
        t = &layout.tensors[i]
        n = head_size(t.head)
        ff_copy_short(frame + t.data - n, t.head, n)
        if pieces[i].data is NULL and t.nbytes:
            with gil:
                fill(t, &pieces[i], arrays[i], frame + t.data, scaled, factor)
        elif t.nbytes <= FEW and not scaled and not pieces[i].converts and WIRE_IS_NATIVE:
            if t.nbytes:
                ff_copy_short(frame + t.data, <const uint8_t*>pieces[i].data, t.nbytes)
            if t.data + t.nbytes - signed_ >= BLOCK:
                sign(codec, &stream, outer, frame + signed_, t.data + t.nbytes - signed_)
                signed_ = t.data + t.nbytes
            continue
        if stands_apart(&pieces[i]) and not scaled and outer is NULL:
            codec.mac_update(&stream, frame + signed_, t.data - signed_)
            codec.mac_update_copy(&stream, frame + t.data, <const uint8_t*>pieces[i].data, t.nbytes)
            signed_ = t.data + t.nbytes
            continue
        done = 0
        step = STEP if scaled or pieces[i].converts else BLOCK
        while done < t.nbytes:
            n = min(t.nbytes - done, step)
            if pieces[i].data is not NULL:
                put(t, &pieces[i], frame + t.data + done, done, n, scaled, factor)
            done += n
            if t.data + done - signed_ >= step:
                n = t.data + done & ~<Py_ssize_t>63     # whole blocks of the hash
                sign(codec, &stream, outer, frame + signed_, n - signed_)
                signed_ = n
    sign(codec, &stream, outer, frame + signed_, layout.size - TAG - signed_)
    codec.mac_end(&stream, frame + layout.size - TAG)
    if outer is not NULL:
        codec.mac_update(outer, frame + layout.size - TAG, TAG)
        codec.mac_end(outer, whole + RECORD)
    return 0


# ----------------------------------------------------------------------------------------------------------- decode


cdef class Framed(Input):
    """A buffer that starts with a round frame, or with a mux record around one."""

    cdef uint8_t tag[TAG]
    cdef Py_ssize_t tagged              # how large the frame is whose tag that is; 0 without one

    cdef int enter(self, FrameCodec codec, record, bint strict) except -1:
        """Check the record around the frame, of this kind, and go on with its payload; None where there is none.

        A record holds its frame and nothing else, as a rule: the frame's tag is computed in the same pass.
        """
        if record is None:
            return 0
        expected = MuxKind(record)
        kind = codec.enter_record(self, strict, self.tag)
        if kind is not expected:
            raise UnknownKindError(f"a {kind.name} record where a {expected.name} one was expected")
        self.tagged = self.n
        return 0


cdef int check_round_mac(FrameCodec codec, Framed source, Py_ssize_t size, bint strict) except -1:
    cdef const uint8_t* tag = source.data + size - TAG
    if not (ff_mac_equal(source.tag, tag) if size == source.tagged else codec.holds(source.data, size - TAG, tag)):
        raise AuthenticationError("the MAC of a round frame does not hold: another salt, or changed bytes")
    if strict and source.n > size:
        raise TrailingDataError(f"{source.n - size} extra bytes after a round frame of {size}")
    return 0


cdef TensorLayout read_layout(FrameCodec codec, Framed source, bint strict):
    """The layout of an authentic frame whose every tensor is one that this revision has."""
    cdef TensorLayout layout = TensorLayout()
    cdef Walk w = Walk(0, 0, 0, 0)
    cdef Py_ssize_t i
    cdef int j
    cdef const uint8_t* head
    cdef uint64_t whole
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
        if head[0] != F32 and (head[0] != BF16 or codec.revision in WITHOUT_BF16):
            known = "0 (float32)" if codec.revision in WITHOUT_BF16 else "0 (float32) and 1 (bfloat16)"
            raise TensorError(f"tensor {i}: dtype {head[0]} ({DTYPE_NAMES.get(head[0], 'unknown')}) is not one of "
                              f"revision {codec.revision.value}, which has {known}")
        fits = whole_size(head, &whole)
        if fits and whole == <uint64_t>layout.tensors[i].nbytes:
            continue
        if layout.tensors[i].nbytes or codec.revision in WITHOUT_ELISION:
            raise TensorError(f"tensor {i}: shape {shape_at(head)} takes {whole_bytes(head)} bytes, the frame gives "
                              f"{layout.tensors[i].nbytes}")
        layout.elide(i, whole if fits else MOST)
        if layout.zeros > <uint64_t>(codec.frame_ceiling - w.data):
            raise LimitError(f"tensor {i}: with its {whole_bytes(head)} bytes of zeros the frame is above the limit of "
                             f"{codec.frame_ceiling} (frame_ceiling)")
    return layout


cdef object whole_bytes(const uint8_t* head):
    """The bytes that the values of a tensor take, however many."""
    size = width(head[0])
    for dim in shape_at(head):
        size *= dim
    return size


cdef int read_into(TensorLayout layout, const uint8_t* frame, tuple arrays) except -1:
    """Copy an authentic frame's tensors into these arrays, once all of them fit."""
    cdef Piece* pieces = <Piece*>PyMem_Malloc((layout.count or 1) * sizeof(Piece))
    if pieces is NULL:
        raise MemoryError()
    try:
        locate(layout, arrays, pieces, frame, layout.size, True)
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
        if pieces[i].data is NULL:
            with gil:
                spread(t, frame + t.data, <object>PyTuple_GET_ITEM(arrays, i), pieces[i].converts)
        elif t.nbytes == 0:
            memset(pieces[i].data, 0, pieces[i].nbytes)
        elif t.nbytes <= FEW and not pieces[i].converts and WIRE_IS_NATIVE:
            ff_copy_short(<uint8_t*>pieces[i].data, frame + t.data, t.nbytes)
        elif pieces[i].converts:
            ff_widen_bf16(pieces[i].data, frame + t.data, t.nbytes // 2)
        else:
            copy_cold(pieces[i].data, frame + t.data, t.nbytes)
    return 0


cdef int spread(const Tensor* t, const uint8_t* data, array, bint converts) except -1:
    """Copy a tensor's values into an array that the kernels cannot reach."""
    cdef cnp.ndarray block
    if type(array) is Elided:
        return 0
    if t.nbytes == 0:
        bits_of(array)[...] = 0
    elif not converts:
        np.copyto(bits_of(array), wire_array(t.head, data, False))
    else:
        with in_blocks(array, "writeonly") as blocks:
            for block in blocks:
                ff_widen_bf16(cnp.PyArray_DATA(block), data, cnp.PyArray_SIZE(block))
                data += 2 * cnp.PyArray_SIZE(block)
    return 0


def decode_round(FrameCodec codec not None, buffer, bint copy, out, bint keep, bint finite, record, trailing):
    """(tensors, kind, weight) of the round frame at the start of a buffer; ``Codec.decode_round`` says the rest."""
    # What keeps the buffer alive is what was read: one that exports itself anew each time may give other memory then.
    cdef object owner = None if copy else PyMemoryView_FromObject(buffer)
    cdef Framed source = Framed(buffer if copy else owner)
    cdef list given = None if out is None else list(out)
    cdef tuple targets = None if out is None else arrays_of(given)
    cdef TensorLayout layout
    cdef const uint8_t* p
    cdef const uint8_t* data
    cdef Py_ssize_t i, bad
    cdef bint strict = is_strict(trailing)
    source.enter(codec, record, strict)
    layout = read_layout(codec, source, strict)
    p = source.data
    if finite:
        for i in range(layout.count):
            data = p + layout.tensors[i].data
            bad = nonfinite(layout.tensors[i].head[0], data, layout.tensors[i].nbytes)
            if bad >= 0:
                raise TensorError(f"tensor {i}: {value_at(layout.tensors[i].head[0], data, bad)} at element {bad}")
    if targets is None:
        given = made(layout, p, keep, owner)
        targets = tuple(given) if copy else None
    if targets is not None:
        read_into(layout, p, targets)
    return given, RoundKind(p[8]), ff_load_f64(p + 9)


cdef double value_at(int code, const uint8_t* data, Py_ssize_t i) noexcept:
    cdef uint8_t wide[4]
    if code == F32:
        return ff_load_f32(data + 4 * i)
    ff_store32(wide, <uint32_t>ff_load16(data + 2 * i) << 16)
    return ff_load_f32(wide)


cdef Py_ssize_t nonfinite(int code, const uint8_t* data, Py_ssize_t nbytes) noexcept:
    """Which of the values on the wire is the first NaN or infinity; -1 if none is."""
    cdef Py_ssize_t n = nbytes // width(code)
    cdef Py_ssize_t at = ff_first_nonfinite_bf16(data, n) if code == BF16 else ff_first_nonfinite_f32(data, n)
    return at if at < n else -1


cdef list made(TensorLayout layout, const uint8_t* frame, bint keep, owner):
    """Tensors for a layout: new arrays, or read-only ones on the frame's own bytes, which the owner keeps.

    What is elided is an array of zeros, or, with ``keep``, an Elided.
    """
    cdef cnp.npy_intp dims[255]
    cdef list tensors = []
    cdef const Tensor* t
    cdef Py_ssize_t i
    cdef int j
    cdef bint elided
    for i in range(layout.count):
        t = &layout.tensors[i]
        elided = layout.elided >= 0 and is_elided(t)
        if elided and keep:
            tensors.append(Elided(shape_at(t.head), "bf16" if t.head[0] == BF16 else "f32"))
            continue
        try:
            if owner is not None and not elided:
                array = wire_array(t.head, frame + t.data, False)
                cnp.set_array_base(array, owner)
                tensors.append(as_values(t.head, array))
            elif owner is not None:
                array = np.zeros(shape_at(t.head), BFLOAT16 if t.head[0] == BF16 else np.float32)
                array.flags.writeable = False
                tensors.append(array)
            else:
                for j in range(t.head[1]):
                    dims[j] = ff_load32(t.head + 2 + 4 * j)
                tensors.append(cnp.PyArray_SimpleNew(
                    t.head[1], dims, NPY_BFLOAT16 if t.head[0] == BF16 else <int>cnp.NPY_FLOAT))
        except ValueError as error:
            raise too_much(i, t.head, error) from None
    return tensors


cdef object as_values(const uint8_t* head, array):
    """A wire_array as the values that it stands for."""
    return array.view(WIRE_BFLOAT16) if head[0] == BF16 else array


cdef object too_much(Py_ssize_t i, const uint8_t* head, error):
    return TensorError(f"tensor {i}: NumPy has no array of {head[1]} dimensions {shape_at(head)}: {error}")


# ------------------------------------------------------------------------------------------------------------- fold


cdef list sum_rows(list rows, ranks, scale):
    """The element-wise sum of several frames' tensors, in float32, from +0.0 on, frame by frame.

    Sums of bfloat16 are rounded to it, and once more where they are scaled. A tensor that all frames elide stays so.

    Args:
        rows: for each frame its tensors, which must agree in count, dtypes and shapes.
        ranks: what to call each frame in an error.
        scale: a factor for each sum, rounded to float32 first; None for none.

    Raises:
        TensorError: the frames do not match; the message names frame, tensor and what differs.
    """
    cdef Py_ssize_t i, j, k, count = len(rows[0])
    cdef const uint8_t** inputs
    cdef cnp.ndarray array
    cdef float factor = 1.0 if scale is None else <float><double>scale
    cdef bint scaled = scale is not None
    cdef list sums = [], held
    for j in range(1, len(rows)):
        check_match(rows[j], ranks[j], rows[0], ranks[0])
    inputs = <const uint8_t**>PyMem_Malloc(len(rows) * sizeof(uint8_t*))
    if inputs is NULL:
        raise MemoryError()
    try:
        for i in range(count):
            held = []
            k = 0
            for j in range(len(rows)):
                item = <object>PyTuple_GET_ITEM(<tuple>rows[j], i)
                if type(item) is Elided:    # zeros change no sum
                    continue
                array = <cnp.ndarray>item
                if not (WIRE_IS_NATIVE and cnp.PyArray_ISCARRAY_RO(array)):
                    array = wire_values(array)
                    held.append(array)
                inputs[k] = <const uint8_t*>cnp.PyArray_BYTES(array)
                k += 1
            item = <object>PyTuple_GET_ITEM(<tuple>rows[0], i)
            sums.append(sum_of(inputs, k, item, scaled, factor) if k else item)
    finally:
        PyMem_Free(inputs)
    return sums


cdef object sum_of(const uint8_t** inputs, Py_ssize_t k, like, bint scaled, float factor):
    """A new array: the sum of k tensors of the same dtype and shape as one that is given."""
    cdef bint half = code_of(like) == BF16
    cdef cnp.ndarray total = empty_like(like, NPY_BFLOAT16 if half else <int>cnp.NPY_FLOAT)
    cdef size_t n = cnp.PyArray_SIZE(total)
    if n * 4 < QUIET:
        fold(total, half, inputs, k, n, scaled, factor)
    else:
        with nogil:
            fold(total, half, inputs, k, n, scaled, factor)
    return total if WIRE_IS_NATIVE or not half else total.byteswap()


cdef inline void fold(cnp.ndarray total, bint half, const uint8_t** inputs, Py_ssize_t k, size_t n, bint scaled,
                      float factor) noexcept nogil:
    if half:
        ff_fold_bf16(<uint8_t*>cnp.PyArray_DATA(total), inputs, k, n, scaled, factor)
    else:
        ff_fold_f32(<float*>cnp.PyArray_DATA(total), inputs, k, n, scaled, factor)


cdef object empty_like(tensor, int type_number):
    """A new array of a tensor's shape."""
    if type(tensor) is Elided:
        return np.empty((<Elided>tensor).shape, cnp.PyArray_DescrFromType(type_number))
    return cnp.PyArray_SimpleNew(cnp.PyArray_NDIM(tensor), cnp.PyArray_DIMS(tensor), type_number)


cdef cnp.ndarray wire_values(array):
    """An array's values as they are on the wire, contiguous, copied only if need be; bfloat16 as its bits."""
    return np.asarray(bits_of(array), WIRE_U16 if code_of(array) == BF16 else WIRE_F32, order="C")


cdef int check_match(tuple arrays, name, tuple firsts, first_name, bytearray codes=None) except -1:
    """The dtypes of the first ones are the codes, where these are given."""
    cdef Py_ssize_t i
    cdef int code
    if len(arrays) != len(firsts):
        raise TensorError(f"frame {name} has {len(arrays)} tensors, frame {first_name} has {len(firsts)}")
    for i in range(len(arrays)):
        ours, theirs = arrays[i], firsts[i]
        code = code_of(theirs) if codes is None else codes[i]
        if code_of(ours) != code:
            raise TensorError(f"frame {name}, tensor {i}: {DTYPE_NAMES[code_of(ours)]}, "
                              f"frame {first_name} has {DTYPE_NAMES[code]}")
        if not same_shape(ours, theirs):
            raise TensorError(f"frame {name}, tensor {i}: shape {ours.shape}, frame {first_name} has {theirs.shape}")
    return 0


cdef inline bint same_shape(ours, theirs) except -1:
    if type(ours) is Elided or type(theirs) is Elided:
        return ours.shape == theirs.shape
    return cnp.PyArray_SAMESHAPE(<cnp.ndarray>ours, <cnp.ndarray>theirs)


cdef inline void add_values(float* sums, const uint8_t* values, size_t n, bint half, bint first) noexcept nogil:
    if half:
        ff_add_bf16(sums, values, n, first)
    else:
        ff_add_f32(sums, values, n, first)


@cython.auto_pickle(False)
cdef class TensorSums:
    """The sums of frames' tensors that come one frame after the other; the same bits as ``fold_frames`` gives.

    Args:
        tensors: those of the first frame.
    """

    cdef bytearray codes    # the dtypes
    cdef list totals        # a float32 array for each tensor; an Elided while all frames have elided it

    def __init__(self, tensors):
        cdef tuple arrays = arrays_of(tensors, True)
        self.codes = bytearray([code_of(array) for array in arrays])
        self.totals = [Elided(array.shape, "bf16" if code_of(array) == BF16 else "f32") for array in arrays]
        self.take_in(arrays)

    def add(self, tensors, name, first_name):
        """Add the tensors of one more frame; nothing is added where they do not match.

        Raises:
            TensorError: as ``fold_frames``; the names are what to call this frame and the first.
        """
        cdef tuple arrays = arrays_of(tensors, True)
        check_match(arrays, name, tuple(self.totals), first_name, self.codes)
        self.take_in(arrays)

    cdef int take_in(self, tuple arrays) except -1:
        cdef Py_ssize_t i
        cdef cnp.ndarray total, array
        cdef const uint8_t* values
        cdef float* sums
        cdef size_t n
        cdef bint half, first
        cdef list totals = [
            empty_like(tensor, cnp.NPY_FLOAT) if type(held) is Elided and type(tensor) is not Elided else held
            for tensor, held in zip(arrays, self.totals)
        ]
        for i in range(len(arrays)):
            item = <object>PyTuple_GET_ITEM(arrays, i)
            if type(item) is Elided:
                continue
            half, first = self.codes[i] == BF16, type(self.totals[i]) is Elided
            array = <cnp.ndarray>item
            if not (WIRE_IS_NATIVE and cnp.PyArray_ISCARRAY_RO(array)):
                array = wire_values(array)
            total = totals[i]
            n = cnp.PyArray_SIZE(total)
            sums, values = <float*>cnp.PyArray_DATA(total), <const uint8_t*>cnp.PyArray_BYTES(array)
            if n * 4 < QUIET:
                add_values(sums, values, n, half, first)
            else:
                with nogil:
                    add_values(sums, values, n, half, first)
        self.totals = totals
        return 0

    def result(self, scale):
        """The sums as ``fold_frames`` gives them; nothing may be added after that."""
        cdef cnp.ndarray total, narrow
        cdef uint8_t* to
        cdef size_t n
        cdef Py_ssize_t i
        cdef float factor = 1.0 if scale is None else <float><double>scale
        cdef bint scaled = scale is not None
        cdef list sums = []
        for i in range(len(self.totals)):
            item = self.totals[i]
            if type(item) is Elided:
                sums.append(item)
                continue
            total = <cnp.ndarray>item
            n = cnp.PyArray_SIZE(total)
            if self.codes[i] == BF16:
                narrow = empty_like(total, NPY_BFLOAT16)
                to = <uint8_t*>cnp.PyArray_DATA(narrow)
                with nogil:
                    ff_narrow_bf16(to, cnp.PyArray_DATA(total), n, False, 1)
                    if scaled:
                        ff_scale_bf16(to, to, n, factor)
                sums.append(narrow if WIRE_IS_NATIVE else narrow.byteswap())
                continue
            if scaled:
                with nogil:
                    ff_scale_f32(<float*>cnp.PyArray_DATA(total), n, factor)
            sums.append(total)
        return sums


cpdef object kind_of(frame, name):
    """The kind of a RoundFrame, whose attribute may have been set to a number.

    Raises:
        TensorError: it is no RoundKind.
    """
    kind = frame.kind
    if type(kind) is RoundKind:
        return kind
    try:
        return RoundKind(check_kind(kind))
    except EncodeError as error:
        raise TensorError(f"frame {name}: {error}") from None


def check_frame(cls, frame, name, kind, first_name, bint finite):
    """The weight of a RoundFrame, which is ``cls``, once its kind is that of the first one, if there is one.

    Raises:
        TypeError: no frame, or a weight of another type.
        TensorError: another kind, a weight that cannot be, or a value that ``finite`` refuses.
    """
    cdef double mass
    if type(frame) is not cls and not isinstance(frame, cls):
        raise TypeError(f"frame {name}: expected a RoundFrame, got {type(frame).__name__}")
    its = kind_of(frame, name)
    if kind is not None and its is not kind:
        raise TensorError(f"frame {name} is {its.name}, frame {first_name} is {kind.name}")
    if finite:
        for i, tensor in enumerate(arrays_of(frame.tensors, True)):
            found = first_nonfinite(tensor)
            if found is not None:
                raise TensorError(f"frame {name}, tensor {i}: {found[1]} at element {found[0]}")
    weight = frame.weight
    if type(weight) is not float:
        weight = plain_number(weight, False)
        if weight is None:
            raise TypeError(f"frame {name}: weight: expected a float, got {type(frame.weight).__name__}")
    mass = weight
    if not (isfinite(mass) and mass >= 0):
        raise TensorError(f"frame {name}: weight must be finite and not negative, got {weight}")
    return mass


def fold_frames(cls, list frames, ranks, bint finite, bint divide):
    """(tensors, kind, weight) of the sum of these RoundFrames, which are ``cls``; divided by the weight if it counts.

    Args:
        ranks: what to call each frame in an error.
        finite: refuse a NaN or an infinity among the inputs.
        divide: multiply the sums of a MODEL frame by ``float32(1 / weight)``.

    Raises:
        As ``check_frame``; TensorError also where the frames' tensors do not match, with frame, tensor and what differs.
    """
    cdef double weight = -0.0   # from there on, for weights that are all -0.0 sum to -0.0 in the crate, unlike tensors
    cdef list rows = []
    cdef Py_ssize_t j
    kind = None
    for j in range(len(frames)):
        frame = frames[j]
        mass = frame.weight if type(frame) is cls else None
        if type(mass) is float and 0 <= <double>mass < INFINITY and not finite and kind is not None and frame.kind is kind:
            weight += <double>mass
        else:
            weight += check_frame(cls, frame, ranks[j], kind, ranks[0], finite)
            kind = kind_of(frame, ranks[j])
        rows.append(arrays_of(frame.tensors, True))
    return sum_rows(rows, ranks, 1.0 / weight if divide and is_divided(kind, weight) else None), kind, weight


cpdef bint is_divided(kind, double weight):
    """Whether a reduction divides a sum of that kind by that weight."""
    return kind is RoundKind.MODEL and weight > 0


def first_nonfinite(tensor):
    """(flat C-order index, value) of a tensor's first NaN or infinity, None if it has none."""
    cdef cnp.ndarray held
    cdef const uint8_t* data
    cdef Py_ssize_t at
    if type(tensor) is Elided:
        return None
    held = wire_values(tensor)
    data = <const uint8_t*>cnp.PyArray_BYTES(held)
    at = nonfinite(code_of(tensor), data, cnp.PyArray_NBYTES(held))
    return None if at < 0 else (at, value_at(code_of(tensor), data, at))


# ---------------------------------------------------------------------------------------------------------- kernels

ff_fold_use(NULL)
cdef bytes choice = os.environ.get("FLODL_FAST_FOLD", "").encode()

if choice and ff_fold_use(choice):
    raise ImportError(f"FLODL_FAST_FOLD={choice.decode()!r} is not a fold kernel of this CPU; "
                      f"available: {ff_fold_kernels().decode()}")


def fold_kernel():
    """The fold kernel in use, and all that this CPU can run, best first."""
    return ff_fold_kernel().decode(), ff_fold_kernels().decode().split(",")
