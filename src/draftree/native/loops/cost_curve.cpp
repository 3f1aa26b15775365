// Piecewise linear curves of costs: see cost_curve.py.
#include "cost_curve.h"

#include "bind_loops.h"

namespace nb = nanobind;

namespace draftree {

double height(const In<double>& at, const In<double>& seconds, double t) {
  const int64_t last = at.size(0) - 1;
  if (last == 0 || t <= at[0]) return seconds[0];
  int64_t i = last;
  while (at[i - 1] > t) i--;
  const double slope = (seconds[i] - seconds[i - 1]) / (at[i] - at[i - 1]);
  if (t >= at[last]) return seconds[last] + larger_of(slope, 0.0) * (t - at[last]);
  return seconds[i - 1] + slope * (t - at[i - 1]);
}

namespace {

Out<double> between(const In<double>& at, const In<double>& seconds, const In<double>& tokens) {
  auto found = Out<double>::empty({tokens.size(0)});
  for (int64_t n = 0; n < tokens.size(0); n++) found[n] = height(at, seconds, tokens[n]);
  return found;
}

}  // namespace

void bind_cost_curve(nb::module_& m) {
  m.def("height", nb::overload_cast<const In<double>&, const In<double>&, double>(&height));
  m.def("between", &between);
}

}  // namespace draftree
