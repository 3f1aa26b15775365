// Stable orders of numbers.
#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace draftree {

// Return the order of falling numbers, the first of equals first: a merge sort from below, whose
// result is defined for NaN, too.
inline std::vector<int64_t> descending_order(const double* score, int64_t count) {
  std::vector<int64_t> order(count), other(count);
  std::iota(order.begin(), order.end(), 0);
  for (int64_t width = 1; width < count; width *= 2) {
    for (int64_t start = 0; start < count; start += 2 * width) {
      const int64_t middle = std::min(start + width, count),
                    end = std::min(start + 2 * width, count);
      int64_t left = start, right = middle;
      for (int64_t at = start; at < end; at++) {
        if (left < middle && (right == end || score[order[left]] >= score[order[right]])) {
          other[at] = order[left++];
        } else {
          other[at] = order[right++];
        }
      }
    }
    order.swap(other);
  }
  return order;
}

}  // namespace draftree
