// The products of attention: queries with keys, and weights with values. Included inside an
// anonymous namespace after gemm.h.
//
// A row is a query of one head. Sums of scores run over the entries of a key, sums of values over
// the slots, one by one.

constexpr int KEYS = 2 * LANES;      // number of slots in a block
constexpr int FEW_ROWS = LANES / 2;  // largest number of rows for which lanes are slots
constexpr float UNSEEN = -3e38f;     // below every score
constexpr int64_t RUN = 2 * KEYS;    // slots whose weights are computed before values are added
constexpr int64_t AHEAD = 2 * KEYS;  // slots after which keys are needed that are fetched

// Sizes of tiles: vectors of rows and keys whose scores are computed at a time, and rows to which
// values are added at a time. Their sums fit into the registers.
constexpr int SCORE_VECTORS = 3;
#if defined(DRAFTREE_AVX512) || defined(__aarch64__)
constexpr int SCORE_KEYS = 8, VALUE_ROWS = 8;
#else
constexpr int SCORE_KEYS = 4, VALUE_ROWS = 6;
#endif
static_assert(KEYS % SCORE_KEYS == 0);

// Queries, keys and weights are multiplied as words: pairs of bfloat16 where the processor
// multiplies such pairs, else float32.
//
// An instruction for pairs adds the product of their upper halves first. The weight of the first of
// two slots lies there, so sums over slots run one by one.
#if defined(DRAFTREE_AVX512) && defined(__AVX512BF16__)
template <class D>
constexpr bool PAIRED = D::TYPE == BFLOAT16;
#else
template <class D>
constexpr bool PAIRED = false;
#endif

// The layout of queries, row by row.
template <class D>
struct QueryRows {
  using G = Singles<Float32>;
};
template <>
struct QueryRows<BFloat16> {
  using G = Pairs;
};

// Return sums plus the products of words.
template <class D>
ALWAYS_INLINE V add_words(U a, V b, V sums) {
#if defined(DRAFTREE_AVX512) && defined(__AVX512BF16__)
  if constexpr (PAIRED<D>) return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)(U)b);
#endif
  return fused((V)a, b, sums);
}

// Write up to KEYS keys as a packed weight whose outputs are the keys.
template <class D>
void pack_keys(const typename D::T* keys, int64_t stride, int64_t count, int64_t dim, char* to) {
  using G = typename QueryRows<D>::G;
  const int64_t steps = steps_of<G>(dim);
  for (int side = 0; side < 2; side++)
    for (int64_t first = 0; first < steps; first += LANES) {
      U words[LANES];
      for (int j = 0; j < LANES; j++) {
        const int64_t key = side * LANES + j, at = first * G::STEP, left = dim - at;
        if (key >= count) {
          words[j] = U{};
        } else if constexpr (D::TYPE == FLOAT16) {
          words[j] = (U)get_some<D>(keys + key * stride + at, left);
        } else if (left >= LANES * G::STEP) {
          words[j] = load_words(keys + key * stride + at);
        } else {
          words[j] = U{};
          __builtin_memcpy(&words[j], keys + key * stride + at,
                           static_cast<size_t>(left) * sizeof(typename D::T));
        }
      }
      transpose(words);
      for (int64_t i = 0; i < LANES && first + i < steps; i++)
        store_words(to + ((first + i) * KEYS + side * LANES) * 4, words[i]);
    }
}

