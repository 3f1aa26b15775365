// One Newton step of logistic regression: see kernels/logistic_regression.py.
#pragma once
#include <cstdint>

namespace draftree {

// Learn from some examples; weights and information are changed in place.
void step_newton(double* weights, double* information, int64_t width, double prior, int64_t count,
                 const double* x, const unsigned char* right, double forgetting, double least);

}  // namespace draftree
