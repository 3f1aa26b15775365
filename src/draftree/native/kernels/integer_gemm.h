// Weights of four and eight bits, multiplied by activations that are rounded to eight bits.
// Included inside an anonymous namespace after gemm.h.

// What the two kinds of weights have in common: groups of 32 inputs with a scale. The sums of a
// group are whole numbers. Rows are the rounded activations, then for each group `Scale`.
struct RoundedRows {
#if defined(DRAFTREE_AVX512)
  static constexpr int VECTORS = 2;
  static constexpr int panels(int m) { return m == 1 ? 2 : 1; }
#else
  static constexpr int VECTORS = 1;
  static constexpr int panels(int m) { return m == 1 ? 4 : m == 2 ? 2 : 1; }
#endif
  static constexpr int COLUMNS = VECTORS * LANES, STEP = GROUP, TOKENS = MAX_TOKENS;

  struct Scale {
    float step;       // of the activations
    float sum;        // of the rounded activations, times the step
    int32_t minus_8;  // -8 times the sum of the whole numbers
    int32_t unused;
  };

  static int64_t row_bytes(int64_t inputs) {
    return round_up(inputs + inputs / GROUP * static_cast<int64_t>(sizeof(Scale)), 64);
  }

  // Vectors convert the numbers, because GCC 12 compiles a loop over them wrongly for AVX-512.
  static void put(char* row, int64_t first, const float* values, int64_t count, int64_t inputs) {
    typedef int8_t Bytes __attribute__((vector_size(LANES)));
    auto* numbers = reinterpret_cast<int8_t*>(row) + first;
    for (int64_t g = 0; g < count / GROUP; g++) {
      const float* x = values + g * GROUP;
      V top = V{}, invalid = V{};  // NaN, if a number is NaN or infinite
      for (int i = 0; i < GROUP; i += LANES) {
        const V v = load(x + i);
        top = larger(top, larger(v, -v));
        invalid += v - v;
      }
      const float most = largest_of(top), by = most > 0 ? 127 / most : 0;
      const V magic = splat(0x1.8p23f);
      I sums = I{};
      for (int i = 0; i < GROUP; i += LANES) {
        const I n = __builtin_convertvector((load(x + i) * splat(by) + magic) - magic, I);
        const Bytes bytes = __builtin_convertvector(n, Bytes);
        __builtin_memcpy(numbers + g * GROUP + i, &bytes, sizeof bytes);
        sums += n;
      }
      int32_t sum = 0;
      for (int i = 0; i < LANES; i++) sum += sums[i];
      const float step = any(invalid != invalid) ? __builtin_nanf("") : most / 127;
      const Scale scale{step, step * static_cast<float>(sum), -8 * sum, 0};
      __builtin_memcpy(row + inputs + (first / GROUP + g) * static_cast<int64_t>(sizeof(Scale)),
                       &scale, sizeof scale);
    }
  }

  // Keep the compiler from reordering the integer sums, which would exhaust the registers.
  static void keep_order(I& sums) {
#if defined(DRAFTREE_AVX512)
    __asm__("" : "+v"(sums));
#elif defined(__x86_64__)
    __asm__("" : "+x"(sums));
#else
    (void)sums;
#endif
  }

  static int32_t four_at(const char* p) {
    int32_t four;
    __builtin_memcpy(&four, p, sizeof four);
    return four;
  }
  static Scale scale_at(const char* scales, int64_t group) {
    Scale scale;
    __builtin_memcpy(&scale, scales + group * static_cast<int64_t>(sizeof scale), sizeof scale);
    return scale;
  }
};

// Weights in four bits, in groups of 32 inputs with a step and a middle: w = step * (number - 8) +
// middle. A panel's group is, for each vector of outputs, a vector of words of step and
// middle in bfloat16, then four of numbers: byte j of load i has input 8 i + j in its lower half
// and 8 i + 4 + j in its upper one.
struct Int4 : RoundedRows {
  static constexpr int64_t VECTOR_BYTES = 5 * 4 * LANES, BYTES = VECTORS * VECTOR_BYTES;

  // Add to each word the products of its four numbers (0 to 15) with four activations.
#if defined(DRAFTREE_AVX512) && defined(__AVX512VNNI__)
  static I dot(I sums, U numbers, int32_t four) {
    return (I)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)numbers, _mm512_set1_epi32(four));
  }
  static I finish(I sums, int32_t minus_8) { return sums + minus_8; }
