// Vectorised loops for one instruction set: this file is compiled once for each, with
// DRAFTREE_VARIANT its name.
#include "simd_loops.h"

#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace draftree {
namespace {  // no function may be shared between instruction sets

#include "simd.h"

constexpr int32_t SIGNLESS = 0x7FFFFFFF, INFINITE = 0x7F800000, FIRST_STEP = 1 << 20;
// Probabilities below exp(-NEGLIGIBLE) are subnormal in float32; they are replaced by it.
constexpr float NEGLIGIBLE = 87;
constexpr int64_t COLUMNS = 16;

// Return how many numbers have a size that is at most `most`.
int64_t count_up_to(const int32_t* bits, int64_t count, int32_t most) {
  constexpr int64_t UNROLLED = 4, STEP = UNROLLED * LANES;
  int64_t found = 0, i = 0;
#if defined(DRAFTREE_AVX512)
  const __m512i mask = _mm512_set1_epi32(SIGNLESS), limit = _mm512_set1_epi32(most);
  for (; i + STEP <= count; i += STEP) {
    uint64_t small = 0;
    for (int64_t u = 0; u < UNROLLED; u++)
      small |= static_cast<uint64_t>(_mm512_cmple_epi32_mask(
                   _mm512_and_si512(_mm512_loadu_si512(bits + i + 16 * u), mask), limit))
               << (16 * u);
    found += __builtin_popcountll(small);
  }
#else
  I counts[UNROLLED] = {};
  for (; i + STEP <= count; i += STEP) {
    for (int64_t u = 0; u < UNROLLED; u++) {
      const I sizes = (I)load_words(bits + i + u * LANES) & SIGNLESS;
      counts[u] -= sizes <= most;
    }
  }
  const I sum = (counts[0] + counts[1]) + (counts[2] + counts[3]);
  for (int lane = 0; lane < LANES; lane++) found += sum[lane];
#endif
  for (; i < count; i++) found += (bits[i] & SIGNLESS) <= most;
  return found;
}

#if defined(DRAFTREE_AVX2)
// For each set of 8 lanes their numbers, in order.
struct Compression {
  int32_t lanes[256][8] = {};
  constexpr Compression() {
    for (int set = 0; set < 256; set++) {
      int at = 0;
      for (int lane = 0; lane < 8; lane++)
        if (set >> lane & 1) lanes[set][at++] = lane;
    }
  }
};
alignas(32) constexpr Compression COMPRESSION;
#endif

// Copy the sizes that are at most `most`, in their order, and return their number. `out` may be
// `bits`, and has room for 16 more.
int64_t copy_up_to(const int32_t* bits, int64_t count, int32_t most, int32_t* out) {
  int64_t kept = 0, i = 0;
#if defined(DRAFTREE_AVX512)
  const __m512i mask = _mm512_set1_epi32(SIGNLESS), limit = _mm512_set1_epi32(most);
  for (; i + 16 <= count; i += 16) {
    const __m512i sizes = _mm512_and_si512(_mm512_loadu_si512(bits + i), mask);
    const __mmask16 small = _mm512_cmple_epi32_mask(sizes, limit);
    _mm512_storeu_si512(out + kept, _mm512_maskz_compress_epi32(small, sizes));
    kept += __builtin_popcount(small);
  }
#elif defined(DRAFTREE_AVX2)
  const __m256i mask = _mm256_set1_epi32(SIGNLESS), limit = _mm256_set1_epi32(most);
  for (; i + 8 <= count; i += 8) {
    const __m256i sizes =
        _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bits + i)), mask);
    const int small =
        ~_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(sizes, limit))) & 255;
    const __m256i order =
        _mm256_load_si256(reinterpret_cast<const __m256i*>(COMPRESSION.lanes[small]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + kept),
                        _mm256_permutevar8x32_epi32(sizes, order));
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

