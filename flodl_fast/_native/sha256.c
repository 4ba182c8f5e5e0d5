#include "sha256.h"

#include <string.h>

/* A block is 64 bytes; the last one also holds a 0x80 and 8 bytes of bit length. */
#define BLOCK 64
#define LAST_ROOM (BLOCK - 9)

/* Messages from which on lanes, all of which take their time, are faster than pairs. */
#define WORTH_LANES 15

/* The outer message: an inner digest after the key block. */
#define OUTER_BITS ((BLOCK + 32) * 8)

static const uint32_t INITIAL[8] = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
};

static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

/* What a kernel does. finish ends a message and its HMAC: it takes the inner state, the `rest` (< 64)
 * bytes not compressed yet out of `total`, key block included, and the key's outer state. */
typedef struct {
    const uint32_t *state;
    const uint8_t *data;
    size_t rest;
    uint64_t total;
} ending;

typedef struct {
    const char *name;
    int (*usable)(void);
    void (*compress)(uint32_t state[8], const uint8_t *data, size_t blocks);
    void (*compress_pair)(uint32_t a[8], const uint8_t *a_data, uint32_t b[8], const uint8_t *b_data,
                          size_t blocks);
    void (*compress_copy)(uint32_t state[8], uint8_t *to, const uint8_t *data, size_t blocks);
    void (*finish)(uint8_t digest[32], const ending *end, const uint32_t outer[8]);
    void (*finish_pair)(uint8_t a_digest[32], const ending *a, uint8_t b_digest[32], const ending *b,
                        const uint32_t outer[8]);
    /* Tag at most FF_LANES messages of at most LAST_ROOM bytes; null where the CPU has no lanes. */
    void (*mac8_lanes)(const ff_mac_key *key, const ff_message *messages, size_t n, uint8_t *tags);
} kernel;

/* Portable C ------------------------------------------------------------------------------------- */

