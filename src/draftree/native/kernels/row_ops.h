// Norms, rotations, changes of type and biases of rows. Included inside an anonymous namespace
// after simd.h.
//
// Every number is the same chain of operations whatever else is computed, and is rounded where
// transformers rounds it.

// Write RMSNorm of a row, rounded, as float32. Squares are added in float64: in float32 long sums
// lose more than torch's own.
template <class D>
void norm_row(const typename D::T* x, const typename D::T* weight, float epsilon, int64_t width,
              float* out) {
  Doubles low{}, high{};
  for (int64_t i = 0; i < width; i += LANES) {
    const V v = get_some<D>(x + i, width - i), square = v * v;
    HalfV parts[2];
    __builtin_memcpy(parts, &square, sizeof square);
    low += __builtin_convertvector(parts[0], Doubles);
    high += __builtin_convertvector(parts[1], Doubles);
  }
  const Doubles both = low + high;
  double total = 0;
  for (int i = 0; i < LANES / 2; i++) total += both[i];
  const V by = splat(static_cast<float>(
      1 / __builtin_sqrt(total / static_cast<double>(width) + static_cast<double>(epsilon))));
  for (int64_t i = 0; i < width; i += LANES) {
    const V scaled = D::round(get_some<D>(x + i, width - i) * by);
    put_some<Float32>(out + i, D::round(get_some<D>(weight + i, width - i) * scaled), width - i);
  }
}

// Rotate the halves of a head by the angles of its position; in and out are rounded float32.
template <class D>
void rotate_row(const float* x, const typename D::T* cosines, const typename D::T* sines,
                int64_t width, float* out) {
  const int64_t half = width / 2;
  for (int64_t i = 0; i < half; i += LANES) {
    const int64_t left = half - i;
    const V a = get_some<Float32>(x + i, left), b = get_some<Float32>(x + half + i, left);
    const V a_cos = D::round(a * get_some<D>(cosines + i, left)),
            b_sin = D::round(-b * get_some<D>(sines + i, left));
    const V b_cos = D::round(b * get_some<D>(cosines + half + i, left)),
            a_sin = D::round(a * get_some<D>(sines + half + i, left));
    put_some<Float32>(out + i, D::round(a_cos + b_sin), left);
    put_some<Float32>(out + half + i, D::round(b_cos + a_sin), left);
  }
}

template <class D>
void widen_row(const typename D::T* x, int64_t width, float* out) {
  for (int64_t i = 0; i < width; i += LANES)
    put_some<Float32>(out + i, get_some<D>(x + i, width - i), width - i);
}

template <class D>
void narrow_row(const float* x, int64_t width, typename D::T* out) {
  for (int64_t i = 0; i < width; i += LANES)
    put_some<D>(out + i, get_some<Float32>(x + i, width - i), width - i);
}

// Return numbers of a dtype that is known at run time.
inline V get_typed(int32_t type, const void* p, int64_t at, int64_t count) {
  switch (type) {
    case BFLOAT16:
      return get_some<BFloat16>(static_cast<const uint16_t*>(p) + at, count);
    case FLOAT16:
      return get_some<Float16>(static_cast<const uint16_t*>(p) + at, count);
    default:
      return get_some<Float32>(static_cast<const float*>(p) + at, count);
  }
}

// Add a bias, if there is one, to sums and round them.
template <class D>
inline V biased(const float* sums, const void* bias, int64_t at, int64_t left) {
  V v = get_some<Float32>(sums, left);
  if (bias != nullptr) v = v + get_some<D>(static_cast<const typename D::T*>(bias) + at, left);
  return D::round(v);
}
