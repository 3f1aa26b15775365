// Acceptance of candidates, and examples to learn it: see acceptance_calibration.py.
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "bind_loops.h"
#include "node_table.h"
#include "reproducible_log_exp.h"

namespace nb = nanobind;

namespace draftree {
namespace {

std::tuple<Out<double, 2>, Out<double>> values(
    const In<double, 2>& log_q, const In<int64_t, 2>& sources, const In<double, 2>& weights,
    const In<double>& entropy, const In<int64_t>& frontier, const In<int64_t>& depth,
    const In<double>& score, double certain) {
  const int64_t nodes = log_q.size(0), width = log_q.size(1), before = score.size(0);
  auto found = Out<double, 2>::empty({nodes, width});
  auto entropies = Out<double>::empty({entropy.size(0)});
  std::copy(entropy.begin(), entropy.end(), entropies.begin());
  std::vector<int64_t> depths;
  std::vector<double> scores;
  depths.reserve(nodes * width);
  scores.reserve(nodes * width);
  const double least = log_of(certain);
  for (int64_t f = 0; f < nodes; f++) {
    const int64_t at = frontier[f] - before;
    const double above = at < 0 ? score[frontier[f]] : scores[at];
    const int64_t deep = at < 0 ? depth[frontier[f]] : depths[at];
    if (std::isnan(entropies[f])) {
      double rest = 1, total = 0;
      for (int64_t k = 0; k < width; k++) {
        const double q = exp_of(log_q(f, k));
        rest -= q;
        total -= q * larger_of(log_q(f, k), least);
      }
      rest = larger_of(rest, certain);
      entropies[f] = total - rest * log_of(rest);
    }
    double together = 0;
    for (int64_t k = 0; k < width; k++) {
      found(f, k) = 0;
      if (log_q(f, k) > -INFINITE) {
        const double* w = weights.row(sources.size() ? sources(f, k) : 0);
        const double q = smaller_of(exp_of(log_q(f, k)), 1 - certain);
        double x = w[0] + w[1] * larger_of(log_q(f, k), least) - w[2] * log_of(1 - q);
        x += w[3] * entropies[f] + w[4] * static_cast<double>(deep + 1);
        found(f, k) = 1 / (1 + exp_of(-x));
        together += found(f, k);
      }
    }
    for (int64_t k = 0; k < width; k++) {
      const double value = found(f, k) / larger_of(together, 1.0);
      found(f, k) = value > 0 ? above + log_of(value) : -INFINITE;
      if (log_q(f, k) > -INFINITE) {
        depths.push_back(deep + 1);
        scores.push_back(found(f, k));
      }
    }
  }
  return {found, entropies};
}

std::tuple<Out<int64_t>, Out<double, 2>, Out<bool>> calibration_examples(
    const NodeTable& verified_nodes, const In<bool>& accepted, const In<int64_t>& bonus,
    const NodeTable& drafted, double certain) {
  const auto parents = verified_nodes.integers(NodeTable::PARENTS),
             tokens = verified_nodes.integers(NodeTable::TOKENS);
  const auto number = verified_nodes.integers(NodeTable::NUMBER);
  const auto all_parents = drafted.integers(NodeTable::PARENTS),
             all_tokens = drafted.integers(NodeTable::TOKENS);
  const auto depth = drafted.integers(NodeTable::DEPTH);
  const auto log_q = drafted.reals(NodeTable::LOG_Q), entropy = drafted.reals(NodeTable::ENTROPY);
  const int64_t all = all_parents.size(0);
  Numbers root(parents.size(0)), nexts(all, -1), nodes;
  std::vector<char> verified(all), some(all);
  for (int64_t i = 0; i < parents.size(0); i++) {
    const int64_t parent = parents[i];
    root[i] = parent < 0 ? i : root[parent];
    verified[number[i]] = true;
    if (parent >= 0) some[number[parent]] = true;
    if (accepted[i]) {
      nexts[number[i]] = bonus[root[i]];
      if (parent >= 0) nexts[number[parent]] = tokens[i];
    }
  }
  for (int64_t i = 0; i < all; i++) {
    const int64_t parent = all_parents[i];
    if (parent >= 0 && nexts[parent] >= 0 && (verified[i] || !some[parent])) nodes.push_back(i);
  }
  const int64_t count = nodes.size();
  auto x = Out<double, 2>::empty({count, 5});
  auto right = Out<bool>::empty({count});
  for (int64_t m = 0; m < count; m++) {
    const int64_t node = nodes[m];
    const double q = smaller_of(exp_of(log_q[node]), 1 - certain);
    x(m, 0) = 1;
    x(m, 1) = larger_of(log_q[node], log_of(certain));
    x(m, 2) = -log_of(1 - q);
    x(m, 3) = entropy[node];
    x(m, 4) = static_cast<double>(depth[node]);
    right[m] = all_tokens[node] == nexts[all_parents[node]];
  }
  return {array_of(nodes), x, right};
}

// `note` is a `RetrievalNote`.
std::tuple<Out<double, 2>, Out<bool>, Out<int64_t>> outcomes(const NodeTable& verified,
                                                             const In<bool>& accepted,
                                                             nb::handle note, double unread,
                                                             double recent) {
  const auto parents = verified.integers(NodeTable::PARENTS),
             tokens = verified.integers(NodeTable::TOKENS);
  const auto number = verified.integers(NodeTable::NUMBER),
             depth = verified.integers(NodeTable::DEPTH);
  const auto score = verified.reals(NodeTable::SCORE), entropy = verified.reals(NodeTable::ENTROPY);
  const auto asked = entry<In<int64_t>>(note, 0);
  const auto share = entry<In<double>>(note, 1);
  const auto found = entry<In<int64_t, 2>>(note, 2);
  const int64_t count = parents.size(0);
  std::vector<char> expanded(count);
  Numbers below(count, -1), nodes;
  for (int64_t i = 0; i < count; i++) {
    const int64_t parent = parents[i];
    if (parent >= 0 && accepted[parent]) {
      expanded[parent] |= entropy[i] != unread;
      if (accepted[i]) below[parent] = i;
    }
  }
  for (int64_t i = 0; i < count; i++)
    if (expanded[i]) nodes.push_back(i);
  const int64_t many = nodes.size();
  auto x = Out<double, 2>::full({many, 5}, 0.0);
  auto reached = Out<bool>::empty({many});
  auto behind = Out<int64_t>::full({many}, 0);
  for (int64_t m = 0; m < many; m++) {
    const int64_t node = nodes[m];
    x(m, 0) = 1;
    x(m, 1) = depth[node] == 0;
    x(m, 2) = score[node];
    x(m, 3) = recent;
    bool own = below[node] >= 0;
    for (int64_t a = 0; a < asked.size(0); a++) {
      if (asked[a] != number[node]) continue;
      x(m, 4) = share[a];
      for (int64_t k = 0; k < found.size(1) && own; k++) own = found(a, k) != tokens[below[node]];
    }
    reached[m] = own;
    for (int64_t after = own ? below[below[node]] : -1; after >= 0 && entropy[after] == unread;
         after = below[after])
      behind[m]++;
  }
  return {x, reached, behind};
}

}  // namespace

void bind_acceptance_calibration(nb::module_& m) {
  m.def("values", &values);
  m.def("calibration_examples", &calibration_examples);
  m.def("outcomes", &outcomes);
}

}  // namespace draftree
