// Candidates of several drafters in one list: see merge_candidates.py.
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "bind_loops.h"
#include "contiguous_arrays.h"
#include "reproducible_log_exp.h"

namespace nb = nanobind;

namespace draftree {
namespace {

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

}  // namespace

void bind_merge_candidates(nb::module_& m) { m.def("merge", &merge); }

}  // namespace draftree
