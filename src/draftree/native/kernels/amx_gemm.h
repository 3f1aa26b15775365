// Products of tokens with packed weights in bfloat16 by the matrix unit (AMX). Included inside an
// anonymous namespace after gemm.h.
//
// The unit multiplies up to 16 tokens by 32 inputs of 16 outputs at a time. It adds the 32 products
// of an output in the same order for any number of tokens, and then adds their sum to the output.
#if defined(DRAFTREE_AMX)

// Weights for the matrix unit. Panels are as those of `Pairs`; inputs are padded with zeros.
struct MatrixPairs {
  static constexpr int COLUMNS = Pairs::COLUMNS, STEP = 32, TOKENS = 32;
  static constexpr int64_t BYTES = STEP / 2 * Pairs::BYTES;
  static int64_t row_bytes(int64_t inputs) { return 2 * round_up(inputs, STEP); }
  static constexpr int panels(int m) { return m <= 16 ? 2 : 1; }

  static void put(char* row, int64_t first, const float* values, int64_t count, int64_t inputs) {
    Pairs::put(row, first, values, count, inputs);
    const int64_t end = first + count;
    if (end == inputs)
      __builtin_memset(row + 2 * end, 0, static_cast<size_t>(row_bytes(inputs) - 2 * end));
  }
  static void pack(const void* weight, int64_t outputs, int64_t inputs, int64_t panel, char* to) {
    const int64_t bytes = round_up(inputs, 2) / 2 * Pairs::BYTES,
                  padded = row_bytes(inputs) / 4 * Pairs::BYTES;
    Pairs::pack(weight, outputs, inputs, panel, to);
    __builtin_memset(to + bytes, 0, static_cast<size_t>(padded - bytes));
  }
};

// Fetch a step's bytes into the level-1 cache, a little before their use: few loads of tiles are
// under way at a time.
ALWAYS_INLINE void fetch_near(const char* at) {
#pragma GCC unroll 32
  for (int64_t line = 0; line < MatrixPairs::BYTES; line += 64)
    __builtin_prefetch(at + NEAR + line, 0, 3);
}

// Finish all stores before tiles are loaded: some compilers do not know what such a load reads.
ALWAYS_INLINE void finish_stores() { __asm__ volatile("" ::: "memory"); }

// The sizes of the matrix unit's tiles: their rows; all rows have 64 bytes.
struct alignas(64) TileSizes {
  uint8_t palette = 1, start_row = 0, unused[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Multiply up to 16 tokens by one or two panels.
template <int P>
ALWAYS_INLINE void multiply_16(const char* w, int64_t panel, const char* x, int64_t stride,
                               int64_t steps, float* out, int64_t ld) {
  using G = MatrixPairs;
  constexpr int64_t ROW = Pairs::BYTES;
  _tile_zero(0);
  _tile_zero(1);
  if (P > 1) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t i = 0; i < steps; i++) {
    const char* const at = w + i * G::BYTES;
    fetch_near(at);
    if (P > 1) fetch_near(at + panel);
    _tile_loadd(4, x + 64 * i, stride);
    _tile_loadd(6, at, ROW);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, at + 64, ROW);
    _tile_dpbf16ps(1, 4, 7);
    if (P > 1) {
      _tile_loadd(6, at + panel, ROW);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, at + panel + 64, ROW);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  _tile_stored(0, out, 4 * ld);
  _tile_stored(1, out + 16, 4 * ld);
  if (P > 1) {
    _tile_stored(2, out + 32, 4 * ld);
    _tile_stored(3, out + 48, 4 * ld);
  }
}

// Multiply 17 to 32 tokens by a panel.
inline void multiply_32(const char* w, const char* x, int64_t stride, int64_t steps, float* out,
                        int64_t ld, Prefetch next) {
  using G = MatrixPairs;
  constexpr int64_t ROW = Pairs::BYTES;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < steps; i++) {
    const char* const at = w + i * G::BYTES;
    fetch<G, 1>(next, i);
    fetch_near(at);
    _tile_loadd(6, at, ROW);
    _tile_loadd(4, x + 64 * i, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, at + 64, ROW);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, x + 16 * stride + 64 * i, stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, out, 4 * ld);
  _tile_stored(1, out + 16, 4 * ld);
  _tile_stored(2, out + 16 * ld, 4 * ld);
  _tile_stored(3, out + 16 * ld + 16, 4 * ld);
}

template <>
class TileState<MatrixPairs> {
 public:
  // For products: tiles 0 to 3 are sums, 4 and 5 tokens, 6 and 7 weights. With more than 16 tokens,
  // 2, 3 and 5 are those of the others.
  void prepare(int tokens) {
    if (tokens == tokens_) return;
    tokens_ = tokens;
    const auto first = static_cast<uint8_t>(tokens < 16 ? tokens : 16),
               second = static_cast<uint8_t>(tokens > 16 ? tokens - 16 : tokens);
    TileSizes sizes;
    sizes.rows[0] = sizes.rows[1] = sizes.rows[4] = first;
    sizes.rows[2] = sizes.rows[3] = sizes.rows[5] = second;
    __asm__ volatile("" : : "r"(&sizes) : "memory");  // see `finish_stores`
    _tile_loadconfig(&sizes);
  }
  ~TileState() {
    if (tokens_ > 0) _tile_release();
  }

 private:
  int tokens_ = 0;
};

template <>
inline void tiles<MatrixPairs>(int m, const char* w, int64_t panel, int64_t panels, const char* x,
                               int64_t stride, int64_t inputs, float* out, int64_t ld,
                               Prefetch next) {
  const int64_t steps = steps_of<MatrixPairs>(inputs);
  int64_t p = 0;
  finish_stores();
  if (m <= 16)
    for (; p + 2 <= panels; p += 2)
      multiply_16<2>(w + p * panel, panel, x, stride, steps, out + 32 * p, ld);
  for (; p < panels; p++) {
    if (m <= 16) {
      multiply_16<1>(w + p * panel, panel, x, stride, steps, out + 32 * p, ld);
    } else {
      multiply_32(w + p * panel, x, stride, steps, out + 32 * p, ld, next.at(p * panel));
    }
  }
}
#endif
