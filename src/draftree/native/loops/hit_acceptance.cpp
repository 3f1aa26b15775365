// Acceptance of retrieval hits in a fused drafter: see hit_acceptance.py.
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "bind_loops.h"
#include "logistic_regression.h"
#include "node_table.h"
#include "reproducible_log_exp.h"

namespace nb = nanobind;

namespace draftree {
namespace {

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

nb::tuple learn_hits(nb::list given_finds, nb::handle judged, nb::handle rates,
                     nb::handle learning) {
  struct Find {
    In<int64_t> numbers;
    In<int64_t, 2> tokens;
    In<double, 2> place;
    In<double, 3> x;
    bool guided;
  };
  struct Examples {
    std::vector<double> x;
    std::vector<unsigned char> right;
  };
  std::vector<Find> finds;
  for (nb::handle find : given_finds)
    finds.push_back({entry<In<int64_t>>(find, 0), entry<In<int64_t, 2>>(find, 1),
                     entry<In<double, 2>>(find, 2), entry<In<double, 3>>(find, 3),
                     entry<bool>(find, 4)});
  const auto numbers = entry<In<int64_t>>(judged, 0), nexts = entry<In<int64_t>>(judged, 1),
             rows = entry<In<int64_t>>(judged, 2);
  const auto old_weights = entry<In<double, 3>>(rates, 0);
  const auto old_information = entry<In<double, 4>>(rates, 1);
  const auto old_recent = entry<In<double>>(rates, 2);
  const int64_t count = old_recent.size(0), kinds = old_weights.size(1),
                width = old_weights.size(2);
  auto weights = Out<double, 3>::empty({count, kinds, width});
  auto information = Out<double, 4>::empty({count, kinds, width, width});
  auto recent = Out<double>::empty({count});
  std::copy_n(old_weights.data(), old_weights.size(), weights.data());
  std::copy_n(old_information.data(), old_information.size(), information.data());
  std::copy_n(old_recent.data(), count, recent.data());
  const double share = entry<double>(learning, 0), prior = entry<double>(learning, 1),
               forgetting = entry<double>(learning, 2), least = entry<double>(learning, 3);
  for (int64_t row = 0; row < count; row++) {
    Examples examples[2];
    for (const Find& find : finds) {
      Examples& mine = examples[find.guided];
      for (int64_t f = 0; f < find.numbers.size(0); f++) {
        for (int64_t i = 0; i < numbers.size(0); i++) {
          if (rows[i] != row || numbers[i] != find.numbers[f]) continue;
          const size_t before = mine.right.size();
          bool success = false;
          for (int64_t k = 0; k < find.tokens.size(1); k++) {
            if (find.place(f, k) != -INFINITE) continue;
            const double* x = &find.x(f, k, 0);
            mine.x.insert(mine.x.end(), x, x + width);
            mine.right.push_back(find.tokens(f, k) == nexts[i]);
            success |= mine.right.back();
          }
          if (mine.right.size() > before)
            recent[row] += share * (static_cast<double>(success) - recent[row]);
        }
      }
    }
    for (int64_t kind = 0; kind < kinds; kind++) {
      const Examples& mine = examples[kind];
      if (mine.right.empty()) continue;
      const int64_t at = row * kinds + kind;
      step_newton(weights.data() + at * width, information.data() + at * width * width, width,
                  prior, static_cast<int64_t>(mine.right.size()), mine.x.data(), mine.right.data(),
                  forgetting, least);
    }
  }
  return nb::make_tuple(weights, information, recent);
}

}  // namespace

void bind_hit_acceptance(nb::module_& m) {
  m.def("odds", &odds);
  m.def("judged", &judged);
  m.def("learn_hits", &learn_hits);
}

}  // namespace draftree
