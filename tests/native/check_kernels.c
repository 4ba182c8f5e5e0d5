/* Checks every kernel of flodl_fast/_native that this CPU can run: HMAC-SHA256 against known answers and
 * the portable kernel, the float loops against plain ones. Needs no Python, so that an emulator can run
 * it too:
 *
 *   aarch64-linux-gnu-gcc -static -O3 -ffp-contract=off -I flodl_fast/_native -o check_kernels \
 *       tests/native/check_kernels.c flodl_fast/_native/sha256.c flodl_fast/_native/fold.c
 *   qemu-aarch64 ./check_kernels armv8 neon
 *
 * Arguments name kernels that must be usable. Each input ends where its allocation does, so that a
 * sanitizer sees the first byte read too many; outputs lie between guards. */

#define _POSIX_C_SOURCE 200112L

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fold.h"
#include "sha256.h"

static unsigned long checks, failures;

#define CHECK(condition, ...) \
    do { \
        checks++; \
        if (!(condition) && failures++ < 20) { \
            printf("FAILED at line %d with %s, %s: ", __LINE__, ff_sha256_kernel(), ff_fold_kernel()); \
            printf(__VA_ARGS__); \
            putchar('\n'); \
        } \
    } while (0)

/* Tools ------------------------------------------------------------------------------------------ */

static uint32_t random32(void)
{
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return state ^ state >> 15;
}

/* Memory whose data starts `alignment` bytes after a 64-byte boundary, guards not counted. */
typedef struct {
    uint8_t *memory, *data;
    size_t length;
} area;

#define GUARD 64
#define GUARD_BYTE 0xa5

static uint8_t *allocate(size_t size)
{
    void *memory;
    if (posix_memalign(&memory, 64, size ? size : 1)) {
        puts("out of memory");
        exit(2);
    }
    return memory;
}

static area input(const void *content, size_t length, size_t alignment)
{
    uint8_t *memory = allocate(alignment + length);
    area made = {memory, memory + alignment, length};
    if (length)
        memcpy(made.data, content, length);
    return made;
}

static area output(size_t length, size_t alignment)
{
    const size_t size = GUARD + alignment + length + GUARD;
    uint8_t *memory = allocate(size);
    area made = {memory, memory + GUARD + alignment, length};
    memset(memory, GUARD_BYTE, size);
    return made;
}

static int guards_hold(const area *out)
{
    for (const uint8_t *p = out->memory; p < out->data; p++)
        if (*p != GUARD_BYTE)
            return 0;
    for (size_t i = 0; i < GUARD; i++)
        if (out->data[out->length + i] != GUARD_BYTE)
            return 0;
    return 1;
}

/* Call check once for each name of a comma-separated list. */
static void for_each(const char *names, int (*use)(const char *), void (*check)(void))
{
    char name[32];
    for (size_t length; *names; names += length + (names[length] == ',')) {
        length = strcspn(names, ",");
        snprintf(name, sizeof name, "%.*s", (int)length, names);
        CHECK(use(name) == 0, "cannot use %s", name);
        check();
    }
}

static int listed(const char *names, const char *name)
{
    const size_t length = strlen(name);
    for (const char *p = names; (p = strstr(p, name)) != NULL; p += length)
        if ((p == names || p[-1] == ',') && (p[length] == ',' || !p[length]))
            return 1;
    return 0;
}

/* HMAC-SHA256 ------------------------------------------------------------------------------------ */

#define SHORT 300
#define LONG ((size_t)1 << 20)

static uint8_t message[LONG];
static ff_mac_key the_key;
static uint8_t short_digests[SHORT + 1][32]; /* by the portable kernel */

static size_t from_hex(uint8_t *out, const char *hex)
{
    unsigned byte;
    size_t n = 0;
    for (; sscanf(hex + 2 * n, "%2x", &byte) == 1; n++)
        out[n] = (uint8_t)byte;
    return n;
}