// Copy the `top` least sizes of numbers. If more are equal to the last of them than there is room
// for, copy none of these. Return how many there are, and below which bits.
//
// Bounds are looked for from a guess on in growing steps, then between two by halves and by
// interpolation in turns: to count is faster than to sort. What turns out to be too large is left
// out of further counts.
Least copy_least(const int32_t* bits, int64_t count, int64_t top, int32_t guess, int32_t* kept) {
  int64_t low = -1, high = INFINITE, below = 0, above = count, middle = guess, step = FIRST_STEP,
          left = count;
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
      const double share =
          halving ? 0.5 : static_cast<double>(top - below) / static_cast<double>(above - below);
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

// Return exp(-x) for 0 <= x <= 87: a power of two, times a polynomial of the rest (Cephes' expf).
// entropy.py does the same.
V exponential(V x) {
  const float whole = 12582912.0f;  // adding and subtracting it rounds to an integer
  const V power = (x * -1.44269504f + whole) - whole;
  const V r = (-x - power * 0.693359375f) + power * 2.12194440e-4f;
  V p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * (r * r) + r) + 1.0f;
  return p * (V)((__builtin_convertvector(power, I) + 127) << 23);
}

// Return the sum of x exp(-x) over sizes of numbers, which are padded to whole columns.
double sum_of_products(const int32_t* sizes, int64_t count) {
  constexpr int64_t HALVES = 2 * COLUMNS / LANES;
  Doubles sums[HALVES] = {};
  for (int64_t begin = 0; begin < count; begin += COLUMNS) {
    for (int64_t v = 0; v < COLUMNS / LANES; v++) {
      V x = (V)load_words(sizes + begin + v * LANES);
      x = x < NEGLIGIBLE ? x : splat(NEGLIGIBLE);
      const V products = x * exponential(x);
      HalfV halves[2];
      std::memcpy(halves, &products, sizeof products);
      for (int64_t h = 0; h < 2; h++)
        sums[2 * v + h] += __builtin_convertvector(halves[h], Doubles);
    }
  }
  double total = 0;
  for (int64_t h = 0; h < HALVES; h++)
    for (int lane = 0; lane < LANES / 2; lane++) total += sums[h][lane];
  return total;
}

void entropies(const float* log_q, int64_t distributions, int64_t tokens, int64_t top,
               double* out) {
  thread_local std::vector<int32_t>
      kept;  // allocated once: new pages cost as much as a distribution
  if (static_cast<int64_t>(kept.size()) < tokens + 2 * COLUMNS) kept.resize(tokens + 2 * COLUMNS);
  // The limit for equally likely tokens.
  int32_t limit = bits_as<int32_t>(static_cast<float>(std::log(static_cast<double>(tokens))));
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
    std::fill_n(kept.data() + count, COLUMNS, bits_as<int32_t>(NEGLIGIBLE));
    double total = sum_of_products(kept.data(), count);
    if (count < top && top < tokens) {  // the remaining ones are equal
      const double edge = bits_as<float>(limit);
      total += edge < static_cast<double>(NEGLIGIBLE)
                   ? static_cast<double>(top - count) * edge * std::exp(-edge)
                   : 0.0;
    }
    out[f] = total;
  }
}

// Write the natural logarithms of positive normal numbers; log_exp.py explains the series.
template <int64_t COUNT>
void logarithms(const double* x, double* out) {
  constexpr uint64_t ROOT = 0x3FE6A09E667F3BCD, BIAS = uint64_t{1} << 63,
                     WHOLE = 0x4330000000000000;
  constexpr int TERMS = 9;
  for (int64_t i = 0; i < COUNT; i++) {
    const auto bits = bits_as<uint64_t>(x[i]);
    // The exponent plus 2048, because AVX2 has no arithmetic shift of 64 bits.
    const uint64_t power = (bits - ROOT + BIAS) >> 52;
    const double m = bits_as<double>(bits - ((power - 2048) << 52));
    const double s = (m - 1.0) / (m + 1.0), z = s * s, twice = s + s;
    double series = z * (1.0 / (2 * TERMS + 1));
    for (int n = TERMS - 1; n > 0; n--) series = z * (series + 1.0 / (2 * n + 1));
    out[i] = (bits_as<double>(power | WHOLE) - (4503599627370496.0 + 2048)) * 0.6931471805599453 +
             (twice + twice * series);
  }
}