static uint32_t load_be32(const uint8_t *p)
{
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static void store_be32(uint8_t *p, uint32_t x)
{
    p[0] = (uint8_t)(x >> 24);
    p[1] = (uint8_t)(x >> 16);
    p[2] = (uint8_t)(x >> 8);
    p[3] = (uint8_t)x;
}

static void store_bits(uint8_t *p, uint64_t bytes)
{
    store_be32(p, (uint32_t)(bytes >> 29));
    store_be32(p + 4, (uint32_t)(bytes << 3));
}

#define ROTATE(x, n) ((x) >> (n) | (x) << (32 - (n)))

/* The eight words change places in every round; the caller turns their names instead. */
#define ROUND(a, b, c, d, e, f, g, h, i) \
    do { \
        h += (ROTATE(e, 6) ^ ROTATE(e, 11) ^ ROTATE(e, 25)) + (g ^ (e & (f ^ g))) + K[t + (i)] + w[i]; \
        d += h; \
        h += (ROTATE(a, 2) ^ ROTATE(a, 13) ^ ROTATE(a, 22)) + (b ^ ((a ^ b) & (b ^ c))); \
    } while (0)

#define EIGHT_ROUNDS(i) \
    do { \
        ROUND(a, b, c, d, e, f, g, h, i); \
        ROUND(h, a, b, c, d, e, f, g, i + 1); \
        ROUND(g, h, a, b, c, d, e, f, i + 2); \
        ROUND(f, g, h, a, b, c, d, e, i + 3); \
        ROUND(e, f, g, h, a, b, c, d, i + 4); \
        ROUND(d, e, f, g, h, a, b, c, i + 5); \
        ROUND(c, d, e, f, g, h, a, b, i + 6); \
        ROUND(b, c, d, e, f, g, h, a, i + 7); \
    } while (0)

static void portable_compress(uint32_t state[8], const uint8_t *data, size_t blocks)
{
    for (; blocks; blocks--, data += BLOCK) {
        uint32_t w[16];
        uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
        uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
        for (int i = 0; i < 16; i++)
            w[i] = load_be32(data + 4 * i);
        for (int t = 0; t < 64; t += 16) {
            if (t)
                for (int i = 0; i < 16; i++) {
                    const uint32_t next = w[(i + 1) & 15], late = w[(i + 14) & 15];
                    w[i] += (ROTATE(next, 7) ^ ROTATE(next, 18) ^ next >> 3) + w[(i + 9) & 15] +
                            (ROTATE(late, 17) ^ ROTATE(late, 19) ^ late >> 10);
                }
            EIGHT_ROUNDS(0);
            EIGHT_ROUNDS(8);
        }
        state[0] += a, state[1] += b, state[2] += c, state[3] += d;
        state[4] += e, state[5] += f, state[6] += g, state[7] += h;
    }
}

static void portable_compress_pair(uint32_t a[8], const uint8_t *a_data, uint32_t b[8], const uint8_t *b_data,
                                   size_t blocks)
{
    portable_compress(a, a_data, blocks);
    portable_compress(b, b_data, blocks);
}

static void portable_compress_copy(uint32_t state[8], uint8_t *to, const uint8_t *data, size_t blocks)
{
    memcpy(to, data, blocks * BLOCK);
    portable_compress(state, data, blocks);
}

static void portable_finish(uint8_t digest[32], const ending *end, const uint32_t outer[8])
{
    uint32_t state[8];
    uint8_t block[BLOCK] = {0};
    memcpy(state, end->state, sizeof state);
    if (end->rest)
        memcpy(block, end->data, end->rest);
    block[end->rest] = 0x80;
    if (end->rest > LAST_ROOM) {
        portable_compress(state, block, 1);
        memset(block, 0, BLOCK);
    }
    store_bits(block + BLOCK - 8, end->total);
    portable_compress(state, block, 1);

    memset(block, 0, BLOCK);
    for (int i = 0; i < 8; i++)
        store_be32(block + 4 * i, state[i]);
    block[32] = 0x80;
    store_be32(block + BLOCK - 4, OUTER_BITS);
    memcpy(state, outer, sizeof state);
    portable_compress(state, block, 1);
    for (int i = 0; i < 8; i++)
        store_be32(digest + 4 * i, state[i]);
}

static void portable_finish_pair(uint8_t a_digest[32], const ending *a, uint8_t b_digest[32], const ending *b,
                                 const uint32_t outer[8])
{
    portable_finish(a_digest, a, outer);
    portable_finish(b_digest, b, outer);
}

static int always(void)
{
    return 1;
}

static const kernel PORTABLE = {
    "portable",      always,               portable_compress, portable_compress_pair, portable_compress_copy,
    portable_finish, portable_finish_pair, NULL,
};

/* CPU instructions -------------------------------------------------------------------------------
 *
 * Both instruction sets work on four words at a time. Each branch below defines the same few
 * operations on such a quad; the kernel itself is written once, over them. */

#if defined(__GNUC__) && defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>

#define HARDWARE "shani"
#define TARGET __attribute__((target("sha,sse4.1")))
#define INLINE static inline TARGET __attribute__((always_inline))

typedef __m128i quad;

static int hardware_usable(void)
{
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSSE3) || !(c & bit_SSE4_1))
        return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_SHA);
}

INLINE quad load(const void *p)
{
    return _mm_loadu_si128((const __m128i *)p);
}

INLINE void store(void *p, quad x)
{
    _mm_storeu_si128((__m128i *)p, x);
}

INLINE quad words(uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3)
{
    return _mm_set_epi32((int)w3, (int)w2, (int)w1, (int)w0);
}

INLINE quad add(quad x, quad y)
{
    return _mm_add_epi32(x, y);
}

INLINE quad either(quad x, quad y)
{
    return _mm_or_si128(x, y);
}

