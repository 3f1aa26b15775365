// Products of a few tokens with packed weights. Included inside an anonymous namespace after
// simd.h.
//
// A weight is packed in panels of `COLUMNS` outputs. A tile is M tokens times P panels; its sums
// stay in registers while the panels stream by. Each sum is one chain of operations over the inputs
// in their order, whatever M and P are: a token has the same bits in a pass of any width.

// Largest number of tokens in a tile. Its sums, a panel's vectors and a factor fit into the
// registers, of which AVX2 and SSE have 16 and the others 32. Without fused operations, a product
// needs one more.
#if defined(DRAFTREE_AVX512) || defined(__aarch64__)
constexpr int MAX_TOKENS = 8;
#elif defined(DRAFTREE_AVX2)
constexpr int MAX_TOKENS = 6;
#else
constexpr int MAX_TOKENS = 4;
#endif
#define ALWAYS_INLINE inline __attribute__((always_inline))

// Number of inputs that share a scale in four-bit weights.
constexpr int GROUP = 32;
// Bytes of inputs that are multiplied by one panel before the next one: half of a level-2 cache.
constexpr int64_t TOKEN_BLOCK = 256 << 10;
// Distances in bytes at which weights are prefetched into the level-2 cache.
constexpr int64_t NEAR = 1024, FAR = 7168;
// Largest number of tokens for which NEAR is used on AMD's processors, measured by
// `benchmarks/passes.py`.
#if defined(DRAFTREE_AVX512)
constexpr int FEW = 4;
#else
constexpr int FEW = 0;
#endif

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Inputs of a product, token by token, in the layout that the weight's type needs.
struct Rows {
  char* data = nullptr;
  int64_t stride = 0;  // bytes
  char* at(int64_t token) const { return data + token * stride; }
};

inline V factor(const char* p) {  // a float32 in all lanes
  float x;
  __builtin_memcpy(&x, p, sizeof x);
  return splat(x);
}

// Weights of one number a word: float32, and float16. Panels are [inputs][COLUMNS]; rows are
// float32.
template <class D>
struct Singles {
  static constexpr int COLUMNS = 2 * LANES, STEP = 1, TOKENS = MAX_TOKENS;
  static constexpr int64_t BYTES = COLUMNS * sizeof(typename D::T);  // of a panel's step
  static int64_t row_bytes(int64_t inputs) { return round_up(4 * inputs, 64); }
  static constexpr int panels(int m) { return m == 1 ? 4 : m == 2 ? 2 : 1; }

  static void put(char* row, int64_t first, const float* values, int64_t count,
                  int64_t /*inputs*/) {
    __builtin_memcpy(row + 4 * first, values, 4 * static_cast<size_t>(count));
  }
  template <int M, int P>
  static ALWAYS_INLINE void step(const char* w, int64_t panel, const char* x, int64_t stride,
                                 int64_t i, V (&sums)[M][P][2]) {
    using T = typename D::T;
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) {
      const auto* at = reinterpret_cast<const T*>(w + p * panel);
      const V a = D::get(at), b = D::get(at + LANES);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        const V f = factor(x + m * stride + 4 * i);
        sums[m][p][0] = fused(a, f, sums[m][p][0]);
        sums[m][p][1] = fused(b, f, sums[m][p][1]);
      }
    }
  }
  static void pack(const void* weight, int64_t outputs, int64_t inputs, int64_t panel, char* to) {
    using T = typename D::T;
    const auto* w = static_cast<const T*>(weight);
    for (int c = 0; c < COLUMNS; c++) {
      const int64_t output = panel * COLUMNS + c;
      for (int64_t k = 0; k < inputs; k++) {
        const T value = output < outputs ? w[output * inputs + k] : T{};
        __builtin_memcpy(to + k * BYTES + c * sizeof(T), &value, sizeof(T));
      }
    }
  }
};

