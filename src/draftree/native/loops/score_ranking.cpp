// Orders of nodes by score: see score_ranking.py.
#include "score_ranking.h"

#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "bind_loops.h"
#include "descending_order.h"

namespace nb = nanobind;

namespace draftree {
namespace {

constexpr int64_t PARTIAL_SORT_FACTOR = 4;

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

}  // namespace

Numbers lead(const int64_t* rows, const double* score, int64_t count, int64_t k) {
  Numbers found;
  if (count <= PARTIAL_SORT_FACTOR * k || !count) {
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

namespace {

Out<int64_t> falling(const In<double>& score) {
  return array_of(descending_order(score.data(), score.size(0)));
}

std::tuple<Out<int64_t>, Out<int64_t>> ranked(const In<int64_t>& rows, const In<double>& score) {
  const auto [order, place] = rank(rows.data(), score.data(), rows.size(0));
  return {array_of(order), array_of(place)};
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

}  // namespace

void bind_score_ranking(nb::module_& m) {
  m.def("falling", &falling);
  m.def("ranked", &ranked);
  m.def("leading", &leading);
  m.def("leading_of_layer", &leading_of_layer);
}

}  // namespace draftree
