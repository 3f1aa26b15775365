// Orders of nodes by score: see score_ranking.py.
#pragma once
#include <cstdint>
#include <vector>

#include "contiguous_arrays.h"

namespace draftree {

// Return the k best of each row, by row and falling score; of equal scores the first ones.
Numbers lead(const int64_t* rows, const double* score, int64_t count, int64_t k);

}  // namespace draftree
