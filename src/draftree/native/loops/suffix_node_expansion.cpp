// Expansion of tree nodes by suffix matches: see `drafters/retrieval/suffix_node_expansion.py`.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "node_column_indices.h"
#include "suffix_match_drafts.h"

namespace draftree {
namespace {

// Space for the longest path after a text.
constexpr int64_t PATH_TOKENS = 64;

nb::list suffix_root_texts(nb::list texts, nb::list roots, nb::handle outputs,
                           nb::handle given_limits) {
  const Outputs memory(outputs);
  const Limits limits(given_limits);
  nb::list found;
  for (size_t i = 0; i < texts.size(); i++) {
    const Ints text = nb::cast<Ints>(texts[i]);
    const int64_t end = text.shape[0] + 1;
    auto tokens = make_array<int32_t>(end + PATH_TOKENS);
    for (int64_t t = 0; t < end - 1; t++) tokens(t) = static_cast<int32_t>(text(t));
    tokens(end - 1) = nb::cast<int32_t>(roots[i]);
    std::fill_n(tokens.data + end, PATH_TOKENS, 0);
    Grown grown;
    {
      nb::gil_scoped_release without_lock;
      grown = draft_after(tokens.data, end, memory, limits);
    }
    found.append(nb::make_tuple(std::move(tokens.object), end, draft_tuple(grown)));
  }
  return found;
}

// The tree that is drafted, and how `children` and `descendants` read the texts up to its roots.
struct Forest {
  Forest(nb::list texts, nb::handle tree, nb::handle outputs, nb::handle given_limits)
      : parents(field<Ints>(tree, NodeColumns::PARENTS)),
        tokens(field<Ints>(tree, NodeColumns::TOKENS)),
        memory(outputs),
        limits(given_limits) {
    for (nb::handle text : texts) {
      nb::handle draft = PyTuple_GetItem(text.ptr(), 2);
      rows.push_back({contiguous(field<Array<int32_t, 1>>(text, 0)).data, whole_field(text, 1),
                      contiguous(field<Array<const int32_t, 2>>(draft, 0)),
                      contiguous(field<Reals>(draft, 1))});
    }
  }

  // A `RootText`.
  struct Row {
    int32_t* text;
    int64_t end;
    Array<const int32_t, 2> nodes;
    Reals shares;
  };
  Ints parents, tokens;
  Outputs memory;
  Limits limits;
  std::vector<Row> rows;
  Grown other;  // the draft after a node that is not in the draft after the root

  struct Reached {
    Draft draft;
    int64_t at, depth;
  };

  // The draft that goes on after a node of the tree, which node of it that is (-1 for where it
  // begins), and its depth.
  Reached reach(const Row& row, int64_t below) {
    int64_t depth = 0;
    for (int64_t node = below; parents(node) >= 0; node = parents(node)) depth++;
    for (int64_t i = depth - 1, node = below; i >= 0; i--, node = parents(node))
      row.text[row.end + i] = static_cast<int32_t>(tokens(node));
    Draft draft{row.nodes.data, row.shares.data, row.nodes.shape[0]};
    int64_t at = -1;
    for (int64_t i = row.end; i < row.end + depth; i++) {
      at = child(draft, at, row.text[i]);
      if (at < -1) {
        other = draft_after(row.text, i + 1, memory, limits);
        draft = draft_of(other);
        at = -1;
      }
    }
    return {draft, at, depth};
  }

  static int64_t child(const Draft& draft, int64_t node, int32_t token) {
    for (int64_t i = node + 1; i < draft.count; i++)
      if (draft.parent(i) == node && draft.token(i) == token) return i;
    return -2;
  }
};

nb::tuple suffix_children(nb::list texts, const Ints& owners, nb::handle tree, const Ints& frontier,
                          int64_t k, nb::handle outputs, nb::handle given_limits) {
  Forest forest(texts, tree, outputs, given_limits);
  const int64_t nodes = frontier.shape[0];
  auto found = make_array<int64_t>(nodes, k);
  auto log_q = make_array<double>(nodes, k);
  int64_t most = 1;
  {
    nb::gil_scoped_release without_lock;
    std::fill_n(found.data, nodes * k, 0);
    std::fill_n(log_q.data, nodes * k, -std::numeric_limits<double>::infinity());
    for (int64_t f = 0; f < nodes; f++) {
      const auto [draft, at, depth] = forest.reach(forest.rows[owners(f)], frontier(f));
      int64_t rank = 0;
      for (int64_t i = at + 1; i < draft.count && rank < k; i++) {
        if (draft.parent(i) != at) continue;
        found(f, rank) = draft.token(i);
        log_q(f, rank++) = std::log(draft.shares[i]);
      }
      most = std::max(most, rank);
    }
  }
  return nb::make_tuple(std::move(found.object), std::move(log_q.object), most);
}

nb::tuple suffix_descendants(nb::list texts, const Ints& owners, nb::handle tree,
                             const Ints& frontier, int64_t k, const Ints& deepest,
                             nb::handle outputs, nb::handle given_limits) {
  struct Waiting {
    int64_t at, number, depth;
  };
  struct Found {
    int64_t token, row, rank;
    double share;
  };
  Forest forest(texts, tree, outputs, given_limits);
  std::vector<int64_t> after, whose;
  std::vector<Found> found;  // in the order of their numbers
  int64_t widest = 1;
  {
    nb::gil_scoped_release without_lock;
    std::vector<Waiting> waiting;
    const int64_t first = forest.tokens.shape[0];
    for (size_t text = 0; text < forest.rows.size(); text++) {
      const size_t most = found.size() + MAX_NODES;
      for (int64_t f = 0; f < frontier.shape[0]; f++) {
        if (owners(f) != static_cast<int64_t>(text)) continue;
        const auto reached = forest.reach(forest.rows[text], frontier(f));
        const Draft& draft = reached.draft;
        waiting.assign(1, {reached.at, frontier(f), reached.depth});
        for (size_t here = 0; here < waiting.size(); here++) {
          const auto [at, number, depth] = waiting[here];
          if (depth >= deepest(text)) continue;
          int64_t rank = 0;
          for (int64_t i = at + 1; i < draft.count && rank < k && found.size() < most; i++) {
            if (draft.parent(i) != at) continue;
            waiting.push_back({i, first + static_cast<int64_t>(found.size()), depth + 1});
            found.push_back(
                {draft.token(i), static_cast<int64_t>(after.size()), rank++, draft.shares[i]});
          }
          if (rank) {
            after.push_back(number);
            whose.push_back(static_cast<int64_t>(text));
          }
          widest = std::max(widest, rank);
        }
      }
    }
  }
  const int64_t count = static_cast<int64_t>(after.size());
  auto next = make_array<int64_t>(count, widest);
  auto log_q = make_array<double>(count, widest);
  std::fill_n(next.data, count * widest, 0);
  std::fill_n(log_q.data, count * widest, -std::numeric_limits<double>::infinity());
  for (const Found& one : found)
    next(one.row, one.rank) = one.token, log_q(one.row, one.rank) = std::log(one.share);
  return nb::make_tuple(copy_array<int64_t>(after.data(), count),
                        copy_array<int64_t>(whose.data(), count), std::move(next.object),
                        std::move(log_q.object));
}

}  // namespace

void bind_suffix_node_expansion(nb::module_& m) {
  m.attr("PATH_TOKENS") = PATH_TOKENS;
  m.def("suffix_root_texts", &suffix_root_texts);
  m.def("suffix_children", &suffix_children);
  m.def("suffix_descendants", &suffix_descendants);
}

}  // namespace draftree
