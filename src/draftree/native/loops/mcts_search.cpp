// The search of `policies/mcts.py`.
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "retrieval_common.h"

namespace draftree {
namespace {

double uniform(uint64_t seed, uint64_t count) {
  uint64_t mixed = seed * 0xD1342543DE82EF95u + (count + 1) * 0x9E3779B97F4A7C15u;
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9u;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBu;
  return static_cast<double>((mixed ^ (mixed >> 31)) >> 11) * 0x1p-53;
}

struct Search {
  const double* prior;
  int64_t* visits;
  double* total;
  double c1, c2;
  bool each_first;

  // The child to go down to: of equals the first.
  int64_t select(int64_t start, int64_t end) const {
    int64_t siblings = 0;
    for (int64_t child = start; child < end; child++) siblings += visits[child];
    const double exploration = c1 + std::log((static_cast<double>(siblings) + c2 + 1) / c2),
                 root = std::sqrt(static_cast<double>(siblings));
    int64_t chosen = start;
    double most = -std::numeric_limits<double>::infinity();
    for (int64_t child = start; child < end; child++) {
      if (visits[child] == 0 && each_first) return child;
      const double mean = visits[child] ? total[child] / static_cast<double>(visits[child]) : 0.0;
      const double worth =
          mean + exploration * prior[child] * root / static_cast<double>(1 + visits[child]);
      if (worth > most) chosen = child, most = worth;
    }
    return chosen;
  }

  // A child drawn in proportion to its prior.
  int64_t draw(int64_t start, int64_t end, double chance) const {
    double mass = 0.0;
    for (int64_t child = start; child < end; child++) mass += prior[child];
    double left = chance * mass;
    for (int64_t child = start; child < end; child++) {
      left -= prior[child];
      if (left < 0) return child;
    }
    return end - 1;
  }
};

// `sentences` is a `SentenceTree`, `by` an `Exploration`.
nb::tuple search_sentences(const Ints& seeds, nb::handle sentences, int64_t iterations,
                           nb::handle by) {
  const Ints first_children = contiguous(field<Ints>(sentences, 0));
  const int64_t nodes = first_children.shape[0], *first = first_children.data,
                *last = contiguous(field<Ints>(sentences, 1)).data;
  const double *prior = contiguous(field<Reals>(sentences, 2)).data,
               *gain = contiguous(field<Reals>(sentences, 3)).data;
  const double offset = real_field(sentences, 4), c1 = real_field(by, 0), c2 = real_field(by, 1);
  const bool each_first = nb::cast<bool>(nb::handle(PyTuple_GetItem(by.ptr(), 2)));
  auto visits = make_array<int64_t>(nodes);
  auto total = make_array<double>(nodes);
  {
    nb::gil_scoped_release without_lock;
    for (int64_t node = 0; node < nodes; node++) visits.data[node] = 0, total.data[node] = 0.0;
    std::vector<char> exist(static_cast<size_t>(nodes));  // true where the node's children do
    std::vector<int64_t> path(static_cast<size_t>(nodes + 1));
    const Search search{prior, visits.data, total.data, c1, c2, each_first};
    for (int64_t row = 0; row < seeds.shape[0]; row++) {
      uint64_t draws = 0;
      if (first[row] == last[row]) continue;
      for (int64_t iteration = 0; iteration < iterations; iteration++) {
        int64_t node = row, length = 1;
        double reward = offset;
        bool drawing = false;
        path[0] = row;
        while (first[node] < last[node]) {  // sentences end where the local model does
          const bool on_path = !drawing;    // the first node drawn is on it, too
          if (exist[node]) {
            node = search.select(first[node], last[node]);
          } else {
            exist[node] = on_path, drawing = true;
            node = search.draw(first[node], last[node],
                               uniform(static_cast<uint64_t>(seeds(row)), draws++));
          }
          reward += gain[node];
          if (on_path) path[length++] = node;
        }
        for (int64_t i = 0; i < length; i++) visits.data[path[i]]++, total.data[path[i]] += reward;
      }
    }
  }
  return nb::make_tuple(std::move(visits.object), std::move(total.object));
}

}  // namespace

void bind_mcts(nb::module_& m) { m.def("search_sentences", &search_sentences); }

}  // namespace draftree
