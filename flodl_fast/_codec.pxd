cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from flodl_fast._wire cimport Node, Reader, Writer, ff_mac_key, ff_mac_stream


# The variants of one payload kind. A kind without variants (Metrics) has one node and no index on the wire.
cdef struct Family:
    Node* variants
    uint32_t n
    bint tagged
    PyObject* name


# Where the instances of a message class go.
cdef struct Entry:
    void* cls
    const Node* node
    uint32_t family         # the frame kind, 0 for Relay
    uint32_t variant


@cython.final
cdef class Table:
    cdef readonly object revision
    cdef Node* nodes
    cdef Py_ssize_t used, room
    cdef Family families[8]
    cdef Entry entries[256]
    cdef list alive                     # owns every object that the nodes point to
    cdef dict columns                   # timing variant -> (its record dtype, whether all its fields are numbers)
    cdef dict newer                     # message classes of later revisions -> the revision
    cdef list keys                      # recently read map keys, by their bytes

    cdef Node* take(self, Py_ssize_t n) noexcept
    cdef PyObject* keep(self, value)
    cdef int compile(self, Node* t, shape) except -1
    cdef int register(self, cls, uint32_t family, uint32_t variant) except -1
    cdef int plan_columns(self) except -1
    cdef const Entry* look_up(self, void* cls) noexcept
    cdef const Entry* find(self, object message) except NULL
    cdef object key(self, Reader* r, Py_ssize_t n)


cdef class Input:
    cdef Py_buffer view
    cdef const uint8_t* data
    cdef Py_ssize_t n

    cdef int skip(self, Py_ssize_t offset) except -1


cdef class Output(Input):
    cdef uint8_t* room(self, Py_ssize_t offset, Py_ssize_t n) except NULL


cpdef bint is_strict(trailing) except -1


cdef class FrameCodec:
    cdef Table table
    cdef Table twin                     # of the revision that looks the same, where the codec is lenient
    cdef ff_mac_key secret
    cdef uint32_t control_version, mux_version
    cdef readonly object revision
    cdef readonly bint lenient
    cdef readonly Py_ssize_t max_payload, max_tensors, frame_ceiling

    cdef void tag(self, const uint8_t* data, Py_ssize_t n, uint8_t* out) noexcept
    cdef bint holds(self, const uint8_t* data, Py_ssize_t n, const uint8_t* tag) noexcept
    cdef void mac_begin(self, ff_mac_stream* stream) noexcept nogil
    cdef void mac_update(self, ff_mac_stream* stream, const uint8_t* data, Py_ssize_t n) noexcept nogil
    cdef void mac_update_pair(self, ff_mac_stream* a, ff_mac_stream* b, const uint8_t* data,
                              Py_ssize_t n) noexcept nogil
    cdef void mac_update_copy(self, ff_mac_stream* stream, uint8_t* to, const uint8_t* data,
                              Py_ssize_t n) noexcept nogil
    cdef void mac_end(self, ff_mac_stream* stream, uint8_t* out) noexcept nogil
    @cython.final
    cdef int write_frame(self, Writer* w, object message) except -1
    @cython.final
    cdef Py_ssize_t measure(self, const uint8_t* p, Py_ssize_t n) except -1
    @cython.final
    cdef Py_ssize_t prefix(self, const uint8_t* p, Py_ssize_t n) except -1
    @cython.final
    cdef object read(self, uint32_t family, const uint8_t* data, Py_ssize_t n, bint strict)
    @cython.final
    cdef object open(self, const uint8_t* p, Py_ssize_t n, bint strict)
    @cython.final
    cdef void sign_pair(self, uint8_t* a, uint8_t* b) noexcept
    @cython.final
    cdef Py_ssize_t measure_mux(self, const uint8_t* p, Py_ssize_t n) except -1
    cdef object enter_record(self, Input source, bint strict, uint8_t* inner)
