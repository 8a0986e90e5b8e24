// GRPO's arithmetic for the course's tiny Qwen3: sampling, the gradient of the loss, AdamW.  The loop is loop.js.
//
// The sizes (HIDDEN, LAYERS ...) are defined by dev/tools/tab.py, which reads the model's config.json.
//
// Nothing is computed twice.  Tokens are rows, and rows form a tree: each knows the row of the token before it.  The
// prompt of a group is the trunk, each completion a branch.  Sampling keeps all activations, and the backward pass
// starts from them: the policy that learns is the one that has sampled.
#include "layers.h"

#define EXPORT __attribute__((visibility("default")))

// --- Memory: taken once, at the start ---

extern unsigned char __heap_base;
static unsigned long used;

static void *take(unsigned long bytes) {
  if (!used)
    used = ((unsigned long)&__heap_base + 15) & ~15ul;
  unsigned long start = used;
  used += (bytes + 15) & ~15ul;
  long missing = (long)(used + 65535) / 65536 - (long)__builtin_wasm_memory_size(0); // pages
  if (missing > 0 && __builtin_wasm_memory_grow(0, missing) == (unsigned long)-1)
    __builtin_trap();
  return (void *)start;
}

static float *floats(long n) {
  return take(n * sizeof(float));
}

// The compiler calls these two.
void *memset(void *to, int value, unsigned long n) {
  for (unsigned char *byte = to; n--;)
    *byte++ = value;
  return to;
}

void *memcpy(void *to, const void *from, unsigned long n) {
  const unsigned char *source = from;
  for (unsigned char *byte = to; n--;)
    *byte++ = *source++;
  return to;
}

// --- Weights, in the order of a checkpoint ---

typedef struct {
  float *input_norm, *qkv, *q_norm, *k_norm, *output, *post_norm, *gate_up, *down;
} Layer;

typedef struct {
  float *embedding; // [VOCABULARY, HIDDEN]; the head is the same matrix, rounded to bfloat16
  Layer layers[LAYERS];
  float *norm;
  float *end;
} Weights;

static Weights weights_at(float *start) {
  Weights w = {.embedding = start};
  float *next = start + VOCABULARY * HIDDEN;
  for (int i = 0; i < LAYERS; i++) {
    Layer *layer = w.layers + i;
    layer->input_norm = next;
    layer->qkv = layer->input_norm + HIDDEN;
    layer->q_norm = layer->qkv + QKV * HIDDEN;
    layer->k_norm = layer->q_norm + HEAD_DIM;
    layer->output = layer->k_norm + HEAD_DIM;
    layer->post_norm = layer->output + HIDDEN * QUERIES;
    layer->gate_up = layer->post_norm + HIDDEN;
    layer->down = layer->gate_up + 2 * INTERMEDIATE * HIDDEN;
    next = layer->down + HIDDEN * INTERMEDIATE;
  }
  w.norm = next;
  w.end = next + HIDDEN;
  return w;
}

enum {
  LAYER_WEIGHTS = HIDDEN * (QKV + QUERIES + 3 * INTERMEDIATE + 2) + 2 * HEAD_DIM,
  WEIGHTS = VOCABULARY * HIDDEN + LAYERS * LAYER_WEIGHTS + HIDDEN
};

static Weights weights, gradient;
static float *first_moment, *second_moment; // AdamW's
static float *head, *head_gradient;         // [VOCABULARY, HIDDEN]
static Packed packed_head;
static struct { Packed qkv, output, gate_up, down; } packed[LAYERS];

static float rounded_to_bfloat16(float x) {
  union {
    float value;
    unsigned bits;
  } number = {x};
  number.bits = (number.bits + 0x7fff + ((number.bits >> 16) & 1)) & 0xffff0000u;
  return number.value;
}

static void pack_both(Packed to, const float *weight, int out, int in) {
  pack(transposed(matrix(weight, out, in)), to.forward);
  pack(matrix(weight, out, in), to.backward);
}

