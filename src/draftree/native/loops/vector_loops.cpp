// Loops over whole vocabularies for one instruction set: this file is compiled once for each, with DRAFTREE_VARIANT its name.
#include "vector_loops.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace draftree {
namespace {  // so that no function is shared between instruction sets

constexpr int32_t SIGNLESS = 0x7FFFFFFF, INFINITE = 0x7F800000, FIRST_STEP = 1 << 20;
constexpr float NEGLIGIBLE = 87;  // probabilities below exp(-87) are no normal numbers of float32, and are taken for this
constexpr int64_t COLUMNS = 16;

int64_t count_up_to(const int32_t* bits, int64_t count, int32_t most) {
  int64_t found = 0;
  for (int64_t begin = 0; begin < count; begin += 1 << 20) {
    const int64_t end = std::min<int64_t>(count, begin + (1 << 20));
    int32_t some = 0;
    for (int64_t i = begin; i < end; i++) some += (bits[i] & SIGNLESS) <= most;
    found += some;
  }
  return found;
}

// Copy the sizes that are at most `most`, in their order, and return their number. `out` may be `bits`, and has room for 16 more.
int64_t copy_up_to(const int32_t* bits, int64_t count, int32_t most, int32_t* out) {
  int64_t kept = 0, i = 0;
#if defined(__AVX512F__)
  const __m512i mask = _mm512_set1_epi32(SIGNLESS), limit = _mm512_set1_epi32(most);
  for (; i + 16 <= count; i += 16) {
    const __m512i sizes = _mm512_and_si512(_mm512_loadu_si512(bits + i), mask);
    const __mmask16 small = _mm512_cmple_epi32_mask(sizes, limit);
    _mm512_storeu_si512(out + kept, _mm512_maskz_compress_epi32(small, sizes));
    kept += __builtin_popcount(small);
  }
#endif
  for (; i < count; i++) {
    const int32_t size = bits[i] & SIGNLESS;
    out[kept] = size;
    kept += size <= most;
  }
  return kept;
}

struct Least {
  int64_t count;
  int32_t limit;
};

// Copy the `top` least sizes of numbers. If more are equal to the last of them than there is room for, copy none of these. Return
// how many there are, and below which bits.
//
// Bounds are looked for from a guess on in growing steps, then between two by halves and by interpolation in turns: to count is
// faster than to sort. What turns out to be too large is left out of further counts.
Least copy_least(const int32_t* bits, int64_t count, int64_t top, int32_t guess, int32_t* kept) {
  int64_t low = -1, high = INFINITE, below = 0, above = count, middle = guess, step = FIRST_STEP, left = count;
  const int32_t* row = bits;
  bool halving = false;
  while (high - low > 1) {
    middle = std::min(std::max(middle, low + 1), high - 1);
    const int64_t found = count_up_to(row, left, static_cast<int32_t>(middle));
    if (found == top) {
      high = middle + 1;
      break;
    }
    if (found > top) {
      high = middle;
      above = found;
      if (4 * above < 3 * left) {
        left = copy_up_to(row, left, static_cast<int32_t>(middle), kept);
        row = kept;
      }
    } else {
      low = middle;
      below = found;
    }
    if (low < 0 || high == INFINITE) {
      middle = low < 0 ? high - step : low + step;
      step *= 2;
    } else {
      const double share = halving ? 0.5 : static_cast<double>(top - below) / static_cast<double>(above - below);
      middle = low + static_cast<int64_t>(static_cast<double>(high - low) * share);
      halving = !halving;
    }
  }
  return {copy_up_to(row, left, static_cast<int32_t>(high - 1), kept), static_cast<int32_t>(high)};
}

template <class To, class From>
To bits_as(From from) {
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// Return exp(-x) for 0 <= x <= 87: a power of two, times a polynomial of what is left (Cephes' expf). entropies.py does the same.
inline float exponential(float x) {
  const float power = std::nearbyint(x * -1.44269504f);
  const float r = (-x - power * 0.693359375f) + power * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r;
  p = p + 1.0f;
  return p * bits_as<float>((static_cast<int32_t>(power) + 127) << 23);
}

void entropies(const float* log_q, int64_t distributions, int64_t tokens, int64_t top, double* out) {
  std::vector<int32_t> kept(tokens + 2 * COLUMNS);
  int32_t limit = bits_as<int32_t>(static_cast<float>(std::log(static_cast<double>(tokens))));  // if all are alike
  for (int64_t f = 0; f < distributions; f++) {
    const auto* bits = reinterpret_cast<const int32_t*>(log_q + f * tokens);
    int64_t count = 0;
    if (top < tokens) {
      const Least least = copy_least(bits, tokens, top, limit, kept.data());
      count = least.count;
      limit = least.limit;
    } else {
      count = copy_up_to(bits, tokens, SIGNLESS, kept.data());
    }
    double sums[COLUMNS] = {};
    for (int64_t begin = 0; begin < count; begin += COLUMNS) {
      float numbers[COLUMNS];
      for (int64_t j = 0; j < COLUMNS; j++) {
        const float x = begin + j < count ? bits_as<float>(kept[begin + j]) : NEGLIGIBLE;
        numbers[j] = x < NEGLIGIBLE ? x : NEGLIGIBLE;
      }
      for (int64_t j = 0; j < COLUMNS; j++) {
        const float product = numbers[j] * exponential(numbers[j]);
        sums[j] += static_cast<double>(product);
      }
    }
    double total = 0;
    for (double sum : sums) total += sum;
    if (count < top && top < tokens) {  // the rest are all alike
      const double edge = bits_as<float>(limit);
      total += edge < static_cast<double>(NEGLIGIBLE) ? static_cast<double>(top - count) * edge * std::exp(-edge) : 0.0;
    }
    out[f] = total;
  }
}

constexpr int16_t SIZE = 0x7FFF, INFINITE_HALF = 0x7F80;

// Return a number of bfloat16 as a whole number of the same order.
inline int16_t ordered(int16_t bits) {
  const int16_t size = bits & SIZE;
  return bits < 0 ? static_cast<int16_t>(-size) : size;
}

void largest(const int16_t* bits, int64_t rows, int64_t width, int64_t* out) {
  constexpr int64_t BLOCK = 64;
  for (int64_t r = 0; r < rows; r++) {
    const int16_t* row = bits + r * width;
    int16_t best = -0x7FFF, most = 0;
    for (int64_t i = 0; i < width; i++) {
      best = std::max(best, ordered(row[i]));
      most = std::max(most, static_cast<int16_t>(row[i] & SIZE));
    }
    out[r] = -1;
    if (most > INFINITE_HALF || best >= INFINITE_HALF || best <= -INFINITE_HALF) continue;
    int64_t i = 0;
    for (; i + BLOCK <= width; i += BLOCK) {
      int16_t found = 0;
      for (int64_t j = 0; j < BLOCK; j++) found |= static_cast<int16_t>(ordered(row[i + j]) == best);
      if (found) break;
    }
    while (i < width && ordered(row[i]) != best) i++;
    if (i < width) out[r] = i;
  }
}

void confidences(const double* x, int64_t features, int64_t nodes, const double* hidden, const double* hidden_bias, int64_t units,
                 const double* output, double output_bias, double* out) {
  constexpr int64_t BLOCK = 32;
  for (int64_t begin = 0; begin < nodes; begin += BLOCK) {
    const int64_t count = std::min(BLOCK, nodes - begin);
    double found[BLOCK], unit[BLOCK];
    std::fill_n(found, BLOCK, output_bias);
    for (int64_t d = 0; d < units; d++) {
      std::fill_n(unit, BLOCK, hidden_bias[d]);
      for (int64_t i = 0; i < features; i++) {
        const double weight = hidden[d * features + i];
        const double* row = x + i * nodes + begin;
        for (int64_t m = 0; m < count; m++) unit[m] += row[m] * weight;
      }
      for (int64_t m = 0; m < count; m++) found[m] += (0.0 > unit[m] ? 0.0 : unit[m]) * output[d];
    }
    for (int64_t m = 0; m < count; m++) out[begin + m] = 0.5 * (1 + std::tanh(found[m] / 2));  // the sigmoid, without overflow
  }
}

}  // namespace

#define DRAFTREE_JOIN(a, b) a##b
#define DRAFTREE_NAMED(name) DRAFTREE_JOIN(loops_, name)
#define DRAFTREE_TEXT_(name) #name
#define DRAFTREE_TEXT(name) DRAFTREE_TEXT_(name)

extern const VectorLoops DRAFTREE_NAMED(DRAFTREE_VARIANT);
const VectorLoops DRAFTREE_NAMED(DRAFTREE_VARIANT) = {DRAFTREE_TEXT(DRAFTREE_VARIANT), entropies, largest, confidences};

}  // namespace draftree
