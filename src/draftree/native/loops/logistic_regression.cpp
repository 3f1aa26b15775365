// One Newton step of logistic regression: see logistic_regression.py.
#include "logistic_regression.h"

#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "bind_loops.h"
#include "contiguous_arrays.h"
#include "reproducible_log_exp.h"

namespace draftree {

void step_newton(double* weights, double* information, int64_t width, double prior, int64_t count,
                 const double* x, const unsigned char* right, double forgetting, double least) {
  std::vector<double> step(width), lower(width * width);
  const auto known = [&](int64_t a, int64_t b) -> double& { return information[a * width + b]; };
  for (int64_t i = 0; i < width * width; i++) information[i] = (1 - forgetting) * information[i];
  for (int64_t a = 0; a < width; a++) known(a, a) += forgetting * prior;
  for (int64_t m = 0; m < count; m++, x += width) {
    double logit = 0;
    for (int64_t a = 0; a < width; a++) logit += weights[a] * x[a];
    const double p = 1 / (1 + exp_of(-logit));
    const double curvature = larger_of(p * (1 - p), least);
    for (int64_t a = 0; a < width; a++) {
      step[a] += x[a] * (static_cast<double>(right[m]) - p);
      for (int64_t b = 0; b < width; b++) known(a, b) += curvature * x[a] * x[b];
    }
  }
  // The Cholesky factor: known = L Lᵀ.
  const auto L = [&](int64_t a, int64_t b) -> double& { return lower[a * width + b]; };
  for (int64_t a = 0; a < width; a++) {
    for (int64_t b = 0; b <= a; b++) {
      double rest = known(a, b);
      for (int64_t c = 0; c < b; c++) rest -= L(a, c) * L(b, c);
      L(a, b) = a == b ? std::sqrt(rest) : rest / L(b, b);
    }
  }
  for (int64_t a = 0; a < width; a++) {
    for (int64_t b = 0; b < a; b++) step[a] -= L(a, b) * step[b];
    step[a] /= L(a, a);
  }
  for (int64_t a = width - 1; a >= 0; a--) {
    for (int64_t b = a + 1; b < width; b++) step[a] -= L(b, a) * step[b];
    step[a] /= L(a, a);
  }
  for (int64_t a = 0; a < width; a++) weights[a] += step[a];
}

namespace {

std::tuple<Out<double>, Out<double, 2>> newton(const In<double>& weights,
                                               const In<double, 2>& information, double prior,
                                               const In<double, 2>& x, const In<bool>& right,
                                               double forgetting, double least) {
  const int64_t width = weights.size(0);
  auto known = Out<double, 2>::empty({width, width});
  auto moved = Out<double>::empty({width});
  std::copy_n(information.data(), width * width, known.data());
  std::copy_n(weights.data(), width, moved.data());
  step_newton(moved.data(), known.data(), width, prior, x.size(0), x.data(),
              reinterpret_cast<const unsigned char*>(right.data()), forgetting, least);
  return {moved, known};
}

}  // namespace

void bind_logistic_regression(nanobind::module_& m) { m.def("newton", &newton); }

}  // namespace draftree
