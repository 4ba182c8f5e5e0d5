"""Message payloads, control frames and mux records, to bytes and back.

The layouts that ``messages.py`` declares are compiled once per revision into tables of nodes; encoding and decoding
run these tables over the slots of message objects. Everything read is bounded by what is left of the input, and
nothing is decoded before its MAC holds (docs/wire.md §2, §3, §7, §10).
"""

import os
import threading

import numpy as np

__all__ = ["FrameCodec", "check_values", "family_name", "is_strict", "plain_number", "sha256_kernel", "whole_number"]

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.object cimport PyObject, PyTypeObject
from cpython.ref cimport Py_INCREF
from libc.math cimport NAN, isinf
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcmp, memcpy, memset

from flodl_fast._wire cimport *

from flodl_fast import messages as _messages
from flodl_fast.errors import (
    AuthenticationError,
    BadMagicError,
    DecodeError,
    EncodeError,
    LimitError,
    PayloadError,
    TrailingDataError,
    TruncatedError,
    UnknownKindError,
    VersionMismatchError,
)
from flodl_fast.layout import struct_of, variants_of
from flodl_fast.protocol import (
    FRAME_CEILING,
    MAGIC_CONTROL_FRAME,
    MAGIC_MUX,
    MAX_PAYLOAD,
    MAX_TENSORS,
    VERSIONS,
    MsgKind,
    MuxKind,
    Revision,
    lookalike,
    parse_salt,
    supported_revision,
    too_long,
    wrong_magic,
    wrong_version,
)

cdef extern from *:
    """
    #include <structmember.h>

    /* The offset of a slot from its descriptor, -1 where it is no slot that holds an object. */
    static Py_ssize_t ff_slot_offset(PyObject *descriptor) {
        if (!Py_IS_TYPE(descriptor, &PyMemberDescr_Type)) return -1;
        PyMemberDef *member = ((PyMemberDescrObject *)descriptor)->d_member;
        return member->type == T_OBJECT_EX ? member->offset : -1;
    }

    /* An object with empty slots that the garbage collector does not know yet. */
    static PyObject *ff_new(PyTypeObject *type) {
        PyObject *made = PyObject_GC_New(PyObject, type);
        if (made) memset(made + 1, 0, (size_t)type->tp_basicsize - sizeof *made);
        return made;
    }

    /* A dict that need not grow while n items come in; CPython exports what it uses itself up to 3.13. */
    #if PY_VERSION_HEX < 0x030E0000 && !defined(PYPY_VERSION)
    PyAPI_FUNC(PyObject *) _PyDict_NewPresized(Py_ssize_t n);
    #define ff_dict_for(n) ((n) > 5 ? _PyDict_NewPresized(n) : PyDict_New())
    #else
    #define ff_dict_for(n) PyDict_New()
    #endif
    """
    dict ff_dict_for(Py_ssize_t n)
    Py_ssize_t ff_slot_offset(object descriptor)

    # Objects as bare pointers, where each reference is handed on at once.
    bint PyLong_CheckExact(PyObject*)
    bint PyLong_Check(PyObject*)
    bint PyBool_Check(PyObject*)
    bint PyFloat_Check(PyObject*)
    bint PyFloat_CheckExact(PyObject*)
    bint PyUnicode_Check(PyObject*)
    bint PyBytes_Check(PyObject*)
    bint PyByteArray_Check(PyObject*)
    bint PyMemoryView_Check(PyObject*)
    bint PyList_Check(PyObject*)
    bint PyTuple_Check(PyObject*)
    bint PyDict_Check(PyObject*)
    bint PyObject_TypeCheck(PyObject*, PyTypeObject*)
    double PyFloat_AS_DOUBLE(PyObject*)
    PyObject* PyFloat_FromDouble(double) except NULL
    PyObject* PyLong_FromUnsignedLongLong(unsigned long long) except NULL
    PyObject* PyLong_FromLong(long) except NULL
    unsigned long long PyLong_AsUnsignedLongLong(PyObject*)
    long PyLong_AsLong(PyObject*)
    PyObject* PyErr_Occurred()
    void PyErr_Clear()
    const char* PyUnicode_AsUTF8AndSize(PyObject*, Py_ssize_t*)
    PyObject* PyUnicode_DecodeUTF8(const char*, Py_ssize_t, const char*)
    bint PyUnicode_CheckExact(PyObject*)
    bint PyUnicode_IS_COMPACT_ASCII(PyObject*)
    const void* PyUnicode_DATA(PyObject*)
    Py_ssize_t PyUnicode_GET_LENGTH(PyObject*)
    int _PyBytes_Resize(PyObject**, Py_ssize_t) except -1
    void Py_SET_SIZE(PyObject*, Py_ssize_t)
    PyObject* PyBytes_NewOwned "PyBytes_FromStringAndSize"(const char*, Py_ssize_t) except NULL
    char* PyBytes_Start "PyBytes_AS_STRING"(PyObject*)
    Py_ssize_t PyBytes_Length "PyBytes_GET_SIZE"(PyObject*)
    object PyList_New(Py_ssize_t)
    object PyTuple_New(Py_ssize_t)
    void PyList_SET_ITEM(object, Py_ssize_t, PyObject*)
    void PyTuple_SET_ITEM(object, Py_ssize_t, PyObject*)
    PyObject* PyList_GET_ITEM(PyObject*, Py_ssize_t)
    PyObject* PyTuple_GET_ITEM(PyObject*, Py_ssize_t)
    Py_ssize_t PyList_GET_SIZE(PyObject*)
    Py_ssize_t PyTuple_GET_SIZE(PyObject*)
    PyObject* PySequence_Item "PySequence_Fast_GET_ITEM"(PyObject*, Py_ssize_t)
    Py_ssize_t PySequence_Length "PySequence_Fast_GET_SIZE"(PyObject*)
    bint PyDict_Next(PyObject*, Py_ssize_t*, PyObject**, PyObject**)
    Py_ssize_t PyDict_GET_SIZE(PyObject*)
    int PyDict_SetPair "PyDict_SetItem"(object, object, PyObject*)
    void Py_IncRef "Py_INCREF"(PyObject*)
    void Py_DecRef "Py_DECREF"(PyObject*)
    void Py_XDecRef "Py_XDECREF"(PyObject*)
    PyObject* None_ "Py_None"
    object PyType_GenericAlloc(PyTypeObject*, Py_ssize_t)
    object ff_new(PyTypeObject*)
    void PyObject_GC_Track(PyObject*)
    void* Py_TYPE(object)

cdef enum Op:
    U8, U16, U32, U64, I32, F32, F64, STR, BYTES, FIXED, OPT, LIST, TUPLE, MAP, ENUM, STRUCT, LATER

_OPS = {
    "u8": U8, "u16": U16, "u32": U32, "u64": U64, "i32": I32, "f32": F32, "f64": F64, "str": STR, "bytes": BYTES,
    "fixed": FIXED, "opt": OPT, "list": LIST, "tuple": TUPLE, "map": MAP, "enum": ENUM, "struct": STRUCT,
}
_LEAST = {F32: 4, F64: 8}
_MOST = {U8: 0xFF, U16: 0xFFFF, U32: 0xFFFFFFFF, U64: 0xFFFFFFFFFFFFFFFF}

DEF SCRATCH = 4096          # messages up to this size are built on the C stack
DEF HEADER = 24             # a control frame's header
DEF MUX_HEADER = 25
DEF QUIET = 16384           # bytes from which on the GIL is released around a MAC
DEF TIMING = 2              # the kind whose messages come as columns
DEF BATCH = 32              # frames looked at together
DEF KEY_SIZE = 40           # bytes of the longest map key that is worth keeping

cdef uint32_t CONTROL_MAGIC = MAGIC_CONTROL_FRAME
cdef uint32_t MUX_MAGIC = MAGIC_MUX
cdef object IGNORE = "ignore"
cdef object Reserved = _messages.Reserved
cdef list KINDS = [None] + [MsgKind(k) for k in range(1, 8)]
cdef uint32_t LAST_KIND = 7
cdef list FAMILY_NAMES = ["Relay", "Control", "Timing", "Metrics", "ParamSnapshotMeta", "Heartbeat", "Rendezvous",
                          "Join"]


# ------------------------------------------------------------------------------------------------ layouts to tables


cdef Py_ssize_t count_nodes(shape):
    cdef Py_ssize_t n = 1
    for part in shape.parts:
        n += count_nodes(part)
    return n