// After every change of the weights.
EXPORT void weights_changed(void) {
  for (int i = 0; i < VOCABULARY * HIDDEN; i++)
    head[i] = rounded_to_bfloat16(weights.embedding[i]);
  pack_both(packed_head, head, VOCABULARY, HIDDEN);
  for (int i = 0; i < LAYERS; i++) {
    Layer *layer = weights.layers + i;
    pack_both(packed[i].qkv, layer->qkv, QKV, HIDDEN);
    pack_both(packed[i].output, layer->output, HIDDEN, QUERIES);
    pack_both(packed[i].gate_up, layer->gate_up, 2 * INTERMEDIATE, HIDDEN);
    pack_both(packed[i].down, layer->down, HIDDEN, INTERMEDIATE);
  }
}

// --- Rows ---

enum { MAX_ROWS = SEQUENCES * MAX_LENGTH, BUFFER_ROWS = MAX_ROWS + SPARE_ROWS };
static int rows, token[MAX_ROWS], before[MAX_ROWS], position[MAX_ROWS]; // before: the row of the token before it, or -1

// Of each layer, and in the last place only x, the stream that leaves the last layer.
static struct {
  float *x;                 // [HIDDEN] what enters
  float *inverse_rms;       // [1]
  float *normed;            // [HIDDEN]
  float *raw;               // [QKV] queries, keys and values as they are computed ...
  float *head_inverse_rms;  // [HEADS + KV_HEADS]
  float *q_k_v;             // [QKV] ... and normalised and rotated
  float *attention_weights; // [HEADS, MAX_LENGTH]
  float *attended;          // [QUERIES]
  float *middle;            // [HIDDEN] the stream after attention
  float *middle_inverse_rms;
  float *middle_normed; // [HIDDEN]
  float *gate_up;       // [2 INTERMEDIATE]
  float *activated;     // [INTERMEDIATE]
} kept[LAYERS + 1];

// An output is the distribution of the token after a row.  Only rows that a token was chosen after have one.
static int outputs, row_of_output[MAX_ROWS], output_of_row[MAX_ROWS];
static float *final_normed, *final_inverse_rms, *probabilities; // [outputs, HIDDEN], [outputs], [outputs, VOCABULARY]

static int add_row(int new_token, int previous) {
  token[rows] = new_token;
  before[rows] = previous;
  position[rows] = previous < 0 ? 0 : position[previous] + 1;
  return rows++;
}

static int seen_from(int row, int *seen) { // the rows of a token and of all before it; returns how many
  int n = position[row] + 1;
  for (int i = n - 1; i >= 0; i--, row = before[row])
    seen[i] = row;
  return n;
}

// --- Forward and backward: n rows from `first` on; what they see is there already ---

static void normalise_heads(int i, int row) {
  float *from = kept[i].raw + (long)row * QKV, *to = kept[i].q_k_v + (long)row * QKV;
  float *inverse = kept[i].head_inverse_rms + row * (HEADS + KV_HEADS);
  for (int h = 0; h < HEADS + KV_HEADS; h++) {
    const float *scale = h < HEADS ? weights.layers[i].q_norm : weights.layers[i].k_norm;
    inverse[h] = rms_norm(to + h * HEAD_DIM, from + h * HEAD_DIM, scale, HEAD_DIM);
    rotate(to + h * HEAD_DIM, position[row], 1);
  }
  copy(to + QUERIES + KEYS, from + QUERIES + KEYS, KEYS); // values stay as they are
}

static void normalise_heads_backward(float *d, int i, int row) { // d [QKV], in place
  float *from = kept[i].raw + (long)row * QKV, *inverse = kept[i].head_inverse_rms + row * (HEADS + KV_HEADS);
  for (int h = 0; h < HEADS + KV_HEADS; h++, d += HEAD_DIM, from += HEAD_DIM) {
    const float *scale = h < HEADS ? weights.layers[i].q_norm : weights.layers[i].k_norm;
    float *d_scale = h < HEADS ? gradient.layers[i].q_norm : gradient.layers[i].k_norm;
    rotate(d, position[row], -1);
    rms_norm_backward(d, d_scale, d, from, scale, inverse[h], HEAD_DIM);
  }
}