constexpr int64_t BLOCK = 8 * COLUMNS, VECTORS = BLOCK / LANES, GROUPS = 4;
static_assert(VECTORS % GROUPS == 0, "each block has as many vectors in each group");

template <class D>
void load_block(const typename D::T* row, int64_t begin, int64_t width, V (&block)[VECTORS]) {
  if (begin + BLOCK <= width) {
    for (int64_t v = 0; v < VECTORS; v++) block[v] = D::get(row + begin + v * LANES);
    return;
  }
  float held[BLOCK];
  std::fill_n(held, BLOCK, -std::numeric_limits<float>::infinity());
  typename D::T last[LANES] = {};
  for (int64_t i = begin; i < width; i += LANES) {
    const int64_t count = std::min<int64_t>(LANES, width - i);
    std::memcpy(last, row + i, sizeof(typename D::T) * static_cast<size_t>(count));
    float wide[LANES];
    store(wide, D::get(last));
    std::copy_n(wide, count, held + (i - begin));
  }
  for (int64_t v = 0; v < VECTORS; v++) block[v] = load(held + v * LANES);
}

// Return the sum of exp(logit - top) over a row. Each column of a block is summed in float32,
// blocks in float64.
template <class D>
double sum_of_exponentials(const typename D::T* row, int64_t width, float top) {
  constexpr int64_t PARTS = COLUMNS / LANES;
  Doubles sums[2 * PARTS] = {};
  for (int64_t begin = 0; begin < width; begin += BLOCK) {
    V block[VECTORS], columns[PARTS] = {};
    load_block<D>(row, begin, width, block);
    for (int64_t v = 0; v < VECTORS; v++) {
      const V x = splat(top) - block[v];
      columns[v % PARTS] += exponential(x < NEGLIGIBLE ? x : splat(NEGLIGIBLE));
    }
    for (int64_t part = 0; part < PARTS; part++) {
      HalfV halves[2];
      std::memcpy(halves, &columns[part], sizeof halves);
      for (int64_t h = 0; h < 2; h++)
        sums[2 * part + h] += __builtin_convertvector(halves[h], Doubles);
    }
  }
  double total = 0;
  for (int64_t h = 0; h < 2 * PARTS; h++)
    for (int lane = 0; lane < LANES / 2; lane++) total += sums[h][lane];
  return total;
}

// The k largest numbers so far, in falling order; the first of equals comes first.
struct Leading {
  int64_t k, count;
  int64_t* tokens;
  double* values;

  void offer(int64_t token, double value) {
    if (count == k && !(value > values[k - 1])) return;
    count = std::min(count + 1, k);
    int64_t at = count - 1;
    for (; at && value > values[at - 1]; at--) {
      values[at] = values[at - 1];
      tokens[at] = tokens[at - 1];
    }
    values[at] = value;
    tokens[at] = token;
  }
};

// Return a number that at least k of a row's logits reach: the k-th largest of the maxima of
// disjoint groups of them.
float reached_by(int64_t k, const V (&groups)[GROUPS]) {
  float maxima[GROUPS * LANES];
  if (k > GROUPS * LANES) return -std::numeric_limits<float>::infinity();
  for (int64_t g = 0; g < GROUPS; g++) store(maxima + g * LANES, groups[g]);
  std::nth_element(maxima, maxima + (k - 1), maxima + GROUPS * LANES,
                   [](float a, float b) { return a > b; });
  return maxima[k - 1];
}