cdef class Table:
    """The message layouts of one revision, compiled."""

    def __cinit__(self, revision):
        self.revision = revision
        self.alive = []
        self.columns = {}
        self.newer = {}
        self.keys = [None] * 256            # by eight bits of a hash
        layouts = []
        for name, (kind, union) in _messages.PAYLOADS.items():
            variants = []
            for cls, since in variants_of(union):
                if since is None or revision >= since:
                    variants.append(cls)
                else:
                    self.newer[cls] = since
            layouts.append((0 if kind is None else int(kind), [struct_of(c) for c in variants or [union]], bool(variants)))
        for _, shapes, _ in layouts:
            for shape in shapes:
                self.room += count_nodes(shape)
        self.nodes = <Node*>PyMem_Malloc(self.room * sizeof(Node))
        if self.nodes is NULL:
            raise MemoryError()
        memset(self.nodes, 0, self.room * sizeof(Node))
        for family, shapes, tagged in layouts:
            self.families[family].variants = self.take(len(shapes))
            self.families[family].n = len(shapes)
            self.families[family].tagged = tagged
            self.families[family].name = self.keep(FAMILY_NAMES[family])
            for i, shape in enumerate(shapes):
                self.compile(&self.families[family].variants[i], shape)
                self.register(shape.cls, family, i)
        self.plan_columns()

    def __dealloc__(self):
        PyMem_Free(self.nodes)

    cdef Node* take(self, Py_ssize_t n) noexcept:
        cdef Node* first = self.nodes + self.used
        self.used += n
        return first

    cdef PyObject* keep(self, value):
        self.alive.append(value)
        return <PyObject*>value

    cdef int compile(self, Node* t, shape) except -1:
        cdef Py_ssize_t i
        cdef Node* part
        t.op = _OPS[shape.op]
        t.n = shape.size or len(shape.parts)
        t.child = self.take(len(shape.parts))
        t.most = _MOST.get(t.op, 0)
        t.least = shape.size or _LEAST.get(t.op, 1)
        t.cls = self.keep(shape.cls)
        if t.op == ENUM:
            members = tuple(shape.cls)
            if [int(m) for m in members] != list(range(len(members))):
                raise TypeError(f"{shape.cls.__name__} must number its members from 0 in order")
            t.members = self.keep(members)
            t.n = len(members)
        for i in range(len(shape.parts)):
            self.compile(&t.child[i], shape.parts[i])
        if t.op == TUPLE or t.op == STRUCT:
            t.least = 0
            for i in range(t.n):
                t.least += t.child[i].least
        if t.op == STRUCT:
            t.atomic = True
            for i in range(t.n):
                part = &t.child[i]
                part.name = self.keep(shape.names[i])
                part.slot = ff_slot_offset(getattr(shape.cls, shape.names[i], None))
                if part.slot < 0:
                    raise TypeError(f"{shape.cls.__name__}.{shape.names[i]} is not a slot")
                if shape.since[i] is not None and self.revision < shape.since[i]:
                    t.least -= part.least
                    part.cls = self.keep({<int>LIST: list, <int>MAP: dict}.get(part.op))
                    part.op = LATER
                if is_container(part):
                    t.atomic = False
        return 0

    cdef int register(self, cls, uint32_t family, uint32_t variant) except -1:
        cdef uint32_t at = hash_pointer(<void*>cls)
        while self.entries[at].cls is not NULL:
            at = (at + 1) & 255
        self.entries[at].cls = <void*>cls
        self.entries[at].node = &self.families[family].variants[variant]
        self.entries[at].family = family
        self.entries[at].variant = variant
        return 0

    cdef const Entry* find(self, object message) except NULL:
        """Where this message goes; a subclass of a message class goes where its base goes."""
        cdef const Entry* found = self.look_up(Py_TYPE(message))
        if found is not NULL:
            return found
        for base in type(message).__mro__:
            found = self.look_up(<void*>base)
            if found is not NULL:
                return found
            if base in self.newer:
                raise EncodeError(f"{base.__name__} needs revision {self.newer[base].value}, the codec's is "
                                  f"{self.revision.value}")
        if isinstance(message, type):
            raise TypeError(f"the class {message.__name__} is not a message of revision {self.revision.value}, "
                            "an instance of it may be")
        raise TypeError(f"{type(message).__name__} is not a message of revision {self.revision.value}")

    cdef const Entry* look_up(self, void* cls) noexcept:
        cdef uint32_t at = hash_pointer(cls)
        while self.entries[at].cls is not cls:
            if self.entries[at].cls is NULL:
                return NULL
            at = (at + 1) & 255
        return &self.entries[at]

    cdef object key(self, Reader* r, Py_ssize_t n):
        """The str of the next n bytes, at most KEY_SIZE; a cached one where the same key was read lately."""
        cdef uint32_t at = ff_hash_short(r.p, n) >> 24
        found = <object>PyList_GET_ITEM(<PyObject*>self.keys, at)
        if (found is not None and PyUnicode_IS_COMPACT_ASCII(<PyObject*>found)
                and PyUnicode_GET_LENGTH(<PyObject*>found) == n
                and ff_same_short(PyUnicode_DATA(<PyObject*>found), r.p, n)):
            r.p += n
            return found
        found = take_text(r, n)
        self.keys[at] = found
        return found

    cdef int plan_columns(self) except -1:
        """Lay out the record of each Timing variant for timing_columns."""
        cdef Node* message
        cdef Node* part
        cdef Py_ssize_t i, j
        formats = {<int>U8: "u1", <int>U16: "u2", <int>U32: "u4", <int>U64: "u8", <int>I32: "i4", <int>F32: "f4",
                   <int>F64: "f8", <int>ENUM: "u4"}
        for i in range(self.families[TIMING].n):
            message = &self.families[TIMING].variants[i]
            fields, plain = [("index", "i8")], True
            for j in range(message.n):
                part = &message.child[j]
                if part.op == LATER:
                    continue
                name = <object>part.name
                kind = formats.get(part.op, "O")
                if part.op == OPT and part.child.op in (F32, F64):
                    kind = formats[part.child.op]
                plain = plain and kind != "O"
                fields.append((name, kind))
                if part.op == OPT:
                    fields.append((f"{name}_present", "?"))
            dtype = np.dtype(fields, align=True)
            message.column = dtype.itemsize
            for j in range(message.n):
                part = &message.child[j]
                if part.op == LATER:
                    continue
                part.column = dtype.fields[<object>part.name][1]
                if part.op == OPT:
                    part.present = dtype.fields[f"{<object>part.name}_present"][1]
            self.columns[i] = (dtype, plain)
        return 0


cdef inline uint32_t hash_pointer(const void* p) noexcept:
    cdef uint64_t x = <uint64_t><uintptr_t>p
    return <uint32_t>((x >> 4) * 0x9E3779B97F4A7C15u >> 56)


cdef bint is_container(const Node* t):
    if t.op == OPT:
        return is_container(t.child)
    if t.op == STRUCT:
        return not t.atomic
    return t.op == LIST or t.op == TUPLE or t.op == MAP or t.op == LATER


cdef dict TABLES = {}
cdef str NEWEST = max(Revision).value      # a text, whose hash is kept
_tables_lock = threading.Lock()


cdef Table table_of(revision):
    """The compiled layouts of a revision, given as such or by name."""
    found = TABLES.get(revision)
    if found is None:
        with _tables_lock:
            known = supported_revision(revision)
            if known not in TABLES:
                TABLES[known] = TABLES[known.value] = Table(known)
            found = TABLES[known]
    return found


# ------------------------------------------------------------------------------------------------------ error texts


cdef str path_of(const Where* here):
    """The way to the value at hand, as in ``EpochAggregated.metrics.per_rank[3]['loss']``."""
    cdef list parts = []
    while here is not NULL:
        if here.node.op == STRUCT:
            parts.append("." + <object>here.node.child[here.index].name)
            if here.up is NULL:
                parts.append((<object>here.node.cls).__name__)
        elif here.node.op == MAP and here.key is not NULL:
            parts.append(f"[{<object>here.key!r}]")
        else:
            parts.append(f"[{here.index}]")
        here = here.up
    return "".join(reversed(parts))


cdef object bad_payload(const Reader* r, const uint8_t* at, str what):
    where = path_of(r.where)
    return PayloadError(f"{where + ': ' if where else ''}{what} (payload byte {at - r.start})")


cdef object shown(value):
    """A value as it stands in an error: an integer of thousands of digits has no text."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    return value


cdef object bad_value(const Writer* w, str what):
    return EncodeError(f"{path_of(w.where)}: {what}")


cdef object bad_type(const Writer* w, str expected, object value):
    text = repr(shown(value)) if isinstance(value, (bool, int, float, str)) else ""
    return TypeError(f"{path_of(w.where)}: expected {expected}, got {type(value).__name__} {text[:40]}".rstrip())


# --------------------------------------------------------------------------------------------------- writing values


cdef inline void begin(Writer* w, uint8_t* scratch) noexcept:
    """Write into SCRATCH bytes of the caller's, for as long as they suffice."""
    w.start = w.p = scratch
    w.end = scratch + SCRATCH
    w.owner = NULL
    w.where = NULL


cdef int grow(Writer* w, Py_ssize_t n) except -1:
    """Make room for n bytes more."""
    return make_room(w, 2 * (w.p - w.start + n))


cdef int make_room(Writer* w, Py_ssize_t room) except -1:
    """Give the writer so many bytes in all."""
    cdef Py_ssize_t used = w.p - w.start
    if w.owner is NULL:
        w.owner = PyBytes_NewOwned(NULL, room)
        memcpy(PyBytes_Start(w.owner), w.start, used)
    else:
        _PyBytes_Resize(&w.owner, room)
    w.start = <uint8_t*>PyBytes_Start(w.owner)
    w.p = w.start + used
    w.end = w.start + room
    return 0


cdef inline Py_ssize_t foresee(Py_ssize_t used, Py_ssize_t done, Py_ssize_t whole) noexcept:
    """The room that the whole will take, and a little more, where a part of it is done; within what is sane."""
    # In floating point: of many gigabytes the product would not fit in 64 bits.
    return <Py_ssize_t>min(1.0625 * used * whole / done, <double>max(16 * used, 64 << 20)) + 1024


cdef inline int reserve(Writer* w, Py_ssize_t n) except -1:
    if w.end - w.p < n:
        grow(w, n)
    return 0


cdef object finish(Writer* w):
    """The bytes written, as an object; the writer is done."""
    cdef Py_ssize_t n = w.p - w.start
    if w.owner is NULL:
        return PyBytes_FromStringAndSize(<char*>w.start, n)
    if w.end - w.p <= n >> 3:
        # Cut short where it lies: an allocator that gets back less than is asked of it the next time keeps asking
        # the system for pages, which cost as much as hashing what they hold.
        w.p[0] = 0
        Py_SET_SIZE(w.owner, n)
    else:
        _PyBytes_Resize(&w.owner, n)
    done = <object>w.owner
    Py_DecRef(w.owner)
    w.owner = NULL
    return done


