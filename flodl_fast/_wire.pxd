# The bounded reader and the growing writer, and where in a message they are.

from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from "_native/le.h" nogil:
    uint16_t ff_load16(const uint8_t* p)
    uint32_t ff_load32(const uint8_t* p)
    uint64_t ff_load64(const uint8_t* p)
    double ff_load_f64(const uint8_t* p)
    double ff_load_f32(const uint8_t* p)
    void ff_store16(uint8_t* p, uint16_t x)
    void ff_store32(uint8_t* p, uint32_t x)
    void ff_store64(uint8_t* p, uint64_t x)
    void ff_store_f64(uint8_t* p, double x)
    void ff_store_f32(uint8_t* p, double x)
    void ff_copy_short(uint8_t* to, const void* data, size_t n)
    bint ff_same_short(const void* a, const void* b, size_t n)
    uint32_t ff_hash_short(const uint8_t* p, size_t n)


cdef extern from "_native/sha256.h" nogil:
    ctypedef struct ff_mac_key:
        pass
    ctypedef struct ff_mac_stream:
        pass
    void ff_mac_key_init(ff_mac_key* key, const uint8_t* salt, size_t length)
    void ff_mac8(const ff_mac_key* key, const uint8_t* data, size_t length, uint8_t* tag)
    void ff_mac8_pair(const ff_mac_key* key, const uint8_t* a, size_t a_length, const uint8_t* b, size_t b_length,
                      uint8_t* a_tag, uint8_t* b_tag)
    ctypedef struct ff_message:
        const uint8_t* data
        size_t length
    size_t ff_mac8_lanes(const ff_mac_key* key, const ff_message* messages, size_t n, uint8_t* tags)
    void ff_mac_begin(ff_mac_stream* stream, const ff_mac_key* key)
    void ff_mac_update(ff_mac_stream* stream, const uint8_t* data, size_t length)
    void ff_mac_update_copy(ff_mac_stream* stream, uint8_t* to, const uint8_t* data, size_t length)
    void ff_mac_update_pair(ff_mac_stream* a, ff_mac_stream* b, const uint8_t* data, size_t length)
    void ff_mac_end(ff_mac_stream* stream, const ff_mac_key* key, uint8_t* tag)
    bint ff_mac_equal(const uint8_t* a, const uint8_t* b)
    const char* ff_sha256_kernels()
    const char* ff_sha256_kernel()
    enum: FF_LANES
    bint ff_sha256_lanes()
    int ff_sha256_use(const char* name)


# One wire type. The children of a list, tuple, map, option or struct lie side by side.
cdef struct Node:
    int op
    uint32_t n              # children; of an enum the number of members; of fixed bytes the length
    Node* child
    Py_ssize_t slot         # a field: its place in the message object
    Py_ssize_t least        # fewest bytes it takes on the wire
    uint64_t most           # an unsigned integer: its largest value
    bint atomic             # a struct without containers: no cycle can go through it
    PyObject* cls           # struct, enum: the class; a field of a later revision: list, dict or None
    PyObject* members       # enum: its members, by index
    PyObject* name          # a field: its name
    Py_ssize_t column       # in a record of timing_columns: a field's offset; the message's size
    Py_ssize_t present      # an optional field there: the offset of its flag


# The way from the message to the value at hand, for error messages: a list on the C stack, innermost first.
cdef struct Where:
    Where* up
    const Node* node        # the container
    Py_ssize_t index        # which field or item
    PyObject* key           # a map's key


cdef struct Reader:
    const uint8_t* start
    const uint8_t* p
    const uint8_t* end
    Where* where


cdef struct Writer:
    uint8_t* start
    uint8_t* p
    uint8_t* end
    PyObject* owner         # the bytes object written into, once the caller's scratch is outgrown
    Where* where
