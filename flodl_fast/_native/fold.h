/* Loops over tensor bytes: fold, scale, float32 to bfloat16 and back, finiteness, copy, byte swap.
 *
 * Memory named uint8_t is little-endian wire bytes, memory named void native values, both at any alignment.
 * Arithmetic is that of a plain loop of f32 operations in the stated order, whatever the kernel: the same bits,
 * a NaN's payload and sign excepted. Buffers may not overlap unless it says so; null pointers are fine where the
 * size is 0.
 */
#ifndef FLODL_FAST_FOLD_H
#define FLODL_FAST_FOLD_H

#include <stddef.h>
#include <stdint.h>

/* out[i] = ((0.0f + in[0][i]) + in[1][i]) + ... in frame order, zeros without frames; then, if scaled,
 * times scale. out is 4-byte aligned (docs/wire.md §6). */
void ff_fold_f32(float *out, const uint8_t *const *in, size_t frames, size_t n, int scaled, float scale);

/* The same of bfloat16 values, in float32: the sum is rounded to bfloat16, then, if scaled, that is multiplied
 * and rounded again. */
void ff_fold_bf16(uint8_t *out, const uint8_t *const *in, size_t frames, size_t n, int scaled, float scale);

/* acc[i] += in[i]; first: acc[i] = 0.0f + in[i]. */
void ff_add_f32(float *acc, const uint8_t *in, size_t n, int first);
void ff_add_bf16(float *acc, const uint8_t *in, size_t n, int first);

/* x[i] *= scale */
void ff_scale_f32(float *x, size_t n, float scale);

/* Copy n native values to wire bytes, each times scale. */
void ff_copy_scaled_f32(uint8_t *dst, const void *src, size_t n, float scale);

/* Copy n bfloat16 values, each times scale in float32 and rounded again; dst may be src. */
void ff_scale_bf16(uint8_t *dst, const uint8_t *src, size_t n, float scale);

/* bfloat16 to float32, exact; past the caches where n is large. */
void ff_widen_bf16(void *dst, const uint8_t *src, size_t n);

/* float32, if scaled times scale, to bfloat16: to nearest, ties to even. A NaN keeps its upper half and turns
 * quiet (docs/wire.md §9). */
void ff_narrow_bf16(uint8_t *dst, const void *src, size_t n, int scaled, float scale);

/* Index of the first NaN or infinity among n values; n if there is none. */
size_t ff_first_nonfinite_f32(const uint8_t *data, size_t n);
size_t ff_first_nonfinite_bf16(const uint8_t *data, size_t n);

/* memcpy that leaves the caches alone where length is large: for data that is not read again at once. */
void ff_copy(void *dst, const void *src, size_t length);

/* Copy n 4-byte words with the bytes of each reversed; dst may be src. */
void ff_swap32(uint8_t *dst, const uint8_t *src, size_t n);

/* Kernels. "portable" is in use until ff_fold_use(NULL) picks the best one, once, before other threads
 * call anything here. */
const char *ff_fold_kernels(void); /* names usable on this CPU, best first: "avx2,portable" */
const char *ff_fold_kernel(void);  /* the name in use */
int ff_fold_use(const char *name); /* NULL: the best; 0, or -1: unknown or unusable here */

#endif