cdef inline int write_varint(Writer* w, uint64_t x) except -1:
    reserve(w, 9)
    w.p = put_varint(w.p, x)
    return 0


# What is put takes a place with room enough and gives the place after it.

cdef inline uint8_t* put_varint(uint8_t* p, uint64_t x) noexcept:
    """A varint, of at most 9 bytes."""
    if x < 251:
        p[0] = <uint8_t>x
        return p + 1
    if x <= 0xFFFF:
        p[0] = 251
        ff_store16(p + 1, <uint16_t>x)
        return p + 3
    if x <= 0xFFFFFFFFu:
        p[0] = 252
        ff_store32(p + 1, <uint32_t>x)
        return p + 5
    p[0] = 253
    ff_store64(p + 1, x)
    return p + 9


cdef inline uint8_t* put_float(uint8_t* p, PyObject* value) noexcept:
    """The eight bytes of a float object."""
    ff_store_f64(p, PyFloat_AS_DOUBLE(value))
    return p + 8


cdef inline int write_raw(Writer* w, const void* data, Py_ssize_t n) except -1:
    reserve(w, n)
    memcpy(w.p, data, n)
    w.p += n
    return 0


def plain_number(value, integer):
    """The plain int or float that a numeric scalar of NumPy or another array library stands for, None if it is none."""
    if isinstance(value, (bool, np.timedelta64)):
        return None
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return None if integer else float(value)
    dtype = getattr(value, "dtype", "")
    dtype = str(getattr(dtype, "name", dtype))
    if getattr(value, "shape", None) not in ((), None) or not ("int" in dtype or "float" in dtype):
        return None
    if integer:
        return value.__index__() if "int" in dtype else None
    return float(value)


def whole_number(value, what, least, most):
    """The int that an integer scalar stands for.

    Raises:
        TypeError: not an integer.
        EncodeError: outside least to most; the message starts with ``what``.
    """
    plain = plain_number(value, True)
    if plain is None:
        raise TypeError(f"{what}: expected an integer, got {type(value).__name__}")
    if not least <= plain <= most:
        raise EncodeError(f"{what}: expected an integer from {least} to {most}, got {shown(plain)}")
    return plain


cdef object to_scalar(Writer* w, object value, bint integer):
    plain = plain_number(value, integer)
    if plain is None:
        raise bad_type(w, "an integer" if integer else "a float", value)
    return plain


cdef int write_unsigned(Writer* w, const Node* t, PyObject* value) except -1:
    cdef object plain
    if PyLong_CheckExact(value):
        return write_whole(w, t, value)
    plain = to_scalar(w, <object>value, True)
    return write_whole(w, t, <PyObject*>plain)


cdef int write_whole(Writer* w, const Node* t, PyObject* value) except -1:
    """An int of an unsigned type."""
    cdef uint64_t x = unsigned_of(w, t, value)
    if t.op == U8:
        reserve(w, 1)
        w.p[0] = <uint8_t>x
        w.p += 1
        return 0
    return write_varint(w, x)


cdef inline uint64_t unsigned_of(Writer* w, const Node* t, PyObject* value) except? <uint64_t>-1:
    """The value of an int, within what its type can hold."""
    cdef uint64_t x = PyLong_AsUnsignedLongLong(value)
    if x > t.most or x == <uint64_t>-1 and PyErr_Occurred() is not NULL:
        PyErr_Clear()
        raise bad_value(w, f"expected an integer from 0 to {t.most}, got {shown(<object>value)}")
    return x


cdef int write_signed(Writer* w, PyObject* value) except -1:
    cdef object plain = <object>value if PyLong_CheckExact(value) else to_scalar(w, <object>value, True)
    if not -0x80000000 <= plain <= 0x7FFFFFFF:
        raise bad_value(w, f"expected an integer from {-0x80000000} to {0x7FFFFFFF}, got {shown(plain)}")
    return write_varint(w, 2 * plain if plain >= 0 else -2 * plain - 1)


cdef double to_float(Writer* w, PyObject* value) except? -1:
    cdef object plain = to_scalar(w, <object>value, False)
    cdef double x
    try:
        x = plain
    except OverflowError:
        raise bad_value(w, f"{shown(plain)} is too large for a float") from None
    if isinf(x) and isinstance(<object>value, np.longdouble) and not np.isinf(<object>value):
        raise bad_value(w, f"{<object>value} is too large for a float")
    return x


cdef int write_f64(Writer* w, PyObject* value) except -1:
    cdef double x = PyFloat_AS_DOUBLE(value) if PyFloat_Check(value) else to_float(w, value)
    reserve(w, 8)
    ff_store_f64(w.p, x)
    w.p += 8
    return 0


cdef int write_f32(Writer* w, PyObject* value) except -1:
    cdef double x = PyFloat_AS_DOUBLE(value) if PyFloat_Check(value) else to_float(w, value)
    reserve(w, 4)
    if isinf(<float>x) and not isinf(x):
        raise bad_value(w, f"{x} is too large for a 32-bit float")
    ff_store_f32(w.p, x)
    w.p += 4
    return 0


cdef inline int write_text(Writer* w, PyObject* value) except -1:
    cdef Py_ssize_t n
    if PyUnicode_CheckExact(value) and PyUnicode_IS_COMPACT_ASCII(value):
        n = PyUnicode_GET_LENGTH(value)
        write_varint(w, n)
        return write_raw(w, PyUnicode_DATA(value), n)
    return write_wide_text(w, value)


cdef int write_wide_text(Writer* w, PyObject* value) except -1:
    """Text that is not plain ASCII, or no text at all."""
    cdef Py_ssize_t n = 0
    cdef const char* text
    if not PyUnicode_Check(value):
        raise bad_type(w, "text", <object>value)
    text = PyUnicode_AsUTF8AndSize(value, &n)
    if text is NULL:
        PyErr_Clear()
        raise bad_value(w, f"{<object>value!a} holds a lone surrogate, which UTF-8 cannot carry")
    write_varint(w, n)
    return write_raw(w, text, n)


cdef int write_bytes(Writer* w, const Node* t, PyObject* value) except -1:
    cdef object data
    if not (PyBytes_Check(value) or PyByteArray_Check(value) or PyMemoryView_Check(value)):
        raise bad_type(w, "bytes", <object>value)
    data = bytes(<object>value)
    if t.op == FIXED:
        if len(data) != t.n:
            raise bad_value(w, f"expected {t.n} bytes, got {len(data)}")
    else:
        write_varint(w, len(data))
    return write_raw(w, PyBytes_AS_STRING(data), len(data))


cdef int write_items(Writer* w, const Node* t, PyObject* value) except -1:
    """A list, or a tuple of the layout's length."""
    cdef Where here
    cdef Py_ssize_t i, n, first = 0
    cdef uint8_t* p
    cdef object items = <object>value, item
    if not (PyList_Check(value) or PyTuple_Check(value)):
        raise bad_type(w, "a list" if t.op == LIST else f"a tuple of {t.n}", items)
    n = PySequence_Length(value)
    if t.op == LIST:
        write_varint(w, n)
    elif n != t.n:
        raise bad_value(w, f"expected {t.n} items, got {n}")
    if t.op == LIST and t.child.op == F64:
        reserve(w, 8 * n)
        p = w.p
        while first < n and PyFloat_CheckExact(PySequence_Item(value, first)):
            p = put_float(p, PySequence_Item(value, first))
            first += 1
        w.p = p
    here.up = w.where
    here.node = t
    here.key = NULL
    w.where = &here
    for i in range(first, n):
        here.index = i
        # a value's own conversion code may have changed the list meanwhile
        if PySequence_Length(value) != n:
            raise bad_value(w, "changed its length while it was encoded")
        item = <object>PySequence_Item(value, i)
        write_value(w, t.child if t.op == LIST else &t.child[i], <PyObject*>item)
    w.where = here.up
    return 0


cdef int write_map(Writer* w, const Node* t, PyObject* value) except -1:
    cdef Where here
    cdef Py_ssize_t at = 0, n, written = 0, length
    cdef bint floats = t.child[1].op == F64
    cdef uint8_t* p
    cdef PyObject* key
    cdef PyObject* item
    cdef object owned = <object>value, owned_key, owned_item
    if not PyDict_Check(value):
        raise bad_type(w, "a dict", <object>value)
    n = PyDict_GET_SIZE(value)
    write_varint(w, n)
    here.up = w.where
    here.node = t
    here.index = 0
    w.where = &here
    while PyDict_Next(value, &at, &key, &item):
        written += 1
        if floats and PyFloat_CheckExact(item) and PyUnicode_CheckExact(key) and PyUnicode_IS_COMPACT_ASCII(key):
            length = PyUnicode_GET_LENGTH(key)
            reserve(w, length + 17)
            p = put_varint(w.p, length)
            ff_copy_short(p, PyUnicode_DATA(key), length)
            w.p = put_float(p + length, item)
            continue
        owned_key, owned_item = <object>key, <object>item
        here.key = key
        write_text(w, key)
        write_value(w, &t.child[1], item)
        if written > n or PyDict_GET_SIZE(value) != n:
            raise bad_value(w, "changed its size while it was encoded")
    if written != n:
        raise bad_value(w, "changed its names while it was encoded")
    w.where = here.up
    return 0


cdef int write_enum(Writer* w, const Node* t, PyObject* value) except -1:
    if not PyObject_TypeCheck(value, <PyTypeObject*>t.cls):
        raise bad_type(w, f"a member of {(<object>t.cls).__name__}", <object>value)
    return write_varint(w, PyLong_AsLong(value))


