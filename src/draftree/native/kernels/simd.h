// Vectors of float for the instruction set that this file is compiled for. Included inside an
// anonymous namespace.
//
// Products and sums are fused only where it is written (`fused`), so that a chain of operations has
// the same bits in every loop; the build turns off the compiler's own contraction.

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define DRAFTREE_AVX512
#if defined(__AMX_BF16__)
#define DRAFTREE_AMX
#endif
constexpr int LANES = 16;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define DRAFTREE_AVX2
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float V __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef uint32_t U __attribute__((vector_size(4 * LANES)));
typedef uint16_t H __attribute__((vector_size(2 * LANES)));
typedef float HalfV __attribute__((vector_size(2 * LANES)));
typedef double Doubles __attribute__((vector_size(4 * LANES)));  // LANES / 2 of them

inline V splat(float x) { return x - V{}; }  // x - 0 is x, whatever x is
inline V load(const float* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, V v) { __builtin_memcpy(p, &v, sizeof v); }
inline U load_words(const void* p) {
  U v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
inline void store_words(void* p, U v) { __builtin_memcpy(p, &v, sizeof v); }

// Return a * b + c, rounded once where the processor can.
inline V fused(V a, V b, V c) {
#if defined(DRAFTREE_AVX512)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(DRAFTREE_AVX2)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

inline V larger(V a, V b) { return a < b ? b : a; }  // a if one is NaN
inline V smaller(V a, V b) { return a > b ? b : a; }

// Between halves and words, by the instructions themselves: GCC converts vectors of 16 in two
// parts.
inline U widen_halves(H h) {
#if defined(DRAFTREE_AVX512)
  return (U)_mm512_cvtepu16_epi32((__m256i)h);
#elif defined(DRAFTREE_AVX2)
  return (U)_mm256_cvtepu16_epi32((__m128i)h);
#else
  return __builtin_convertvector(h, U);
#endif
}
inline H lower_halves(U words) {
#if defined(DRAFTREE_AVX512)
  return (H)_mm512_cvtepi32_epi16((__m512i)words);
#else
  return __builtin_convertvector(words, H);
#endif
}

// bfloat16 and float16 as float32, and back, rounded to the nearest; of two equally near, to the
// even one.
inline V widen_bfloat16(H h) { return (V)(widen_halves(h) << 16); }
inline V round_bfloat16(V v) {
  const U bits = (U)v;
  const U near = bits + (((bits >> 16) & 1u) + 0x7FFFu);
  const U kept = v == v ? near : (bits | 0x00400000u);  // keeps a NaN from becoming infinite
  return (V)(kept & 0xFFFF0000u);
}
inline H narrow_bfloat16(V rounded) { return lower_halves((U)rounded >> 16); }

#if defined(DRAFTREE_AVX512) || defined(DRAFTREE_AVX2)
inline V widen_float16(H h) {
#if defined(DRAFTREE_AVX512)
  return _mm512_cvtph_ps((__m256i)h);
#else
  return _mm256_cvtph_ps((__m128i)h);
#endif
}
inline H narrow_float16(V v) {
#if defined(DRAFTREE_AVX512)
  return (H)_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
#else
  return (H)_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
#endif
}
#elif defined(__aarch64__)
inline V widen_float16(H h) { return (V)vcvt_f32_f16((float16x4_t)h); }
inline H narrow_float16(V v) { return (H)vcvt_f16_f32((float32x4_t)v); }
#else
inline V widen_float16(H h) {
  // The exponent is moved from bias 15 to 127 by a multiplication, which makes subnormal numbers
  // normal, too.
  const U bits = __builtin_convertvector(h, U);
  const U sign = (bits & 0x8000u) << 16, size = (bits & 0x7FFFu) << 13;
  const U finite = (U)((V)size * splat(0x1p112f)), other = size | 0x7F800000u;
  return (V)(sign | ((bits & 0x7C00u) == 0x7C00u ? other : finite));
}
inline H narrow_float16(V v) {
  const U bits = (U)v, sign = (bits >> 16) & 0x8000u, size = bits & 0x7FFFFFFFu;
  const U normal = (size - (112u << 23) + (0x0FFFu + ((size >> 13) & 1u))) >> 13;
  // The last bit of the sum is worth 2^-24, float16's smallest step.
  const U subnormal = (U)((V)size + splat(0.5f)) - (126u << 23);
  U half = size < (113u << 23) ? subnormal : normal;
  half = size >= 0x477FF000u ? U{} + 0x7C00u : half;  // rounds to 65536 or more
  half = size > 0x7F800000u ? U{} + 0x7E00u : half;
  return __builtin_convertvector(sign | half, H);
}
#endif

// The dtypes: how numbers are stored, and rounded where transformers rounds them.
struct Float32 {
  using T = float;
  static constexpr int32_t TYPE = FLOAT32;
  static V get(const T* p) { return load(p); }
  static void put(T* p, V v) { store(p, v); }
  static V round(V v) { return v; }
};

struct BFloat16 {
  using T = uint16_t;
  static constexpr int32_t TYPE = BFLOAT16;
  static V get(const T* p) {
    H h;
    __builtin_memcpy(&h, p, sizeof h);
    return widen_bfloat16(h);
  }
  static void put(T* p, V v) {
    const H h = narrow_bfloat16(round_bfloat16(v));
    __builtin_memcpy(p, &h, sizeof h);
  }
  static V round(V v) { return round_bfloat16(v); }
};

struct Float16 {
  using T = uint16_t;
  static constexpr int32_t TYPE = FLOAT16;
  static V get(const T* p) {
    H h;
    __builtin_memcpy(&h, p, sizeof h);
    return widen_float16(h);
  }
  static void put(T* p, V v) {
    const H h = narrow_float16(v);
    __builtin_memcpy(p, &h, sizeof h);
  }
  static V round(V v) { return widen_float16(narrow_float16(v)); }
};

// Return the first `count` numbers, up to LANES of them, and 0 after them.
template <class D>
inline V get_some(const typename D::T* p, int64_t count) {
  if (count >= LANES) return D::get(p);
  typename D::T held[LANES] = {};
  __builtin_memcpy(held, p, sizeof(typename D::T) * static_cast<size_t>(count));
  return D::get(held);
}

template <class D>
inline void put_some(typename D::T* p, V v, int64_t count) {
  if (count >= LANES) return D::put(p, v);
  typename D::T held[LANES];
  D::put(held, v);
  __builtin_memcpy(p, held, sizeof(typename D::T) * static_cast<size_t>(count));
}

// Return whether a lane of a comparison is true.
inline bool any(I v) {
#if defined(DRAFTREE_AVX512)
  return _mm512_test_epi32_mask((__m512i)v, (__m512i)v) != 0;
#elif defined(DRAFTREE_AVX2)
  return _mm256_movemask_ps((__m256)v) != 0;
#else
  return (v[0] | v[1] | v[2] | v[3]) != 0;
#endif
}

// Return which lanes are among the first `count`.
inline I first_lanes(int64_t count) {
  I lanes;
  for (int i = 0; i < LANES; i++) lanes[i] = i;
  return lanes < (count < LANES ? static_cast<int32_t>(count) : LANES);
}

inline float largest_of(V v) {
  float held[LANES], top;
  store(held, v);
  top = held[0];
  for (int i = 1; i < LANES; i++) top = top < held[i] ? held[i] : top;
  return top;
}

constexpr float LOG2E = 1.4426950408889634f;

// Return 2^x for exponents of normal numbers, to some 1e-7.
inline V power_of_2(V x) {
  // To the nearest whole number, by a sum whose last bit is worth 1.
  const V magic = splat(0x1.8p23f), whole = (x + magic) - magic, y = x - whole;
  V p = splat(0.00015403530f);
  p = fused(p, y, splat(0.0013333558f));
  p = fused(p, y, splat(0.0096181291f));
  p = fused(p, y, splat(0.055504109f));
  p = fused(p, y, splat(0.24022651f));
  p = fused(p, y, splat(0.69314718f));
  p = fused(p, y, splat(1.0f));
  const I exponent = __builtin_convertvector(whole, I) + 127;
  return p * (V)(exponent << 23);
}

// Return e^(score - top); 0 where that is less than the smallest normal number.
inline V weigh(V score, V top) {
  const V x = (score - top) * splat(LOG2E), least = splat(-126.0f);
  return x < least ? V{} : power_of_2(larger(x, least));
}

// Return silu(x), rounded, times other.
template <class D>
inline V gated(V x, V other) {
  const V z = smaller(larger(x * splat(-LOG2E), splat(-126.0f)), splat(126.0f));
  return D::round(x / (splat(1.0f) + power_of_2(z))) * other;
}

// Transpose LANES x LANES words in place.
inline void transpose(U (&a)[LANES]) {
#if defined(DRAFTREE_AVX512)
  __m512i t[16], s[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32((__m512i)a[i], (__m512i)a[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32((__m512i)a[i], (__m512i)a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      s[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + 2 + j]);
      s[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + 2 + j]);
    }
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 4; j++) {
      t[i + j] = _mm512_shuffle_i32x4(s[i + j], s[i + 4 + j], 0x88);
      t[i + 4 + j] = _mm512_shuffle_i32x4(s[i + j], s[i + 4 + j], 0xDD);
    }
  for (int j = 0; j < 8; j++) {
    a[j] = (U)_mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
    a[8 + j] = (U)_mm512_shuffle_i32x4(t[j], t[8 + j], 0xDD);
  }
#elif defined(DRAFTREE_AVX2)
  __m256i t[8], s[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32((__m256i)a[i], (__m256i)a[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32((__m256i)a[i], (__m256i)a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      s[i + 2 * j] = _mm256_unpacklo_epi64(t[i + j], t[i + 2 + j]);
      s[i + 2 * j + 1] = _mm256_unpackhi_epi64(t[i + j], t[i + 2 + j]);
    }
  for (int j = 0; j < 4; j++) {
    a[j] = (U)_mm256_permute2x128_si256(s[j], s[4 + j], 0x20);
    a[4 + j] = (U)_mm256_permute2x128_si256(s[j], s[4 + j], 0x31);
  }
#else
  U b[LANES];
  for (int i = 0; i < LANES; i++)
    for (int j = 0; j < LANES; j++) b[i][j] = a[j][i];
  for (int i = 0; i < LANES; i++) a[i] = b[i];
#endif
}