/* Byte i of the result is byte order[i] of x, 0 where order[i] is 0x80. */
INLINE quad pick(quad x, quad order)
{
    return _mm_shuffle_epi8(x, order);
}

INLINE quad swap_words(quad x)
{
    return pick(x, _mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3));
}

/* The instructions want the state as the words FEBA and HGDC. */
INLINE void enter(quad state[2], quad abcd, quad efgh)
{
    const quad dcba = _mm_shuffle_epi32(abcd, 0x1b), hgfe = _mm_shuffle_epi32(efgh, 0x1b);
    state[0] = _mm_unpackhi_epi64(hgfe, dcba);
    state[1] = _mm_unpacklo_epi64(hgfe, dcba);
}

INLINE void leave(const quad state[2], quad *abcd, quad *efgh)
{
    *abcd = _mm_shuffle_epi32(_mm_unpackhi_epi64(state[1], state[0]), 0x1b);
    *efgh = _mm_shuffle_epi32(_mm_unpacklo_epi64(state[1], state[0]), 0x1b);
}

INLINE void four_rounds(quad state[2], quad wk)
{
    state[1] = _mm_sha256rnds2_epu32(state[1], state[0], wk);
    state[0] = _mm_sha256rnds2_epu32(state[0], state[1], _mm_shuffle_epi32(wk, 0x0e));
}

/* The four words of the schedule that follow these sixteen. */
INLINE quad expand(quad w0, quad w1, quad w2, quad w3)
{
    return _mm_sha256msg2_epu32(add(_mm_sha256msg1_epu32(w0, w1), _mm_alignr_epi8(w3, w2, 4)), w3);
}

/* clang before 16 hides the intrinsics unless the whole file is compiled for them (Apple's is). */
#elif defined(__GNUC__) && defined(__aarch64__) && !defined(__AARCH64EB__) && \
    (!defined(__clang__) || __clang_major__ >= 16 || defined(__ARM_FEATURE_SHA2))

#include <arm_neon.h>
#ifdef __linux__
#include <sys/auxv.h>
#endif

#define HARDWARE "armv8"
#ifdef __ARM_FEATURE_SHA2
#define TARGET
#else
#define TARGET __attribute__((target("+crypto")))
#endif
#define INLINE static inline TARGET __attribute__((always_inline))

typedef uint32x4_t quad;

static int hardware_usable(void)
{
#if defined(__APPLE__)
    return 1;
#elif defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_SHA2) != 0;
#else
    return 0;
#endif
}

INLINE quad load(const void *p)
{
    return vreinterpretq_u32_u8(vld1q_u8((const uint8_t *)p));
}

INLINE void store(void *p, quad x)
{
    vst1q_u8((uint8_t *)p, vreinterpretq_u8_u32(x));
}

INLINE quad words(uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3)
{
    const uint32_t w[4] = {w0, w1, w2, w3};
    return vld1q_u32(w);
}

INLINE quad add(quad x, quad y)
{
    return vaddq_u32(x, y);
}

INLINE quad either(quad x, quad y)
{
    return vorrq_u32(x, y);
}

INLINE quad pick(quad x, quad order)
{
    return vreinterpretq_u32_u8(vqtbl1q_u8(vreinterpretq_u8_u32(x), vreinterpretq_u8_u32(order)));
}

INLINE quad swap_words(quad x)
{
    return vreinterpretq_u32_u8(vrev32q_u8(vreinterpretq_u8_u32(x)));
}

INLINE void enter(quad state[2], quad abcd, quad efgh)
{
    state[0] = abcd;
    state[1] = efgh;
}

INLINE void leave(const quad state[2], quad *abcd, quad *efgh)
{
    *abcd = state[0];
    *efgh = state[1];
}

INLINE void four_rounds(quad state[2], quad wk)
{
    const quad abcd = state[0];
    state[0] = vsha256hq_u32(abcd, state[1], wk);
    state[1] = vsha256h2q_u32(state[1], abcd, wk);
}

