/* HMAC-SHA256 cut to its first 8 digest bytes: the tag on every frame (MAC8 in docs/wire.md).
 *
 * The key's two padded blocks are compressed once per key, so a message of up to 55 bytes costs two
 * compressions. Nothing allocates, fails or keeps state of its own; keys are read only and may be
 * shared between threads. Data may lie at any alignment; a null pointer is fine where the length is 0.
 */
#ifndef FLODL_FAST_SHA256_H
#define FLODL_FAST_SHA256_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define FF_TAG_BYTES 8

typedef struct {
    uint32_t inner[8], outer[8]; /* SHA-256 states after the padded key block of each side */
} ff_mac_key;

typedef struct {
    uint32_t state[8];
    uint64_t length;  /* bytes taken so far, the key block included */
    uint8_t tail[64]; /* the first length % 64 bytes wait for the rest of their block */
} ff_mac_stream;

/* Prepare a key from a salt of at most 64 bytes (a longer one is cut there). */
void ff_mac_key_init(ff_mac_key *key, const uint8_t *salt, size_t length);

/* Tag one message that is all there. */
void ff_mac8(const ff_mac_key *key, const uint8_t *data, size_t length, uint8_t tag[FF_TAG_BYTES]);

/* Tag two messages under one key, their compressions interleaved where the CPU gains by it. */
void ff_mac8_pair(const ff_mac_key *key, const uint8_t *a, size_t a_length, const uint8_t *b,
                  size_t b_length, uint8_t a_tag[FF_TAG_BYTES], uint8_t b_tag[FF_TAG_BYTES]);

typedef struct {
    const uint8_t *data;
    size_t length;
} ff_message;

/* Tag the first of n messages, each in a lane of its own, FF_TAG_BYTES for each. Returns how many: at most
 * FF_LANES, and 0 where the kernel has no lanes or pairs are as fast, as they are for longer messages. */
#define FF_LANES 16
size_t ff_mac8_lanes(const ff_mac_key *key, const ff_message *messages, size_t n, uint8_t *tags);

/* Tag a message that comes in pieces: begin, any number of updates, end. */
void ff_mac_begin(ff_mac_stream *stream, const ff_mac_key *key);
void ff_mac_update(ff_mac_stream *stream, const uint8_t *data, size_t length);
/* The same as ff_mac_update, and the piece is copied on the way, which costs next to nothing there. */
void ff_mac_update_copy(ff_mac_stream *stream, uint8_t *to, const uint8_t *data, size_t length);
void ff_mac_end(ff_mac_stream *stream, const ff_mac_key *key, uint8_t tag[FF_TAG_BYTES]);

/* The same piece into two different streams, interleaved: a host frame is signed as a round and again as
 * the payload of its mux record. */
void ff_mac_update_pair(ff_mac_stream *a, ff_mac_stream *b, const uint8_t *data, size_t length);

/* The whole HMAC-SHA256 digest. */
void ff_mac32(const ff_mac_key *key, const uint8_t *data, size_t length, uint8_t digest[32]);

/* 1 if the tags are equal, in a time that does not depend on where they differ. */
static inline int ff_mac_equal(const uint8_t a[FF_TAG_BYTES], const uint8_t b[FF_TAG_BYTES])
{
    uint64_t x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    x ^= y;
    return (int)(1 ^ (x | (0 - x)) >> 63);
}

/* Kernels. "portable" is in use until ff_sha256_use(NULL) picks the best one, once, before other threads
 * call anything here. */
const char *ff_sha256_kernels(void); /* names usable on this CPU, best first: "avx512,shani,portable" */
const char *ff_sha256_kernel(void);  /* the name in use */
int ff_sha256_lanes(void);           /* whether it has lanes */
int ff_sha256_use(const char *name); /* NULL: the best; 0, or -1: unknown or unusable here */

#endif
