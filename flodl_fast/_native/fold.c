#include "fold.h"

#include <string.h>

/* Results from this size on are written past the caches: fetching lines only to overwrite them costs more
 * than reading the result from memory later. */
#define STREAM_BYTES ((size_t)256 << 10)

/* Frames folded in one pass. The CPU fetches ahead for no more arrays than this, so further frames come
 * in passes of their own, over a chunk of values that stays in the cache. */
#define GROUP 12
#define CHUNK 8192

#define LINE 64 /* bytes in a cache line */
#define TO_LINE(p) ((LINE - (uintptr_t)(p) % LINE) % LINE)

#define EXPONENT 0x7f800000u
#define EXPONENT_UNIT 0x00800000u

#define REVERSED(x) ((x) << 24 | ((x) & 0xff00) << 8 | ((x) >> 8 & 0xff00) | (x) >> 24)

#ifdef __GNUC__
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif

INLINE uint32_t wire_u32(const uint8_t *p)
{
    uint32_t x;
    memcpy(&x, p, 4);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    x = REVERSED(x);
#endif
    return x;
}

INLINE float wire_f32(const uint8_t *p)
{
    const uint32_t bits = wire_u32(p);
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* The ends of arrays that no vector fits. */

static void fold_plain(float *out, int resume, const uint8_t *const *in, size_t frames, size_t from,
                       size_t to, float scale)
{
    for (size_t i = from; i < to; i++) {
        float sum = resume ? out[i] : 0.0f;
        for (size_t f = 0; f < frames; f++)
            sum += wire_f32(in[f] + 4 * i);
        out[i] = sum * scale;
    }
}

static void swap32_plain(uint8_t *dst, const uint8_t *src, size_t from, size_t to)
{
    for (size_t i = from; i < to; i++) {
        uint32_t x;
        memcpy(&x, src + 4 * i, 4);
        x = REVERSED(x);
        memcpy(dst + 4 * i, &x, 4);
    }
}

typedef struct {
    const char *name;
    int (*usable)(void);
    /* out = (start + in[0] + in[1] + ...) * scale, where start is zero or, to resume, out itself. stream
     * and copy ask for stores past the caches, for results of at least a cache line. */
    void (*fold)(float *out, int resume, const uint8_t *const *in, size_t frames, size_t n, float scale,
                 int stream);
    size_t (*first_nonfinite)(const uint8_t *data, size_t n);
    void (*swap32)(uint8_t *dst, const uint8_t *src, size_t n);
    void (*copy)(void *dst, const void *src, size_t length);
} kernel;

#define KERNEL(k) {#k, k##_usable, k##_fold, k##_first_nonfinite, k##_swap32, k##_copy}

static int portable_usable(void)
{
    return 1;
}

#define NAME(x) portable_##x
#define TARGET
#define BYTES 4
#define WIDTH 16
#include "fold_kernel.h"

static const kernel PORTABLE = KERNEL(portable);

/* AVX-512 has been measured and is left out: no faster than AVX2 in the caches or from memory. */
#if defined(__GNUC__) && defined(__x86_64__)

#include <immintrin.h>

static int avx2_usable(void)
{
    return __builtin_cpu_supports("avx2");
}

#define NAME(x) avx2_##x
#define TARGET __attribute__((target("avx2")))
#define BYTES 32
#define WIDTH 8
#define STREAM(p, v) _mm256_stream_ps((float *)(p), v)
#define FENCE _mm_sfence
#include "fold_kernel.h"

static const kernel AVX2 = KERNEL(avx2);

#define KERNELS {&AVX2, &PORTABLE}
#define NAMES "avx2,portable"

#elif defined(__GNUC__) && defined(__aarch64__) && !defined(__AARCH64EB__)

#define neon_usable portable_usable /* part of every 64-bit Arm */

#define NAME(x) neon_##x
#define TARGET
#define BYTES 16
#define WIDTH 8
#include "fold_kernel.h"

static const kernel NEON = KERNEL(neon);

#define KERNELS {&NEON, &PORTABLE}
#define NAMES "neon,portable"

#else

#define KERNELS {&PORTABLE}
#define NAMES "portable"

#endif

#define PUBLIC(x) ff_fold_##x
#include "kernel_choice.h"

void ff_fold_f32(float *out, const uint8_t *const *in, size_t frames, size_t n, int scaled, float scale)
{
    if (!scaled)
        scale = 1.0f;
    if (frames <= GROUP) {
        active->fold(out, 0, in, frames, n, scale, n >= STREAM_BYTES / 4);
        return;
    }
    for (size_t i = 0; i < n; i += CHUNK) {
        const size_t values = n - i < CHUNK ? n - i : CHUNK;
        for (size_t first = 0; first < frames; first += GROUP) {
            const uint8_t *group[GROUP];
            const size_t rest = frames - first, count = rest < GROUP ? rest : GROUP;
            for (size_t f = 0; f < count; f++)
                group[f] = in[first + f] + 4 * i;
            active->fold(out + i, first > 0, group, count, values, rest > GROUP ? 1.0f : scale, 0);
        }
    }
}

void ff_add_f32(float *acc, const uint8_t *in, size_t n)
{
    active->fold(acc, 1, &in, 1, n, 1.0f, 0);
}

void ff_scale_f32(float *x, size_t n, float scale)
{
    active->fold(x, 1, NULL, 0, n, scale, 0);
}

void ff_copy_scaled_f32(uint8_t *dst, const uint8_t *src, size_t n, float scale)
{
    for (size_t i = 0; i < n; i++) {
        float x;
        memcpy(&x, src + 4 * i, 4);
        x *= scale;
        memcpy(dst + 4 * i, &x, 4);
    }
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    ff_swap32(dst, dst, n);
#endif
}

size_t ff_first_nonfinite_f32(const uint8_t *data, size_t n)
{
    return active->first_nonfinite(data, n);
}

void ff_copy(void *dst, const void *src, size_t length)
{
    if (length >= STREAM_BYTES)
        active->copy(dst, src, length);
    else if (length)
        memcpy(dst, src, length);
}

void ff_swap32(uint8_t *dst, const uint8_t *src, size_t n)
{
    active->swap32(dst, src, n);
}