INLINE quad expand(quad w0, quad w1, quad w2, quad w3)
{
    return vsha256su1q_u32(vsha256su0q_u32(w0, w1), w2, w3);
}

#endif

#ifdef HARDWARE

/* One message on its way through a block. Functions over lanes take one or two: y may be null, and as
 * everything here is inlined, each use is compiled for its count. Two chains of rounds side by side
 * hide each other's latency. */
typedef struct {
    quad state[2], w[4];
} lane;

INLINE void step(lane *x, int i, quad k, int more)
{
    four_rounds(x->state, add(x->w[i], k));
    if (more)
        x->w[i] = expand(x->w[i], x->w[(i + 1) & 3], x->w[(i + 2) & 3], x->w[(i + 3) & 3]);
}

INLINE void sixteen_rounds(lane *x, lane *y, const uint32_t *k, int more)
{
#define STEP(i) \
    do { \
        const quad ki = load(k + 4 * i); \
        step(x, i, ki, more); \
        if (y) \
            step(y, i, ki, more); \
    } while (0)
    STEP(0);
    STEP(1);
    STEP(2);
    STEP(3);
#undef STEP
}

INLINE void one_block(lane *x, lane *y)
{
    const quad x0 = x->state[0], x1 = x->state[1];
    const quad y0 = y ? y->state[0] : x0, y1 = y ? y->state[1] : x1;
    sixteen_rounds(x, y, K, 1);
    sixteen_rounds(x, y, K + 16, 1);
    sixteen_rounds(x, y, K + 32, 1);
    sixteen_rounds(x, y, K + 48, 0);
    x->state[0] = add(x->state[0], x0);
    x->state[1] = add(x->state[1], x1);
    if (y) {
        y->state[0] = add(y->state[0], y0);
        y->state[1] = add(y->state[1], y1);
    }
}

INLINE void load_block(lane *x, const uint8_t *data)
{
    x->w[0] = swap_words(load(data));
    x->w[1] = swap_words(load(data + 16));
    x->w[2] = swap_words(load(data + 32));
    x->w[3] = swap_words(load(data + 48));
}

INLINE void load_state(lane *x, const uint32_t state[8])
{
    enter(x->state, load(state), load(state + 4));
}

INLINE void store_state(const lane *x, uint32_t state[8])
{
    quad abcd, efgh;
    leave(x->state, &abcd, &efgh);
    store(state, abcd);
    store(state + 4, efgh);
}

TARGET static void hardware_compress(uint32_t state[8], const uint8_t *data, size_t blocks)
{
    lane x;
    load_state(&x, state);
    for (; blocks; blocks--, data += BLOCK) {
        load_block(&x, data);
        one_block(&x, NULL);
    }
    store_state(&x, state);
}

TARGET static void hardware_compress_pair(uint32_t a[8], const uint8_t *a_data, uint32_t b[8],
                                          const uint8_t *b_data, size_t blocks)
{
    lane x, y;
    load_state(&x, a);
    load_state(&y, b);
    for (; blocks; blocks--, a_data += BLOCK, b_data += BLOCK) {
        load_block(&x, a_data);
        load_block(&y, b_data);
        one_block(&x, &y);
    }
    store_state(&x, a);
    store_state(&y, b);
}

/* Eight blocks are copied at a time: one by one, reads and writes take turns at the memory, which where they
 * meet in its banks costs a tenth of all the time. What is hashed is the copy, whatever becomes of the data. */
TARGET static void hardware_compress_copy(uint32_t state[8], uint8_t *to, const uint8_t *data, size_t blocks)
{
    lane x;
    load_state(&x, state);
    while (blocks) {
        const size_t n = (blocks < 8 ? blocks : 8) * BLOCK;
        for (size_t i = 0; i < n; i += 16)
            store(to + i, load(data + i));
        for (size_t i = 0; i < n; i += BLOCK) {
            load_block(&x, to + i);
            one_block(&x, NULL);
        }
        to += n;
        data += n;
        blocks -= n / BLOCK;
    }
    store_state(&x, state);
}

