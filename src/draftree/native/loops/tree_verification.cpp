// A verified forest: its pass, the paths that are accepted, and the slots that are committed: see
// tree_verification.py.
#include <nanobind/stl/tuple.h>

#include <cstring>
#include <vector>

#include "contiguous_arrays.h"
#include "bind_loops.h"

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
  auto whole = Out<int64_t>::empty({static_cast<int64_t>(found.size())});
  std::copy(found.begin(), found.end(), whole.begin());
  return {whole, ends, last};
}

std::tuple<Out<int64_t>, Out<int64_t>> path_slots(const In<int64_t>& row, const In<int64_t>& nodes,
                                                  const In<int64_t>& lengths) {
  std::vector<int64_t> slot(row.size(0)), next(lengths.begin(), lengths.end());
  for (int64_t i = 0; i < row.size(0); i++) slot[i] = next[row[i]]++;
  auto rows = Out<int64_t>::empty({nodes.size(0)});
  auto slots = Out<int64_t>::empty({nodes.size(0)});
  for (int64_t i = 0; i < nodes.size(0); i++) {
    rows[i] = row[nodes[i]];
    slots[i] = slot[nodes[i]];
  }
  return {rows, slots};
}

std::tuple<Out<int64_t>, Out<int64_t>> next_slots(const In<int64_t>& rows,
                                                  const In<int64_t>& lengths) {
  auto left = Out<int64_t>::empty({lengths.size(0)});
  std::copy(lengths.begin(), lengths.end(), left.begin());
  auto slots = Out<int64_t>::empty({rows.size(0)});
  for (int64_t i = 0; i < rows.size(0); i++) slots[i] = left[rows[i]]++;
  return {slots, left};
}

void move_slots(const Out<uint8_t, 5>& stored, const In<int64_t>& rows, const In<int64_t>& old,
                const In<int64_t>& to) {
  const int64_t layers = stored.size(0), sequences = stored.size(1), heads = stored.size(2),
                slots = stored.size(3);
  const int64_t width = stored.size(4);
  std::vector<int64_t> from, into;  // offsets within a layer's first head
  for (int64_t i = 0; i < rows.size(0); i++) {
    if (old[i] == to[i]) continue;
    const int64_t begin = rows[i] * heads * slots;
    from.push_back((begin + old[i]) * width);
    into.push_back((begin + to[i]) * width);
  }
  std::vector<uint8_t> between(from.size() * width);
  for (int64_t layer = 0; layer < layers; layer++)
    for (int64_t head = 0; head < heads; head++) {
      uint8_t* base = stored.data() + (layer * sequences * heads + head) * slots * width;
      for (size_t i = 0; i < from.size(); i++)
        std::memcpy(between.data() + i * width, base + from[i], width);
      for (size_t i = 0; i < from.size(); i++)
        std::memcpy(base + into[i], between.data() + i * width, width);
    }
}

}  // namespace

void bind_tree_verification(nb::module_& m) {
  m.def("packed", &packed);
  m.def("followed", &followed);
  m.def("path_slots", &path_slots);
  m.def("next_slots", &next_slots);
  m.def("move_slots", &move_slots);
}

}  // namespace draftree