cdef int write_later(Writer* w, PyObject* value) except -1:
    """A field that this revision does not have: it may not hold anything."""
    if value is not None_ and not (isinstance(<object>value, (list, dict)) and not <object>value):
        raise bad_value(w, "is set, but the codec's revision does not have it")
    return 0


cdef int write_struct(Writer* w, const Node* t, PyObject* message) except -1:
    cdef Where here
    cdef Py_ssize_t i
    cdef PyObject* value
    cdef uint8_t* p
    cdef const Node* part
    cdef object owned = <object>message     # a value's own conversion code may drop it from where it came
    here.up = w.where
    here.node = t
    here.key = NULL
    w.where = &here
    reserve(w, 9 * t.n)
    p = w.p
    for i in range(t.n):
        here.index = i
        part = &t.child[i]
        value = (<PyObject**>(<char*>message + part.slot))[0]
        if value is NULL:
            raise TypeError(f"{path_of(w.where)}: the field has no value")
        # The most frequent kinds of field, of at most 9 bytes, without another call.
        if part.op == F64 and PyFloat_CheckExact(value):
            p = put_float(p, value)
        elif part.op == U64 and PyLong_CheckExact(value):
            p = put_varint(p, unsigned_of(w, part, value))
        elif part.op == OPT and value is None_:
            p[0] = 0
            p += 1
        elif part.op == OPT and part.child.op == F64 and PyFloat_CheckExact(value):
            p[0] = 1
            p = put_float(p + 1, value)
        else:
            w.p = p
            write_value(w, part, value)
            reserve(w, 9 * t.n)
            p = w.p
    w.p = p
    w.where = here.up
    return 0


cdef int write_value(Writer* w, const Node* t, PyObject* value) except -1:
    cdef int op = t.op
    if op == F64:
        return write_f64(w, value)
    elif op == U64 or op == U8 or op == U16 or op == U32:
        return write_unsigned(w, t, value)
    elif op == OPT:
        reserve(w, 1)
        w.p[0] = value is not None_
        w.p += 1
        return write_value(w, t.child, value) if value is not None_ else 0
    elif op == STR:
        return write_text(w, value)
    elif op == LIST or op == TUPLE:
        return write_items(w, t, value)
    elif op == MAP:
        return write_map(w, t, value)
    elif op == STRUCT:
        if not PyObject_TypeCheck(value, <PyTypeObject*>t.cls):
            raise bad_type(w, (<object>t.cls).__name__, <object>value)
        return write_struct(w, t, value)
    elif op == ENUM:
        return write_enum(w, t, value)
    elif op == BYTES or op == FIXED:
        return write_bytes(w, t, value)
    elif op == F32:
        return write_f32(w, value)
    elif op == I32:
        return write_signed(w, value)
    return write_later(w, value)


cdef inline int write_message(Writer* w, Table table, const Entry* entry, object message) except -1:
    if table.families[entry.family].tagged:
        write_varint(w, entry.variant)
    return write_struct(w, entry.node, <PyObject*>message)


# --------------------------------------------------------------------------------------------------- reading values


cdef inline int need(Reader* r, uint64_t n) except -1:
    if n > <uint64_t>(r.end - r.p):
        raise bad_payload(r, r.p, f"the payload ends here: {n} bytes more expected, {r.end - r.p} left")
    return 0


cdef uint64_t read_wide(Reader* r, uint64_t most) except? 0xFFFFFFFFFFFFFFFF:
    """A varint of more than one byte, for an integer type whose largest value is ``most``."""
    cdef uint8_t lead = r.p[0]
    cdef uint64_t x
    if lead == 251:
        need(r, 3)
        x = ff_load16(r.p + 1)
        r.p += 3
    elif lead == 252 and most > 0xFFFF:
        need(r, 5)
        x = ff_load32(r.p + 1)
        r.p += 5
    elif lead == 253 and most > 0xFFFFFFFFu:
        need(r, 9)
        x = ff_load64(r.p + 1)
        r.p += 9
    else:
        raise bad_payload(r, r.p, f"integer lead byte {lead:#x} is not one of a u{most.bit_length()}")
    return x


cdef inline uint64_t read_varint(Reader* r, uint64_t most) except? 0xFFFFFFFFFFFFFFFF:
    need(r, 1)
    if r.p[0] >= 251:
        return read_wide(r, most)
    r.p += 1
    return (r.p - 1)[0]


cdef inline Py_ssize_t read_count(Reader* r, Py_ssize_t least) except -1:
    """The number of items that follow, checked against what is left before anything is allocated for them."""
    cdef const uint8_t* at = r.p
    cdef uint64_t n = read_varint(r, 0xFFFFFFFFFFFFFFFF)
    if n > <uint64_t>(r.end - r.p) or n * least > <uint64_t>(r.end - r.p):
        raise bad_payload(r, at, f"{n} items of at least {least} bytes announced, {r.end - r.p} bytes left")
    return n


cdef inline uint8_t read_tag(Reader* r) except? 255:
    """The byte of an option: 0 or 1."""
    need(r, 1)
    if r.p[0] > 1:
        raise bad_payload(r, r.p, f"option tag must be 0 or 1, got {r.p[0]}")
    r.p += 1
    return (r.p - 1)[0]


cdef inline uint32_t read_index(Reader* r, uint32_t n, PyObject* owner) except? 0xFFFFFFFF:
    """The index of one of the owner's n variants or members."""
    cdef const uint8_t* at = r.p
    cdef uint64_t x = read_varint(r, 0xFFFFFFFFu)
    if x >= n:
        name = getattr(<object>owner, "__name__", <object>owner)
        raise bad_payload(r, at, f"unknown variant {x} of {name}, this revision has 0 to {n - 1}")
    return <uint32_t>x


cdef inline int32_t unzigzag(uint64_t x) noexcept:
    return <int32_t>(<uint32_t>(x >> 1) ^ (0 - <uint32_t>(x & 1)))


cdef inline PyObject* take_float(Reader* r) except NULL:
    """The float in the next 8 bytes, which are there."""
    r.p += 8
    return PyFloat_FromDouble(ff_load_f64(r.p - 8))


cdef inline object take_text(Reader* r, Py_ssize_t n):
    """The str in the next n bytes, which are there."""
    return taken_text(r, n, PyUnicode_DecodeUTF8(<const char*>r.p, n, NULL))


cdef object taken_text(Reader* r, Py_ssize_t n, PyObject* text):
    """The text just decoded from the next n bytes; NULL and an exception set where they are not UTF-8."""
    if text is NULL:
        try:
            raise_pending()
        except UnicodeDecodeError as error:
            raise bad_payload(r, r.p + <Py_ssize_t>error.start, f"text is not UTF-8: {error.reason}") from None
    r.p += n
    decoded = <object>text
    Py_DecRef(text)
    return decoded


cdef object read_list(Reader* r, const Node* t, Table table):
    cdef Where here
    cdef Py_ssize_t i, n = read_count(r, t.child.least)
    cdef object items = PyList_New(n)
    if t.child.op == F64:           # and so many are there: their count says so
        for i in range(n):
            PyList_SET_ITEM(items, i, take_float(r))
        return items
    here.up = r.where
    here.node = t
    here.key = NULL
    r.where = &here
    for i in range(n):
        here.index = i
        PyList_SET_ITEM(items, i, read_value(r, t.child, table))
    r.where = here.up
    return items


cdef object read_tuple(Reader* r, const Node* t, Table table):
    cdef Where here
    cdef Py_ssize_t i
    cdef object items = PyTuple_New(t.n)
    here.up = r.where
    here.node = t
    here.key = NULL
    r.where = &here
    for i in range(t.n):
        here.index = i
        PyTuple_SET_ITEM(items, i, read_value(r, &t.child[i], table))
    r.where = here.up
    return items


cdef int raise_pending() except -1:
    """Let the exception through that a C function has set."""
    return -1


cdef object read_map(Reader* r, const Node* t, Table table):
    cdef Where here
    cdef Py_ssize_t i, n = read_count(r, t.child[0].least + t.child[1].least)
    # A count is only as good as the bytes that follow: past some size let the dict grow with them.
    cdef dict items = ff_dict_for(min(n, 1024))
    cdef Py_ssize_t length
    cdef bint floats = t.child[1].op == F64
    cdef object key
    cdef PyObject* value
    cdef int error
    here.up = r.where
    here.node = t
    r.where = &here
    for i in range(n):
        here.index = i
        here.key = NULL
        length = read_count(r, 1)
        key = table.key(r, length) if length <= KEY_SIZE else take_text(r, length)
        here.key = <PyObject*>key
        if floats:
            need(r, 8)
            value = take_float(r)
        else:
            value = read_value(r, &t.child[1], table)
        error = PyDict_SetPair(items, key, value)
        Py_DecRef(value)
        if error:
            raise_pending()
    r.where = here.up
    return items


cdef object read_struct(Reader* r, const Node* t, Table table):
    cdef Where here
    cdef Py_ssize_t i
    cdef const Node* part
    cdef PyObject* value
    cdef object message = ff_new(<PyTypeObject*>t.cls) if t.n else PyType_GenericAlloc(<PyTypeObject*>t.cls, 0)
    here.up = r.where
    here.node = t
    here.key = NULL
    r.where = &here
    for i in range(t.n):
        here.index = i
        part = &t.child[i]
        if part.op == F64:
            need(r, 8)
            value = take_float(r)
        elif part.op == U64:
            value = PyLong_FromUnsignedLongLong(read_varint(r, part.most))
        else:
            value = read_value(r, part, table)
        (<PyObject**>(<char*><PyObject*>message + part.slot))[0] = value
    r.where = here.up
    if not t.atomic:
        PyObject_GC_Track(<PyObject*>message)
    return message


