/* HMAC-SHA256 of sixteen messages at a time, one in each 32-bit lane of AVX-512's registers; included by
 * sha256.c. Each message fills one block at most. */

#define TARGET_LANES __attribute__((target("avx512f,avx512bw")))
#define INLINE_LANES static inline TARGET_LANES __attribute__((always_inline))

/* The same word of every message. */
typedef __m512i wide;

/* The builtin asks the operating system too, which has to keep the registers. */
static int lanes_usable(void)
{
    return hardware_usable() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
}

INLINE_LANES wide every(uint32_t x)
{
    return _mm512_set1_epi32((int)x);
}

INLINE_LANES wide sum(wide x, wide y)
{
    return _mm512_add_epi32(x, y);
}

/* Each bit of the truth table is the result for one choice of three bits. */
#define PARITY(x, y, z) _mm512_ternarylogic_epi32(x, y, z, 0x96)
#define CHOICE(x, y, z) _mm512_ternarylogic_epi32(x, y, z, 0xca)
#define MAJORITY(x, y, z) _mm512_ternarylogic_epi32(x, y, z, 0xe8)
#define TURN(x, n) _mm512_ror_epi32(x, n)
#define SHIFT(x, n) _mm512_srli_epi32(x, n)

/* The eight words change places in every round; the caller turns their names instead. */
#define WIDE_ROUND(a, b, c, d, e, f, g, h, i, more) \
    do { \
        h = sum(sum(h, sum(w[i], every(K[t + (i)]))), \
                sum(PARITY(TURN(e, 6), TURN(e, 11), TURN(e, 25)), CHOICE(e, f, g))); \
        d = sum(d, h); \
        h = sum(h, sum(PARITY(TURN(a, 2), TURN(a, 13), TURN(a, 22)), MAJORITY(a, b, c))); \
        if (more) { \
            const wide next = w[((i) + 1) & 15], late = w[((i) + 14) & 15]; \
            w[i] = sum(sum(w[i], PARITY(TURN(next, 7), TURN(next, 18), SHIFT(next, 3))), \
                       sum(w[((i) + 9) & 15], PARITY(TURN(late, 17), TURN(late, 19), SHIFT(late, 10)))); \
        } \
    } while (0)

#define EIGHT_WIDE_ROUNDS(i, more) \
    do { \
        WIDE_ROUND(a, b, c, d, e, f, g, h, i, more); \
        WIDE_ROUND(h, a, b, c, d, e, f, g, i + 1, more); \
        WIDE_ROUND(g, h, a, b, c, d, e, f, i + 2, more); \
        WIDE_ROUND(f, g, h, a, b, c, d, e, i + 3, more); \
        WIDE_ROUND(e, f, g, h, a, b, c, d, i + 4, more); \
        WIDE_ROUND(d, e, f, g, h, a, b, c, i + 5, more); \
        WIDE_ROUND(c, d, e, f, g, h, a, b, i + 6, more); \
        WIDE_ROUND(b, c, d, e, f, g, h, a, i + 7, more); \
    } while (0)

/* One block; w is used up. */
INLINE_LANES void wide_block(wide state[8], wide w[16])
{
    wide a = state[0], b = state[1], c = state[2], d = state[3];
    wide e = state[4], f = state[5], g = state[6], h = state[7];
    int t;
    for (t = 0; t < 48; t += 16) {
        EIGHT_WIDE_ROUNDS(0, 1);
        EIGHT_WIDE_ROUNDS(8, 1);
    }
    EIGHT_WIDE_ROUNDS(0, 0);
    EIGHT_WIDE_ROUNDS(8, 0);
    const wide turned[8] = {a, b, c, d, e, f, g, h};
    for (int i = 0; i < 8; i++)
        state[i] = sum(state[i], turned[i]);
}

INLINE_LANES wide swap_every(wide x)
{
    return _mm512_shuffle_epi8(
        x, _mm512_broadcast_i32x4(_mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3)));
}

/* A message with its end marked and zeros after it. */
INLINE_LANES wide block_of(const ff_message *message)
{
    const __mmask64 end = (__mmask64)1 << message->length;
    const wide bytes = _mm512_maskz_loadu_epi8(end - 1, message->data);
    return swap_every(_mm512_mask_blend_epi8(end, bytes, _mm512_set1_epi8((char)0x80)));
}

/* From one message in each row to one in each column. */
INLINE_LANES void transpose(wide rows[16])
{
    wide x[16];
    for (int i = 0; i < 16; i += 2) {
        x[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        x[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        rows[i] = _mm512_unpacklo_epi64(x[i], x[i + 2]);
        rows[i + 1] = _mm512_unpackhi_epi64(x[i], x[i + 2]);
        rows[i + 2] = _mm512_unpacklo_epi64(x[i + 1], x[i + 3]);
        rows[i + 3] = _mm512_unpackhi_epi64(x[i + 1], x[i + 3]);
    }
    /* Now rows[4 * q + i] has the words i, i + 4, i + 8, i + 12 of the messages 4 * q to 4 * q + 3. */
    for (int i = 0; i < 4; i++) {
        const wide low = _mm512_shuffle_i32x4(rows[i], rows[4 + i], 0x44);
        const wide high = _mm512_shuffle_i32x4(rows[i], rows[4 + i], 0xee);
        const wide later_low = _mm512_shuffle_i32x4(rows[8 + i], rows[12 + i], 0x44);
        const wide later_high = _mm512_shuffle_i32x4(rows[8 + i], rows[12 + i], 0xee);
        x[i] = _mm512_shuffle_i32x4(low, later_low, 0x88);
        x[4 + i] = _mm512_shuffle_i32x4(low, later_low, 0xdd);
        x[8 + i] = _mm512_shuffle_i32x4(high, later_high, 0x88);
        x[12 + i] = _mm512_shuffle_i32x4(high, later_high, 0xdd);
    }
    memcpy(rows, x, sizeof x);
}

TARGET_LANES static void lanes_mac8(const ff_mac_key *key, const ff_message *messages, size_t n, uint8_t *tags)
{
    uint32_t bits[FF_LANES] = {0};
    uint8_t all[FF_LANES * FF_TAG_BYTES];
    wide state[8], w[16];

    for (size_t i = 0; i < FF_LANES; i++)
        w[i] = _mm512_setzero_si512();
    for (size_t i = 0; i < n; i++) {
        w[i] = block_of(&messages[i]);
        bits[i] = (uint32_t)(BLOCK + messages[i].length) * 8;
    }
    transpose(w);
    w[15] = _mm512_loadu_si512(bits);
    for (int i = 0; i < 8; i++)
        state[i] = every(key->inner[i]);
    wide_block(state, w);

    memcpy(w, state, sizeof state);
    w[8] = every(0x80000000);
    for (int i = 9; i < 15; i++)
        w[i] = _mm512_setzero_si512();
    w[15] = every(OUTER_BITS);
    for (int i = 0; i < 8; i++)
        state[i] = every(key->outer[i]);
    wide_block(state, w);

    /* The first two words of each digest, brought together. */
    const wide some = swap_every(_mm512_unpacklo_epi32(state[0], state[1]));
    const wide others = swap_every(_mm512_unpackhi_epi32(state[0], state[1]));
    _mm512_storeu_si512(all, _mm512_permutex2var_epi64(some, _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), others));
    _mm512_storeu_si512(all + sizeof all / 2,
                        _mm512_permutex2var_epi64(some, _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4), others));
    memcpy(tags, all, n * FF_TAG_BYTES);
}
