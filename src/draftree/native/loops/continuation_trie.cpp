// Tries of continuations: see `drafters/retrieval/continuation_trie.py`.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "retrieval_common.h"

namespace draftree {
namespace {

constexpr int64_t END = -1, UNKNOWN = -1;

// A node of a trie before it is pruned: its token, its matches and its parent.
struct Run {
  int64_t begin, end, parent, token;
  int64_t count() const { return end - begin; }
};

// Keep the k most frequent, in their own order; of equals the first.
void keep_most_frequent(std::vector<Run>& runs, size_t k, std::vector<int64_t>* kept = nullptr) {
  std::vector<int64_t> order(runs.size());
  std::iota(order.begin(), order.end(), 0);
  if (runs.size() > k) {
    const auto is_before = [&](int64_t a, int64_t b) {
      return runs[a].count() != runs[b].count() ? runs[a].count() > runs[b].count() : a < b;
    };
    std::nth_element(order.begin(), order.begin() + k, order.end(), is_before);
    order.resize(k);
    std::sort(order.begin(), order.end());
    for (size_t i = 0; i < k; i++) runs[i] = runs[order[i]];
    runs.resize(k);
  }
  if (kept) *kept = std::move(order);
}

nb::tuple grow_trie(const Array<const int64_t, 2>& rows, int64_t nodes) {
  const int64_t matches = rows.shape[0], length = rows.shape[1];
  std::vector<Run> trie = {{0, matches, 0, END}};
  std::vector<int64_t> kept;
  {
    nb::gil_scoped_release without_lock;
    std::vector<Run> runs;
    size_t layer = 0;
    for (int64_t depth = 0; depth < length; depth++) {
      runs.clear();
      for (size_t node = layer; node < trie.size(); node++) {
        for (int64_t at = trie[node].begin, end = trie[node].end; at < end;) {
          const int64_t token = rows(at, depth), begin = at;
          while (++at < end && rows(at, depth) == token) {
          }
          if (token != END) runs.push_back({begin, at, static_cast<int64_t>(node), token});
        }
      }
      keep_most_frequent(runs, static_cast<size_t>(nodes));
      // Side by side below each parent, the most frequent first.
      std::stable_sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) {
        return a.parent != b.parent ? a.parent < b.parent : a.count() > b.count();
      });
      layer = trie.size();
      trie.insert(trie.end(), runs.begin(), runs.end());
    }
    runs = trie;
    // The root is the most frequent run, or the first of equally frequent ones.
    keep_most_frequent(runs, static_cast<size_t>(nodes + 1), &kept);
  }
  const int64_t size = static_cast<int64_t>(kept.size());
  auto tokens = make_array<int64_t>(size);
  auto log_q = make_array<double>(size);
  auto first = make_array<int64_t>(size), children = make_array<int64_t>(size);
  std::vector<int64_t> number(trie.size());
  for (int64_t i = 0; i < size; i++) {
    const Run& run = trie[kept[i]];
    tokens.data[i] = run.token;
    log_q.data[i] = 0.0;
    first.data[i] = children.data[i] = 0;
    if (i == 0) continue;
    number[kept[i]] = i;
    const int64_t above = number[run.parent];
    log_q.data[i] =
        std::log(static_cast<double>(run.count()) / static_cast<double>(trie[run.parent].count()));
    if (children.data[above] == 0) first.data[above] = i;
    children.data[above]++;
  }
  return nb::make_tuple(std::move(tokens.object), std::move(log_q.object), std::move(first.object),
                        std::move(children.object));
}

// A trie as it is given: `PrefixTree`.
struct Trie {
  explicit Trie(nb::handle tuple)
      : tokens(field<Ints>(tuple, 0)),
        log_q(field<Reals>(tuple, 1)),
        first(field<Ints>(tuple, 2)),
        children(field<Ints>(tuple, 3)) {}
  Ints tokens;
  Reals log_q;
  Ints first, children;
};

nb::object follow(const Ints& known, const Ints& tokens, const Ints& parents,
                  nb::handle prefix_tree) {
  const Trie trie(prefix_tree);
  const int64_t nodes = tokens.shape[0];
  auto found = make_array<int64_t>(nodes);
  for (int64_t node = 0; node < known.shape[0]; node++) found.data[node] = known(node);
  for (int64_t node = known.shape[0]; node < nodes; node++) {
    const int64_t above = parents(node) >= 0 ? found.data[parents(node)] : UNKNOWN;
    found.data[node] = UNKNOWN;
    if (above < 0) continue;
    const int64_t first = trie.first(above), end = first + trie.children(above);
    for (int64_t child = first; child < end; child++)
      if (trie.tokens(child) == tokens(node)) found.data[node] = child;
  }
  return std::move(found.object);
}

nb::tuple best_children(nb::handle prefix_tree, const Ints& at, int64_t k) {
  const Trie trie(prefix_tree);
  const int64_t rows = at.shape[0];
  int64_t widest = 1;
  for (int64_t i = 0; i < rows; i++) widest = std::max(widest, std::min(k, trie.children(at(i))));
  auto found = make_array<int64_t>(rows, widest);
  auto value = make_array<double>(rows, widest);
  for (int64_t i = 0; i < rows; i++) {
    const int64_t first = trie.first(at(i)), count = std::min(widest, trie.children(at(i)));
    for (int64_t j = 0; j < widest; j++) {
      found(i, j) = j < count ? trie.tokens(first + j) : 0;
      value(i, j) = j < count ? trie.log_q(first + j) : -std::numeric_limits<double>::infinity();
    }
  }
  return nb::make_tuple(std::move(found.object), std::move(value.object));
}

nb::object context_of(const Ints& text, const Ints& tokens, const Ints& parents, int64_t node,
                      int64_t longest) {
  std::vector<int64_t> found(static_cast<size_t>(longest));
  const int64_t count =
      write_context(text, text.shape[0], tokens, parents, node, longest, found.data());
  return copy_array<int64_t>(found.data() + longest - count, count);
}

}  // namespace

void bind_continuation_trie(nb::module_& m) {
  m.def("grow_trie", &grow_trie);
  m.def("context_of", &context_of);
  m.def("follow", &follow);
  m.def("best_children", &best_children);
}

}  // namespace draftree
