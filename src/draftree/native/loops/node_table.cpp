// Columns and paths of a draft tree: see node_table.py.
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <vector>

#include "bind_loops.h"
#include "node_table.h"

namespace nb = nanobind;

namespace draftree {
namespace {

std::tuple<nb::object, bool> kept(const NodeTable& nodes, const In<bool>& keep) {
  const int64_t count = std::count(keep.begin(), keep.end(), true);
  const In<int64_t> parents = nodes.integers(NodeTable::PARENTS);
  bool connected = true;
  NewNodeTable made(count);
  std::vector<int64_t> moved(keep.size()), chosen(count);
  int64_t at = 0;
  for (int64_t i = 0; i < keep.size(); i++) {
    const int64_t parent = parents[i];
    if (!keep[i]) {
      connected &= parent >= 0;
      continue;
    }
    moved[i] = at;
    connected &= parent < 0 || keep[parent];
    made.integers(NodeTable::PARENTS)[at] = parent >= 0 ? moved[parent] : -1;
    chosen[at++] = i;
  }
  for (int column = 0; column < NodeTable::COUNT; column++) {
    if (column == NodeTable::PARENTS) continue;
    if (NodeTable::is_real(column)) {
      const In<double> from = nodes.reals(column);
      double* to = made.reals(column);
      for (int64_t i = 0; i < count; i++) to[i] = from[chosen[i]];
    } else {
      const In<int64_t> from = nodes.integers(column);
      int64_t* to = made.integers(column);
      for (int64_t i = 0; i < count; i++) to[i] = from[chosen[i]];
    }
  }
  return {made.like(nodes), connected};
}

Out<bool, 2> paths(const In<int64_t>& parents) {
  const int64_t count = parents.size(0);
  auto seen = Out<bool, 2>::full({count, count}, false);
  for (int64_t i = 0; i < count; i++) {
    if (parents[i] >= 0) std::copy_n(seen.row(parents[i]), count, seen.row(i));
    seen(i, i) = true;
  }
  return seen;
}

Out<int64_t> shallow(const In<int64_t>& nodes, const In<int64_t>& depth, const In<int64_t>& row,
                     const In<int64_t>& bounds, double most) {
  const auto above = [&](int64_t node) {
    const double bound = static_cast<double>(bounds[row[node]]);
    return static_cast<double>(depth[node]) < (most < bound ? most : bound);
  };
  auto found = Out<int64_t>::empty({std::count_if(nodes.begin(), nodes.end(), above)});
  std::copy_if(nodes.begin(), nodes.end(), found.begin(), above);
  return found;
}

}  // namespace

void bind_node_table(nb::module_& m) {
  m.def("kept", &kept);
  m.def("paths", &paths);
  m.def("shallow", &shallow);
}

}  // namespace draftree