#elif defined(DRAFTREE_AVX512)
  static I dot(I sums, U numbers, int32_t four) {  // sums of 16 bits: at most 16 * 15 * 127
    return (I)_mm512_add_epi16((__m512i)sums,
                               _mm512_maddubs_epi16((__m512i)numbers, _mm512_set1_epi32(four)));
  }
  static I finish(I sums, int32_t minus_8) {
    return (I)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1)) + minus_8;
  }
#elif defined(DRAFTREE_AVX2)
  static I dot(I sums, U numbers, int32_t four) {
    return (I)_mm256_add_epi16((__m256i)sums,
                               _mm256_maddubs_epi16((__m256i)numbers, _mm256_set1_epi32(four)));
  }
  static I finish(I sums, int32_t minus_8) {
    return (I)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1)) + minus_8;
  }
#else
  static I dot(I sums, U numbers, int32_t four) {
    const auto word = static_cast<uint32_t>(four);
    for (int j = 0; j < 4; j++)
      sums += (I)((numbers >> (8 * j)) & 0xFFu) *
              static_cast<int32_t>(static_cast<int8_t>(word >> (8 * j)));
    return sums;
  }
  static I finish(I sums, int32_t minus_8) { return sums + minus_8; }
#endif

  template <int M, int P>
  static ALWAYS_INLINE void step(const char* w, int64_t panel, const char* x, int64_t stride,
                                 int64_t i, V (&sums)[M][P][VECTORS], const char* scales) {
#pragma GCC unroll 8
    for (int p = 0; p < P; p++)
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++) {
        const char* at = w + p * panel + v * VECTOR_BYTES;
        I within[M];
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) within[m] = I{};
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
          const U both = load_words(at + 4 * LANES * (1 + j)), low = both & 0x0F0F0F0Fu,
                  high = (both >> 4) & 0x0F0F0F0Fu;
#pragma GCC unroll 8
          for (int m = 0; m < M; m++) {
            const char* const eight = x + m * stride + GROUP * i + 8 * j;
            within[m] = dot(dot(within[m], low, four_at(eight)), high, four_at(eight + 4));
            keep_order(within[m]);
          }
        }
        const U words = load_words(at);
        const V steps = (V)(words << 16), middles = (V)(words & 0xFFFF0000u);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
          const Scale scale = scale_at(scales + m * stride, i);
          const V whole = __builtin_convertvector(finish(within[m], scale.minus_8), V);
          sums[m][p][v] = fused(middles, splat(scale.sum),
                                fused(whole, steps * splat(scale.step), sums[m][p][v]));
        }
      }
  }
  static void pack(const uint8_t* numbers, const uint16_t* scales, int64_t outputs, int64_t inputs,
                   int64_t panel, char* to) {
    for (int64_t g = 0; g < inputs / GROUP; g++)
      for (int v = 0; v < VECTORS; v++)
        for (int c = 0; c < LANES; c++) {
          const int64_t output = panel * COLUMNS + v * LANES + c;
          char* at = to + g * BYTES + v * VECTOR_BYTES + 4 * c;
          uint32_t words[5] = {};
          if (output < outputs) {
            const uint16_t* both = scales + (g * outputs + output) * 2;
            const uint8_t* n = numbers + output * inputs + g * GROUP;
            words[0] = both[0] | static_cast<uint32_t>(both[1]) << 16;
            for (int j = 0; j < 4; j++)
              for (int b = 0; b < 4; b++)
                words[1 + j] |= (n[8 * j + b] | static_cast<uint32_t>(n[8 * j + 4 + b]) << 4)
                                << (8 * b);
          }
          for (int j = 0; j < 5; j++) __builtin_memcpy(at + 4 * LANES * j, &words[j], 4);
        }
  }
};

// Weights in eight bits, in groups of 32 inputs with a step: w = step * (number - 128), numbers
// from 1 to 255; a step of NaN stands for weights that are not finite. A panel's group is, for each
// vector of outputs, a vector of steps in float32, then eight of numbers: byte j of load i has
// input 4 i + j.
struct Int8 : RoundedRows {
  static constexpr int64_t VECTOR_BYTES = 9 * 4 * LANES, BYTES = VECTORS * VECTOR_BYTES;

  // Add to each word the products of its four numbers with four activations.
#if defined(DRAFTREE_AVX512) && defined(__AVX512VNNI__)
  struct Numbers {
    U all;
    explicit Numbers(U numbers) : all(numbers) {}
    I dot(I sums, int32_t four) const {
      return (I)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)all, _mm512_set1_epi32(four));
    }
  };
  static I finish(I sums, int32_t minus_8) { return sums + 16 * minus_8; }
