/* A kernel of fold.c, which includes this file once per instruction set with
 *
 *   NAME(x)       the kernel's own name for x
 *   TARGET        the attribute that turns its instructions on
 *   BYTES         the size of its vectors; 4 means plain floats
 *   WIDTH         the vectors of a block, all held in registers
 *   STREAM(p, v)  a store past the caches at an aligned place, and
 *   FENCE()       what orders such stores before all later ones; both undefined where there are none
 *   WIRE_U16(p)   16-bit values as a vector of 32-bit ones, and
 *   PACKED(a, b)  two vectors of 32-bit values below 65536 as one of 16-bit ones, where the compiler's own ways
 *                 are slow
 */

#define LANES (BYTES / 4)

#if LANES > 1
typedef float NAME(vec) __attribute__((vector_size(BYTES), aligned(1), may_alias));
typedef uint32_t NAME(bits) __attribute__((vector_size(BYTES), aligned(1), may_alias));
typedef uint16_t NAME(halves) __attribute__((vector_size(BYTES / 2), aligned(1), may_alias));
#define LOAD(p) (*(const NAME(vec) *)(p))
#define STORE(p, v) (*(NAME(vec) *)(p) = (v))
#define WIRE_U32(p) (*(const NAME(bits) *)(p))
#ifndef WIRE_U16
#define WIRE_U16(p) __builtin_convertvector(*(const NAME(halves) *)(p), NAME(bits))
#endif
#define STORE_U16(p, v) (*(NAME(halves) *)(p) = __builtin_convertvector(v, NAME(halves)))
#define IS_NAN(v) ((NAME(bits))((v) != (v)))
#else /* may also be compiled for hosts that are not little-endian, as the wire is */
typedef float NAME(vec);
typedef uint32_t NAME(bits);
#define LOAD native_f32
#define STORE store_f32
#define WIRE_U32 wire_u32
#define WIRE_U16 wire_u16
#define STORE_U16 store_u16
#define IS_NAN(v) (0u - (uint32_t)((v) != (v)))
#endif

#ifdef STREAM
#define STREAMS 1
#else
#define STREAMS 0
#define STREAM STORE
#define FENCE() ((void)0)
#endif

INLINE TARGET NAME(vec) NAME(value)(NAME(bits) x)
{
    NAME(vec) value;
    memcpy(&value, &x, sizeof value);
    return value;
}

INLINE TARGET NAME(bits) NAME(bits_of)(NAME(vec) value)
{
    NAME(bits) x;
    memcpy(&x, &value, sizeof x);
    return x;
}

/* Values on the wire as float32: bfloat16 is its upper half. */
INLINE TARGET NAME(vec) NAME(wire)(const uint8_t *p, int half)
{
    return NAME(value)(half ? WIRE_U16(p) << 16 : WIRE_U32(p));
}

/* Round float32 to bfloat16: to nearest, ties to even; a NaN keeps its upper half and turns quiet. */
INLINE TARGET NAME(bits) NAME(rounded)(NAME(vec) value)
{
    const NAME(bits) x = NAME(bits_of)(value), nan = IS_NAN(value);
    return ((x | (nan & QUIET)) + (~nan & ((x >> 16 & 1) + 0x7fff))) >> 16;
}

/* One block, in registers over all frames: read once from each, written once. */
INLINE TARGET void NAME(fold_block)(float *out, int resume, const uint8_t *const *in, size_t frames, int half,
                                    size_t i, float scale, int width, int stream)
{
    NAME(vec) sum[WIDTH];
    for (int j = 0; j < width; j++)
        sum[j] = resume ? LOAD(out + i + j * LANES) : (NAME(vec)){0};
    for (size_t f = 0; f < frames; f++) {
        const uint8_t *p = in[f] + (half ? 2 : 4) * i;
        for (int j = 0; j < width; j++)
            sum[j] += NAME(wire)(p + (half ? 2 : 4) * j * LANES, half);
    }
    for (int j = 0; j < width; j++) {
        sum[j] *= scale;
        if (stream)
            STREAM(out + i + j * LANES, sum[j]);
        else
            STORE(out + i + j * LANES, sum[j]);
    }
}

