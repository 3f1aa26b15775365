// Nodes that pay for their verification or expansion: see node_selection.py.
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "bind_loops.h"
#include "cost_curve.h"
#include "descending_order.h"
#include "node_table.h"
#include "reproducible_log_exp.h"
#include "score_ranking.h"

namespace nb = nanobind;

namespace draftree {
namespace {

std::tuple<Out<int64_t>, Out<double>> nodes_that_pay(const In<double>& score,
                                                     const In<int64_t>& row, int64_t roots,
                                                     int64_t before, int64_t k,
                                                     const In<double>& worth, double least) {
  Numbers kept = lead(row.data() + roots, score.data() + roots, score.size(0) - roots, k), good;
  auto total = Out<double>::full({worth.size(0)}, 0.0);
  for (int64_t& node : kept) {
    node += roots;
    total[row[node]] += exp_of(score[node]);
  }
  for (int64_t node : kept)
    if (node >= before && total[row[node]] - worth[row[node]] > least) good.push_back(node);
  return {array_of(good), total};
}

Curve curve_of(nb::handle tuple) {
  return {entry<In<double>>(tuple, 0), entry<In<double>>(tuple, 1)};
}

struct PassPrice {
  explicit PassPrice(nb::handle tuple)
      : target(curve_of(entry<nb::object>(tuple, 0))),
        rows(entry<int64_t>(tuple, 1)),
        rate(entry<double>(tuple, 2)),
        left(entry<double>(tuple, 3)) {}
  double seconds(double tokens) const { return height(target, tokens); }
  Curve target;
  int64_t rows;
  double rate, left;
};

struct Scan {
  Numbers order;
  int64_t best;
  double further, worst;
};

Scan scan(const double* score, int64_t count, const PassPrice& price, int64_t ahead) {
  Numbers order = descending_order(score, count);
  int64_t best = 0;
  double most = 0, gain = 0;
  const double roots = price.seconds(1.0), each = static_cast<double>(price.rows);
  double beside = roots;
  for (int64_t i = 0; i < count; i++) {
    gain += round_to_unit(exp_of(score[order[i]]));
    const double seconds = price.seconds(1 + static_cast<double>(i + 1) / each);
    const double net = gain - price.rate * (seconds - roots);
    if (seconds - roots <= larger_of(price.left, 0.0) && net > most) {
      best = i + 1;
      most = net;
      beside = seconds;
    }
  }
  double further = INFINITE;
  for (int64_t i = 1; i <= ahead; i++)
    further =
        smaller_of(further, (price.seconds(1 + static_cast<double>(best + i) / each) - beside) /
                                static_cast<double>(i));
  const double worst = best ? exp_of(score[order[best - 1]]) : INFINITE;
  return {std::move(order), best, price.rate * further, worst};
}

std::tuple<Out<int64_t>, int64_t, double, double> worth_verifying(const In<double>& score,
                                                                  nb::handle price, int64_t ahead) {
  const Scan it = scan(score.data(), score.size(0), PassPrice(price), ahead);
  return {array_of(it.order), it.best, it.further, it.worst};
}

Out<bool> selected(const In<double>& score, nb::handle given_price) {
  const PassPrice price(given_price);
  const Scan it = scan(score.data() + price.rows, score.size(0) - price.rows, price, 1);
  auto keep = Out<bool>::full({score.size(0)}, false);
  std::fill_n(keep.data(), price.rows, true);
  for (int64_t i = 0; i < it.best; i++) keep[price.rows + it.order[i]] = true;
  return keep;
}

std::tuple<Out<int64_t>, Out<int64_t>, double, double> promising(
    const NodeTable& tree, int64_t start, const In<int64_t>& deepest, double limit, int64_t widest,
    double unread, nb::handle given_price, int64_t ahead) {
  const auto row = tree.integers(NodeTable::ROW), depth = tree.integers(NodeTable::DEPTH);
  const auto score = tree.reals(NodeTable::SCORE), entropy = tree.reals(NodeTable::ENTROPY);
  const PassPrice price(given_price);
  Numbers nodes, of, likely, read;
  std::vector<double> scores;
  for (int64_t node = start; node < row.size(0); node++) {
    if (static_cast<double>(depth[node]) <
        smaller_of(static_cast<double>(deepest[row[node]]), limit)) {
      nodes.push_back(node);
      of.push_back(row[node]);
      scores.push_back(score[node]);
    }
  }
  for (int64_t i : lead(of.data(), scores.data(), nodes.size(), widest)) {
    likely.push_back(nodes[i]);
    if (entropy[nodes[i]] != unread) read.push_back(nodes[i]);
  }
  const Scan it = scan(score.data() + price.rows, score.size(0) - price.rows, price, ahead);
  return {array_of(likely), array_of(read), it.further, it.worst};
}

// `success` is a `DraftSuccess`, `step` a `DraftPrice`.
std::tuple<Out<int64_t>, double> worth_expanding(const NodeTable& tree, const In<int64_t>& frontier,
                                                 const In<double>& below, nb::handle success,
                                                 double least, nb::handle step,
                                                 nb::handle given_price) {
  const auto score = tree.reals(NodeTable::SCORE);
  const auto depth = tree.integers(NodeTable::DEPTH);
  const auto weights = entry<In<double>>(success, 0);
  const auto recent = entry<double>(success, 1), beyond = entry<double>(success, 2);
  const Curve draft = curve_of(entry<nb::object>(step, 0));
  const auto fed = entry<int64_t>(step, 1), ahead = entry<int64_t>(step, 2);
  const auto waiting = entry<double>(step, 3);
  const PassPrice price(given_price);
  const int64_t count = frontier.size(0);
  const double each = static_cast<double>(price.rows);
  std::vector<double> net(count);
  for (int64_t f = 0; f < count; f++) {
    const int64_t node = frontier[f];
    const double x = weights[0] + weights[1] * (depth[node] == 0) + weights[2] * score[node] +
                     weights[3] * recent;
    const double value = exp_of(score[node]);
    double worth = value / (1 + exp_of(-x - (below.size() ? weights[4] * below[f] / value : 0.0)));
    for (int64_t i = 0; i < ahead; i++) {
      net[f] += larger_of((1 + beyond) * worth - least, 0.0);
      worth /= 1 + exp_of(-x);
    }
  }
  const Numbers order = descending_order(net.data(), count);
  int64_t best = 0;
  double most = 0, gain = 0, spent = 0;
  const double left = price.left - (price.seconds(1 + 1 / each) - price.seconds(1.0));
  for (int64_t i = 0; i < count; i++) {
    gain += round_to_unit(larger_of(net[order[i]], 0.0));
    const double seconds =
        waiting + height(draft, static_cast<double>(std::min(i + 1, fed)) / each);
    if (seconds <= left && gain - price.rate * seconds > most) {
      best = i + 1;
      most = gain - price.rate * seconds;
      spent = seconds;
    }
  }
  auto chosen = Out<int64_t>::empty({best});
  for (int64_t i = 0; i < best; i++) chosen[i] = frontier[order[i]];
  return {chosen, spent};
}

}  // namespace

void bind_node_selection(nb::module_& m) {
  m.def("nodes_that_pay", &nodes_that_pay);
  m.def("worth_verifying", &worth_verifying);
  m.def("selected", &selected);
  m.def("promising", &promising);
  m.def("worth_expanding", &worth_expanding);
}

}  // namespace draftree