#elif defined(DRAFTREE_AVX512)
  struct Numbers {  // sizes and signs: a sum of two products is at most 2 * 127 * 127
    __m512i sizes;
    __mmask64 negative;
    explicit Numbers(U numbers) {
      const __m512i n = (__m512i)(numbers ^ 0x80808080u);
      sizes = _mm512_abs_epi8(n), negative = _mm512_movepi8_mask(n);
    }
    I dot(I sums, int32_t four) const {
      const __m512i x = _mm512_set1_epi32(four),
                    turned = _mm512_mask_sub_epi8(x, negative, __m512i{}, x);
      return sums + (I)_mm512_madd_epi16(_mm512_maddubs_epi16(sizes, turned), _mm512_set1_epi16(1));
    }
  };
  static I finish(I sums, int32_t) { return sums; }
#elif defined(DRAFTREE_AVX2)
  struct Numbers {  // sizes and signs: a sum of two products is at most 2 * 127 * 127
    __m256i sizes, signs;
    explicit Numbers(U numbers) {
      signs = (__m256i)(numbers ^ 0x80808080u), sizes = _mm256_abs_epi8(signs);
    }
    I dot(I sums, int32_t four) const {
      const __m256i turned = _mm256_sign_epi8(_mm256_set1_epi32(four), signs);
      return sums + (I)_mm256_madd_epi16(_mm256_maddubs_epi16(sizes, turned), _mm256_set1_epi16(1));
    }
  };
  static I finish(I sums, int32_t) { return sums; }
#else
  struct Numbers {
    U all;
    explicit Numbers(U numbers) : all(numbers) {}
    I dot(I sums, int32_t four) const { return Int4::dot(sums, all, four); }
  };
  static I finish(I sums, int32_t minus_8) { return sums + 16 * minus_8; }
#endif

  template <int M, int P>
  static ALWAYS_INLINE void step(const char* w, int64_t panel, const char* x, int64_t stride,
                                 int64_t i, V (&sums)[M][P][VECTORS], const char* scales) {
#pragma GCC unroll 8
    for (int p = 0; p < P; p++)
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++) {
        const char* at = w + p * panel + v * VECTOR_BYTES;
        I within[M];
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) within[m] = I{};
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
          const Numbers numbers(load_words(at + 4 * LANES * (1 + j)));
#pragma GCC unroll 8
          for (int m = 0; m < M; m++) {
            within[m] = numbers.dot(within[m], four_at(x + m * stride + GROUP * i + 4 * j));
            keep_order(within[m]);
          }
        }
        const V steps = (V)load_words(at);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
          const Scale scale = scale_at(scales + m * stride, i);
          const V whole = __builtin_convertvector(finish(within[m], scale.minus_8), V);
          sums[m][p][v] = fused(whole, steps * splat(scale.step), sums[m][p][v]);
        }
      }
  }
  // Round weights [outputs, inputs], the largest of a group to 127 steps, and pack a panel of them.
  template <class D>
  static void pack(const typename D::T* weight, int64_t outputs, int64_t inputs, int64_t panel,
                   char* to) {
    for (int64_t g = 0; g < inputs / GROUP; g++)
      for (int c = 0; c < COLUMNS; c++) {
        const int64_t output = panel * COLUMNS + c;
        char* const at = to + g * BYTES + c / LANES * VECTOR_BYTES + 4 * (c % LANES);
        float values[GROUP] = {}, most = 0, invalid = 0;
        if (output < outputs) widen_row<D>(weight + output * inputs + g * GROUP, GROUP, values);
        for (const float value : values) {
          const float size = value < 0 ? -value : value;
          most = size > most ? size : most;
          invalid += value - value;
        }
        const bool valid = invalid == 0;  // no number is NaN or infinite
        const float step = valid ? most / 127 : __builtin_nanf("");
        const float by = valid && most > 0 ? 127 / most : 0;
        __builtin_memcpy(at, &step, sizeof step);
        for (int j = 0; j < GROUP / 4; j++) {
          uint32_t word = 0;
          for (int b = 0; b < 4; b++) {
            const auto number =
                valid ? static_cast<int32_t>((values[4 * j + b] * by + 0x1.8p23f) - 0x1.8p23f) : 0;
            word |= static_cast<uint32_t>(number + 128) << (8 * b);
          }
          __builtin_memcpy(at + 4 * LANES * (1 + j), &word, sizeof word);
        }
      }
  }
};
