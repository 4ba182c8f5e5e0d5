#include "fold.h"

#include <string.h>

#include "le.h"

/* Results from this size on are written past the caches: fetching lines only to overwrite them costs more
 * than reading the result from memory later. */
#define STREAM_BYTES ((size_t)256 << 10)

/* Copies do so from this size on: below it what they overwrite is likely in a cache. */
#define FAR_BYTES ((size_t)4 << 20)

/* Frames folded in one pass. The CPU fetches ahead for no more arrays than this, so further frames come
 * in passes of their own, over a chunk of values that stays in the cache. */
#define GROUP 12
#define CHUNK 8192

/* float32 values between two bfloat16 steps, on the stack. */
#define SCRATCH 2048

#define LINE 64 /* bytes in a cache line */
#define TO_LINE(p) ((LINE - (uintptr_t)(p) % LINE) % LINE)

#define SIGN 0x80000000u
#define EXPONENT 0x7f800000u
#define EXPONENT_UNIT 0x00800000u
#define QUIET 0x00400000u

#define REVERSED(x) ((x) << 24 | ((x) & 0xff00) << 8 | ((x) >> 8 & 0xff00) | (x) >> 24)

#ifdef __GNUC__
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif

#define wire_u32 ff_load32
#define wire_u16(p) ((uint32_t)ff_load16(p))
#define store_u16(p, x) ff_store16(p, (uint16_t)(x))

INLINE float native_f32(const void *p)
{
    float x;
    memcpy(&x, p, 4);
    return x;
}

INLINE void store_f32(void *p, float x)
{
    memcpy(p, &x, 4);
}

/* A wire value as the bits of a float32; half: it is a bfloat16. */
INLINE uint32_t wire_bits(const uint8_t *data, size_t i, int half)
{
    return half ? wire_u16(data + 2 * i) << 16 : wire_u32(data + 4 * i);
}

/* The ends of arrays that no vector fits. */

static void fold_plain(float *out, int resume, const uint8_t *const *in, size_t frames, int half, size_t from,
                       size_t to, float scale)
{
    for (size_t i = from; i < to; i++) {
        float sum = resume ? out[i] : 0.0f;
        for (size_t f = 0; f < frames; f++) {
            const uint32_t bits = wire_bits(in[f], i, half);
            sum += native_f32(&bits);
        }
        out[i] = sum * scale;
    }
}

static void widen_plain(uint8_t *dst, const uint8_t *src, size_t from, size_t to)
{
    for (size_t i = from; i < to; i++) {
        const uint32_t bits = wire_bits(src, i, 1);
        memcpy(dst + 4 * i, &bits, 4);
    }
}

static void narrow_plain(uint8_t *dst, const uint8_t *src, size_t from, size_t to, int scaled, float scale)
{
    for (size_t i = from; i < to; i++) {
        const float value = scaled ? native_f32(src + 4 * i) * scale : native_f32(src + 4 * i);
        uint32_t x;
        memcpy(&x, &value, 4);
        store_u16(dst + 2 * i, ((x & ~SIGN) > EXPONENT ? x | QUIET : x + 0x7fff + (x >> 16 & 1)) >> 16);
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
    /* out = (start + in[0] + in[1] + ...) * scale, where start is zero or, to resume, out itself. half: the
     * wire's values are bfloat16. stream and copy ask for stores past the caches, for results of at least a
     * cache line. */
    void (*fold)(float *out, int resume, const uint8_t *const *in, size_t frames, int half, size_t n, float scale,
                 int stream);
    void (*widen)(uint8_t *dst, const uint8_t *src, size_t n, int stream);
    void (*narrow)(uint8_t *dst, const uint8_t *src, size_t n, int scaled, float scale);
    size_t (*first_nonfinite)(const uint8_t *data, size_t n, int half);
    void (*swap32)(uint8_t *dst, const uint8_t *src, size_t n);
    void (*copy)(void *dst, const void *src, size_t length);
} kernel;

#define KERNEL(k) \
    {#k, k##_usable, k##_fold, k##_widen, k##_narrow, k##_first_nonfinite, k##_swap32, k##_copy}

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
#define WIRE_U16(p) ((avx2_bits)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)(p))))
#define PACKED(a, b) \
    ((avx2_bits)_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)(a), (__m256i)(b)), 0xd8))
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

