// Tokens, positions, visibility and mask of a pass over draft trees: see pass_layout.py.
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <vector>

#include "bind_loops.h"
#include "contiguous_arrays.h"

namespace nb = nanobind;

namespace draftree {
namespace {

std::tuple<Out<int64_t>, Out<int64_t>, Out<int64_t>, Out<int64_t>, Out<bool>> packed(
    const In<int64_t>& row, const In<int64_t>& tokens, const In<int64_t>& depth,
    const In<int64_t>& parents, const In<int64_t>& lengths) {
  const int64_t nodes = row.size(0), sequences = lengths.size(0);
  auto counts = Out<int64_t>::full({sequences}, 0);
  for (int64_t owner : row) counts[owner]++;
  std::vector<int64_t> first(sequences), corner(sequences), next(sequences);
  int64_t before = 0, seen_before = 0;
  for (int64_t r = 0; r < sequences; r++) {
    first[r] = next[r] = before;
    corner[r] = seen_before;
    before += counts[r];
    seen_before += counts[r] * counts[r];
  }
  auto place = Out<int64_t>::empty({nodes});
  auto ids = Out<int64_t>::empty({nodes});
  auto positions = Out<int64_t>::empty({nodes});
  auto seen = Out<bool>::full({seen_before}, false);
  for (int64_t i = 0; i < nodes; i++) {
    const int64_t owner = row[i], at = next[owner]++, count = counts[owner],
                  line = at - first[owner];
    place[i] = at;
    ids[at] = tokens[i];
    positions[at] = lengths[owner] + depth[i];
    bool* mine = seen.data() + corner[owner];
    if (parents[i] >= 0)
      std::copy_n(mine + (place[parents[i]] - first[owner]) * count, count, mine + line * count);
    mine[line * count + line] = true;
  }
  return {place, ids, positions, counts, seen};
}

std::tuple<Out<int64_t>, Out<int64_t>> unfed(const In<int64_t>& parents,
                                             const In<int64_t>& frontier, const In<int64_t>& fed) {
  const int64_t count = parents.size(0);
  auto places = Out<int64_t>::full({count}, -1);
  std::vector<char> wanted(count);
  int64_t many = 0;
  for (int64_t i = 0; i < fed.size(0); i++) places[fed[i]] = i;
  for (int64_t node : frontier)
    for (; node >= 0 && places[node] < 0 && !wanted[node]; node = parents[node]) {
      wanted[node] = true;
      many++;
    }
  auto nodes = Out<int64_t>::empty({many});
  int64_t at = 0;
  for (int64_t i = 0; i < count; i++)
    if (wanted[i]) nodes[at++] = i;
  return {nodes, places};
}

std::tuple<Out<int64_t>, Out<int64_t>, Out<bool, 2>, Out<int64_t>> laid(
    const In<int64_t>& pending, const In<int64_t>& before, const In<int64_t>& nodes, int64_t base,
    const In<int64_t>& tokens, const In<int64_t>& depth, const In<int64_t>& parents) {
  const int64_t count = pending.size(0), done = before.size(0), waiting = done ? 0 : count,
                now = nodes.size(0);
  const int64_t wide = waiting + now, deep = count + done + now;
  auto ids = Out<int64_t>::empty({wide});
  auto positions = Out<int64_t>::empty({wide});
  auto scratch = Out<int64_t>::empty({deep});
  auto seen = Out<bool, 2>::full({wide, deep}, false);
  std::vector<int64_t> at(parents.size(0), -1);
  for (int64_t i = 0; i < count; i++) scratch[i] = base + i;
  for (int64_t i = 0; i < done + now; i++) {
    const int64_t node = i < done ? before[i] : nodes[i - done];
    at[node] = count + i;
    scratch[count + i] = base + count + depth[node];
  }
  for (int64_t i = 0; i < waiting; i++) {
    ids[i] = pending[i];
    positions[i] = base + i;
    std::fill_n(seen.row(i), i + 1, true);
  }
  for (int64_t i = 0; i < now; i++) {
    const int64_t line = waiting + i;
    ids[line] = tokens[nodes[i]];
    positions[line] = base + count + depth[nodes[i]];
    std::fill_n(seen.row(line), count, true);
    for (int64_t node = nodes[i]; node >= 0; node = parents[node])
      if (at[node] >= 0) seen(line, at[node]) = true;
  }
  return {ids, positions, seen, scratch};
}

template <class T>
void hide(const Out<T, 2>& bits, const In<bool, 2>& seen, int64_t length, int64_t lowest) {
  const int64_t wide = seen.size(0), deep = seen.size(1), slots = bits.size(1);
  for (int64_t i = 0; i < bits.size(0); i++) {
    T* row = bits.data() + i * slots;
    if (i >= wide) {
      std::fill_n(row, slots, T{0});
      continue;
    }
    std::fill_n(row, length, T{0});
    std::fill(row + length, row + slots, static_cast<T>(lowest));
    for (int64_t j = 0; j < deep; j++)
      if (seen(i, j)) row[length + j] = 0;
  }
}

}  // namespace

void bind_pass_layout(nb::module_& m) {
  m.def("packed", &packed);
  m.def("unfed", &unfed);
  m.def("laid", &laid);
  m.def("hide", &hide<int16_t>);
  m.def("hide", &hide<int32_t>);
  m.def("hide", &hide<int64_t>);
}

}  // namespace draftree
