// Appends candidates to a draft tree: see tree_growth.py.
#include <algorithm>

#include "bind_loops.h"
#include "node_table.h"
#include "reproducible_log_exp.h"

namespace nb = nanobind;

namespace draftree {
namespace {

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

}  // namespace

void bind_tree_growth(nb::module_& m) { m.def("appended", &appended); }

}  // namespace draftree