// Weights in bfloat16, two to a word. Panels are [inputs / 2][COLUMNS][2]; rows are bfloat16 where
// the processor multiplies such pairs, else float32.
struct Pairs {
  static constexpr int COLUMNS = 2 * LANES, STEP = 2, TOKENS = MAX_TOKENS;
  static constexpr int64_t BYTES = COLUMNS * 4;
#if defined(DRAFTREE_AVX512) && defined(__AVX512BF16__)
  static int64_t row_bytes(int64_t inputs) { return round_up(2 * inputs, 64); }
  static constexpr int panels(int m) { return m == 1 ? 2 : 1; }
#else
  static int64_t row_bytes(int64_t inputs) { return round_up(4 * round_up(inputs, 2), 64); }
  static constexpr int panels(int m) { return m == 1 ? 4 : m == 2 ? 2 : 1; }
#endif

  static void put(char* row, int64_t first, const float* values, int64_t count, int64_t inputs) {
#if defined(DRAFTREE_AVX512) && defined(__AVX512BF16__)
    auto* to = reinterpret_cast<uint16_t*>(row);
    for (int64_t i = 0; i < count; i += LANES)
      put_some<BFloat16>(to + first + i, get_some<Float32>(values + i, count - i), count - i);
    if (inputs % 2 && first + count == inputs) to[inputs] = 0;
#else
    __builtin_memcpy(row + 4 * first, values, 4 * static_cast<size_t>(count));
    if (inputs % 2 && first + count == inputs) __builtin_memset(row + 4 * inputs, 0, 4);
#endif
  }
  template <int M, int P>
  static ALWAYS_INLINE void step(const char* w, int64_t panel, const char* x, int64_t stride,
                                 int64_t i, V (&sums)[M][P][2]) {
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) {
      const U a = load_words(w + p * panel), b = load_words(w + p * panel + 4 * LANES);
#if defined(DRAFTREE_AVX512) && defined(__AVX512BF16__)
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        const auto f = (__m512bh)(U)factor(x + m * stride + 4 * i);
        sums[m][p][0] = _mm512_dpbf16_ps(sums[m][p][0], f, (__m512bh)a);
        sums[m][p][1] = _mm512_dpbf16_ps(sums[m][p][1], f, (__m512bh)b);
      }
#else
      const V a0 = (V)(a << 16), b0 = (V)(b << 16);
#if !defined(DRAFTREE_AVX2)
      const V a1 = (V)(a & 0xFFFF0000u), b1 = (V)(b & 0xFFFF0000u);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        const char* const at = x + m * stride + 8 * i;
        const V f0 = factor(at), f1 = factor(at + 4);
        sums[m][p][0] = fused(a1, f1, fused(a0, f0, sums[m][p][0]));
        sums[m][p][1] = fused(b1, f1, fused(b0, f0, sums[m][p][1]));
      }
#else
      // The order keeps no more than 16 vectors in use at a time.
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        const V f = factor(x + m * stride + 8 * i);
        sums[m][p][0] = fused(a0, f, sums[m][p][0]);
        sums[m][p][1] = fused(b0, f, sums[m][p][1]);
        if (M > 4) __asm__ __volatile__("" : "+x"(sums[m][p][0]), "+x"(sums[m][p][1]) : : "memory");
      }
      const V a1 = (V)(load_words(w + p * panel) & 0xFFFF0000u),
              b1 = (V)(load_words(w + p * panel + 4 * LANES) & 0xFFFF0000u);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        const V f = factor(x + m * stride + 8 * i + 4);
        sums[m][p][0] = fused(a1, f, sums[m][p][0]);
        sums[m][p][1] = fused(b1, f, sums[m][p][1]);
        if (M > 4) __asm__ __volatile__("" : "+x"(sums[m][p][0]), "+x"(sums[m][p][1]) : : "memory");
      }
