// Candidates of several drafters in one list: see merge_candidates.py.
#include <nanobind/stl/tuple.h>

#include <cmath>
#include <limits>
#include <vector>

#include "contiguous_arrays.h"
#include "bind_loops.h"
#include "reproducible_log_exp.h"
#include "logistic.h"
#include "tree_arguments.h"

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

void bind_merge_candidates(nb::module_& m) {
  m.def("odds", &odds);
  m.def("judged", &judged);
  m.def("learn_hits", &learn_hits);
  m.def("merge", &merge);
}

}  // namespace draftree