template <class D>
void top_log_probs_of(const typename D::T* row, int64_t width, int64_t k, int64_t* tokens,
                      double* log_q, float* log_sum) {
  constexpr float INF = std::numeric_limits<float>::infinity();
  thread_local std::vector<float> maxima;  // of each lane in each block
  const int64_t blocks = (width + BLOCK - 1) / BLOCK;
  if (static_cast<int64_t>(maxima.size()) < blocks * LANES) maxima.resize(blocks * LANES);
  V groups[GROUPS];
  I nothing = {};
  std::fill_n(groups, GROUPS, splat(-INF));
  for (int64_t b = 0; b < blocks; b++) {
    V block[VECTORS], here[GROUPS];
    load_block<D>(row, b * BLOCK, width, block);
    for (int64_t g = 0; g < GROUPS; g++) here[g] = block[g];
    for (int64_t v = 0; v < VECTORS; v++) nothing |= block[v] != block[v];
    for (int64_t v = GROUPS; v < VECTORS; v++)
      here[v % GROUPS] = larger(here[v % GROUPS], block[v]);
    for (int64_t g = 0; g < GROUPS; g++) groups[g] = larger(groups[g], here[g]);
    store(maxima.data() + b * LANES, larger(larger(here[0], here[1]), larger(here[2], here[3])));
  }
  const float top = largest_of(larger(larger(groups[0], groups[1]), larger(groups[2], groups[3])));
  if (any(nothing) || !(top > -INF && top < INF)) {
    for (int64_t i = 0; i < k; i++) tokens[i] = i;
    std::fill_n(log_q, k, std::numeric_limits<double>::quiet_NaN());
    *log_sum = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  double logarithm = sum_of_exponentials<D>(row, width, top);
  logarithms<1>(&logarithm, &logarithm);
  const float sum = *log_sum = static_cast<float>(static_cast<double>(top) + logarithm);
  if (k == 0) return;
  const float least = reached_by(k, groups) - sum;
  Leading leading{k, 0, tokens, log_q};
  for (int64_t b = 0; b < blocks; b++) {
    if (!any(load(maxima.data() + b * LANES) - splat(sum) >= splat(least))) continue;
    V block[VECTORS];
    load_block<D>(row, b * BLOCK, width, block);
    for (int64_t v = 0; v < VECTORS; v++) {
      const V values = block[v] - splat(sum);
      if (!any(values >= splat(least))) continue;
      const int64_t first = b * BLOCK + v * LANES;
      float held[LANES];
      store(held, values);
      for (int64_t lane = 0; lane < std::min<int64_t>(LANES, width - first); lane++)
        if (held[lane] >= least) leading.offer(first + lane, held[lane]);
    }
  }
}

void top_log_probs(const void* logits, int32_t type, int64_t rows, int64_t width, int64_t k,
                   int64_t* tokens, double* log_q, float* log_sums) {
  for (int64_t r = 0; r < rows; r++) {
    int64_t* const places = tokens + r * k;
    double* const values = log_q + r * k;
    if (type == FLOAT32)
      top_log_probs_of<Float32>(static_cast<const float*>(logits) + r * width, width, k, places,
                                values, log_sums + r);
    else
      top_log_probs_of<BFloat16>(static_cast<const uint16_t*>(logits) + r * width, width, k, places,
                                 values, log_sums + r);
  }
}

// Numbers of bfloat16 that are not negative are ordered as their bits, negative ones the other way
// round.
void largest(const int16_t* bits, int64_t rows, int64_t width, int64_t* out) {
  constexpr int16_t SIZE = 0x7FFF, INFINITE_HALF = 0x7F80;
  constexpr uint16_t MINUS_INFINITE = 0xFF80;
  constexpr int64_t BLOCK = 128;
  for (int64_t r = 0; r < rows; r++) {
    const int16_t* row = bits + r * width;
    out[r] = -1;
    if (!width) continue;
    int16_t best = -0x7FFF - 1;
    uint16_t low = 0;
    for (int64_t i = 0; i < width; i++) {
      best = std::max(best, row[i]);
      low = std::max(low, static_cast<uint16_t>(row[i]));
    }
    if (best < 0) best = *std::min_element(row, row + width);
    if (low > MINUS_INFINITE || (best & SIZE) >= INFINITE_HALF) continue;
    const int16_t mask = best & SIZE ? -1 : SIZE, wanted = best & mask;  // both zeros are equal
    int64_t i = 0;
    for (; i + BLOCK <= width; i += BLOCK) {
      int16_t found = 0;
      for (int64_t j = 0; j < BLOCK; j++)
        found |= static_cast<int16_t>(static_cast<int16_t>(row[i + j] & mask) == wanted);
      if (found) break;
    }
    while ((row[i] & mask) != wanted) i++;
    out[r] = i;
  }
}

void confidences(const double* x, int64_t features, int64_t nodes, const double* hidden,
                 const double* hidden_bias, int64_t units, const double* output, double output_bias,
                 double* out) {
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
    // The sigmoid, computed without overflow.
    for (int64_t m = 0; m < count; m++) out[begin + m] = 0.5 * (1 + std::tanh(found[m] / 2));
  }
}