#endif
#endif
    }
  }
  static void pack(const void* weight, int64_t outputs, int64_t inputs, int64_t panel, char* to) {
    const auto* w = static_cast<const uint16_t*>(weight);
    auto* out = reinterpret_cast<uint16_t*>(to);
    for (int c = 0; c < COLUMNS; c++) {
      const int64_t output = panel * COLUMNS + c;
      for (int64_t k = 0; k < round_up(inputs, 2); k++)
        out[(k / 2 * COLUMNS + c) * 2 + k % 2] =
            output < outputs && k < inputs ? w[output * inputs + k] : uint16_t{0};
    }
  }
};

// Return the steps of a panel, and its bytes.
template <class G>
inline int64_t steps_of(int64_t inputs) {
  return (inputs + G::STEP - 1) / G::STEP;
}
template <class G>
inline int64_t panel_bytes(int64_t inputs) {
  return steps_of<G>(inputs) * G::BYTES;
}
template <class G>
inline int64_t panels_of(int64_t outputs) {
  return (outputs + G::COLUMNS - 1) / G::COLUMNS;
}

// The bytes that are prefetched while a tile is computed: from an address on, as many as the tile
// reads (`full`), or half as many. Bytes of a `stream` are read once and shall not stay in caches.
struct Prefetch {
  const char* from;
  bool full, half, stream = false;

  // Return the same for the tile whose panels begin `bytes` further on.
  Prefetch at(int64_t bytes) const { return {from + bytes / (half ? 2 : 1), full, half, stream}; }
};

// For one token, even the test whether to stream takes a tenth of the time of a pass.
template <class G, int M>
ALWAYS_INLINE void fetch(Prefetch next, int64_t i) {
  constexpr int64_t HALF = G::BYTES / 128 * 64 > 0 ? G::BYTES / 128 * 64 : 64;
  if (M > 1 && next.stream) {
#pragma GCC unroll 10
    for (int64_t line = 0; line < G::BYTES; line += 64)
      __builtin_prefetch(next.from + i * G::BYTES + line, 0, 0);
  } else if (next.full) {
#pragma GCC unroll 10
    for (int64_t line = 0; line < G::BYTES; line += 64)
      __builtin_prefetch(next.from + i * G::BYTES + line, 0, 2);
  } else if (next.half) {
#pragma GCC unroll 10
    for (int64_t line = 0; line < HALF; line += 64)
      __builtin_prefetch(next.from + i * (G::BYTES / 2) + line, 0, 2);
  }
}

template <class G, int M, int P>
void tile(const char* w, int64_t panel, const char* x, int64_t stride, int64_t inputs, float* out,
          int64_t ld, Prefetch next) {
  constexpr int VECTORS = G::COLUMNS / LANES;
  V sums[M][P][VECTORS];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 8
    for (int p = 0; p < P; p++)
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++) sums[m][p][v] = V{};
  const int64_t steps = steps_of<G>(inputs);
  for (int64_t i = 0; i < steps; i++) {
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) fetch<G, M>(next.at(p * panel), i);
    if constexpr (G::STEP == GROUP) {
      G::template step<M, P>(w + i * G::BYTES, panel, x, stride, i, sums, x + inputs);
    } else {
      G::template step<M, P>(w + i * G::BYTES, panel, x, stride, i, sums);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 8
    for (int p = 0; p < P; p++)
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++)
        store(out + m * ld + p * G::COLUMNS + v * LANES, sums[m][p][v]);
}

template <class G, int M>
void tiles(const char* w, int64_t panel, int64_t panels, const char* x, int64_t stride,
           int64_t inputs, float* out, int64_t ld, Prefetch next) {
  constexpr int P = G::panels(M);
  int64_t p = 0;
  for (; p + P <= panels; p += P) {
    tile<G, M, P>(w + p * panel, panel, x, stride, inputs, out + p * G::COLUMNS, ld,
                  next.at(p * panel));
  }
  if constexpr (P > 1)
    for (; p < panels; p++)
      tile<G, M, 1>(w + p * panel, panel, x, stride, inputs, out + p * G::COLUMNS, ld,
                    next.at(p * panel));
}

