// Logarithm and exponential of float64 with the bits of log_exp.py and scalar_log_exp.py, which
// explain the series.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace draftree {

constexpr double INFINITE = std::numeric_limits<double>::infinity();

template <class To, class From>
inline To same_bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To out;
  std::memcpy(&out, &x, sizeof(out));
  return out;
}

// Return e^x: 0 below -700, e^700 above 700, NaN for NaN.
inline double exp_of(double x) {
  constexpr double LN2 = 0.6931471805599453, ROUNDING = 1.5 * 4503599627370496.0, LARGEST = 700.0;
  constexpr uint64_t WHOLE = 0x4338000000000000, BIAS = 1023;
  constexpr int TERMS = 12;
  if (x < -LARGEST) return 0;
  if (x > LARGEST) x = LARGEST;
  const double shifted = x * (1.0 / LN2) + ROUNDING;
  const double r = x - (shifted - ROUNDING) * LN2;
  double series = r * (1.0 / TERMS) + 1.0;
  for (int n = TERMS - 1; n > 0; n--) series = series * (r * (1.0 / n)) + 1.0;
  return series * same_bits<double>((same_bits<uint64_t>(shifted) - WHOLE + BIAS) << 52);
}

// Return the natural logarithm of a normal number; -infinity for 0, NaN for what is below 0.
inline double log_of(double x) {
  constexpr double LN2 = 0.6931471805599453;
  constexpr int64_t ROOT = 0x3FE6A09E667F3BCD;
  constexpr int TERMS = 9;
  if (!(x > 0 && x < INFINITE)) {
    if (x > 0 || std::isnan(x)) return x;
    return x == 0 ? -INFINITE : std::numeric_limits<double>::quiet_NaN();
  }
  const auto bits = same_bits<int64_t>(x);
  const int64_t power = (bits - ROOT) >> 52;
  const double m =
      same_bits<double>(static_cast<uint64_t>(bits) - (static_cast<uint64_t>(power) << 52));
  const double s = (m - 1.0) / (m + 1.0), z = s * s, twice = s + s;
  double series = z * (1.0 / (2 * TERMS + 1));
  for (int n = TERMS - 1; n > 0; n--) series = z * (series + 1.0 / (2 * n + 1));
  return static_cast<double>(power) * LN2 + (twice + twice * series);
}

// Return x rounded to a multiple of 2^-40, for |x| < 2048: sums of such numbers do not depend on
// their order.
inline double round_to_unit(double x) {
  constexpr double ROUNDING = 1.5 * 4096.0;
  return x + ROUNDING - ROUNDING;
}

}  // namespace draftree
