/* A kernel of fold.c, which includes this file once per instruction set with
 *
 *   NAME(x)       the kernel's own name for x
 *   TARGET        the attribute that turns its instructions on
 *   BYTES         the size of its vectors; 4 means plain floats
 *   WIDTH         the vectors of a block, all held in registers
 *   STREAM(p, v)  a store past the caches at an aligned place, and
 *   FENCE()       what orders such stores before all later ones; both undefined where there are none
 */

#define LANES (BYTES / 4)

#if LANES > 1
typedef float NAME(vec) __attribute__((vector_size(BYTES), aligned(1), may_alias));
typedef uint32_t NAME(bits) __attribute__((vector_size(BYTES), aligned(1), may_alias));
#define LOAD(p) (*(const NAME(vec) *)(p))
#define STORE(p, v) (*(NAME(vec) *)(p) = (v))
#define WIRE_F32 LOAD
#define WIRE_U32(p) (*(const NAME(bits) *)(p))
#else /* may also be compiled for hosts that are not little-endian, as the wire is */
typedef float NAME(vec);
typedef uint32_t NAME(bits);
#define LOAD(p) (*(p))
#define STORE(p, v) (*(p) = (v))
#define WIRE_F32 wire_f32
#define WIRE_U32 wire_u32
#endif

#ifdef STREAM
#define STREAMS 1
#else
#define STREAMS 0
#define STREAM STORE
#define FENCE() ((void)0)
#endif

/* One block, in registers over all frames: read once from each, written once. */
INLINE TARGET void NAME(fold_block)(float *out, int resume, const uint8_t *const *in, size_t frames,
                                    size_t i, float scale, int width, int stream)
{
    NAME(vec) sum[WIDTH];
    for (int j = 0; j < width; j++)
        sum[j] = resume ? LOAD(out + i + j * LANES) : (NAME(vec)){0};
    for (size_t f = 0; f < frames; f++) {
        const uint8_t *p = in[f] + 4 * i;
        for (int j = 0; j < width; j++)
            sum[j] += WIRE_F32(p + j * BYTES);
    }
    for (int j = 0; j < width; j++) {
        sum[j] *= scale;
        if (stream)
            STREAM(out + i + j * LANES, sum[j]);
        else
            STORE(out + i + j * LANES, sum[j]);
    }
}

TARGET static void NAME(fold)(float *out, int resume, const uint8_t *const *in, size_t frames, size_t n,
                              float scale, int stream)
{
    size_t i = 0;
    if (STREAMS && stream) {
        i = TO_LINE(out) / 4;
        fold_plain(out, resume, in, frames, 0, i, scale);
        for (; i + WIDTH * LANES <= n; i += WIDTH * LANES)
            NAME(fold_block)(out, resume, in, frames, i, scale, WIDTH, 1);
        FENCE();
    }
    for (; i + WIDTH * LANES <= n; i += WIDTH * LANES)
        NAME(fold_block)(out, resume, in, frames, i, scale, WIDTH, 0);
    for (; i + LANES <= n; i += LANES)
        NAME(fold_block)(out, resume, in, frames, i, scale, 1, 0);
    fold_plain(out, resume, in, frames, i, n, scale);
}

TARGET static size_t NAME(first_nonfinite)(const uint8_t *data, size_t n)
{
    size_t i = 0;
    for (; i + WIDTH * LANES <= n; i += WIDTH * LANES) {
        NAME(bits) carry = {0};
        uint32_t lanes[LANES], any = 0;
        for (int j = 0; j < WIDTH; j++) /* an exponent of ones carries into the sign */
            carry |= (WIRE_U32(data + 4 * i + j * BYTES) & EXPONENT) + EXPONENT_UNIT;
        memcpy(lanes, &carry, BYTES);
        for (int j = 0; j < LANES; j++)
            any |= lanes[j];
        if (any >> 31)
            break;
    }
    while (i < n && (wire_u32(data + 4 * i) & EXPONENT) != EXPONENT)
        i++;
    return i;
}

TARGET static void NAME(swap32)(uint8_t *dst, const uint8_t *src, size_t n)
{
    size_t i = 0;
#if LANES > 1
    for (; i + LANES <= n; i += LANES) {
        const NAME(bits) x = *(const NAME(bits) *)(src + 4 * i);
        *(NAME(bits) *)(dst + 4 * i) = REVERSED(x);
    }
#endif
    swap32_plain(dst, src, i, n);
}

TARGET static void NAME(copy)(void *dst, const void *src, size_t length)
{
    uint8_t *to = dst;
    const uint8_t *from = src;
    if (STREAMS) {
        const size_t head = TO_LINE(to);
        memcpy(to, from, head);
        to += head, from += head, length -= head;
        for (; length >= WIDTH * BYTES; to += WIDTH * BYTES, from += WIDTH * BYTES, length -= WIDTH * BYTES)
            for (int j = 0; j < WIDTH; j++)
                STREAM(to + j * BYTES, LOAD(from + j * BYTES));
        FENCE();
    }
    memcpy(to, from, length);
}

#undef LANES
#undef WIDTH
#undef LOAD
#undef STORE
#undef WIRE_F32
#undef WIRE_U32
#undef NAME
#undef TARGET
#undef BYTES
#undef STREAM
#undef STREAMS
#undef FENCE