/* Load the state and the rest of a message, all but the bit length in place for its last block. From 16
 * bytes on each quad is loaded from the message, what is past its end from its last 16 bytes and shifted
 * out: rounds would have to wait for a block that is put together in memory. */
INLINE void load_ending(lane *x, const ending *end)
{
#define NONE 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80
    static const uint8_t SHIFT[BLOCK] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, NONE, NONE, NONE};
#undef NONE
    static const uint8_t MARK[2 * BLOCK] = {[BLOCK] = 0x80};
    const quad zero = words(0, 0, 0, 0);
    const size_t rest = end->rest;
    const uint8_t *const data = end->data, *const mark = MARK + BLOCK - rest;
    quad block[4] = {zero, zero, zero, zero};

    if (rest >= 16) {
        const size_t at3 = rest - 16, at2 = at3 < 32 ? at3 : 32, at1 = at3 < 16 ? at3 : 16;
        block[0] = load(data);
        block[1] = pick(load(data + at1), load(SHIFT + 16 - at1));
        block[2] = pick(load(data + at2), load(SHIFT + 32 - at2));
        block[3] = pick(load(data + at3), load(SHIFT + 48 - at3));
    } else {
        uint64_t low = 0, high = 0;
        if (rest >= 8) {
            memcpy(&low, data, 8);
            memcpy(&high, data + rest - 8, 8);
            high = high >> 8 * (15 - rest) >> 8;
        } else {
            for (size_t i = 0; i < rest; i++)
                low |= (uint64_t)data[i] << 8 * i;
        }
        block[0] = words((uint32_t)low, (uint32_t)(low >> 32), (uint32_t)high, (uint32_t)(high >> 32));
    }
    /* Not a loop, in which gcc keeps the words in memory. */
    x->w[0] = swap_words(either(block[0], load(mark)));
    x->w[1] = swap_words(either(block[1], load(mark + 16)));
    x->w[2] = swap_words(either(block[2], load(mark + 32)));
    x->w[3] = swap_words(either(block[3], load(mark + 48)));

    load_state(x, end->state);
    if (rest > LAST_ROOM) {
        one_block(x, NULL);
        x->w[0] = x->w[1] = x->w[2] = x->w[3] = zero;
    }
    x->w[3] = either(x->w[3], words(0, 0, (uint32_t)(end->total >> 29), (uint32_t)(end->total << 3)));
}

INLINE void load_outer(lane *x, const uint32_t outer[8])
{
    leave(x->state, &x->w[0], &x->w[1]);
    x->w[2] = words(0x80000000, 0, 0, 0);
    x->w[3] = words(0, 0, 0, OUTER_BITS);
    load_state(x, outer);
}

INLINE void store_digest(const lane *x, uint8_t digest[32])
{
    quad abcd, efgh;
    leave(x->state, &abcd, &efgh);
    store(digest, swap_words(abcd));
    store(digest + 16, swap_words(efgh));
}

TARGET static void hardware_finish(uint8_t digest[32], const ending *end, const uint32_t outer[8])
{
    lane x;
    load_ending(&x, end);
    one_block(&x, NULL);
    load_outer(&x, outer);
    one_block(&x, NULL);
    store_digest(&x, digest);
}

TARGET static void hardware_finish_pair(uint8_t a_digest[32], const ending *a, uint8_t b_digest[32],
                                        const ending *b, const uint32_t outer[8])
{
    lane x, y;
    load_ending(&x, a);
    load_ending(&y, b);
    one_block(&x, &y);
    load_outer(&x, outer);
    load_outer(&y, outer);
    one_block(&x, &y);
    store_digest(&x, a_digest);
    store_digest(&y, b_digest);
}