cdef inline PyObject* own(object value) noexcept:
    """A reference of its own to the value."""
    Py_IncRef(<PyObject*>value)
    return <PyObject*>value


cdef PyObject* read_value(Reader* r, const Node* t, Table table) except NULL:
    """The next value, as a new reference."""
    cdef int op = t.op
    cdef uint64_t x
    if op == F64:
        need(r, 8)
        return take_float(r)
    elif op == U64 or op == U32 or op == U16:
        return PyLong_FromUnsignedLongLong(read_varint(r, t.most))
    elif op == OPT:
        return read_value(r, t.child, table) if read_tag(r) else own(None)
    elif op == STR:
        return own(take_text(r, read_count(r, 1)))
    elif op == LIST:
        return own(read_list(r, t, table))
    elif op == TUPLE:
        return own(read_tuple(r, t, table))
    elif op == MAP:
        return own(read_map(r, t, table))
    elif op == STRUCT:
        return own(read_struct(r, t, table))
    elif op == ENUM:
        x = read_index(r, t.n, t.cls)
        return own(<object>PyTuple_GET_ITEM(t.members, x))
    elif op == BYTES or op == FIXED:
        x = t.n if op == FIXED else <uint64_t>read_count(r, 1)
        need(r, x)
        r.p += x
        return PyBytes_NewOwned(<const char*>r.p - x, x)
    elif op == U8:
        need(r, 1)
        r.p += 1
        return PyLong_FromLong((r.p - 1)[0])
    elif op == F32:
        need(r, 4)
        r.p += 4
        return PyFloat_FromDouble(ff_load_f32(r.p - 4))
    elif op == I32:
        x = read_varint(r, 0xFFFFFFFFu)
        return PyLong_FromLong(unzigzag(x))
    return own(None if t.cls is None_ else (<object>t.cls)())


cdef object read_payload(Table table, uint32_t family, const uint8_t* data, Py_ssize_t n, bint strict):
    """The message in these payload bytes; strict: nothing may be left after it."""
    cdef Reader r
    cdef uint32_t variant = 0
    cdef Family* known = &table.families[family]
    if known.n == 0:
        return Reserved(KINDS[family], PyBytes_FromStringAndSize(<const char*>data, n))
    r.start = r.p = data
    r.end = data + n
    r.where = NULL
    if known.tagged:
        variant = read_index(&r, known.n, known.name)
    message = read_struct(&r, &known.variants[variant], table)
    if strict:
        check_end(&r, type(message).__name__)
    return message


cdef int check_end(const Reader* r, str name) except -1:
    """Refuse what is left after a value."""
    if r.p != r.end:
        raise TrailingDataError(f"{name} ends at payload byte {r.p - r.start}, {r.end - r.p} extra bytes of "
                                f"{r.end - r.start} follow")
    return 0


# --------------------------------------------------------------------------------------------------- buffers, frames


cdef class Input:
    """A caller's buffer, held while its bytes are read."""

    def __cinit__(self, buffer):
        PyObject_GetBuffer(buffer, &self.view, PyBUF_SIMPLE)
        self.data = <const uint8_t*>self.view.buf
        self.n = self.view.len

    def __dealloc__(self):
        PyBuffer_Release(&self.view)

    cdef int skip(self, Py_ssize_t offset) except -1:
        """Start at the offset."""
        if not 0 <= offset <= self.n:
            raise ValueError(f"offset must be from 0 to {self.n}, got {offset}")
        self.data += offset
        self.n -= offset
        return 0


cdef class Output(Input):
    """A caller's writable buffer."""

    def __cinit__(self, buffer):
        if self.view.readonly:
            raise TypeError(f"expected a writable buffer, got a read-only {type(buffer).__name__}")

    cdef uint8_t* room(self, Py_ssize_t offset, Py_ssize_t n) except NULL:
        """Where n bytes at the offset go."""
        if offset < 0 or self.n - offset < n:
            raise EncodeError(f"the frame takes {n} bytes at offset {offset}, the buffer has {self.n}")
        return <uint8_t*>self.view.buf + offset


cpdef bint is_strict(trailing) except -1:
    """Whether ``trailing`` is "error" and not "ignore"; a ValueError where it is neither."""
    if trailing is IGNORE or trailing == "ignore":
        return False
    if trailing == "error":
        return True
    raise ValueError(f'trailing must be "ignore" or "error", got {trailing!r}')


cdef uint32_t family_of(kind) except? 0xFFFFFFFF:
    """The number of a payload kind from a MsgKind, its number, or its name; 0 for "Relay"."""
    if isinstance(kind, str) and kind in FAMILY_NAMES:
        return FAMILY_NAMES.index(kind)
    if not isinstance(kind, (str, bool)):
        try:
            number = kind.__index__()
        except AttributeError:
            number = 0
        if 1 <= number <= LAST_KIND:
            return number
    raise UnknownKindError(f"unknown kind {kind!r}: expected a MsgKind, 1 to {LAST_KIND}, or one of {FAMILY_NAMES}")


def family_name(kind):
    """The name of a payload kind, from whatever names it."""
    return FAMILY_NAMES[family_of(kind)]


# A frame found in a buffer, its MAC not yet checked.
cdef struct Span:
    const uint8_t* frame
    uint32_t kind
    Py_ssize_t length       # of the payload
    Py_ssize_t left         # bytes after it in its length prefix


