// Drafts of suffix matches, for the loops that read them.
#pragma once
#include <cstdint>
#include <vector>

#include "retrieval_common.h"

namespace draftree {

constexpr int64_t MAX_NODES = 512;  // draftree.tree.MAX_NODES

// Bounds of a draft: `Limits` of suffix_match_drafts.py.
struct Limits {
  explicit Limits(nb::handle tuple)
      : longest(whole_field(tuple, 0)),
        length(whole_field(tuple, 1)),
        factor(real_field(tuple, 2)),
        least(real_field(tuple, 3)),
        places(whole_field(tuple, 4)) {}
  int64_t longest, length;
  double factor, least;
  int64_t places;
};

// Earlier outputs: `Outputs` of suffix_match_drafts.py.
struct Outputs {
  explicit Outputs(nb::handle tuple)
      : tokens(contiguous(field<Shorts>(tuple, 0))),
        order(contiguous(field<Shorts>(tuple, 1))),
        blocks(field<Ints>(tuple, 2)),
        sorted_blocks(field<Ints>(tuple, 3)) {}
  Shorts tokens, order;
  Ints blocks, sorted_blocks;
};

// A drafted tree: [M, 2] tokens and their parents, and [M] the share of each. `score` is the sum of
// its path probabilities. The other two are the largest number of tokens that match in the text and
// in earlier outputs.
struct Grown {
  std::vector<int32_t> nodes;
  std::vector<double> shares;
  double score = 0.0;
  int64_t matched_here = 0, matched_earlier = 0;
};

// A draft of which only the entries are read; they stand in an array of Python's or in a `Grown`.
struct Draft {
  const int32_t* nodes;
  const double* shares;
  int64_t count;

  int32_t token(int64_t node) const { return nodes[2 * node]; }
  int32_t parent(int64_t node) const { return nodes[2 * node + 1]; }
};

inline Draft draft_of(const Grown& grown) {
  return {grown.nodes.data(), grown.shares.data(), static_cast<int64_t>(grown.shares.size())};
}

// The draft of the best matches of a text's end, in the text itself or in earlier outputs.
Grown draft_after(const int32_t* text, int64_t end, const Outputs& memory, const Limits& limits);

// A draft as Python reads it: `Draft` of suffix_match_drafts.py.
nb::tuple draft_tuple(const Grown& grown);

}  // namespace draftree