#define HARDWARE_KERNEL(name, usable, mac8_lanes) \
    { \
        name, usable, hardware_compress, hardware_compress_pair, hardware_compress_copy, hardware_finish, \
            hardware_finish_pair, mac8_lanes \
    }

static const kernel HARDWARE_ALONE = HARDWARE_KERNEL(HARDWARE, hardware_usable, NULL);

/* gcc before 7 lacks some of the intrinsics. */
#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 7)

#include "sha256_lanes.h"

static const kernel WITH_LANES = HARDWARE_KERNEL("avx512", lanes_usable, lanes_mac8);

#define KERNELS {&WITH_LANES, &HARDWARE_ALONE, &PORTABLE}
#define NAMES "avx512," HARDWARE ",portable"

#else

#define KERNELS {&HARDWARE_ALONE, &PORTABLE}
#define NAMES HARDWARE ",portable"

#endif

#else

#define KERNELS {&PORTABLE}
#define NAMES "portable"

#endif

#define PUBLIC(x) ff_sha256_##x
#include "kernel_choice.h"

/* HMAC ------------------------------------------------------------------------------------------- */

void ff_mac_key_init(ff_mac_key *key, const uint8_t *salt, size_t length)
{
    uint8_t inner[BLOCK], outer[BLOCK];
    for (size_t i = 0; i < BLOCK; i++) {
        const uint8_t byte = i < length ? salt[i] : 0;
        inner[i] = byte ^ 0x36;
        outer[i] = byte ^ 0x5c;
    }
    memcpy(key->inner, INITIAL, sizeof INITIAL);
    memcpy(key->outer, INITIAL, sizeof INITIAL);
    active->compress_pair(key->inner, inner, key->outer, outer, 1);
}

void ff_mac32(const ff_mac_key *key, const uint8_t *data, size_t length, uint8_t digest[32])
{
    ending end = {key->inner, data, length, BLOCK + (uint64_t)length};
    uint32_t state[8];
    if (length >= BLOCK) {
        memcpy(state, key->inner, sizeof state);
        active->compress(state, data, length / BLOCK);
        end.state = state;
        end.data = data + length / BLOCK * BLOCK;
        end.rest = length % BLOCK;
    }
    active->finish(digest, &end, key->outer);
}

void ff_mac8(const ff_mac_key *key, const uint8_t *data, size_t length, uint8_t tag[FF_TAG_BYTES])
{
    uint8_t digest[32];
    ff_mac32(key, data, length, digest);
    memcpy(tag, digest, FF_TAG_BYTES);
}

void ff_mac8_pair(const ff_mac_key *key, const uint8_t *a, size_t a_length, const uint8_t *b,
                  size_t b_length, uint8_t a_tag[FF_TAG_BYTES], uint8_t b_tag[FF_TAG_BYTES])
{
    const size_t a_blocks = a_length / BLOCK, b_blocks = b_length / BLOCK;
    const size_t both = a_blocks < b_blocks ? a_blocks : b_blocks;
    ending a_end = {key->inner, a, a_length, BLOCK + (uint64_t)a_length};
    ending b_end = {key->inner, b, b_length, BLOCK + (uint64_t)b_length};
    uint32_t a_state[8], b_state[8];
    uint8_t a_digest[32], b_digest[32];

    if (a_blocks) {
        memcpy(a_state, key->inner, sizeof a_state);
        a_end.state = a_state;
        a_end.data = a + a_blocks * BLOCK;
        a_end.rest = a_length % BLOCK;
    }
    if (b_blocks) {
        memcpy(b_state, key->inner, sizeof b_state);
        b_end.state = b_state;
        b_end.data = b + b_blocks * BLOCK;
        b_end.rest = b_length % BLOCK;
    }
    if (both)
        active->compress_pair(a_state, a, b_state, b, both);
    if (a_blocks > both)
        active->compress(a_state, a + both * BLOCK, a_blocks - both);
    if (b_blocks > both)
        active->compress(b_state, b + both * BLOCK, b_blocks - both);
    active->finish_pair(a_digest, &a_end, b_digest, &b_end, key->outer);
    memcpy(a_tag, a_digest, FF_TAG_BYTES);
    memcpy(b_tag, b_digest, FF_TAG_BYTES);
}

