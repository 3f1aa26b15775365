// Slots of the KV cache that a step writes and moves: see cache_slots.py.
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "bind_loops.h"
#include "contiguous_arrays.h"

namespace nb = nanobind;

namespace draftree {
namespace {

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

void bind_cache_slots(nb::module_& m) {
  m.def("path_slots", &path_slots);
  m.def("next_slots", &next_slots);
  m.def("move_slots", &move_slots);
}

}  // namespace draftree
