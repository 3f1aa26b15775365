// The search in a corpus by its suffix array: see `drafters/retrieval/suffix_array.py`.
#pragma once
#include "retrieval_common.h"

namespace draftree {

constexpr int64_t SEPARATOR = 4294967295;

// The longest suffix of a context that occurs, and its range in the suffix array; length 0 for
// none.
struct FoundSuffix {
  int64_t length = 0, low = 0, high = 0;
};

// Find the longest suffix of the tokens before `end`, of `shortest` to `longest` tokens, that
// occurs with a token after it.
FoundSuffix find_suffix(const WholeNumbers& tokens, const WholeNumbers& suffixes,
                        const int64_t* end, int64_t longest, int64_t shortest);

}  // namespace draftree