cdef class FrameCodec:
    """Control frames and mux records under one salt and revision. ``frames.Codec`` adds the rest."""

    def __cinit__(self, salt, revision="0.6", *, max_payload=MAX_PAYLOAD, max_tensors=MAX_TENSORS,
                  frame_ceiling=FRAME_CEILING, bint lenient=False):
        cdef bytes raw = parse_salt(salt)
        self.table = table_of(revision)
        self.revision = self.table.revision
        self.lenient = lenient
        self.twin = table_of(lookalike(self.revision)) if lenient and lookalike(self.revision) else None
        self.control_version = VERSIONS[self.revision].control
        self.mux_version = VERSIONS[self.revision].mux
        self.max_payload = whole_number(max_payload, "max_payload", 1, 0xFFFFFFFF - HEADER)
        self.max_tensors = whole_number(max_tensors, "max_tensors", 1, 0xFFFFFFFF)
        self.frame_ceiling = whole_number(frame_ceiling, "frame_ceiling", 1, (1 << 63) - 1)
        ff_mac_key_init(&self.secret, <const uint8_t*>PyBytes_AS_STRING(raw), len(raw))

    def __reduce__(self):
        raise TypeError("a Codec is not pickled, as it holds the salt: make one where it is needed")

    def __repr__(self):
        lenient = ", lenient=True" if self.lenient else ""
        return (f"{type(self).__name__}(<salt>, revision={self.revision.value!r}, max_payload={self.max_payload}, "
                f"max_tensors={self.max_tensors}, frame_ceiling={self.frame_ceiling}{lenient})")

    # -- MAC

    cdef void tag(self, const uint8_t* data, Py_ssize_t n, uint8_t* out) noexcept:
        if n < QUIET:
            ff_mac8(&self.secret, data, n, out)
        else:
            with nogil:
                ff_mac8(&self.secret, data, n, out)

    cdef bint holds(self, const uint8_t* data, Py_ssize_t n, const uint8_t* tag) noexcept:
        """Whether the tag is that of the data."""
        cdef uint8_t expected[8]
        self.tag(data, n, expected)
        return ff_mac_equal(expected, tag)

    # The MAC of a frame that is built or checked piece by piece.

    cdef void mac_begin(self, ff_mac_stream* stream) noexcept nogil:
        ff_mac_begin(stream, &self.secret)

    cdef void mac_update(self, ff_mac_stream* stream, const uint8_t* data, Py_ssize_t n) noexcept nogil:
        ff_mac_update(stream, data, n)

    cdef void mac_update_pair(self, ff_mac_stream* a, ff_mac_stream* b, const uint8_t* data,
                              Py_ssize_t n) noexcept nogil:
        ff_mac_update_pair(a, b, data, n)

    cdef void mac_update_copy(self, ff_mac_stream* stream, uint8_t* to, const uint8_t* data,
                              Py_ssize_t n) noexcept nogil:
        ff_mac_update_copy(stream, to, data, n)

    cdef void mac_end(self, ff_mac_stream* stream, uint8_t* out) noexcept nogil:
        ff_mac_end(stream, &self.secret, out)

    def mac(self, data):
        """The 8 tag bytes of any contiguous buffer: HMAC-SHA256 under the salt, cut (docs/wire.md §1).

        Args:
            data: the buffer.
        """
        cdef Input source = Input(data)
        cdef uint8_t out[8]
        self.tag(source.data, source.n, out)
        return PyBytes_FromStringAndSize(<char*>out, 8)

    # -- one frame

    cdef int write_frame(self, Writer* w, object message) except -1:
        """The frame but for its tag; the writer's next byte follows it."""
        cdef Py_ssize_t at = w.p - w.start, n
        cdef uint32_t kind
        cdef const Entry* entry
        cdef uint8_t* head
        reserve(w, HEADER)
        w.p += HEADER
        if type(message) is Reserved:
            kind = whole_number(message.kind, "Reserved.kind", MsgKind.PARAM_SNAPSHOT_META, MsgKind.HEARTBEAT)
            payload = Input(message.payload)
            write_raw(w, (<Input>payload).data, (<Input>payload).n)
        else:
            entry = self.table.find(message)
            kind = entry.family
            if kind == 0:
                raise TypeError(f"{type(message).__name__} travels in a mux record, not in a control frame")
            write_message(w, self.table, entry, message)
        head = w.start + at
        n = w.p - head - HEADER
        if n > self.max_payload:
            raise EncodeError(f"{type(message).__name__}: a payload of {n} bytes is above the limit of "
                              f"{self.max_payload} (max_payload)")
        ff_store32(head, CONTROL_MAGIC)
        ff_store32(head + 4, self.control_version)
        ff_store32(head + 16, kind)
        ff_store32(head + 20, <uint32_t>n)
        return 0

    def encode(self, message):
        """The whole control frame of a message (docs/wire.md §3), as bytes.

        Args:
            message: any Message.

        Raises:
            EncodeError: a value is out of range, or the payload above ``max_payload``.
            TypeError: not a control-frame message, or a value of the wrong type.
        """
        cdef uint8_t scratch[SCRATCH]
        cdef Writer w
        begin(&w, scratch)
        try:
            self.write_frame(&w, message)
            self.tag(w.start + 16, w.p - w.start - 16, w.start + 8)
            return finish(&w)
        except:
            Py_XDecRef(w.owner)
            raise

    def encode_into(self, message, buffer, Py_ssize_t offset=0):
        """Write the frame into a buffer; nothing is written unless all of it fits.

        Args:
            message: any Message.
            buffer: any writable, contiguous buffer.
            offset: where the frame is to start in it, in bytes.

        Returns:
            The number of bytes written.

        Raises:
            EncodeError: as ``encode``, or the buffer has too little room.
            TypeError: as ``encode``, or the buffer is read-only.
            BufferError: the buffer is not contiguous.
        """
        cdef Output target = Output(buffer)
        cdef bytes frame = self.encode(message)
        memcpy(target.room(offset, len(frame)), PyBytes_AS_STRING(frame), len(frame))
        return len(frame)

    def encode_payload(self, message):
        """The payload bytes alone (docs/wire.md §2).

        Args:
            message: any message that a control frame or a CONTROL mux record carries.

        Raises:
            EncodeError, TypeError: as ``encode``.
        """
        cdef uint8_t scratch[SCRATCH]
        cdef Writer w
        if type(message) is Reserved:
            return bytes(memoryview(message.payload))
        begin(&w, scratch)
        try:
            write_message(&w, self.table, self.table.find(message), message)
            return finish(&w)
        except:
            Py_XDecRef(w.owner)
            raise

    cdef Py_ssize_t measure(self, const uint8_t* p, Py_ssize_t n) except -1:
        """The whole size of the frame that starts here, from its checked header; 0 where n is less than a header."""
        cdef uint32_t length
        if n < HEADER:
            return 0
        if ff_load32(p) != CONTROL_MAGIC:
            raise BadMagicError(wrong_magic(CONTROL_MAGIC, ff_load32(p), ff_load32(p + 4)))
        if ff_load32(p + 4) != self.control_version:
            raise VersionMismatchError(wrong_version("control frame", "control", ff_load32(p + 4), self.revision))
        if not 1 <= ff_load32(p + 16) <= LAST_KIND:
            raise UnknownKindError(f"control frame kind {ff_load32(p + 16)}, known are 1 to {LAST_KIND}")
        length = ff_load32(p + 20)
        if length > self.max_payload:
            raise LimitError(f"a control payload of {length} bytes is above the limit of {self.max_payload} "
                             "(max_payload)")
        return HEADER + <Py_ssize_t>length

    cdef Py_ssize_t prefix(self, const uint8_t* p, Py_ssize_t n) except -1:
        """The checked length prefix at p; 0 where it is not all there."""
        if n < 4:
            return 0
        if ff_load32(p) > self.frame_ceiling:
            raise LimitError(too_long(ff_load32(p), self.frame_ceiling))
        return ff_load32(p)

    cdef object open(self, const uint8_t* p, Py_ssize_t n, bint strict):
        """The message of the one frame at p; strict: nothing may be left after value and frame."""
        cdef Py_ssize_t size = self.measure(p, n)
        if size == 0:
            raise TruncatedError(f"a control frame's header takes {HEADER} bytes, got {n}")
        if n < size:
            raise TruncatedError(f"a control frame of {size} bytes ends after {n}")
        if not self.holds(p + 16, size - 16, p + 8):
            raise bad_mac(ff_load32(p + 16))
        if strict and n > size:
            raise TrailingDataError(f"{n - size} extra bytes after a control frame of {size}")
        return self.read(ff_load32(p + 16), p + HEADER, size - HEADER, strict)

    cdef object read(self, uint32_t family, const uint8_t* data, Py_ssize_t n, bint strict):
        """The message in these payload bytes; where the codec is lenient, also in the layout of its lookalike.

        A payload that one of the two layouts fills to its last byte is of that revision: no payload fills both.
        """
        if self.twin is None:
            return read_payload(self.table, family, data, n, strict)
        try:
            return read_payload(self.table, family, data, n, True)
        except DecodeError:
            pass
        try:
            return read_payload(self.twin, family, data, n, True)
        except DecodeError:
            return read_payload(self.table, family, data, n, strict)

    def decode(self, frame, *, trailing="ignore"):
        """The message of one control frame (docs/wire.md §3).

        Args:
            frame: any contiguous buffer that starts with the frame.
            trailing: "ignore" takes bytes left after the value or the frame as the crate does; "error" refuses them.

        Raises:
            DecodeError: one of TruncatedError, BadMagicError, VersionMismatchError, UnknownKindError, LimitError,
                AuthenticationError, PayloadError, TrailingDataError, in this order of checks.
        """
        cdef bint strict = is_strict(trailing)
        cdef Input source
        if PyBytes_CheckExact(frame):
            return self.open(<const uint8_t*>PyBytes_AS_STRING(frame), PyBytes_GET_SIZE(frame), strict)
        source = Input(frame)
        return self.open(source.data, source.n, strict)

    def decode_payload(self, kind, payload, *, trailing="ignore"):
        """The message of payload bytes alone.

        Args:
            kind: a MsgKind, its number, or its name; "Relay" for the payload of a control mux record.
            payload: any contiguous buffer that starts with the payload.
            trailing: as ``decode``, of bytes after the value.

        Raises:
            UnknownKindError: no such kind.
            PayloadError: the bytes are no such message.
            TrailingDataError: bytes are left, and ``trailing`` refuses them.
        """
        cdef Input source = Input(payload)
        return self.read(family_of(kind), source.data, source.n, is_strict(trailing))

    def measure_frame(self, buffer, Py_ssize_t offset=0):
        """The size of the control frame that starts at the offset, in bytes; None where its header is not all there.

        Args:
            buffer: any contiguous buffer.
            offset: where the frame starts in it.

        Raises:
            DecodeError: BadMagicError, VersionMismatchError, UnknownKindError, LimitError, in this order of checks.
        """
        cdef Input source = Input(buffer)
        source.skip(offset)
        return self.measure(source.data, source.n) or None

    def take_frame(self, buffer, Py_ssize_t offset, bint prefixed, bint strict):
        """The (message, size) of the control frame that starts at the offset, None where it is not all there.

        Args:
            buffer: any contiguous buffer.
            offset: where the frame, or its prefix, starts in it.
            prefixed: the frame has its u32 length before it, which the size then includes.
            strict: refuse bytes left after the value, or after the frame inside its prefix.

        Raises:
            DecodeError: as ``decode``; what a header alone can tell, as soon as the header is there.
        """
        cdef Input source = Input(buffer)
        cdef const uint8_t* p
        cdef Py_ssize_t n, size
        source.skip(offset)
        p, n = source.data, source.n
        if not prefixed:
            size = self.measure(p, n)
            return (self.open(p, size, strict), size) if 0 < size <= n else None
        size = self.prefix(p, n)
        if n < 4 or n - 4 < size:
            self.measure(p + 4, n - 4)
            return None
        return self.open(p + 4, size, strict), 4 + size

    # -- many frames

    def encode_many(self, messages, *, bint prefixed=False):
        """The frames of these messages one after the other, as bytes.

        Args:
            messages: the messages.
            prefixed: put the u32 length before each, as on the leg between rank and relay (docs/wire.md §7).

        Raises:
            EncodeError, TypeError: as ``encode``, naming the message's place in the sequence.
        """
        cdef uint8_t scratch[SCRATCH]
        cdef Writer w
        cdef Py_ssize_t at, waiting = -1, i = 0, listed = len(messages) if type(messages) is list else 0
        cdef bint writing = False           # not asking the caller's iterable, whose errors are its own
        begin(&w, scratch)
        try:
            for message in messages:
                if i and i % BATCH == 0 and i < listed and (w.end - w.p) * i < (w.p - w.start) * min(BATCH, listed - i):
                    make_room(&w, foresee(w.p - w.start, i, listed))
                if prefixed:
                    reserve(&w, 4)
                    w.p += 4
                at = w.p - w.start
                writing = True
                self.write_frame(&w, message)
                writing = False
                if prefixed:
                    ff_store32(w.start + at - 4, <uint32_t>(w.p - w.start - at))
                # Two tags at a time: their hashing interleaves.
                if waiting < 0:
                    waiting = at
                else:
                    self.sign_pair(w.start + waiting, w.start + at)
                    waiting = -1
                i += 1
            if waiting >= 0:
                self.tag(w.start + waiting + 16, HEADER - 16 + ff_load32(w.start + waiting + 20),
                         w.start + waiting + 8)
            return finish(&w)
        except (EncodeError, TypeError) as error:
            Py_XDecRef(w.owner)
            if writing:
                error.args = (f"message {i}: {error}",)
            raise
        except:
            Py_XDecRef(w.owner)
            raise

    cdef void sign_pair(self, uint8_t* a, uint8_t* b) noexcept:
        ff_mac8_pair(&self.secret, a + 16, HEADER - 16 + <size_t>ff_load32(a + 20),
                     b + 16, HEADER - 16 + <size_t>ff_load32(b + 20), a + 8, b + 8)

    def decode_many(self, buffer, *, bint prefixed=False, trailing="ignore"):
        """Decode the frames of a buffer one after the other.

        Args:
            buffer: any contiguous buffer; a partial last frame is left for the next call.
            prefixed: each frame has its u32 length before it.
            trailing: as ``decode``; inside a length prefix it also covers bytes after the frame.

        Returns:
            (messages, consumed): the list, and the number of bytes that its frames took.

        Raises:
            DecodeError: as ``decode``; ``.decoded`` holds the messages before the fault and ``.offset`` the byte where
                the faulty frame starts.
        """
        cdef Scan scan = Scan(self, buffer, prefixed, is_strict(trailing))
        cdef list messages = []
        cdef Py_ssize_t i
        try:
            while scan.fill():
                for i in range(scan.good):
                    scan.at = scan.place(i)
                    messages.append(scan.message(i))
            scan.end()
        except DecodeError as error:
            error.decoded = messages
            raise scan.blame(error)
        return messages, scan.done

    def timing_columns(self, buffer, *, bint prefixed=False, trailing="ignore"):
        """The Timing frames of a buffer as columns.

        Args:
            buffer: any contiguous buffer of whole frames.
            prefixed: each frame has its u32 length before it.
            trailing: as ``decode_many``.

        Returns:
            A dict from the name of each Timing variant met to a one-dimensional structured array with the fields of the
            message, after ``index`` (i8), the number of the frame in the buffer. Integers keep their width, an enum is
            its number (u4), text and bytes are object columns. An optional float is NaN where absent, other optional
            values are None, and a bool column ``<name>_present`` tells. Frames of other kinds are checked and skipped.

        Raises:
            DecodeError: as ``decode``, with ``.offset``; TruncatedError for a partial last frame.
        """
        cdef Scan scan = Scan(self, buffer, prefixed, is_strict(trailing))
        cdef Records records = Records(self.table, scan)
        cdef Py_ssize_t i
        try:
            while scan.fill():
                for i in range(scan.good):
                    scan.at = scan.place(i)
                    scan.check_left(i)
                    if scan.spans[i].kind == TIMING:
                        records.add(i)
                    scan.index += 1
            scan.end()
            if scan.done != scan.source.n:
                scan.at = scan.done
                raise TruncatedError(f"the buffer ends inside its last frame, {scan.source.n - scan.done} bytes into it")
        except DecodeError as error:
            raise scan.blame(error)
        return records.arrays()

    # -- mux records

    def seal_record(self, int kind, uint32_t rank, payload):
        """The mux record of these payload bytes (docs/wire.md §7): ``Codec.encode_mux`` without its checks.

        Args:
            kind: the number of a MuxKind.
            rank: whose frame it carries.
            payload: any contiguous buffer.

        Raises:
            EncodeError: a payload above ``frame_ceiling``.
        """
        cdef Input source = Input(payload)
        cdef ff_mac_stream stream
        cdef uint8_t* p
        if source.n > self.frame_ceiling or source.n > 0xFFFFFFFF:
            raise EncodeError(f"a mux payload of {source.n} bytes is above the limit of {self.frame_ceiling} "
                              "(frame_ceiling)")
        record = PyBytes_FromStringAndSize(NULL, MUX_HEADER + source.n)
        p = <uint8_t*>PyBytes_AS_STRING(record)
        ff_store32(p, MUX_MAGIC)
        ff_store32(p + 4, self.mux_version)
        p[8] = <uint8_t>kind
        ff_store32(p + 9, rank)
        ff_store32(p + 13, <uint32_t>source.n)
        with nogil:
            memcpy(p + MUX_HEADER, source.data, source.n)
            ff_mac_begin(&stream, &self.secret)
            ff_mac_update(&stream, p, 17)
            ff_mac_update(&stream, p + MUX_HEADER, source.n)
            ff_mac_end(&stream, &self.secret, p + 17)
        return record

    cdef Py_ssize_t measure_mux(self, const uint8_t* p, Py_ssize_t n) except -1:
        if n < MUX_HEADER:
            return 0
        if ff_load32(p) != MUX_MAGIC:
            raise BadMagicError(wrong_magic(MUX_MAGIC, ff_load32(p)))
        if ff_load32(p + 4) != self.mux_version:
            raise VersionMismatchError(wrong_version("mux record", "mux", ff_load32(p + 4), self.revision))
        if ff_load32(p + 13) > self.frame_ceiling:
            raise LimitError(f"a mux payload of {ff_load32(p + 13)} bytes is above the limit of {self.frame_ceiling} "
                             "(frame_ceiling)")
        return MUX_HEADER + <Py_ssize_t>ff_load32(p + 13)

    def measure_record(self, buffer, Py_ssize_t offset=0):
        """The size of the mux record that starts at the offset, in bytes; None where its header is not all there.

        Args:
            buffer: any contiguous buffer.
            offset: where the record starts in it.

        Raises:
            DecodeError: BadMagicError, VersionMismatchError, LimitError, in this order of checks.
        """
        cdef Input source = Input(buffer)
        source.skip(offset)
        return self.measure_mux(source.data, source.n) or None

    def open_record(self, buffer, *, trailing="ignore"):
        """The (MuxKind, rank, payload bytes) of a mux record (docs/wire.md §7).

        Args:
            buffer: any contiguous buffer that starts with the record.
            trailing: as ``decode``, of bytes after the record.

        Raises:
            DecodeError: TruncatedError, BadMagicError, VersionMismatchError, LimitError, AuthenticationError,
                UnknownKindError, TrailingDataError, in this order of checks.
        """
        cdef Input source = Input(buffer)
        cdef const uint8_t* p = source.data
        kind = self.enter_record(source, is_strict(trailing), NULL)
        return kind, ff_load32(p + 9), PyBytes_FromStringAndSize(<const char*>source.data, source.n)

    cdef object enter_record(self, Input source, bint strict, uint8_t* inner):
        """The MuxKind of the mux record that a buffer starts with, its MAC checked; what is left is its payload.

        In the same pass ``inner``, unless it is NULL, becomes the tag of all but the payload's last 8 bytes, which are
        that tag where the payload is a round frame.
        """
        cdef const uint8_t* p = source.data
        cdef Py_ssize_t size = self.measure_mux(p, source.n), taken = 0
        cdef ff_mac_stream stream, frame
        cdef uint8_t expected[8]
        if size == 0:
            raise TruncatedError(f"a mux record's header takes {MUX_HEADER} bytes, got {source.n}")
        if source.n < size:
            raise TruncatedError(f"a mux record of {size} bytes ends after {source.n}")
        with nogil:
            ff_mac_begin(&stream, &self.secret)
            ff_mac_update(&stream, p, 17)
            if inner is not NULL:
                taken = max(0, size - MUX_HEADER - 8)
                ff_mac_begin(&frame, &self.secret)
                ff_mac_update_pair(&frame, &stream, p + MUX_HEADER, taken)
                ff_mac_end(&frame, &self.secret, inner)
            ff_mac_update(&stream, p + MUX_HEADER + taken, size - MUX_HEADER - taken)
            ff_mac_end(&stream, &self.secret, expected)
        if not ff_mac_equal(expected, p + 17):
            raise AuthenticationError("the MAC of a mux record does not hold: another salt, or changed bytes")
        try:
            kind = MuxKind(p[8])
        except ValueError:
            raise UnknownKindError(f"mux record kind {p[8]}, known are 1 to {len(MuxKind)}") from None
        if strict and source.n > size:
            raise TrailingDataError(f"{source.n - size} extra bytes after a mux record of {size}")
        source.data += MUX_HEADER
        source.n = size - MUX_HEADER
        return kind