// Return a block of keys as words, row by row: where they are stored, or a copy padded with zeros.
template <class D>
Rows key_rows(const typename D::T* keys, int64_t stride, int64_t count, int64_t dim, char* copy) {
  constexpr auto SIZE = static_cast<int64_t>(sizeof(typename D::T));
  if (count == KEYS && (D::TYPE == FLOAT32 || (PAIRED<D> && dim % 2 == 0)))
    return {const_cast<char*>(reinterpret_cast<const char*>(keys)), stride * SIZE};
  const int64_t bytes = 4 * round_up(dim, LANES);
  if (count < KEYS || PAIRED<D>) __builtin_memset(copy, 0, static_cast<size_t>(KEYS * bytes));
  for (int64_t j = 0; j < count; j++) {
    if constexpr (PAIRED<D>) {
      __builtin_memcpy(copy + j * bytes, keys + j * stride, static_cast<size_t>(dim * SIZE));
    } else {
      for (int64_t i = 0; i < dim; i += LANES)
        store(reinterpret_cast<float*>(copy + j * bytes) + i,
              get_some<D>(keys + j * stride + i, dim - i));
    }
  }
  return {copy, bytes};
}

// Write rows of queries as words [words, ld], for `count` rows.
inline void transpose_queries(Rows queries, int64_t count, int64_t words, int64_t ld, char* to) {
  for (int64_t first = 0; first < ld; first += LANES)
    for (int64_t i = 0; i < words; i += LANES) {
      U block[LANES];
      for (int j = 0; j < LANES; j++)
        block[j] = first + j < count ? load_words(queries.at(first + j) + 4 * i) : U{};
      transpose(block);
      for (int64_t j = 0; j < LANES && i + j < words; j++)
        store_words(to + ((i + j) * ld + first) * 4, block[j]);
    }
}

// Compute the scores [KEYS, ld] of a block of keys, for P vectors of rows.
template <class D, int P>
void score_keys(Rows keys, const char* queries, int64_t words, int64_t ld, float* scores) {
  constexpr int M = SCORE_KEYS;
  for (int64_t first = 0; first < KEYS; first += M) {
    const char* const x = keys.at(first);
    V sums[M][P];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 3
      for (int p = 0; p < P; p++) sums[m][p] = V{};
    for (int64_t i = 0; i < words; i++) {
      U q[P];
#pragma GCC unroll 3
      for (int p = 0; p < P; p++) q[p] = load_words(queries + (i * ld + p * LANES) * 4);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        const V key = factor(x + m * keys.stride + 4 * i);
#pragma GCC unroll 3
        for (int p = 0; p < P; p++) sums[m][p] = add_words<D>(q[p], key, sums[m][p]);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 3
      for (int p = 0; p < P; p++) store(scores + (first + m) * ld + p * LANES, sums[m][p]);
  }
}

template <class D>
void score_keys(Rows keys, const char* queries, int64_t words, int64_t ld, float* scores) {
  for (int64_t at = 0; at < ld; at += SCORE_VECTORS * LANES) {
    const int64_t vectors = (ld - at) / LANES;
    if (vectors > 2) {
      score_keys<D, SCORE_VECTORS>(keys, queries + 4 * at, words, ld, scores + at);
    } else if (vectors > 1) {
      score_keys<D, 2>(keys, queries + 4 * at, words, ld, scores + at);
    } else {
      score_keys<D, 1>(keys, queries + 4 * at, words, ld, scores + at);
    }
  }
}

template <int N>
struct Constant {
  static constexpr int value = N;
};

// Where the weight of slot j and row m lies among the weights of a run, as an index of words. With
// lanes of rows, the weights are [slots, ld]; with lanes of slots, [rows, RUN].
template <bool OF_ROWS>
ALWAYS_INLINE int64_t weight_at(int64_t j, int64_t m, int64_t ld) {
  return OF_ROWS ? j * ld + m : m * RUN + j;
}

#if defined(DRAFTREE_AVX512) && defined(__AVX512BF16__)
// Store sums of interleaved rows of values in the order of their columns: 0 … 3, 8 … 11, … are in
// `low`, 4 … 7, … in `high`.
inline void store_columns(float* to, V low, V high) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23),
                second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  store(to, _mm512_permutex2var_ps(low, first, high));
  store(to + LANES, _mm512_permutex2var_ps(low, second, high));
}