void gumbel(const uint32_t* place, int64_t count, double* out) {
  constexpr int64_t PAIRS = 32;
  constexpr int ROUNDS = 10;
  for (int64_t begin = 0; begin < count; begin += 2 * PAIRS) {
    uint64_t word[4][PAIRS];  // of 32 bits each
    for (int64_t i = 0; i < PAIRS; i++) {
      word[0][i] = static_cast<uint32_t>(begin / 2 + i);
      for (int w = 1; w < 4; w++) word[w][i] = place[w + 1];
    }
    uint32_t first = place[0], second = place[1];
    for (int round = 0; round < ROUNDS; round++, first += 0x9E3779B9, second += 0xBB67AE85) {
      for (int64_t i = 0; i < PAIRS; i++) {
        const uint64_t low = word[0][i] * 0xD2511F53, high = word[2][i] * 0xCD9E8D57;
        word[0][i] = high >> 32 ^ word[1][i] ^ first;
        word[1][i] = static_cast<uint32_t>(high);
        word[2][i] = low >> 32 ^ word[3][i] ^ second;
        word[3][i] = static_cast<uint32_t>(low);
      }
    }
    double noise[2 * PAIRS];
    for (int64_t i = 0; i < PAIRS; i++) {
      for (int64_t t = 0; t < 2; t++) {
        const uint64_t fraction = word[2 * t + 1][i] << 20 | word[2 * t][i] >> 12;
        noise[2 * i + t] = (bits_as<double>(fraction | 0x3FF0000000000000) - 1.0) + 0x1p-53;
      }
    }
    for (int repeat = 0; repeat < 2; repeat++) {
      logarithms<2 * PAIRS>(noise, noise);
      for (int64_t i = 0; i < 2 * PAIRS; i++) noise[i] = -noise[i];
    }
    std::copy_n(noise, std::min(2 * PAIRS, count - begin), out + begin);
  }
}

}  // namespace

#define DRAFTREE_JOIN(a, b) a##b
#define DRAFTREE_NAMED(name) DRAFTREE_JOIN(loops_, name)
#define DRAFTREE_TEXT_(name) #name
#define DRAFTREE_TEXT(name) DRAFTREE_TEXT_(name)

extern const SimdLoops DRAFTREE_NAMED(DRAFTREE_VARIANT);
const SimdLoops DRAFTREE_NAMED(DRAFTREE_VARIANT) = {
    DRAFTREE_TEXT(DRAFTREE_VARIANT), entropies, largest, confidences, top_log_probs, gumbel};

}  // namespace draftree
