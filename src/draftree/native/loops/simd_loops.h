// Vectorised loops over vocabularies, nodes and noise, compiled for each instruction set; all give
// the same bits.
#pragma once
#include <cstdint>

namespace draftree {

struct SimdLoops {
  const char* name;
  // Write entropies [distributions] over the `top` likeliest tokens of log q [distributions,
  // tokens].
  void (*entropies)(const float* log_q, int64_t distributions, int64_t tokens, int64_t top,
                    double* out);
  // Write where the largest number of each row of bfloat16 [rows, width] is; -1 if it is infinite
  // or one is NaN.
  void (*largest)(const int16_t* bits, int64_t rows, int64_t width, int64_t* out);
  // Write [nodes] what a ReLU layer, a linear one and a sigmoid make of features x [features,
  // nodes].
  void (*confidences)(const double* x, int64_t features, int64_t nodes, const double* hidden,
                      const double* hidden_bias, int64_t units, const double* output,
                      double output_bias, double* out);
  // Write the k likeliest tokens [rows, k] after logits [rows, width], their log q, and log of the
  // sum of exp(logits) [rows]. `type` is FLOAT32 or BFLOAT16. Of equal log q the lower token comes
  // first. A row whose largest logit is not finite, or that holds a NaN, has tokens 0 … k − 1 and
  // NaN.
  void (*top_log_probs)(const void* logits, int32_t type, int64_t rows, int64_t width, int64_t k,
                        int64_t* tokens, double* log_q, float* log_sums);
  // Write the Gumbel noise [count] of a place: two words of the key and three of the counter.
  void (*gumbel)(const uint32_t* place, int64_t count, double* out);
};

}  // namespace draftree
