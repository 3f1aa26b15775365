// The interface of the kernels: plain structures and one table of functions for each instruction
// set.
//
// Shapes: R sequences, n tokens of each, N = R * n tokens, G key-value heads, H query heads that
// share one of them, D entries of a head, S slots of the cache. All matrices are row-major; strides
// count elements.
#pragma once
#include <cstddef>
#include <cstdint>

namespace draftree {

enum DType : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, INT4 = 3, INT8 = 4 };

// A linear layer y = x W^T + b. `weight` was written by `Kernels::pack`, `pack_int4` or
// `pack_int8`.
struct Linear {
  const void* weight = nullptr;
  const void* bias = nullptr;  // [outputs] in the dtype of the model, or null
  int64_t inputs = 0;
  int64_t outputs = 0;
  int32_t type = FLOAT32;  // of the weight: the model's dtype, INT4 or INT8
};

// RMSNorm; a null weight stands for no norm.
struct Norm {
  const void* weight = nullptr;
  float epsilon = 0;
};

// One decoder layer of the Llama kind. The outputs of `gate_up` alternate: 32 of the gate, 32 of
// the up projection.
struct Layer {
  Norm input_norm;
  // Set: attention reads the normalised input, and behind it the normalised features of the pass,
  // as in EAGLE-3.
  Norm feature_norm;
  Linear qkv;  // G * H heads of queries, then G of keys, then G of values
  Norm q_norm, k_norm;
  Linear o_proj;
  Norm post_norm;
  Linear gate_up, down;
};

// What all layers of a pass have in common.
struct Shape {
  int64_t hidden = 0;        // entries of a hidden state
  int64_t intermediate = 0;  // entries between gate_up and down
  int64_t groups = 0;        // G
  int64_t heads = 0;         // H, for each group
  int64_t head_dim = 0;      // D, a multiple of 32
  int32_t dtype = FLOAT32;   // of hidden states, norms, biases, cache and mask
  float scale = 1;           // of the attention scores
};

// The place of a sequence in a packed pass, in which sequences have different numbers of tokens.
struct Sequence {
  int64_t first = 0;        // index of the sequence's first token
  int64_t start = 0;        // cache slot of that token
  int64_t slots = 0;        // number of slots that its tokens see
  int64_t mask = 0;         // offset of its mask
  int64_t mask_stride = 0;  // from one query to the next
};

// Parts of a layer: PROJECT ends with the stored keys and values, FINISH begins with attention.
enum Parts : int32_t { PROJECT = 1, FINISH = 2 };

// A pass over N tokens through `count` layers, and through the last norm and the head if there is
// one.
struct Pass {
  Shape shape;
  int32_t parts = PROJECT | FINISH;
  int64_t sequences = 0, tokens = 0;  // R, n
  // [R + 1] with an end mark at token N. Null: all sequences have n tokens and see `slots` slots.
  const Sequence* table = nullptr;
  const Layer* const* layers = nullptr;  // [count]
  int64_t count = 0;
  const void* input = nullptr;     // [N, hidden] input of the first layer
  const void* features = nullptr;  // [N, hidden] for layers with a `feature_norm`
  const void* residual = nullptr;  // [N, hidden] added to the first attention's output
  void* const* outputs = nullptr;  // [count] outputs [N, hidden] of the layers; null: not needed
  const void* cosines = nullptr;   // [P, D]
  const void* sines = nullptr;
  const int64_t* positions = nullptr;  // [N] rows of cosines and sines
  // [N] the number of each token's ancestors among the pass's tokens, for a mask that may hide some
  // of them by a sliding window. Null: it hides none.
  const int64_t* depths = nullptr;
  const int64_t* starts = nullptr;  // [R] slots of each sequence's first token; null: 0
  void* keys = nullptr;             // [layers, R, G, S, D]
  void* values = nullptr;
  int64_t key_strides[3] = {}, value_strides[3] = {};  // from one sequence, group, slot to the next
  int64_t key_layer = 0, value_layer = 0;              // from one layer to the next
  const void* mask = nullptr;  // [R or 1, n, S] added to the scores; the lowest number hides a slot
  int64_t mask_strides[2] = {};  // from one sequence, query to the next
  int64_t slots = 0;             // S
  float hidden_below = 0;        // a slot is visible if its mask is above this
  Norm final_norm;               // a null weight: no norm and no head
  Linear head;
  void* final_states = nullptr;  // [N, hidden] after the last norm
  void* logits = nullptr;        // [N, outputs of head]
  // [selected_count] the tokens for which results of the last layer, the last norm and the head are
  // computed. Their rows follow each other in this order. Null: all tokens.
  const int64_t* selected = nullptr;
  int64_t selected_count = 0;
};

// Attention alone, with all that models of other kinds need.
struct Attention {
  int64_t sequences = 0, groups = 0, heads = 0, tokens = 0, slots = 0, key_dim = 0, value_dim = 0;
  const void *queries = nullptr, *keys = nullptr, *values = nullptr, *mask = nullptr;
  int32_t dtype = FLOAT32;  // of queries, keys, values and outputs
  int32_t mask_dtype = FLOAT32;
  int64_t query_strides[3] = {};  // from one sequence, head, query to the next
  int64_t key_strides[3] = {}, value_strides[3] = {};
  // From one sequence, head, query to the next; 0 if all share one.
  int64_t mask_strides[3] = {};
  const float* sinks = nullptr;  // [G * H] extra scores without a value (attention sinks)
  float scale = 1, cap = 0;      // soft cap of the scores, cap * tanh(score / cap); 0: none
  float hidden_below = 0;
  void* outputs = nullptr;  // [R, n, G * H, value_dim]
};

// Whether the processor is one of AMD's, on which other ways to fetch weights are fast.
extern const bool made_by_amd;

struct Kernels {
  const char* name;
  // Return the bytes of a packed weight.
  int64_t (*packed_bytes)(int32_t type, int64_t outputs, int64_t inputs);
  // Pack a weight [outputs, inputs] of type FLOAT32, BFLOAT16 or FLOAT16.
  void (*pack)(int32_t type, const void* weight, int64_t outputs, int64_t inputs, void* packed,
               int threads);
  // Pack numbers 0 to 15 [outputs, inputs] and, for each group of 32 inputs, a step and the value
  // of number 8 in bfloat16, [inputs / 32, outputs, 2].
  void (*pack_int4)(const uint8_t* numbers, const uint16_t* scales, int64_t outputs, int64_t inputs,
                    void* packed, int threads);
  // Round a weight [outputs, inputs] of type FLOAT32, BFLOAT16 or FLOAT16 to eight bits, in groups
  // of 32 inputs that share a step, and pack it.
  void (*pack_int8)(int32_t type, const void* weight, int64_t outputs, int64_t inputs, void* packed,
                    int threads);
  void (*linear)(const Linear& layer, int32_t dtype, const void* input, int64_t tokens,
                 void* output, int threads);
  void (*forward)(const Pass& pass, int threads);
  void (*attend)(const Attention& attention, int threads);
  void (*rms_norm)(int32_t dtype, const void* input, const void* weight, void* output, int64_t rows,
                   int64_t width, float epsilon);
  // Rotate halves of heads [rows, heads, width] by the angles [rows, width] of their row.
  void (*rotate)(int32_t dtype, const void* input, const void* cosines, const void* sines,
                 void* output, int64_t rows, int64_t heads, int64_t width);
  // Multiply silu(gate) by up.
  void (*swiglu)(int32_t dtype, const void* gate, const void* up, void* output, int64_t count);
};

}  // namespace draftree