template <class G>
void tiles(int m, const char* w, int64_t panel, int64_t panels, const char* x, int64_t stride,
           int64_t inputs, float* out, int64_t ld, Prefetch next) {
  switch (m) {
    case 1:
      return tiles<G, 1>(w, panel, panels, x, stride, inputs, out, ld, next);
    case 2:
      return tiles<G, 2>(w, panel, panels, x, stride, inputs, out, ld, next);
    case 3:
      return tiles<G, 3>(w, panel, panels, x, stride, inputs, out, ld, next);
    case 4:
      return tiles<G, 4>(w, panel, panels, x, stride, inputs, out, ld, next);
    case 5:
      return tiles<G, 5>(w, panel, panels, x, stride, inputs, out, ld, next);
    case 6:
      return tiles<G, 6>(w, panel, panels, x, stride, inputs, out, ld, next);
#if defined(DRAFTREE_AVX512) || defined(__aarch64__)
    case 7:
      return tiles<G, 7>(w, panel, panels, x, stride, inputs, out, ld, next);
    case 8:
      return tiles<G, 8>(w, panel, panels, x, stride, inputs, out, ld, next);
#endif
    default:
      __builtin_unreachable();
  }
}

// What products with packed weights need the processor to be prepared for: nothing, but for a
// matrix unit.
template <class G>
class TileState {
 public:
  void prepare(int /*tokens*/) {}
};

struct Range {
  int64_t begin, end;
};

inline Range share(int64_t count, int thread, int threads) {
  return {count * thread / threads, count * (thread + 1) / threads};
}

// Multiply tokens by the panels of a range.
//
// `unit` panels are computed for up to G::TOKENS tokens at a time, into `sums` [tokens][unit *
// COLUMNS]; then use(first token, tokens, first panel, panels, sums, entries from one token's sums
// to the next one's) is called. With `stream` the weight is prefetched as data that is read once,
// if there are two tokens or more.
template <class G, class Use>
void multiply(Rows x, int64_t tokens, int64_t inputs, const void* weight, bool stream, int64_t unit,
              Range range, float* sums, Use&& use) {
  const int64_t panel = panel_bytes<G>(inputs), ld = unit * G::COLUMNS;
  int64_t block = TOKEN_BLOCK / x.stride / G::TOKENS * G::TOKENS;
  block = block < 4 * G::TOKENS ? 4 * G::TOKENS : block;
  TileState<G> state;
  for (int64_t start = 0; start < tokens; start += block) {
    const int64_t here = tokens - start < block ? tokens - start : block;
    const int64_t lots = (here + G::TOKENS - 1) / G::TOKENS;
    for (int64_t p = range.begin; p < range.end; p += unit) {
      const int64_t panels = range.end - p < unit ? range.end - p : unit;
      const char* w = static_cast<const char*>(weight) + p * panel;
      for (int64_t lot = 0; lot < lots; lot++) {
        const int64_t first = here * lot / lots, m = here * (lot + 1) / lots - first;
        // Of few tokens, weights are fetched from memory a little before their use. Of more, the
        // first two lots fetch the next unit, half of it each, so that memory does not rest while
        // the other lots read this one from the cache.
        Prefetch next{w, false, false};
        if (lots == 1) {
          const bool near = m <= FEW && G::STEP < GROUP && made_by_amd;
          next = {w + (near ? NEAR : FAR), true, false, stream};
        } else if (lot < 2) {
          next = {w + panels * panel + lot * (panels * panel / 2), false, true};
        }
        state.prepare(static_cast<int>(m));
        tiles<G>(static_cast<int>(m), w, panel, panels, x.at(start + first), x.stride, inputs, sums,
                 ld, next);
        use(start + first, static_cast<int>(m), p, panels, sums, ld);
      }
    }
  }
}