cdef object bad_mac(uint32_t kind):
    return AuthenticationError(f"the MAC of a {FAMILY_NAMES[kind]} frame does not hold: another salt, or changed bytes")


def check_values(message):
    """Raise what encoding the message would raise at a revision that has all it holds (docs/wire.md §5)."""
    cdef uint8_t scratch[SCRATCH]
    cdef Writer w
    cdef Table table = table_of(NEWEST)
    begin(&w, scratch)
    try:
        write_message(&w, table, table.find(message), message)
    finally:
        Py_XDecRef(w.owner)


# ------------------------------------------------------------------------------------------------- batches, columns


@cython.final
cdef class Scan:
    """The frames of a buffer, looked at a batch at a time: headers first, then the MACs, many or two at once."""

    cdef FrameCodec codec
    cdef Input source
    cdef bint prefixed, strict
    cdef Span spans[BATCH]
    cdef Py_ssize_t good                # spans of the batch whose MAC holds
    cdef Py_ssize_t done                # bytes of the buffer that the frames so far took
    cdef Py_ssize_t at                  # where the frame in hand starts
    cdef Py_ssize_t index               # its number, where the user counts
    cdef object fault                   # what stops the scan after this batch
    cdef Py_ssize_t fault_at            # the start of the frame at fault

    def __cinit__(self, FrameCodec codec, buffer, bint prefixed, bint strict):
        self.codec = codec
        self.source = Input(buffer)
        self.prefixed = prefixed
        self.strict = strict

    cdef Py_ssize_t look(self, Span* span) except -1:
        """Find the frame at ``done``; returns the bytes it takes, 0 where it is not all there."""
        cdef const uint8_t* p = self.source.data + self.done
        cdef Py_ssize_t n = self.source.n - self.done, size, prefix = 0
        if self.prefixed:
            prefix = self.codec.prefix(p, n)
            if n < 4 or n - 4 < prefix:
                return 0
            p += 4
            n = prefix
        size = self.codec.measure(p, n)
        if size == 0 or size > n:
            if self.prefixed:
                raise TruncatedError(f"a length prefix of {prefix} bytes holds less than its control frame")
            return 0
        span.frame = p
        span.kind = ff_load32(p + 16)
        span.length = size - HEADER
        span.left = n - size if self.prefixed else 0
        return prefix + 4 if self.prefixed else size

    cdef Py_ssize_t fill(self) except -1:
        """Find and authenticate the next frames; returns how many may be read now."""
        cdef Py_ssize_t found = 0, size
        if self.fault is not None:
            return 0
        try:
            while found < BATCH:
                size = self.look(&self.spans[found])
                if size == 0:
                    break
                self.done += size
                found += 1
        except DecodeError as error:
            self.fault, self.fault_at = error, self.done
        self.good = self.authenticate(found)
        if self.good < found:
            self.fault, self.fault_at = bad_mac(self.spans[self.good].kind), self.place(self.good)
        return self.good

    cdef Py_ssize_t place(self, Py_ssize_t i) noexcept:
        """Where in the buffer the i-th span starts, its length prefix included."""
        return self.spans[i].frame - self.source.data - (4 if self.prefixed else 0)

    cdef Py_ssize_t authenticate(self, Py_ssize_t found) noexcept:
        """How many of the spans found, from the first on, have a MAC that holds."""
        cdef Py_ssize_t i = 0, j, n
        cdef ff_message signed[BATCH]
        cdef uint8_t tags[FF_LANES * 8]
        cdef const Span* s = self.spans
        cdef bint lanes = ff_sha256_lanes()
        if lanes:
            for i in range(found):
                signed[i].data = s[i].frame + 16
                signed[i].length = s[i].length + 8
            i = 0
        while i < found:
            n = ff_mac8_lanes(&self.codec.secret, signed + i, found - i, tags) if lanes and i % FF_LANES == 0 else 0
            for j in range(n):
                if not ff_mac_equal(tags + 8 * j, s[i + j].frame + 8):
                    return i + j
            if n:
                i += n
            elif i + 1 < found and s[i].length < QUIET and s[i + 1].length < QUIET:
                ff_mac8_pair(&self.codec.secret, s[i].frame + 16, s[i].length + 8, s[i + 1].frame + 16,
                             s[i + 1].length + 8, tags, tags + 8)
                if not ff_mac_equal(tags, s[i].frame + 8):
                    return i
                if not ff_mac_equal(tags + 8, s[i + 1].frame + 8):
                    return i + 1
                i += 2
            else:
                if not self.codec.holds(s[i].frame + 16, s[i].length + 8, s[i].frame + 8):
                    return i
                i += 1
        return found

    cdef object message(self, Py_ssize_t i):
        cdef const Span* s = &self.spans[i]
        self.check_left(i)
        return self.codec.read(s.kind, s.frame + HEADER, s.length, self.strict)

    cdef int check_left(self, Py_ssize_t i) except -1:
        if self.strict and self.spans[i].left:
            raise TrailingDataError(f"{self.spans[i].left} extra bytes after a control frame of "
                                    f"{HEADER + self.spans[i].length} in its length prefix")
        return 0

    cdef int end(self) except -1:
        """Raise the fault that stopped the scan, if one did."""
        if self.fault is not None:
            self.at = self.fault_at
            raise self.fault
        return 0

    cdef object blame(self, error):
        """The error, with the place of its frame."""
        error.offset = self.at
        error.args = (f"frame at byte {self.at}: {error}",)
        return error