static void attention_block(int i, int first, int n) { // kept[i].x -> kept[i].middle
  for (int row = first; row < first + n; row++) {
    float *normed = kept[i].normed + (long)row * HIDDEN, *x = kept[i].x + (long)row * HIDDEN;
    kept[i].inverse_rms[row] = rms_norm(normed, x, weights.layers[i].input_norm, HIDDEN);
  }
  linear(kept[i].raw + (long)first * QKV, kept[i].normed + (long)first * HIDDEN, packed[i].qkv, n, HIDDEN, QKV);
  for (int row = first; row < first + n; row++)
    normalise_heads(i, row);
  for (int row = first; row < first + n; row++) {
    int seen[MAX_LENGTH], count = seen_from(row, seen);
    float *attention_weights = kept[i].attention_weights + (long)row * HEADS * MAX_LENGTH;
    attention(kept[i].attended + (long)row * QUERIES, attention_weights, kept[i].q_k_v, row, seen, count);
  }
  float *middle = kept[i].middle + (long)first * HIDDEN;
  linear(middle, kept[i].attended + (long)first * QUERIES, packed[i].output, n, QUERIES, HIDDEN);
  add_scaled(middle, 1, kept[i].x + (long)first * HIDDEN, n * HIDDEN);
}

static float *d_stream, *d_hidden, *d_wide,
    *d_q_k_v; // [rows, HIDDEN], [rows, widest input], [rows, 2 INTERMEDIATE] ...

static void attention_block_backward(int i) { // d_stream: of kept[i].middle -> of kept[i].x
  Layer *layer = weights.layers + i, *d_layer = gradient.layers + i;
  linear_backward(d_hidden, d_layer->output, d_stream, kept[i].attended, packed[i].output, rows, QUERIES, HIDDEN);
  clear(d_q_k_v, (long)rows * QKV);
  for (int row = 0; row < rows; row++) {
    int seen[MAX_LENGTH], count = seen_from(row, seen);
    float *attention_weights = kept[i].attention_weights + (long)row * HEADS * MAX_LENGTH;
    attention_backward(d_q_k_v, d_hidden + (long)row * QUERIES, attention_weights, kept[i].q_k_v, row, seen, count);
  }
  for (int row = 0; row < rows; row++)
    normalise_heads_backward(d_q_k_v + (long)row * QKV, i, row);
  linear_backward(d_hidden, d_layer->qkv, d_q_k_v, kept[i].normed, packed[i].qkv, rows, HIDDEN, QKV);
  for (int row = 0; row < rows; row++) {
    float *d = d_hidden + (long)row * HIDDEN, *x = kept[i].x + (long)row * HIDDEN;
    rms_norm_backward(d, d_layer->input_norm, d, x, layer->input_norm, kept[i].inverse_rms[row], HIDDEN);
  }
  add_scaled(d_stream, 1, d_hidden, rows * HIDDEN);
}

static void mlp_block(int i, int first, int n) { // kept[i].middle -> kept[i + 1].x
  float *middle = kept[i].middle + (long)first * HIDDEN, *normed = kept[i].middle_normed + (long)first * HIDDEN;
  for (int j = 0; j < n; j++) {
    float inverse = rms_norm(normed + j * HIDDEN, middle + j * HIDDEN, weights.layers[i].post_norm, HIDDEN);
    kept[i].middle_inverse_rms[first + j] = inverse;
  }
  linear(kept[i].gate_up + (long)first * 2 * INTERMEDIATE, normed, packed[i].gate_up, n, HIDDEN, 2 * INTERMEDIATE);
  for (int row = first; row < first + n; row++)
    swiglu(kept[i].activated + (long)row * INTERMEDIATE, kept[i].gate_up + (long)row * 2 * INTERMEDIATE);
  float *next = kept[i + 1].x + (long)first * HIDDEN;
  linear(next, kept[i].activated + (long)first * INTERMEDIATE, packed[i].down, n, INTERMEDIATE, HIDDEN);
  add_scaled(next, 1, middle, n * HIDDEN);
}