/* The sums of n values from value i on, in as many passes as the frames need. */
static void fold_groups(float *out, const uint8_t *const *in, size_t frames, int half, size_t i, size_t n, float scale)
{
    for (size_t first = 0; first < frames; first += GROUP) {
        const uint8_t *group[GROUP];
        const size_t rest = frames - first, count = rest < GROUP ? rest : GROUP;
        for (size_t f = 0; f < count; f++)
            group[f] = in[first + f] + (half ? 2 : 4) * i;
        active->fold(out, first > 0, group, count, half, n, rest > GROUP ? 1.0f : scale, 0);
    }
}

void ff_fold_f32(float *out, const uint8_t *const *in, size_t frames, size_t n, int scaled, float scale)
{
    if (!scaled)
        scale = 1.0f;
    if (frames <= GROUP)
        active->fold(out, 0, in, frames, 0, n, scale, n >= STREAM_BYTES / 4);
    else
        for (size_t i = 0; i < n; i += CHUNK)
            fold_groups(out + i, in, frames, 0, i, n - i < CHUNK ? n - i : CHUNK, scale);
}

void ff_fold_bf16(uint8_t *out, const uint8_t *const *in, size_t frames, size_t n, int scaled, float scale)
{
    float sums[SCRATCH] = {0};
    for (size_t i = 0; i < n; i += SCRATCH) {
        const size_t values = n - i < SCRATCH ? n - i : SCRATCH;
        fold_groups(sums, in, frames, 1, i, values, 1.0f);
        ff_narrow_bf16(out + 2 * i, sums, values, 0, 1.0f);
        if (scaled)
            ff_scale_bf16(out + 2 * i, out + 2 * i, values, scale);
    }
}

void ff_add_f32(float *acc, const uint8_t *in, size_t n, int first)
{
    active->fold(acc, !first, &in, 1, 0, n, 1.0f, 0);
}

void ff_add_bf16(float *acc, const uint8_t *in, size_t n, int first)
{
    active->fold(acc, !first, &in, 1, 1, n, 1.0f, 0);
}

void ff_scale_f32(float *x, size_t n, float scale)
{
    active->fold(x, 1, NULL, 0, 0, n, scale, 0);
}

void ff_scale_bf16(uint8_t *dst, const uint8_t *src, size_t n, float scale)
{
    float values[SCRATCH];
    for (size_t i = 0; i < n; i += SCRATCH) {
        const size_t count = n - i < SCRATCH ? n - i : SCRATCH;
        active->widen((uint8_t *)values, src + 2 * i, count, 0);
        ff_narrow_bf16(dst + 2 * i, values, count, 1, scale);
    }
}

void ff_widen_bf16(void *dst, const uint8_t *src, size_t n)
{
    active->widen(dst, src, n, n >= FAR_BYTES / 4);
}

void ff_narrow_bf16(uint8_t *dst, const void *src, size_t n, int scaled, float scale)
{
    active->narrow(dst, src, n, scaled, scale);
}

void ff_copy_scaled_f32(uint8_t *dst, const void *src, size_t n, float scale)
{
    const uint8_t *from = src;
    for (size_t i = 0; i < n; i++)
        store_f32(dst + 4 * i, native_f32(from + 4 * i) * scale);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    ff_swap32(dst, dst, n);
#endif
}

size_t ff_first_nonfinite_f32(const uint8_t *data, size_t n)
{
    return active->first_nonfinite(data, n, 0);
}

size_t ff_first_nonfinite_bf16(const uint8_t *data, size_t n)
{
    return active->first_nonfinite(data, n, 1);
}

void ff_copy(void *dst, const void *src, size_t length)
{
    if (length >= FAR_BYTES)
        active->copy(dst, src, length);
    else if (length)
        memcpy(dst, src, length);
}

void ff_swap32(uint8_t *dst, const uint8_t *src, size_t n)
{
    active->swap32(dst, src, n);
}
