// Growth of a draft tree: see tree_growth.py for what each function does.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "bind_loops.h"
#include "reproducible_log_exp.h"
#include "tree_arguments.h"
#include "descending_order.h"

namespace nb = nanobind;

namespace draftree {
namespace {

constexpr double INFINITE = std::numeric_limits<double>::infinity();
constexpr int64_t MANY = 4;

using Curve = std::pair<In<double>, In<double>>;

double height(const In<double>& at, const In<double>& seconds, double t) {
  const int64_t last = at.size(0) - 1;
  if (last == 0 || t <= at[0]) return seconds[0];
  int64_t i = last;
  while (at[i - 1] > t) i--;
  const double slope = (seconds[i] - seconds[i - 1]) / (at[i] - at[i - 1]);
  if (t >= at[last]) return seconds[last] + larger_of(slope, 0.0) * (t - at[last]);
  return seconds[i - 1] + slope * (t - at[i - 1]);
}

double height(const Curve& curve, double t) { return height(curve.first, curve.second, t); }

Out<double> between(const In<double>& at, const In<double>& seconds, const In<double>& tokens) {
  auto found = Out<double>::empty({tokens.size(0)});
  for (int64_t n = 0; n < tokens.size(0); n++) found[n] = height(at, seconds, tokens[n]);
  return found;
}

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

using Numbers = std::vector<int64_t>;

Out<int64_t> array_of(const Numbers& numbers) {
  auto array = Out<int64_t>::empty({static_cast<int64_t>(numbers.size())});
  std::copy(numbers.begin(), numbers.end(), array.begin());
  return array;
}

Out<int64_t> falling(const In<double>& score) {
  return array_of(descending_order(score.data(), score.size(0)));
}

// The least of some rows, and how many rows there are from it to the greatest.
std::pair<int64_t, int64_t> span(const int64_t* rows, int64_t count) {
  if (!count) return {0, 1};
  const auto [low, high] = std::minmax_element(rows, rows + count);
  return {*low, *high - *low + 1};
}

std::pair<Numbers, Numbers> rank(const int64_t* rows, const double* score, int64_t count) {
  const auto [low, many] = span(rows, count);
  Numbers begin(many + 1), order(count), place(count);
  for (int64_t i = 0; i < count; i++) begin[rows[i] - low + 1]++;
  std::partial_sum(begin.begin(), begin.end(), begin.begin());
  Numbers at = begin;
  for (int64_t node : descending_order(score, count)) {
    const int64_t row = rows[node] - low;
    order[at[row]] = node;
    place[at[row]] = at[row] - begin[row];
    at[row]++;
  }
  return {order, place};
}

std::tuple<Out<int64_t>, Out<int64_t>> ranked(const In<int64_t>& rows, const In<double>& score) {
  const auto [order, place] = rank(rows.data(), score.data(), rows.size(0));
  return {array_of(order), array_of(place)};
}

Numbers lead(const int64_t* rows, const double* score, int64_t count, int64_t k) {
  Numbers found;
  if (count <= MANY * k || !count) {
    const auto [order, place] = rank(rows, score, count);
    for (int64_t i = 0; i < count; i++)
      if (place[i] < k) found.push_back(order[i]);
    return found;
  }
  const auto [low, many] = span(rows, count);
  Numbers best(many * k), counts(many);
  for (int64_t i = 0; i < count; i++) {
    const int64_t row = rows[i] - low;
    int64_t* mine = best.data() + row * k;
    int64_t at = counts[row];
    if (at < k) {
      counts[row]++;
    } else if (k && score[mine[k - 1]] < score[i]) {
      at = k - 1;
    } else {
      continue;
    }
    for (; at && score[mine[at - 1]] < score[i]; at--) mine[at] = mine[at - 1];
    mine[at] = i;
  }
  for (int64_t row = 0; row < many; row++)
    found.insert(found.end(), best.begin() + row * k, best.begin() + row * k + counts[row]);
  return found;
}

Out<int64_t> leading(const In<int64_t>& rows, const In<double>& score, int64_t k) {
  return array_of(lead(rows.data(), score.data(), score.size(0), k));
}

Out<bool, 2> leading_of_layer(const In<int64_t>& row, const In<int64_t>& frontier,
                              const In<double, 2>& score, int64_t k) {
  const int64_t width = score.size(1);
  Numbers rows(score.size());
  for (int64_t i = 0; i < score.size(); i++) rows[i] = row[frontier[i / width]];
  auto keep = Out<bool, 2>::full({score.size(0), width}, false);
  for (int64_t i : lead(rows.data(), score.data(), score.size(), k)) keep[i] = true;
  return keep;
}

// `candidates` is a `CandidateTable`.
nb::object appended(const NodeTable& nodes, const In<int64_t>& frontier, nb::handle candidates,
                    const In<bool, 2>& keep, const In<double, 2>& new_score,
                    const In<double>& new_entropy, int64_t first_q) {
  const auto new_tokens = entry<In<int64_t, 2>>(candidates, 0);
  const auto new_log_q = entry<In<double, 2>>(candidates, 1);
  const auto sources = entry<In<int64_t, 2>>(candidates, 2);
  const auto same_source = entry<int64_t>(candidates, 3);
  const int64_t width = new_log_q.size(1), before = nodes.integers(NodeTable::TOKENS).size(0);
  const auto wanted = [&](int64_t f, int64_t k) {
    return new_log_q(f, k) > -INFINITE && (!keep.size() || keep(f, k));
  };
  int64_t added = 0;
  for (int64_t f = 0; f < new_log_q.size(0); f++)
    for (int64_t k = 0; k < width; k++) added += wanted(f, k);
  NewNodeTable made(before + added);
  for (int column = 0; column < NodeTable::COUNT; column++) {
    if (NodeTable::is_real(column)) {
      std::copy_n(nodes.reals(column).data(), before, made.reals(column));
    } else {
      std::copy_n(nodes.integers(column).data(), before, made.integers(column));
    }
  }
  int64_t *tokens = made.integers(NodeTable::TOKENS), *parents = made.integers(NodeTable::PARENTS);
  int64_t *depth = made.integers(NodeTable::DEPTH), *row = made.integers(NodeTable::ROW);
  int64_t *source = made.integers(NodeTable::SOURCE), *number = made.integers(NodeTable::NUMBER);
  int64_t* q_row = made.integers(NodeTable::Q_ROW);
  double *log_q = made.reals(NodeTable::LOG_Q), *score = made.reals(NodeTable::SCORE),
         *entropy = made.reals(NodeTable::ENTROPY);
  int64_t at = before;
  for (int64_t f = 0; f < new_log_q.size(0); f++) {
    const int64_t parent = frontier[f];
    for (int64_t k = 0; k < width; k++) {
      if (!wanted(f, k)) continue;
      tokens[at] = new_tokens(f, k);
      parents[at] = parent;
      depth[at] = depth[parent] + 1;
      row[at] = row[parent];
      log_q[at] = new_log_q(f, k);
      score[at] = new_score.size() ? new_score(f, k) : score[parent] + new_log_q(f, k);
      source[at] = sources.size() ? sources(f, k) : same_source;
      entropy[at] = new_entropy.size() ? new_entropy[f] : 0.0;
      number[at] = at;
      q_row[at] = first_q >= 0 ? first_q + f : -1;
      at++;
    }
  }
  return made.like(nodes);
}

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

void bind_tree_growth(nb::module_& m) {
  m.def("height", nb::overload_cast<const In<double>&, const In<double>&, double>(&height));
  m.def("between", &between);
  m.def("values", &values);
  m.def("falling", &falling);
  m.def("ranked", &ranked);
  m.def("leading", &leading);
  m.def("leading_of_layer", &leading_of_layer);
  m.def("appended", &appended);
  m.def("nodes_that_pay", &nodes_that_pay);
  m.def("calibration_examples", &calibration_examples);
  m.def("outcomes", &outcomes);
  m.def("worth_verifying", &worth_verifying);
  m.def("selected", &selected);
  m.def("promising", &promising);
  m.def("worth_expanding", &worth_expanding);
}

}  // namespace draftree