static void mlp_block_backward(int i) { // d_stream: of kept[i + 1].x -> of kept[i].middle
  Layer *layer = weights.layers + i, *d_layer = gradient.layers + i;
  linear_backward(d_hidden, d_layer->down, d_stream, kept[i].activated, packed[i].down, rows, INTERMEDIATE, HIDDEN);
  for (long row = 0; row < rows; row++) {
    float *gate_up = kept[i].gate_up + row * 2 * INTERMEDIATE;
    swiglu_backward(d_wide + row * 2 * INTERMEDIATE, d_hidden + row * INTERMEDIATE, gate_up);
  }
  float *normed = kept[i].middle_normed;
  linear_backward(d_hidden, d_layer->gate_up, d_wide, normed, packed[i].gate_up, rows, HIDDEN, 2 * INTERMEDIATE);
  for (int row = 0; row < rows; row++) {
    float *d = d_hidden + (long)row * HIDDEN, *x = kept[i].middle + (long)row * HIDDEN;
    rms_norm_backward(d, d_layer->post_norm, d, x, layer->post_norm, kept[i].middle_inverse_rms[row], HIDDEN);
  }
  add_scaled(d_stream, 1, d_hidden, rows * HIDDEN);
}

static void forward(int first) { // the rows from `first` on
  for (int row = first; row < rows; row++)
    copy(kept[0].x + (long)row * HIDDEN, weights.embedding + token[row] * HIDDEN, HIDDEN);
  for (int i = 0; i < LAYERS; i++) {
    attention_block(i, first, rows - first);
    mlp_block(i, first, rows - first);
  }
}

static void predict(const int *after, int n, float temperature) { // an output for each of n rows
  int first = outputs;
  for (int i = 0; i < n; i++, outputs++) {
    row_of_output[outputs] = after[i];
    output_of_row[after[i]] = outputs;
    const float *x = kept[LAYERS].x + (long)after[i] * HIDDEN;
    final_inverse_rms[outputs] = rms_norm(final_normed + (long)outputs * HIDDEN, x, weights.norm, HIDDEN);
  }
  float *logits = probabilities + (long)first * VOCABULARY;
  linear(logits, final_normed + (long)first * HIDDEN, packed_head, n, HIDDEN, VOCABULARY);
  for (int i = 0; i < n * VOCABULARY; i++)
    logits[i] /= temperature;
  for (int i = 0; i < n; i++)
    softmax(logits + i * VOCABULARY, VOCABULARY);
}

static float *d_logits, *d_final; // [outputs, VOCABULARY], [outputs, HIDDEN]

static void predict_backward(void) { // d_logits -> d_stream
  linear_backward(d_final, head_gradient, d_logits, final_normed, packed_head, outputs, HIDDEN, VOCABULARY);
  clear(d_stream, (long)rows * HIDDEN);
  for (int i = 0; i < outputs; i++) {
    long row = row_of_output[i];
    float *d = d_final + (long)i * HIDDEN;
    rms_norm_backward(d, gradient.norm, d, kept[LAYERS].x + row * HIDDEN, weights.norm, final_inverse_rms[i], HIDDEN);
    add_scaled(d_stream + row * HIDDEN, 1, d, HIDDEN);
  }
}

// --- Sampling, and the gradient of what was sampled ---

// What passes between loop.js and here; the prompts' `group_size` completions each stand together.
static int prompt[SEQUENCES][MAX_PROMPT], prompt_length[SEQUENCES];
static int completion[SEQUENCES][MAX_COMPLETION], completion_length[SEQUENCES];
static float dice[SEQUENCES][MAX_COMPLETION];              // in: random numbers from 0 to 1
static float token_probability[SEQUENCES][MAX_COMPLETION]; // out
static float d_logp[SEQUENCES][MAX_COMPLETION];            // in: derivative of the loss after log π(token)
static int output_of[SEQUENCES][MAX_COMPLETION];           // from which each token was chosen
static int sequences;
static float sampled_at; // temperature

