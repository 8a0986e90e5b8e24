// Vectors and matrix products, with the 128-bit instructions of WebAssembly.
//
// Why not a library: the gradient of one step took 10 s with jax-js 0.1.25 and 19 s with tfjs 4.22, both in
// WebAssembly; here a whole step takes half a second, on the same core.  Part of that is what is not computed at all:
// no padding, the prompt of a group once, no second forward pass (model.c).
#pragma once
#include <wasm_simd128.h>

typedef v128_t Vector; // four floats
enum { LANES = 4 };

static inline Vector load(const float *x) {
  return wasm_v128_load(x);
}

static inline void store(float *x, Vector value) {
  wasm_v128_store(x, value);
}

static inline Vector splat(float x) {
  return wasm_f32x4_splat(x);
}

static inline Vector add(Vector a, Vector b) {
  return wasm_f32x4_add(a, b);
}

static inline Vector subtract(Vector a, Vector b) {
  return wasm_f32x4_sub(a, b);
}

static inline Vector multiply(Vector a, Vector b) {
  return wasm_f32x4_mul(a, b);
}

static inline Vector add_product(Vector sum, Vector a, Vector b) {
  return add(sum, multiply(a, b));
}

static inline float sum_of(Vector x) {
  float first = wasm_f32x4_extract_lane(x, 0) + wasm_f32x4_extract_lane(x, 1);
  return first + wasm_f32x4_extract_lane(x, 2) + wasm_f32x4_extract_lane(x, 3);
}

// n of all functions: a multiple of LANES.

static float dot(const float *a, const float *b, int n) {
  Vector sum = splat(0);
  for (int i = 0; i < n; i += LANES)
    sum = add_product(sum, load(a + i), load(b + i));
  return sum_of(sum);
}

static void add_scaled(float *y, float factor, const float *x, int n) { // y += factor x
  Vector factors = splat(factor);
  for (int i = 0; i < n; i += LANES)
    store(y + i, add_product(load(y + i), factors, load(x + i)));
}

static void clear(float *x, long n) {
  __builtin_memset(x, 0, n * sizeof(float));
}

static void copy(float *to, const float *from, long n) {
  __builtin_memcpy(to, from, n * sizeof(float));
}

// e^x = 2^n e^r with |r| <= ln(2) / 2, and e^r by the first eight terms of its series: to within 3e-7 of the value.
static Vector exponential(Vector x) {
  x = wasm_f32x4_max(wasm_f32x4_min(x, splat(88)), splat(-87)); // beyond, float32 has no such number
  Vector n = wasm_f32x4_nearest(multiply(x, splat(1.442695041f)));
  // ln(2) in two parts, of which the first has few bits: its product with n is exact.
  Vector r = subtract(subtract(x, multiply(n, splat(0.693359375f))), multiply(n, splat(-2.12194440e-4f)));
  Vector sum = splat(1.f / 5040);
  static const float terms[] = {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2, 1, 1};
  for (int i = 0; i < 7; i++)
    sum = add_product(splat(terms[i]), sum, r);
  Vector exponent = wasm_i32x4_add(wasm_i32x4_trunc_sat_f32x4(n), wasm_i32x4_const_splat(127));
  return multiply(sum, wasm_i32x4_shl(exponent, 23));
}

// A matrix as it lies in memory: element (i, j) is data[i * row_stride + j * column_stride].
typedef struct {
  const float *data;
  int rows, columns, row_stride, column_stride;
} Matrix;

static Matrix matrix(const float *data, int rows, int columns) {
  return (Matrix){data, rows, columns, columns, 1};
}

static Matrix transposed(Matrix a) {
  return (Matrix){a.data, a.columns, a.rows, a.column_stride, a.row_stride};
}

// The product reads its right factor in panels of 8 columns, each row of a panel together, and computes 4 rows of the
// result at a time: 4 x 8 sums stay in registers.
enum { PANEL = 8, STRIP = 4 };

static void pack(Matrix b, float *panels) {
  for (int j = 0; j < b.columns; j += PANEL)
    for (int i = 0; i < b.rows; i++)
      for (int column = j; column < j + PANEL; column++)
        *panels++ = b.data[i * b.row_stride + column * b.column_stride];
}

static inline void product_of_strip(const float *a, int row_stride, int column_stride, const float *panel, int inner,
                                    float *result, int columns, int accumulate) {
  Vector sums[STRIP][2];
  for (int i = 0; i < STRIP; i++)
    for (int half = 0; half < 2; half++)
      sums[i][half] = accumulate ? load(result + i * columns + half * LANES) : splat(0);
  for (int k = 0; k < inner; k++, a += column_stride, panel += PANEL) {
    Vector left = load(panel), right = load(panel + LANES);
#pragma clang loop unroll(full)
    for (int i = 0; i < STRIP; i++) {
      Vector factor = wasm_v128_load32_splat(a + i * row_stride);
      sums[i][0] = add_product(sums[i][0], factor, left);
      sums[i][1] = add_product(sums[i][1], factor, right);
    }
  }
  for (int i = 0; i < STRIP; i++)
    for (int half = 0; half < 2; half++)
      store(result + i * columns + half * LANES, sums[i][half]);
}

// result [a.rows, columns] = a b, or += where accumulate; b is packed.  Rows are computed by fours: up to three rows
// after the last one are overwritten, so every buffer has SPARE_ROWS.
enum { SPARE_ROWS = STRIP };

static void product(Matrix a, const float *packed, float *result, int columns, int accumulate) {
  for (int j = 0; j < columns; j += PANEL)
    for (int i = 0; i < a.rows; i += STRIP)
      product_of_strip(a.data + i * a.row_stride, a.row_stride, a.column_stride, packed + (long)j * a.columns,
                       a.columns, result + i * columns + j, columns, accumulate);
}