// As `add_values`, for pairs.
template <bool OF_ROWS, int M>
void add_pairs(const float* weights, int64_t ld_weights, const uint16_t* values, int64_t stride,
               int64_t slots, int64_t left, float* sums, int64_t ld) {
  // Interleaving two rows of values takes the columns in the order 0 … 3, 8 … 11, …, 4 … 7, …
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
                second = _mm512_add_epi32(first, _mm512_set1_epi32(4));
  const __mmask32 columns = left >= 2 * LANES ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
  __m512 total[M][2];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) {
    const __m512 a = load(sums + m * ld), b = load(sums + m * ld + LANES);
    total[m][0] = _mm512_permutex2var_ps(a, first, b);
    total[m][1] = _mm512_permutex2var_ps(a, second, b);
  }
  for (int64_t j = 0; j < slots; j += 2) {
    const uint16_t* const row = values + j * stride;
    const __m512i a = _mm512_maskz_loadu_epi16(columns, row),
                  b = _mm512_maskz_loadu_epi16(j + 1 < slots ? columns : 0, row + stride);
    const V c = (V)_mm512_unpacklo_epi16(b, a), d = (V)_mm512_unpackhi_epi16(b, a);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      const U f = (U)factor(
          reinterpret_cast<const char*>(weights + weight_at<OF_ROWS>(j / 2, m, ld_weights)));
      total[m][0] = add_words<BFloat16>(f, c, total[m][0]);
      total[m][1] = add_words<BFloat16>(f, d, total[m][1]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) store_columns(sums + m * ld, total[m][0], total[m][1]);
}
#endif

// Add the values of some slots, each times its weight, to the sums of M rows, for `left` columns,
// at most 2 * LANES.
template <class D, bool OF_ROWS, int M>
void add_values(const float* weights, int64_t ld_weights, const typename D::T* values,
                int64_t stride, int64_t slots, int64_t left, float* sums, int64_t ld) {
#if defined(DRAFTREE_AVX512) && defined(__AVX512BF16__)
  if constexpr (PAIRED<D>)
    return add_pairs<OF_ROWS, M>(weights, ld_weights, values, stride, slots, left, sums, ld);
#endif
  V total[M][2];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) {
    total[m][0] = load(sums + m * ld);
    total[m][1] = load(sums + m * ld + LANES);
  }
  auto add = [&](int64_t j, V a, V b) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      const V f = splat(weights[weight_at<OF_ROWS>(j, m, ld_weights)]);
      total[m][0] = fused(a, f, total[m][0]);
      total[m][1] = fused(b, f, total[m][1]);
    }
  };
  if (left >= 2 * LANES) {
    for (int64_t j = 0; j < slots; j++)
      add(j, D::get(values + j * stride), D::get(values + j * stride + LANES));
  } else {
    for (int64_t j = 0; j < slots; j++)
      add(j, get_some<D>(values + j * stride, left),
          left > LANES ? get_some<D>(values + j * stride + LANES, left - LANES) : V{});
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) {
    store(sums + m * ld, total[m][0]);
    store(sums + m * ld + LANES, total[m][1]);
  }
}

template <class D, bool OF_ROWS>
void add_values(int m, const float* weights, int64_t ld_weights, const typename D::T* values,
                int64_t stride, int64_t slots, int64_t left, float* sums, int64_t ld) {
  auto add = [&](auto rows) {
    add_values<D, OF_ROWS, decltype(rows)::value>(weights, ld_weights, values, stride, slots, left,
                                                  sums, ld);
  };
  switch (m) {
    case 1:
      return add(Constant<1>{});
    case 2:
      return add(Constant<2>{});
    case 3:
      return add(Constant<3>{});
    case 4:
      return add(Constant<4>{});
    case 5:
      return add(Constant<5>{});
    case 6:
      return add(Constant<6>{});
#if defined(DRAFTREE_AVX512) || defined(__aarch64__)
    case 7:
      return add(Constant<7>{});
    case 8:
      return add(Constant<8>{});
#endif
    default:
      __builtin_unreachable();
  }
}