static int likeliest(const float *p) {
  int best = 0;
  for (int i = 1; i < VOCABULARY; i++)
    best = p[i] > p[best] ? i : best;
  return best;
}

static int drawn(const float *p, float dice) {
  float sum = 0;
  for (int i = 0; i < VOCABULARY; i++) {
    sum += p[i];
    if (dice < sum)
      return i;
  }
  return likeliest(p); // the probabilities of float32 can add up to a little less than 1
}

enum { SAMPLE, GREEDY, GIVEN }; // GIVEN: the completions are there, and get their probabilities

static int choose(int sequence, int t, int row, int how) { // returns whether the completion goes on
  int output = output_of_row[row], *chosen = &completion[sequence][t];
  const float *p = probabilities + (long)output * VOCABULARY;
  if (how != GIVEN)
    *chosen = how == GREEDY ? likeliest(p) : drawn(p, dice[sequence][t]);
  output_of[sequence][t] = output;
  token_probability[sequence][t] = p[*chosen];
  if (how == GIVEN)
    return t + 1 < completion_length[sequence];
  completion_length[sequence] = t + 1;
  return *chosen != END && t + 1 < MAX_COMPLETION;
}

EXPORT void generate(int prompts, int group_size, float temperature, int how) {
  int last[SEQUENCES]; // row of the last token, of each sequence
  int going[SEQUENCES], count = prompts * group_size;
  rows = outputs = 0;
  sequences = count;
  sampled_at = temperature;
  for (int i = 0; i < prompts; i++) {
    int row = -1;
    for (int t = 0; t < prompt_length[i]; t++)
      row = add_row(prompt[i][t], row);
    last[i] = row;
  }
  forward(0);
  predict(last, prompts, temperature);
  for (int i = count - 1; i >= 0; i--) { // from behind: last[i / group_size] is still a prompt's
    going[i] = i;
    last[i] = last[i / group_size];
  }
  for (int t = 0; count; t++) {
    int first = rows, still = 0, new_rows[SEQUENCES];
    for (int i = 0; i < count; i++) {
      int sequence = going[i];
      if (choose(sequence, t, last[sequence], how)) {
        last[sequence] = add_row(completion[sequence][t], last[sequence]);
        new_rows[still] = last[sequence];
        going[still++] = sequence;
      }
    }
    count = still;
    if (count) {
      forward(first);
      predict(new_rows, count, temperature);
    }
  }
}

// Adds the gradient of the completions that `generate` made last, from d_logp.
EXPORT void backward(void) {
  clear(d_logits, (long)outputs * VOCABULARY);
  for (int sequence = 0; sequence < sequences; sequence++)
    for (int t = 0; t < completion_length[sequence]; t++) {
      // d log p(chosen) / d logit = (1 if it is the chosen token's) - p, over the temperature
      float d = d_logp[sequence][t] / sampled_at;
      long output = output_of[sequence][t] * (long)VOCABULARY;
      add_scaled(d_logits + output, -d, probabilities + output, VOCABULARY);
      d_logits[output + completion[sequence][t]] += d;
    }
  predict_backward();
  for (int i = LAYERS - 1; i >= 0; i--) {
    mlp_block_backward(i);
    attention_block_backward(i);
  }
  for (int row = 0; row < rows; row++)
    add_scaled(gradient.embedding + token[row] * HIDDEN, 1, d_stream + (long)row * HIDDEN, HIDDEN);
}

// --- AdamW ---

EXPORT void clear_gradient(void) {
  clear(gradient.embedding, WEIGHTS);
  clear(head_gradient, VOCABULARY * HIDDEN);
}

EXPORT void clear_moments(void) {
  clear(first_moment, WEIGHTS);
  clear(second_moment, WEIGHTS);
}

// The norm of the whole gradient.  The head is rounded in plain_grpo, and so is its gradient.
EXPORT double gradient_norm(void) {
  for (int i = 0; i < VOCABULARY * HIDDEN; i++)
    gradient.embedding[i] += rounded_to_bfloat16(head_gradient[i]);
  clear(head_gradient, VOCABULARY * HIDDEN);
  double sum = 0;
  for (int i = 0; i < WEIGHTS; i++)
    sum += (double)gradient.embedding[i] * gradient.embedding[i];
  return __builtin_sqrt(sum);
}