static void check_mac(const char *key_hex, const void *data, size_t length, const char *digest_hex)
{
    uint8_t salt[64], expected[32], digest[32], tag[8];
    ff_mac_key key;
    ff_mac_key_init(&key, salt, from_hex(salt, key_hex));
    const size_t known = from_hex(expected, digest_hex);
    ff_mac32(&key, data, length, digest);
    CHECK(!memcmp(digest, expected, known), "digest of %zu bytes is not %s", length, digest_hex);
    ff_mac8(&key, data, length, tag);
    CHECK(!memcmp(tag, expected, 8), "tag of %zu bytes is not that of %s", length, digest_hex);
}

static void check_known_answers(void)
{
    uint8_t dd[50], cd[50], frame[16];
    memset(dd, 0xdd, sizeof dd);
    memset(cd, 0xcd, sizeof cd);
    /* RFC 4231, section 4. Its keys of 131 bytes enter by their SHA-256, as HMAC has it. */
    check_mac("0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b", "Hi There", 8,
              "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
    check_mac("4a656665", "what do ya want for nothing?", 28,
              "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    check_mac("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", dd, sizeof dd,
              "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
    check_mac("0102030405060708090a0b0c0d0e0f10111213141516171819", cd, sizeof cd,
              "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
    check_mac("0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c0c", "Test With Truncation", 20,
              "a3b6167473100ee06e0c796c2955552b");
    check_mac("45ad4b37c6e2fc0a2cfcc1b5da524132ec707615c2cae1dbbc43c97aa521db81",
              "Test Using Larger Than Block-Size Key - Hash Key First", 54,
              "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
    check_mac("45ad4b37c6e2fc0a2cfcc1b5da524132ec707615c2cae1dbbc43c97aa521db81",
              "This is a test using a larger than block-size key and a larger than block-size data. The key "
              "needs to be hashed before being used by the HMAC algorithm.", 152,
              "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
    /* docs/wire.md, section 3: the heartbeat's kind, length and payload. */
    check_mac("00112233445566778899aabbccddeeff", frame, from_hex(frame, "02000000050000000503fbe803"),
              "9f0e7e73ea8c1444");
}

/* A stream made to believe that 2^60 + 2^33 bytes have passed, against an independent SHA-256. */
static void check_bit_length(void)
{
    uint8_t salt[16], expected[8], tag[8];
    ff_mac_key key;
    ff_mac_stream stream;
    ff_mac_key_init(&key, salt, from_hex(salt, "00112233445566778899aabbccddeeff"));
    ff_mac_begin(&stream, &key);
    stream.length += ((uint64_t)1 << 60) + ((uint64_t)1 << 33);
    ff_mac_update(&stream, (const uint8_t *)"abc", 3);
    ff_mac_end(&stream, &key, tag);
    from_hex(expected, "b7b9a37bb567b9bd");
    CHECK(!memcmp(tag, expected, 8), "the bit length of a long stream");
}

static void check_every_length_and_alignment(void)
{
    uint8_t digest[32], tag[8];
    for (size_t length = 0; length <= SHORT; length++)
        for (size_t alignment = 0; alignment < 64; alignment++) {
            area in = input(message, length, alignment);
            ff_mac32(&the_key, in.data, length, digest);
            CHECK(!memcmp(digest, short_digests[length], 32), "digest of %zu at %zu", length, alignment);
            ff_mac8(&the_key, in.data, length, tag);
            CHECK(!memcmp(tag, short_digests[length], 8), "tag of %zu at %zu", length, alignment);
            free(in.memory);
        }
    ff_mac8(&the_key, NULL, 0, tag);
    CHECK(!memcmp(tag, short_digests[0], 8), "tag of nothing at a null pointer");
}

static void check_pairs(void)
{
    uint8_t a_tag[8], b_tag[8];
    for (size_t a_length = 0; a_length <= 200; a_length++)
        for (size_t b_length = 0; b_length <= 200; b_length++) {
            area a = input(message, a_length, a_length % 64);
            area b = input(message, b_length, (a_length + 7) % 64);
            ff_mac8_pair(&the_key, a.data, a_length, b.data, b_length, a_tag, b_tag);
            CHECK(!memcmp(a_tag, short_digests[a_length], 8) && !memcmp(b_tag, short_digests[b_length], 8),
                  "pair of %zu and %zu", a_length, b_length);
            free(a.memory);
            free(b.memory);
        }
}

/* Any number of messages, all of one length or each of a length of its own, with bytes and memory of its own. */
static void check_lanes(void)
{
    for (size_t n = 0; n <= 2 * FF_LANES; n++)
        for (size_t length = 0; length <= 70; length++)
            for (int own = 0; own < 2; own++) {
                ff_message messages[2 * FF_LANES];
                area in[2 * FF_LANES], tags = output(8 * FF_LANES, length % 64);
                for (size_t i = 0; i < n; i++) {
                    const size_t size = own ? random32() % (length + 1) : length;
                    in[i] = input(message + 5 * i, size, (7 * i + length) % 64);
                    messages[i] = (ff_message){in[i].data, size};
                }
                const size_t done = ff_mac8_lanes(&the_key, messages, n, tags.data);
                CHECK(done == 0 || (ff_sha256_lanes() && done == (n < FF_LANES ? n : FF_LANES)),
                      "%zu of %zu messages tagged", done, n);
                CHECK(done || !ff_sha256_lanes() || n < FF_LANES || length > 55, "none of %zu messages tagged", n);
                for (size_t i = 0; i < done; i++) {
                    uint8_t tag[8];
                    ff_mac8(&the_key, in[i].data, messages[i].length, tag);
                    CHECK(!memcmp(tags.data + 8 * i, tag, 8), "tag of %zu bytes, message %zu of %zu",
                          messages[i].length, i, n);
                }
                for (size_t i = 8 * done; i < 8 * FF_LANES; i++)
                    CHECK(tags.data[i] == GUARD_BYTE, "byte %zu beyond %zu tags", i, done);
                CHECK(guards_hold(&tags), "bytes around the tags of %zu messages", n);
                for (size_t i = 0; i < n; i++)
                    free(in[i].memory);
                free(tags.memory);
            }
}

static void check_streams(void)
{
    uint8_t tag[8], other[8];
    ff_mac_stream stream, second;
    for (size_t length = 0; length <= SHORT; length++)
        for (size_t cut = 0; cut <= length; cut++) {
            ff_mac_begin(&stream, &the_key);
            ff_mac_update(&stream, message, cut);
            ff_mac_update(&stream, message + cut, length - cut);
            ff_mac_end(&stream, &the_key, tag);
            CHECK(!memcmp(tag, short_digests[length], 8), "stream of %zu cut at %zu", length, cut);
        }

    /* A stream that copies what it takes. */
    for (size_t length = 0; length <= SHORT; length++)
        for (size_t first = 0; first <= length; first += 1 + length / 16) {
            const size_t rest = length - first;
            area in = input(message + first, rest, length % 64), out = output(rest, first % 64);
            ff_mac_begin(&stream, &the_key);
            ff_mac_update(&stream, message, first);
            ff_mac_update_copy(&stream, out.data, in.data, rest);
            ff_mac_end(&stream, &the_key, tag);
            CHECK(!memcmp(tag, short_digests[length], 8) && !memcmp(out.data, message + first, rest) && guards_hold(&out),
                  "copying stream at %zu, then %zu", first, rest);
            free(in.memory);
            free(out.memory);
        }

    /* Two streams that start apart and then take the same bytes. */
    for (size_t length = 0; length <= SHORT; length++)
        for (size_t first = 0; first <= length; first += 1 + length / 16) {
            const size_t lag = (first * 3 + 17) % (first + 1);
            area in = input(message + first, length - first, length % 64);
            uint8_t expected[8];
            memcpy(message + LONG / 2, message, lag);
            memcpy(message + LONG / 2 + lag, message + first, length - first);
            ff_mac8(&the_key, message + LONG / 2, lag + length - first, expected);
            ff_mac_begin(&stream, &the_key);
            ff_mac_begin(&second, &the_key);
            ff_mac_update(&stream, message, first);
            ff_mac_update(&second, message, lag);
            ff_mac_update_pair(&stream, &second, in.data, length - first);
            ff_mac_end(&stream, &the_key, tag);
            ff_mac_end(&second, &the_key, other);
            CHECK(!memcmp(tag, short_digests[length], 8) && !memcmp(other, expected, 8),
                  "streams at %zu and %zu, then %zu", first, lag, length - first);
            free(in.memory);
        }
}

static void check_long_messages(void)
{
    const char *const kernel = ff_sha256_kernel();
    for (int round = 0; round < 20; round++) {
        const size_t a_length = random32() % LONG, b_length = random32() % LONG;
        const size_t cut = random32() % (a_length + 1);
        uint8_t a_digest[32], b_digest[32], digest[32], a_tag[8], b_tag[8], tag[8];
        area a = input(message, a_length, random32() % 64), b = input(message, b_length, random32() % 64);
        ff_mac_stream stream;
        ff_sha256_use("portable");
        ff_mac32(&the_key, message, a_length, a_digest);
        ff_mac32(&the_key, message, b_length, b_digest);
        ff_sha256_use(kernel);
        ff_mac32(&the_key, a.data, a_length, digest);
        CHECK(!memcmp(digest, a_digest, 32), "digest of %zu", a_length);
        ff_mac8_pair(&the_key, a.data, a_length, b.data, b_length, a_tag, b_tag);
        CHECK(!memcmp(a_tag, a_digest, 8) && !memcmp(b_tag, b_digest, 8), "pair of %zu and %zu", a_length,
              b_length);
        ff_mac_begin(&stream, &the_key);
        ff_mac_update(&stream, a.data, cut);
        ff_mac_update(&stream, a.data + cut, a_length - cut);
        ff_mac_end(&stream, &the_key, tag);
        CHECK(!memcmp(tag, a_digest, 8), "stream of %zu cut at %zu", a_length, cut);
        free(a.memory);
        free(b.memory);
    }
}

static void check_equal(void)
{
    uint8_t a[8], b[8];
    for (int bit = 0; bit < 64; bit++) {
        memcpy(a, message + bit, 8);
        memcpy(b, a, 8);
        CHECK(ff_mac_equal(a, b) == 1, "equal tags");
        b[bit / 8] ^= (uint8_t)(1 << bit % 8);
        CHECK(ff_mac_equal(a, b) == 0, "tags that differ in bit %d", bit);
    }
}

static void check_sha256_kernel(void)
{
    check_known_answers();
    check_bit_length();
    check_every_length_and_alignment();
    check_pairs();
    check_lanes();
    check_streams();
    check_long_messages();
}

static void check_sha256(void)
{
    for (size_t i = 0; i < LONG; i++)
        message[i] = (uint8_t)random32();
    ff_sha256_use("portable");
    ff_mac_key_init(&the_key, message, 16);
    for (size_t length = 0; length <= SHORT; length++)
        ff_mac32(&the_key, message, length, short_digests[length]);
    check_equal();
    for_each(ff_sha256_kernels(), ff_sha256_use, check_sha256_kernel);
    CHECK(ff_sha256_use("none") == -1, "an unknown kernel is accepted");
    ff_sha256_use(NULL);
    CHECK(strstr(ff_sha256_kernels(), ff_sha256_kernel()) == ff_sha256_kernels(), "the best is not in use");
}

/* float32 and bfloat16 ---------------------------------------------------------------------------------------- */

/* Any bits, every third from the edges of the format. */
static uint32_t random_f32(void)
{
    static const uint32_t EDGES[] = {
        0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007fffff, 0x00800000, 0x3f800000, 0xbf800000,
        0x7f7fffff, 0xff7fffff, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc00000, 0x7f800001, 0x33800000,
    };
    const uint32_t choice = random32();
    return choice % 3 ? random32() : EDGES[choice / 3 % 16];
}

static uint32_t *random_values(size_t n)
{
    uint32_t *values = (uint32_t *)(void *)allocate(4 * n);
    for (size_t i = 0; i < n; i++)
        values[i] = random_f32();
    return values;
}

/* The wire's bytes of a value. */
static void to_wire(uint8_t *out, const uint32_t *bits, size_t n)
{
    for (size_t i = 0; i < n; i++)
        for (int byte = 0; byte < 4; byte++)
            out[4 * i + (size_t)byte] = (uint8_t)(bits[i] >> 8 * byte);
}

static float value_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* The same bits, a NaN's payload and sign excepted. */
static int same(const void *a, const void *b)
{
    uint32_t x, y;
    memcpy(&x, a, 4);
    memcpy(&y, b, 4);
    return x == y || ((x & 0x7fffffff) > 0x7f800000 && (y & 0x7fffffff) > 0x7f800000);
}

static size_t first_difference(const void *a, const void *b, size_t n)
{
    size_t i = 0;
    while (i < n && same((const uint8_t *)a + 4 * i, (const uint8_t *)b + 4 * i))
        i++;
    return i;
}

#define MOST_FRAMES 40

static void check_fold(size_t n, size_t frames, size_t out_alignment)
{
    const float scale = value_of(0x3eaaaaab); /* a third, rounded */
    uint32_t *values[MOST_FRAMES];
    const uint8_t *in[MOST_FRAMES];
    area areas[MOST_FRAMES], out = output(4 * n, out_alignment);
    float *expected = (float *)(void *)allocate(4 * n);

    for (size_t f = 0; f < frames; f++) {
        values[f] = random_values(n);
        areas[f] = input(values[f], 4 * n, random32() % 64);
        to_wire(areas[f].data, values[f], n);
        in[f] = areas[f].data;
    }
    for (int scaled = 0; scaled < 2; scaled++) {
        for (size_t i = 0; i < n; i++) {
            volatile float sum = 0.0f; /* one rounding after each operation, on any host */
            for (size_t f = 0; f < frames; f++)
                sum = sum + value_of(values[f][i]);
            if (scaled)
                sum = sum * scale;
            expected[i] = sum;
        }
        memset(out.data, 0x7e, 4 * n);
        ff_fold_f32((float *)(void *)out.data, in, frames, n, scaled, scale);
        const size_t wrong = first_difference(out.data, expected, n);
        CHECK(wrong == n, "fold of %zu frames of %zu, scaled %d: value %zu", frames, n, scaled, wrong);
        CHECK(guards_hold(&out), "fold of %zu frames of %zu writes outside", frames, n);
    }
    for (size_t f = 0; f < frames; f++) {
        free(values[f]);
        free(areas[f].memory);
    }
    free(out.memory);
    free(expected);
}

/* bfloat16 of a float32's bits, by the distance to both neighbours. */
static uint16_t rounded(uint32_t bits)
{
    const uint32_t upper = bits >> 16, lower = bits & 0xffff;
    if ((bits & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(upper | 0x40);
    return (uint16_t)(lower > 0x8000 || (lower == 0x8000 && (upper & 1)) ? upper + 1 : upper);
}

static uint16_t rounded_value(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return rounded(bits);
}

static int same_half(uint32_t a, uint32_t b)
{
    return a == b || ((a & 0x7fff) > 0x7f80 && (b & 0x7fff) > 0x7f80);
}

static uint16_t half_at(const uint8_t *p, size_t i)
{
    return (uint16_t)(p[2 * i] | p[2 * i + 1] << 8);
}

static void put_half(uint8_t *p, size_t i, uint16_t x)
{
    p[2 * i] = (uint8_t)x;
    p[2 * i + 1] = (uint8_t)(x >> 8);
}

/* n values of bfloat16 on the wire. */
static area random_halves(size_t n, size_t alignment)
{
    uint32_t *values = random_values(n);
    area made = input(values, 2 * n, alignment);
    for (size_t i = 0; i < n; i++)
        put_half(made.data, i, (uint16_t)(values[i] >> 16));
    free(values);
    return made;
}

static void check_conversions(size_t n, size_t alignment)
{
    const float scale = value_of(0x3eaaaaab);
    uint32_t *values = random_values(n);
    area single = input(values, 4 * n, alignment), half = random_halves(n, (alignment + n) % 64);
    area narrow = output(2 * n, (3 * alignment + n) % 64), wide = output(4 * n, (5 * alignment + 1) % 64);
    size_t right = 0;

    ff_narrow_bf16(narrow.data, single.data, n, 0, scale);
    while (right < n && half_at(narrow.data, right) == rounded(values[right]))
        right++;
    CHECK(right == n, "narrow of %zu at %zu: value %zu", n, alignment, right);

    ff_narrow_bf16(narrow.data, single.data, n, 1, scale);
    for (right = 0; right < n; right++) {
        volatile float product = value_of(values[right]) * scale;
        if (!same_half(half_at(narrow.data, right), rounded_value(product)))
            break;
    }
    CHECK(right == n, "scaled narrow of %zu at %zu: value %zu", n, alignment, right);

    ff_scale_bf16(narrow.data, half.data, n, scale);
    for (right = 0; right < n; right++) {
        volatile float product = value_of((uint32_t)half_at(half.data, right) << 16) * scale;
        if (!same_half(half_at(narrow.data, right), rounded_value(product)))
            break;
    }
    CHECK(right == n, "scale of %zu halves at %zu: value %zu", n, alignment, right);

    ff_widen_bf16(wide.data, half.data, n);
    for (right = 0; right < n; right++) {
        uint32_t bits;
        memcpy(&bits, wide.data + 4 * right, 4);
        if (bits != (uint32_t)half_at(half.data, right) << 16)
            break;
    }
    CHECK(right == n, "widen of %zu at %zu: value %zu", n, alignment, right);
    CHECK(guards_hold(&narrow) && guards_hold(&wide), "a conversion of %zu writes outside", n);
    free(values);
    free(single.memory);
    free(half.memory);
    free(narrow.memory);
    free(wide.memory);
}

static void check_fold_bf16(size_t n, size_t frames, size_t alignment)
{
    const float scale = value_of(0x3eaaaaab);
    const uint8_t *in[MOST_FRAMES];
    area areas[MOST_FRAMES], out = output(2 * n, alignment), acc = output(4 * n, alignment / 4 * 4);

    memset(acc.data, 0, 4 * n);
    for (size_t f = 0; f < frames; f++) {
        areas[f] = random_halves(n, random32() % 64);
        in[f] = areas[f].data;
        ff_add_bf16((float *)(void *)acc.data, in[f], n, f == 0);
    }
    for (int scaled = 0; scaled < 2; scaled++) {
        size_t right = 0;
        ff_fold_bf16(out.data, in, frames, n, scaled, scale);
        for (; right < n; right++) {
            volatile float sum = 0.0f, held;
            for (size_t f = 0; f < frames; f++)
                sum = sum + value_of((uint32_t)half_at(in[f], right) << 16);
            memcpy((void *)&held, acc.data + 4 * right, 4);
            uint16_t expected = rounded_value(sum);
            if (scaled) {
                sum = value_of((uint32_t)expected << 16) * scale;
                expected = rounded_value(sum);
            } else if (!same_half(rounded_value(held), expected))
                break;
            if (!same_half(half_at(out.data, right), expected))
                break;
        }
        CHECK(right == n, "fold of %zu frames of %zu halves, scaled %d: value %zu", frames, n, scaled, right);
    }
    CHECK(guards_hold(&out) && guards_hold(&acc), "fold of %zu halves writes outside", n);
    for (size_t f = 0; f < frames; f++)
        free(areas[f].memory);
    free(out.memory);
    free(acc.memory);
}

static void check_first_nonfinite_bf16(size_t n)
{
    static const uint16_t NONFINITE[] = {0x7f80, 0xff80, 0x7fc0, 0xffff, 0x7f81};
    area in = random_halves(n, n % 64);
    for (size_t i = 0; i < n; i++)
        put_half(in.data, i, half_at(in.data, i) & 0x807f);
    CHECK(ff_first_nonfinite_bf16(in.data, n) == n, "a non-finite value among %zu finite halves", n);
    for (size_t i = 0; i < n; i++) {
        const uint16_t before = half_at(in.data, i);
        put_half(in.data, i, NONFINITE[random32() % 5]);
        CHECK(ff_first_nonfinite_bf16(in.data, n) == i, "the one non-finite value %zu of %zu halves", i, n);
        put_half(in.data, i, before);
    }
    free(in.memory);
}

/* Every float32 whose lower half is at the cut or its edges, and bits between at random. */
static void check_every_upper_half(void)
{
    static const uint32_t LOWER[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
    uint32_t values[64];
    uint8_t out[2 * 64];
    for (uint32_t upper = 0; upper < 0x10000; upper++) {
        for (size_t i = 0; i < 64; i++)
            values[i] = upper << 16 | (i < 6 ? LOWER[i] : random32() & 0xffff);
        ff_narrow_bf16(out, values, 64, 0, 1.0f);
        for (size_t i = 0; i < 64; i++)
            CHECK(half_at(out, i) == rounded(values[i]), "%08x rounds to %04x", values[i], half_at(out, i));
    }
}

static void check_add_and_scale(size_t n, size_t in_alignment)
{
    const float scale = value_of(0x3eaaaaab);
    uint32_t *before = random_values(n), *values = random_values(n);
    area in = input(values, 4 * n, in_alignment), acc = output(4 * n, in_alignment / 4 * 4);
    float *expected = (float *)(void *)allocate(4 * n);
    to_wire(in.data, values, n);
    memcpy(acc.data, before, 4 * n);

    for (size_t i = 0; i < n; i++)
        expected[i] = value_of(before[i]) + value_of(values[i]);
    ff_add_f32((float *)(void *)acc.data, in.data, n, 0);
    size_t wrong = first_difference(acc.data, expected, n);
    CHECK(wrong == n, "add of %zu at %zu: value %zu", n, in_alignment, wrong);

    for (size_t i = 0; i < n; i++)
        expected[i] *= scale;
    ff_scale_f32((float *)(void *)acc.data, n, scale);
    wrong = first_difference(acc.data, expected, n);
    CHECK(wrong == n, "scale of %zu at %zu: value %zu", n, in_alignment, wrong);
    CHECK(guards_hold(&acc), "add or scale of %zu writes outside", n);
    free(before);
    free(values);
    free(in.memory);
    free(acc.memory);
    free(expected);
}

static void check_first_nonfinite(size_t n)
{
    static const uint32_t NONFINITE[] = {
        0x7f800000, 0xff800000, 0x7fc00000, 0xffc00000, 0x7f800001, 0xffffffff,
    };
    static const uint32_t FINITE[] = {
        0x7f7fffff, 0xff7fffff, 0x00000000, 0x80000000, 0x007fffff, 0x3f800000,
    };
    uint32_t *values = random_values(n);
    area in = input(values, 4 * n, n % 64);
    for (size_t i = 0; i < n; i++)
        values[i] = FINITE[random32() % 6];
    to_wire(in.data, values, n);
    CHECK(ff_first_nonfinite_f32(in.data, n) == n, "a non-finite value among %zu finite ones", n);
    for (size_t i = 0; i < n; i++) {
        const size_t later = i + random32() % (n - i);
        to_wire(in.data + 4 * i, &NONFINITE[random32() % 6], 1);
        CHECK(ff_first_nonfinite_f32(in.data, n) == i, "the one non-finite value %zu of %zu", i, n);
        to_wire(in.data + 4 * later, &NONFINITE[random32() % 6], 1);
        CHECK(ff_first_nonfinite_f32(in.data, n) == i, "the first non-finite value, %zu of %zu", i, n);
        to_wire(in.data + 4 * later, &values[later], 1);
        to_wire(in.data + 4 * i, &values[i], 1);
    }
    free(values);
    free(in.memory);
}

static void check_copy(size_t length, size_t dst_alignment, size_t src_alignment)
{
    area src = input(message, length, src_alignment), dst = output(length, dst_alignment);
    ff_copy(dst.data, src.data, length);
    CHECK(!memcmp(dst.data, message, length), "copy of %zu from %zu to %zu", length, src_alignment,
          dst_alignment);
    CHECK(guards_hold(&dst), "copy of %zu to %zu writes outside", length, dst_alignment);
    free(src.memory);
    free(dst.memory);
}

static void check_swap32(size_t n, size_t alignment)
{
    area src = input(message, 4 * n, alignment), dst = output(4 * n, (alignment + n) % 64);
    ff_swap32(dst.data, src.data, n);
    size_t right = 0;
    while (right < 4 * n && dst.data[right] == message[right ^ 3])
        right++;
    CHECK(right == 4 * n, "swap of %zu at %zu: byte %zu", n, alignment, right);
    CHECK(guards_hold(&dst), "swap of %zu at %zu writes outside", n, alignment);
    ff_swap32(dst.data, dst.data, n);
    CHECK(!memcmp(dst.data, message, 4 * n), "swap of %zu in place", n);
    free(src.memory);
    free(dst.memory);
}

static void check_fold_kernel(void)
{
    static const size_t MANY[] = {12, 13, 24, 25, 40};
    static const size_t LARGE[] = {8191, 8192, 8193, 16421, 65535, 65536, 65575};
    for (size_t n = 0; n <= 200; n++) {
        for (size_t frames = 0; frames <= 9; frames++) {
            check_fold(n, frames, 4 * (n % 16));
            check_fold_bf16(n, frames, n % 64);
        }
        for (size_t i = 0; i < sizeof MANY / sizeof *MANY; i++) {
            check_fold(n, MANY[i], 4 * (n % 16));
            check_fold_bf16(n, MANY[i], n % 64);
        }
        for (size_t alignment = 0; alignment < 64; alignment++) {
            check_add_and_scale(n, alignment);
            check_conversions(n, alignment);
            check_swap32(n, alignment);
        }
        check_first_nonfinite(n);
        check_first_nonfinite_bf16(n);
    }
    check_every_upper_half();
    for (size_t i = 0; i < sizeof LARGE / sizeof *LARGE; i++)
        for (size_t alignment = 0; alignment < 64; alignment += 20) {
            check_fold(LARGE[i], 1 + i % 5, alignment);
            check_fold(LARGE[i], 13 + i, alignment);
            check_fold_bf16(LARGE[i], 1 + i % 5, alignment);
            check_fold_bf16(LARGE[i], 13 + i, alignment);
            check_conversions(LARGE[i], alignment);
        }
    for (size_t alignment = 0; alignment < 64; alignment++) {
        for (size_t length = 0; length <= SHORT; length++)
            check_copy(length, alignment, length % 64);
        check_copy(((size_t)256 << 10) + alignment * 37, alignment, 63 - alignment);
    }
    ff_fold_f32(NULL, NULL, 0, 0, 1, 2.0f);
    ff_add_f32(NULL, NULL, 0, 0);
    ff_scale_f32(NULL, 0, 2.0f);
    ff_copy(NULL, NULL, 0);
    ff_swap32(NULL, NULL, 0);
    ff_fold_bf16(NULL, NULL, 0, 0, 1, 2.0f);
    ff_narrow_bf16(NULL, NULL, 0, 1, 2.0f);
    ff_scale_bf16(NULL, NULL, 0, 2.0f);
    ff_widen_bf16(NULL, NULL, 0);
    CHECK(ff_first_nonfinite_f32(NULL, 0) == 0, "a non-finite value in nothing");
}

static void check_float32(void)
{
    for_each(ff_fold_kernels(), ff_fold_use, check_fold_kernel);
    CHECK(ff_fold_use("none") == -1, "an unknown kernel is accepted");
    ff_fold_use(NULL);
    CHECK(strstr(ff_fold_kernels(), ff_fold_kernel()) == ff_fold_kernels(), "the best is not in use");
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        CHECK(listed(ff_sha256_kernels(), argv[i]) || listed(ff_fold_kernels(), argv[i]), "no kernel %s here",
              argv[i]);
    check_sha256();
    check_float32();
    printf("check_kernels: sha256 (%s), fold (%s): %lu checks, %lu failures\n", ff_sha256_kernels(),
           ff_fold_kernels(), checks, failures);
    return failures != 0;
}