int ff_sha256_lanes(void)
{
    return active->mac8_lanes != NULL;
}

size_t ff_mac8_lanes(const ff_mac_key *key, const ff_message *messages, size_t n, uint8_t *tags)
{
    if (!active->mac8_lanes || n < WORTH_LANES)
        return 0;
    if (n > FF_LANES)
        n = FF_LANES;
    for (size_t i = 0; i < n; i++)
        if (messages[i].length > LAST_ROOM)
            return 0;
    active->mac8_lanes(key, messages, n, tags);
    return n;
}

void ff_mac_begin(ff_mac_stream *stream, const ff_mac_key *key)
{
    memcpy(stream->state, key->inner, sizeof stream->state);
    stream->length = BLOCK;
}

void ff_mac_update(ff_mac_stream *stream, const uint8_t *data, size_t length)
{
    const size_t held = stream->length % BLOCK;
    stream->length += length;
    if (held) {
        const size_t gap = BLOCK - held;
        if (length < gap) {
            if (length)
                memcpy(stream->tail + held, data, length);
            return;
        }
        memcpy(stream->tail + held, data, gap);
        active->compress(stream->state, stream->tail, 1);
        data += gap;
        length -= gap;
    }
    if (length >= BLOCK) {
        const size_t whole = length / BLOCK * BLOCK;
        active->compress(stream->state, data, whole / BLOCK);
        data += whole;
        length -= whole;
    }
    if (length)
        memcpy(stream->tail, data, length);
}

void ff_mac_update_pair(ff_mac_stream *a, ff_mac_stream *b, const uint8_t *data, size_t length)
{
    /* Bytes each stream needs to stand at a block's start; from there both run side by side. */
    const size_t a_gap = (BLOCK - a->length % BLOCK) % BLOCK, b_gap = (BLOCK - b->length % BLOCK) % BLOCK;
    const size_t gap = a_gap > b_gap ? a_gap : b_gap;
    if (length >= gap + BLOCK) {
        const size_t whole = (length - gap) / BLOCK * BLOCK;
        ff_mac_update(a, data, a_gap);
        ff_mac_update(b, data, b_gap);
        active->compress_pair(a->state, data + a_gap, b->state, data + b_gap, whole / BLOCK);
        a->length += whole;
        b->length += whole;
        ff_mac_update(a, data + a_gap + whole, length - a_gap - whole);
        ff_mac_update(b, data + b_gap + whole, length - b_gap - whole);
    } else {
        ff_mac_update(a, data, length);
        ff_mac_update(b, data, length);
    }
}

void ff_mac_update_copy(ff_mac_stream *stream, uint8_t *to, const uint8_t *data, size_t length)
{
    const size_t gap = (BLOCK - stream->length % BLOCK) % BLOCK;
    size_t whole = 0;
    if (length >= gap + BLOCK) {
        whole = (length - gap) / BLOCK * BLOCK;
        memcpy(to, data, gap);
        ff_mac_update(stream, data, gap);
        active->compress_copy(stream->state, to + gap, data + gap, whole / BLOCK);
        stream->length += whole;
        whole += gap;
    }
    if (length > whole) {
        memcpy(to + whole, data + whole, length - whole);
        ff_mac_update(stream, data + whole, length - whole);
    }
}

void ff_mac_end(ff_mac_stream *stream, const ff_mac_key *key, uint8_t tag[FF_TAG_BYTES])
{
    const ending end = {stream->state, stream->tail, stream->length % BLOCK, stream->length};
    uint8_t digest[32];
    active->finish(digest, &end, key->outer);
    memcpy(tag, digest, FF_TAG_BYTES);
}