@cython.final
cdef class Records:
    """Timing messages gathered by variant: numbers into records, messages with text or bytes as rows of objects."""

    cdef Table table
    cdef Scan scan
    cdef dict gathered                  # variant -> its array, or its list of rows
    cdef bint begun[64]                 # per variant: met before
    cdef char* next[64]                 # per variant of numbers: where its next record goes
    cdef Py_ssize_t left[64]            # and how many more there is room for

    def __cinit__(self, Table table, Scan scan):
        self.table = table
        self.scan = scan
        self.gathered = {}

    cdef int add(self, Py_ssize_t i) except -1:
        """Take the scan's i-th frame."""
        cdef const Span* s = &self.scan.spans[i]
        cdef Family* timing = &self.table.families[TIMING]
        cdef Reader r
        cdef uint32_t variant
        cdef const Node* layout
        r.start = s.frame + HEADER
        r.p = r.start
        r.end = r.start + s.length
        r.where = NULL
        variant = read_index(&r, timing.n, timing.name)
        layout = &timing.variants[variant]
        if not self.begun[variant]:
            self.begin(variant, layout)
        if self.next[variant] is NULL:
            message = self.scan.message(i)
            row = [self.scan.index]
            for j in range(layout.n):
                if layout.child[j].op == LATER:
                    continue
                value = getattr(message, <object>layout.child[j].name)
                row.append(value)
                if layout.child[j].op == OPT:
                    row.append(value is not None)
            (<list>self.gathered[variant]).append(tuple(row))
            return 0
        if self.left[variant] == 0:
            self.extend(variant, layout)
        memset(self.next[variant], 0, layout.column)
        (<int64_t*>self.next[variant])[0] = self.scan.index
        read_record(&r, layout, self.next[variant])
        if self.scan.strict:
            check_end(&r, (<object>layout.cls).__name__)
        self.next[variant] += layout.column
        self.left[variant] -= 1
        return 0

    cdef int begin(self, uint32_t variant, const Node* layout) except -1:
        dtype, plain = self.table.columns[variant]
        self.begun[variant] = True
        self.gathered[variant] = np.empty(2 * BATCH, dtype) if plain else []
        if plain:
            self.next[variant] = data_of(self.gathered[variant])
            self.left[variant] = 2 * BATCH
        return 0

    cdef int extend(self, uint32_t variant, const Node* layout) except -1:
        """Make the room that the rest of the buffer will take, going by the part of it that is done."""
        full = self.gathered[variant]
        cdef Py_ssize_t used = full.nbytes
        cdef Py_ssize_t room = foresee(used, self.scan.at, self.scan.source.n) // layout.column
        array = np.empty(room, full.dtype)
        memcpy(data_of(array), data_of(full), used)
        self.gathered[variant] = array
        self.next[variant] = data_of(array) + used
        self.left[variant] = room - used // layout.column
        return 0

    cdef dict arrays(self):
        """The finished arrays by variant name, in the order of the variants."""
        cdef dict named = {}
        for variant in sorted(self.gathered):
            rows = self.gathered[variant]
            if self.next[<int>variant] is NULL:
                rows = np.array(rows, self.table.columns[variant][0])
            else:
                n = len(rows) - self.left[<int>variant]
                if self.left[<int>variant] <= n >> 3:
                    rows = rows[:n]             # kept whole, as in finish
                else:
                    rows.resize(n, refcheck=False)
            named[(<object>self.table.families[TIMING].variants[<int>variant].cls).__name__] = rows
        return named


cdef char* data_of(array) except NULL:
    return <char*><uintptr_t>array.ctypes.data


cdef int read_record(Reader* r, const Node* message, char* record) except -1:
    """Read a message of numbers into its record."""
    cdef Where here
    cdef Py_ssize_t i
    cdef const Node* t
    cdef char* to
    here.up = NULL
    here.node = message
    here.key = NULL
    r.where = &here
    for i in range(message.n):
        here.index = i
        t = &message.child[i]
        to = record + t.column
        if t.op == LATER:
            continue
        if t.op == OPT:
            record[t.present] = read_tag(r)
            if record[t.present]:
                read_number(r, t.child, to)
            elif t.child.op == F64:
                (<double*>to)[0] = NAN
            else:
                (<float*>to)[0] = NAN
        else:
            read_number(r, t, to)
    return 0


cdef inline int read_number(Reader* r, const Node* t, char* to) except -1:
    """Read a number into native memory that is aligned for it."""
    cdef int op = t.op
    if op == F64:
        need(r, 8)
        (<double*>to)[0] = ff_load_f64(r.p)
        r.p += 8
    elif op == U64:
        (<uint64_t*>to)[0] = read_varint(r, t.most)
    elif op == U32:
        (<uint32_t*>to)[0] = <uint32_t>read_varint(r, t.most)
    elif op == U16:
        (<uint16_t*>to)[0] = <uint16_t>read_varint(r, t.most)
    elif op == ENUM:
        (<uint32_t*>to)[0] = read_index(r, t.n, t.cls)
    elif op == U8:
        need(r, 1)
        to[0] = r.p[0]
        r.p += 1
    elif op == I32:
        (<int32_t*>to)[0] = unzigzag(read_varint(r, 0xFFFFFFFFu))
    else:
        need(r, 4)
        (<uint32_t*>to)[0] = ff_load32(r.p)
        r.p += 4
    return 0


# ---------------------------------------------------------------------------------------------------------- kernels

ff_sha256_use(NULL)
cdef bytes choice = os.environ.get("FLODL_FAST_SHA256", "").encode()

if choice and ff_sha256_use(choice):
    raise ImportError(f"FLODL_FAST_SHA256={choice.decode()!r} is not a SHA-256 kernel of this CPU; "
                      f"available: {ff_sha256_kernels().decode()}")


def sha256_kernel():
    """The SHA-256 kernel in use, and all that this CPU can run, best first."""
    return ff_sha256_kernel().decode(), ff_sha256_kernels().decode().split(",")
