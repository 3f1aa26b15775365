// The accepted paths of verified trees: see tree_verification.py.
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <vector>

#include "contiguous_arrays.h"
#include "bind_loops.h"

namespace nb = nanobind;

namespace draftree {
namespace {

std::tuple<Out<int64_t>, Out<int64_t>, Out<int64_t>> followed(const In<int64_t>& parents,
                                                              const In<int64_t>& tokens,
                                                              const In<int64_t>& chosen) {
  const int64_t nodes = parents.size(0);
  int64_t roots = 0;
  while (roots < nodes && parents[roots] < 0) roots++;
  std::vector<int64_t> found;
  auto ends = Out<int64_t>::empty({roots});
  auto last = Out<int64_t>::empty({roots});
  for (int64_t root = 0; root < roots; root++) {
    int64_t node = root;
    found.push_back(node);
    for (int64_t child = std::max(node + 1, roots); child < nodes; child++)
      if (parents[child] == node && tokens[child] == chosen[node]) found.push_back(node = child);
    ends[root] = static_cast<int64_t>(found.size());
    last[root] = chosen[node];
  }
  return {array_of(found), ends, last};
}

}  // namespace

void bind_tree_verification(nb::module_& m) { m.def("followed", &followed); }

}  // namespace draftree