// One step with the gradient times `scale`.  correction1, correction2: 1 - b1^step, 1 - b2^step.
EXPORT void adamw(float rate, float b1, float b2, float correction1, float correction2, float decay, float scale) {
  for (int i = 0; i < WEIGHTS; i++) {
    float g = gradient.embedding[i] * scale, *weight = weights.embedding + i;
    first_moment[i] = b1 * first_moment[i] + (1 - b1) * g;
    second_moment[i] = b2 * second_moment[i] + (1 - b2) * g * g;
    float root = __builtin_sqrtf(second_moment[i] / correction2) + 1e-8f;
    *weight -= rate * (first_moment[i] / correction1 / root + decay * *weight);
  }
  weights_changed();
}

// --- The start ---

static Packed room_for(int out, int in) {
  return (Packed){floats(out * in), floats(out * in)};
}

static float *rows_of(int width) {
  return floats((long)BUFFER_ROWS * width);
}

static void take_layer(int i) {
  packed[i].qkv = room_for(QKV, HIDDEN);
  packed[i].output = room_for(HIDDEN, QUERIES);
  packed[i].gate_up = room_for(2 * INTERMEDIATE, HIDDEN);
  packed[i].down = room_for(HIDDEN, INTERMEDIATE);
  kept[i].inverse_rms = rows_of(1);
  kept[i].normed = rows_of(HIDDEN);
  kept[i].raw = rows_of(QKV);
  kept[i].head_inverse_rms = rows_of(HEADS + KV_HEADS);
  kept[i].q_k_v = rows_of(QKV);
  kept[i].attention_weights = rows_of(HEADS * MAX_LENGTH);
  kept[i].attended = rows_of(QUERIES);
  kept[i].middle = rows_of(HIDDEN);
  kept[i].middle_inverse_rms = rows_of(1);
  kept[i].middle_normed = rows_of(HIDDEN);
  kept[i].gate_up = rows_of(2 * INTERMEDIATE);
  kept[i].activated = rows_of(INTERMEDIATE);
}

EXPORT void start(void) {
  weights = weights_at(floats(WEIGHTS));
  gradient = weights_at(floats(WEIGHTS));
  first_moment = floats(WEIGHTS);
  second_moment = floats(WEIGHTS);
  head = floats(VOCABULARY * HIDDEN);
  head_gradient = floats(VOCABULARY * HIDDEN);
  packed_head = room_for(VOCABULARY, HIDDEN);
  for (int i = 0; i < LAYERS; i++)
    take_layer(i);
  for (int i = 0; i <= LAYERS; i++)
    kept[i].x = rows_of(HIDDEN);
  final_normed = rows_of(HIDDEN);
  final_inverse_rms = rows_of(1);
  probabilities = rows_of(VOCABULARY);
  d_logits = rows_of(VOCABULARY);
  d_final = rows_of(HIDDEN);
  d_stream = rows_of(HIDDEN);
  d_hidden = rows_of(WIDEST_INPUT);
  d_wide = rows_of(2 * INTERMEDIATE);
  d_q_k_v = rows_of(QKV);
  packed_rows = rows_of(WIDEST_INPUT);
  cosines = floats(MAX_LENGTH * HEAD_DIM / 2);
  sines = floats(MAX_LENGTH * HEAD_DIM / 2);
}

// Where things are, by the names that engine.js has for them.
EXPORT void *address(int thing) {
  void *all[] = {weights.embedding,
                 gradient.embedding,
                 cosines,
                 sines,
                 prompt,
                 prompt_length,
                 completion,
                 completion_length,
                 dice,
                 token_probability,
                 d_logp,
                 probabilities};
  return all[thing];
}

EXPORT int size(int thing) {
  int all[] = {WEIGHTS, SEQUENCES, MAX_PROMPT, MAX_COMPLETION, HEAD_DIM, VOCABULARY};
  return all[thing];
}
