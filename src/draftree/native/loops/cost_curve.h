// Piecewise linear curves of costs: see cost_curve.py.
#pragma once
#include <utility>

#include "contiguous_arrays.h"

namespace draftree {

using Curve = std::pair<In<double>, In<double>>;

double height(const In<double>& at, const In<double>& seconds, double t);

inline double height(const Curve& curve, double t) { return height(curve.first, curve.second, t); }

}  // namespace draftree
