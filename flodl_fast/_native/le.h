/* Little-endian loads and stores at any alignment, on any host. */
#ifndef FLODL_FAST_LE_H
#define FLODL_FAST_LE_H

#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#define FF_LE16(x) __builtin_bswap16(x)
#define FF_LE32(x) __builtin_bswap32(x)
#define FF_LE64(x) __builtin_bswap64(x)
#else
#define FF_LE16(x) (x)
#define FF_LE32(x) (x)
#define FF_LE64(x) (x)
#endif

static inline uint16_t ff_load16(const uint8_t *p) { uint16_t x; memcpy(&x, p, 2); return FF_LE16(x); }
static inline uint32_t ff_load32(const uint8_t *p) { uint32_t x; memcpy(&x, p, 4); return FF_LE32(x); }
static inline uint64_t ff_load64(const uint8_t *p) { uint64_t x; memcpy(&x, p, 8); return FF_LE64(x); }
static inline void ff_store16(uint8_t *p, uint16_t x) { x = FF_LE16(x); memcpy(p, &x, 2); }
static inline void ff_store32(uint8_t *p, uint32_t x) { x = FF_LE32(x); memcpy(p, &x, 4); }
static inline void ff_store64(uint8_t *p, uint64_t x) { x = FF_LE64(x); memcpy(p, &x, 8); }

static inline double ff_load_f64(const uint8_t *p) { uint64_t bits = ff_load64(p); double x; memcpy(&x, &bits, 8); return x; }
static inline void ff_store_f64(uint8_t *p, double x) { uint64_t bits; memcpy(&bits, &x, 8); ff_store64(p, bits); }

/* Copies, comparisons and hashes of a few bytes: names, the heads of tensors, small tensors. Shorter than a call; most
 * names have 8 to 16 bytes, which are their first and last 8, and these may overlap. */
static inline void ff_copy_short(uint8_t *to, const void *data, size_t n) {
    const uint8_t *from = (const uint8_t *)data;
    if (n - 8 <= 8) {
        const uint64_t first = ff_load64(from), last = ff_load64(from + n - 8);
        ff_store64(to, first);
        ff_store64(to + n - 8, last);
    } else if (n > 16) {
        for (size_t i = 0; i + 16 <= n; i += 16)
            memcpy(to + i, from + i, 16);
        memcpy(to + n - 16, from + n - 16, 16);
    } else {
        for (size_t i = 0; i < n; i++)
            to[i] = from[i];
    }
}
static inline int ff_same_short(const void *a, const void *b, size_t n) {
    const uint8_t *x = (const uint8_t *)a, *y = (const uint8_t *)b;
    uint64_t unlike = 0;
    if (n >= 8) {
        for (size_t i = 0; i + 8 < n; i += 8)
            unlike |= ff_load64(x + i) ^ ff_load64(y + i);
        unlike |= ff_load64(x + n - 8) ^ ff_load64(y + n - 8);
    } else {
        for (size_t i = 0; i < n; i++)
            unlike |= x[i] ^ y[i];
    }
    return unlike == 0;
}
static inline uint32_t ff_hash_short(const uint8_t *p, size_t n) {
    uint64_t h = n;
    if (n >= 8) {
        for (size_t i = 0; i + 16 < n; i += 8)
            h = (h ^ ff_load64(p + 8 + i)) * 0x9e3779b97f4a7c15u;
        h = (h ^ ff_load64(p)) * 0x9e3779b97f4a7c15u;
        h = (h ^ ff_load64(p + n - 8)) * 0x9e3779b97f4a7c15u;
    } else {
        for (size_t i = 0; i < n; i++)
            h = (h ^ p[i]) * 0x9e3779b97f4a7c15u;
    }
    return (uint32_t)(h >> 32);
}

/* f32 <-> f64 that keeps a NaN's payload and its signalling bit, which the CPU's own conversion would set. */
static inline double ff_load_f32(const uint8_t *p) {
    uint32_t bits = ff_load32(p);
    float narrow;
    double wide;
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        uint64_t nan = ((uint64_t)(bits & 0x80000000u) << 32) | 0x7ff0000000000000u | ((uint64_t)(bits & 0x7fffffu) << 29);
        memcpy(&wide, &nan, 8);
        return wide;
    }
    memcpy(&narrow, &bits, 4);
    return narrow;
}
static inline void ff_store_f32(uint8_t *p, double x) {
    uint64_t wide;
    uint32_t bits;
    memcpy(&wide, &x, 8);
    if (x != x) {
        bits = (uint32_t)(wide >> 32 & 0x80000000u) | 0x7f800000u | (uint32_t)(wide >> 29 & 0x7fffffu);
        if (!(bits & 0x7fffffu)) bits |= 0x400000u; /* a payload that only f64 can hold: still a NaN */
    } else {
        float narrow = (float)x;
        memcpy(&bits, &narrow, 4);
    }
    ff_store32(p, bits);
}

#endif
