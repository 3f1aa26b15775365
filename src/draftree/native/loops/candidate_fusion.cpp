// Candidates of several drafters in one list, and calibrations that are learnt: see
// merge_candidates.py and logistic.py.
#include <nanobind/stl/tuple.h>

#include <cmath>
#include <limits>
#include <vector>

#include "numpy_arrays.h"
#include "bind_loops.h"
#include "log_exp.h"

namespace nb = nanobind;

namespace draftree {
namespace {

constexpr double INFINITE = std::numeric_limits<double>::infinity();

double odds(double log_q, double certain) {
  const double q = smaller_of(larger_of(exp_of(log_q), certain), 1 - certain);
  return log_of(q) - log_of(1 - q);
}

std::tuple<Out<double, 3>, Out<double, 2>, Out<double, 2>, Out<double, 2>> judged(
    const In<double, 2>& log_q, const In<double, 2>& guide, const In<double>& recent,
    const In<double, 2>& weights, double neutral, double certain) {
  const int64_t nodes = log_q.size(0), width = log_q.size(1);
  auto x = Out<double, 3>::empty({nodes, width, 4});
  auto value = Out<double, 2>::full({nodes, width}, 0.0);
  auto theirs = Out<double, 2>::full({nodes, width}, 0.0);
  auto place = Out<double, 2>::full({nodes, width}, std::numeric_limits<double>::quiet_NaN());
  for (int64_t f = 0; f < nodes; f++) {
    for (int64_t k = 0; k < width; k++) {
      double* features = x.data() + (f * width + k) * 4;
      features[0] = 1;
      features[1] = odds(log_q(f, k), certain);
      features[2] = 0;
      features[3] = recent[f] - neutral;
      if (guide.size()) {
        features[2] = odds(guide(f, k), certain);
        theirs(f, k) = exp_of(guide(f, k));
      }
      if (log_q(f, k) > -INFINITE) {
        double logit = 0;
        for (int64_t i = 0; i < 4; i++) logit += features[i] * weights(f, i);
        value(f, k) = 1 / (1 + exp_of(-logit));
        place(f, k) = -INFINITE;
      }
    }
  }
  return {x, value, theirs, place};
}

std::tuple<Out<double, 2>, Out<bool>, double> judgements(
    const In<int64_t>& numbers, const In<double, 2>& place, const In<int64_t, 2>& tokens,
    const In<double, 3>& x, const In<int64_t>& kept, const In<int64_t>& nexts, double recent,
    double share) {
  const int64_t nodes = x.size(0), width = x.size(1), features = x.size(2);
  auto examples = Out<double, 2>::empty({nodes * width, features});
  auto right = Out<bool>::empty({nodes * width});
  int64_t count = 0;
  for (int64_t f = 0; f < nodes; f++) {
    for (int64_t i = 0; i < kept.size(0); i++) {
      if (kept[i] != numbers[f]) continue;
      const int64_t before = count;
      bool success = false;
      for (int64_t k = 0; k < width; k++) {
        if (place(f, k) != -INFINITE) continue;
        std::copy_n(&x(f, k, 0), features, examples.data() + count * features);
        right[count] = tokens(f, k) == nexts[i];
        success |= right[count];
        count++;
      }
      if (count > before) recent += share * (static_cast<double>(success) - recent);
    }
  }
  return {examples.first(count), right.first(count), recent};
}

std::tuple<Out<int64_t, 2>, Out<double, 2>, Out<int64_t, 2>> merge(
    const In<int64_t, 2>& tokens, const In<double, 2>& log_q, const In<double, 2>& value,
    const In<double, 2>& seen, const In<int64_t>& bits, int64_t k, double most, double certain) {
  const int64_t nodes = tokens.size(0), columns = tokens.size(1), width = std::min(k, columns);
  struct Candidate {
    int64_t id, by;
    double guide, worth, known;
  };
  std::vector<Candidate> candidates, best;  // the best of each node, `width` a node
  best.reserve(nodes * width);
  std::vector<int64_t> counts(nodes), order;
  int64_t used = 0;
  for (int64_t f = 0; f < nodes; f++) {
    candidates.clear();
    for (int64_t m = 0; m < columns; m++) {
      if (std::isnan(log_q(f, m))) continue;
      size_t i = 0;
      while (i < candidates.size() && candidates[i].id != tokens(f, m)) i++;
      if (i == candidates.size()) candidates.push_back({tokens(f, m), 0, -INFINITE, 0.0, 0.0});
      Candidate& it = candidates[i];
      it.by |= bits[m];
      it.guide = larger_of(it.guide, log_q(f, m));
      it.worth = larger_of(it.worth, value(f, m));
      it.known = larger_of(it.known, seen(f, m));
    }
    double total = 0, listed = 0, rest = 1;
    for (const Candidate& it : candidates) {
      total += it.worth;
      rest -= it.known;
      listed += it.worth > 0 ? 0.0 : exp_of(it.guide);
    }
    const double cut = most / larger_of(total, most);
    const double shift =
        total > 0 ? log_of(1 - total * cut) - log_of(larger_of(rest, larger_of(listed, certain)))
                  : 0.0;
    for (Candidate& it : candidates)
      it.guide = it.worth > 0 ? log_of(it.worth * cut) : it.guide + shift;
    std::stable_sort(candidates.begin(), candidates.end(),
                     [](const Candidate& a, const Candidate& b) {
                       return a.guide > b.guide || (std::isnan(b.guide) && !std::isnan(a.guide));
                     });
    counts[f] = std::min<int64_t>(width, candidates.size());
    used = std::max(used, counts[f]);
    best.insert(best.end(), candidates.begin(), candidates.begin() + counts[f]);
  }
  auto token = Out<int64_t, 2>::full({nodes, used}, 0);
  auto found = Out<double, 2>::full({nodes, used}, -INFINITE);
  auto parts = Out<int64_t, 2>::full({nodes, used}, -1);
  const Candidate* next = best.data();
  for (int64_t f = 0; f < nodes; f++) {
    for (int64_t i = 0; i < counts[f]; i++, next++) {
      token(f, i) = next->id;
      found(f, i) = next->guide;
      parts(f, i) = next->by - 1;
    }
  }
  return {token, found, parts};
}

std::tuple<Out<double>, Out<double, 2>> newton(const In<double>& weights,
                                               const In<double, 2>& information, double prior,
                                               const In<double, 2>& x, const In<bool>& right,
                                               double forgetting, double least) {
  const int64_t width = weights.size(0);
  auto known = Out<double, 2>::empty({width, width});
  auto moved = Out<double>::empty({width});
  std::vector<double> step(width), lower(width * width);
  for (int64_t i = 0; i < width * width; i++) known[i] = (1 - forgetting) * information[i];
  for (int64_t a = 0; a < width; a++) known(a, a) += forgetting * prior;
  for (int64_t m = 0; m < x.size(0); m++) {
    double logit = 0;
    for (int64_t a = 0; a < width; a++) logit += weights[a] * x(m, a);
    const double p = 1 / (1 + exp_of(-logit));
    const double curvature = larger_of(p * (1 - p), least);
    for (int64_t a = 0; a < width; a++) {
      step[a] += x(m, a) * (static_cast<double>(right[m]) - p);
      for (int64_t b = 0; b < width; b++) known(a, b) += curvature * x(m, a) * x(m, b);
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
  for (int64_t a = 0; a < width; a++) moved[a] = weights[a] + step[a];
  return {moved, known};
}

}  // namespace

void bind_candidate_fusion(nb::module_& m) {
  m.def("odds", &odds);
  m.def("judged", &judged);
  m.def("judgements", &judgements);
  m.def("merge", &merge);
  m.def("newton", &newton);
}

}  // namespace draftree