INLINE TARGET void NAME(fold_all)(float *out, int resume, const uint8_t *const *in, size_t frames, int half,
                                  size_t n, float scale, int width, int stream)
{
    size_t i = 0;
    if (STREAMS && stream) {
        i = TO_LINE(out) / 4;
        fold_plain(out, resume, in, frames, half, 0, i, scale);
        for (; i + width * LANES <= n; i += width * LANES)
            NAME(fold_block)(out, resume, in, frames, half, i, scale, width, 1);
        FENCE();
    }
    for (; i + width * LANES <= n; i += width * LANES)
        NAME(fold_block)(out, resume, in, frames, half, i, scale, width, 0);
    for (; i + LANES <= n; i += LANES)
        NAME(fold_block)(out, resume, in, frames, half, i, scale, 1, 0);
    fold_plain(out, resume, in, frames, half, i, n, scale);
}

TARGET static void NAME(fold)(float *out, int resume, const uint8_t *const *in, size_t frames, int half, size_t n,
                              float scale, int stream)
{
    if (frames == 1 && !stream && half)
        NAME(fold_all)(out, resume, in, 1, 1, n, scale, 4, 0);
    else if (frames == 1 && !stream)
        NAME(fold_all)(out, resume, in, 1, 0, n, scale, 4, 0);
    else if (half)
        NAME(fold_all)(out, resume, in, frames, 1, n, scale, WIDTH, stream);
    else
        NAME(fold_all)(out, resume, in, frames, 0, n, scale, WIDTH, stream);
}

TARGET static void NAME(widen)(uint8_t *dst, const uint8_t *src, size_t n, int stream)
{
    size_t i = 0;
    if (STREAMS && stream && TO_LINE(dst) % 4 == 0) {
        i = TO_LINE(dst) / 4;
        widen_plain(dst, src, 0, i);
        for (; i + WIDTH * LANES <= n; i += WIDTH * LANES)
            for (int j = 0; j < WIDTH; j++)
                STREAM(dst + 4 * (i + j * LANES), NAME(wire)(src + 2 * (i + j * LANES), 1));
        FENCE();
    }
    for (; i + LANES <= n; i += LANES)
        STORE(dst + 4 * i, NAME(wire)(src + 2 * i, 1));
    widen_plain(dst, src, i, n);
}

INLINE TARGET NAME(bits) NAME(rounded_at)(const uint8_t *src, int scaled, float scale)
{
    NAME(vec) value = LOAD(src);
    if (scaled)
        value *= scale;
    return NAME(rounded)(value);
}

INLINE TARGET void NAME(narrow_all)(uint8_t *dst, const uint8_t *src, size_t n, int scaled, float scale)
{
    size_t i = 0;
#ifdef PACKED
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        const NAME(bits) low = NAME(rounded_at)(src + 4 * i, scaled, scale);
        const NAME(bits) high = NAME(rounded_at)(src + 4 * (i + LANES), scaled, scale);
        *(NAME(bits) *)(dst + 2 * i) = PACKED(low, high);
    }
#endif
    for (; i + LANES <= n; i += LANES)
        STORE_U16(dst + 2 * i, NAME(rounded_at)(src + 4 * i, scaled, scale));
    narrow_plain(dst, src, i, n, scaled, scale);
}

TARGET static void NAME(narrow)(uint8_t *dst, const uint8_t *src, size_t n, int scaled, float scale)
{
    if (scaled)
        NAME(narrow_all)(dst, src, n, 1, scale);
    else
        NAME(narrow_all)(dst, src, n, 0, scale);
}

INLINE TARGET size_t NAME(first_nonfinite_of)(const uint8_t *data, size_t n, int half)
{
    size_t i = 0;
    for (; i + WIDTH * LANES <= n; i += WIDTH * LANES) {
        NAME(bits) carry = {0};
        uint32_t lanes[LANES], any = 0;
        for (int j = 0; j < WIDTH; j++) /* an exponent of ones carries into the sign */
            carry |= (NAME(bits_of)(NAME(wire)(data + (half ? 2 : 4) * (i + j * LANES), half)) & EXPONENT) + EXPONENT_UNIT;
        memcpy(lanes, &carry, BYTES);
        for (int j = 0; j < LANES; j++)
            any |= lanes[j];
        if (any >> 31)
            break;
    }
    while (i < n && (wire_bits(data, i, half) & EXPONENT) != EXPONENT)
        i++;
    return i;
}

TARGET static size_t NAME(first_nonfinite)(const uint8_t *data, size_t n, int half)
{
    return half ? NAME(first_nonfinite_of)(data, n, 1) : NAME(first_nonfinite_of)(data, n, 0);
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
#undef WIRE_U32
#undef WIRE_U16
#undef PACKED
#undef STORE_U16
#undef IS_NAN
#undef NAME
#undef TARGET
#undef BYTES
#undef STREAM
#undef STREAMS
#undef FENCE
