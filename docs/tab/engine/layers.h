// The parts of a Qwen3 (arXiv:2505.09388), each with its backward pass below it.
//
// In a backward pass d_x is the derivative of the loss with respect to x.  Those of weights are added to what is there.
#pragma once
#include "matrix.h"

// y = scale x / rms(x).  Returns 1 / rms(x), which the backward pass needs.
static float rms_norm(float *y, const float *x, const float *scale, int n) {
  float inverse = 1 / __builtin_sqrtf(dot(x, x, n) / n + RMS_NORM_EPS);
  Vector factor = splat(inverse);
  for (int i = 0; i < n; i += LANES)
    store(y + i, multiply(multiply(load(scale + i), load(x + i)), factor));
  return inverse;
}

// d_x may be d_y.
static void rms_norm_backward(float *d_x, float *d_scale, const float *d_y, const float *x, const float *scale,
                              float inverse, int n) {
  Vector factor = splat(inverse), along = splat(0);
  for (int i = 0; i < n; i += LANES) {
    Vector both = multiply(load(d_y + i), load(x + i));
    store(d_scale + i, add_product(load(d_scale + i), both, factor));
    along = add_product(along, both, load(scale + i));
  }
  Vector pull = splat(sum_of(along) * inverse * inverse * inverse / n); // a longer x changes the rms too
  for (int i = 0; i < n; i += LANES) {
    Vector direct = multiply(factor, multiply(load(d_y + i), load(scale + i)));
    store(d_x + i, subtract(direct, multiply(pull, load(x + i))));
  }
}

// y [rows, out] = x weight', with the weight [out, in] as checkpoints have it.
typedef struct {
  float *forward;  // the weight's transpose, packed
  float *backward; // the weight, packed
} Packed;

static void linear(float *y, const float *x, Packed weight, int rows, int in, int out) {
  product(matrix(x, rows, in), weight.forward, y, out, 0);
}

static float *packed_rows; // room for [rows, in]

static void linear_backward(float *d_x, float *d_weight, const float *d_y, const float *x, Packed weight, int rows,
                            int in, int out) {
  product(matrix(d_y, rows, out), weight.backward, d_x, in, 0);
  pack(matrix(x, rows, in), packed_rows);
  product(transposed(matrix(d_y, rows, out)), packed_rows, d_weight, in, 1);
}

// Rotary embedding of one head at a position; its backward pass turns the other way.
static float *cosines, *sines; // [positions, HEAD_DIM / 2]

static void rotate(float *x, int position, float direction) {
  const float *cosine = cosines + position * HEAD_DIM / 2, *sine = sines + position * HEAD_DIM / 2;
  for (int i = 0; i < HEAD_DIM / 2; i++) {
    float first = x[i], second = x[i + HEAD_DIM / 2];
    x[i] = first * cosine[i] - direction * second * sine[i];
    x[i + HEAD_DIM / 2] = second * cosine[i] + direction * first * sine[i];
  }
}

// In place; x has room for the next multiple of LANES, which is filled with zeros.
static void softmax(float *x, int n) {
  float largest = x[0];
  for (int i = 1; i < n; i++)
    largest = x[i] > largest ? x[i] : largest;
  int end = (n + LANES - 1) / LANES * LANES;
  Vector sums = splat(0);
  for (int i = n; i < end; i++)
    x[i] = 0;
  for (int i = 0; i < end; i += LANES)
    store(x + i, exponential(subtract(load(x + i), splat(largest))));
  for (int i = n; i < end; i++)
    x[i] = 0;
  for (int i = 0; i < end; i += LANES)
    sums = add(sums, load(x + i));
  Vector factor = splat(1 / sum_of(sums));
  for (int i = 0; i < end; i += LANES)
    store(x + i, multiply(load(x + i), factor));
}

// Attention of one token, in all heads.  q_k_v [rows, QKV]: of each token its queries, keys and values, after
// normalisation and rotation.  rows: which of them the token sees, itself included.
enum { QUERIES = HEADS * HEAD_DIM, KEYS = KV_HEADS * HEAD_DIM, QKV = QUERIES + 2 * KEYS };
static const float SCALE = ATTENTION_SCALE; // 1 / sqrt(HEAD_DIM)

static long key_of(int row, int head) { // several queries share a key and value
  return (long)row * QKV + QUERIES + head / (HEADS / KV_HEADS) * HEAD_DIM;
}

static void attention(float *y, float *weights, const float *q_k_v, int row, const int *rows, int n) {
  clear(y, QUERIES);
  for (int head = 0; head < HEADS; head++, weights += MAX_LENGTH, y += HEAD_DIM) {
    const float *query = q_k_v + (long)row * QKV + head * HEAD_DIM;
    for (int j = 0; j < n; j++)
      weights[j] = SCALE * dot(query, q_k_v + key_of(rows[j], head), HEAD_DIM);
    softmax(weights, n);
    for (int j = 0; j < n; j++)
      add_scaled(y, weights[j], q_k_v + key_of(rows[j], head) + KEYS, HEAD_DIM);
  }
}

// Adds to d_q_k_v, also in the rows of the tokens that were seen.
static void attention_backward(float *d_q_k_v, const float *d_y, const float *weights, const float *q_k_v, int row,
                               const int *rows, int n) {
  for (int head = 0; head < HEADS; head++, weights += MAX_LENGTH, d_y += HEAD_DIM) {
    float d_weights[MAX_LENGTH], mean = 0;
    for (int j = 0; j < n; j++) {
      long value = key_of(rows[j], head) + KEYS;
      d_weights[j] = dot(d_y, q_k_v + value, HEAD_DIM);
      mean += weights[j] * d_weights[j];
      add_scaled(d_q_k_v + value, weights[j], d_y, HEAD_DIM);
    }
    long query = (long)row * QKV + head * HEAD_DIM;
    for (int j = 0; j < n; j++) {
      long key = key_of(rows[j], head);
      float d_score = SCALE * weights[j] * (d_weights[j] - mean);
      add_scaled(d_q_k_v + query, d_score, q_k_v + key, HEAD_DIM);
      add_scaled(d_q_k_v + key, d_score, q_k_v + query, HEAD_DIM);
    }
  }
}

// SwiGLU: y [INTERMEDIATE] = silu(gate) up, with gate and up one after the other.
static Vector sigmoid(Vector x) {
  return wasm_f32x4_div(splat(1), add(splat(1), exponential(wasm_f32x4_neg(x))));
}

static void swiglu(float *y, const float *gate_up) {
  for (int i = 0; i < INTERMEDIATE; i += LANES) {
    Vector gate = load(gate_up + i), up = load(gate_up + INTERMEDIATE + i);
    store(y + i, multiply(multiply(gate, sigmoid(gate)), up));
  }
}

static void swiglu_backward(float *d_gate_up, const float *d_y, const float *gate_up) {
  for (int i = 0; i < INTERMEDIATE; i += LANES) {
    Vector gate = load(gate_up + i), up = load(gate_up + INTERMEDIATE + i), d = load(d_y + i);
    Vector opened = sigmoid(gate), silu = multiply(gate, opened);
    Vector slope = add(opened, multiply(silu, subtract(splat(1), opened))); // of silu
    store(d_gate_up + i, multiply(multiply(d, up), slope));
    store(d_gate_up + INTERMEDIATE + i, multiply(d, silu));
  }
}
