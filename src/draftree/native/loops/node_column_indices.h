// The order of the columns of draft trees, `NodeTable` in kernels/node_table.py.
#pragma once

namespace draftree {

struct NodeColumns {
  static constexpr int COUNT = 10;
  static constexpr int TOKENS = 0, PARENTS = 1, DEPTH = 2, ROW = 3, LOG_Q = 4, SCORE = 5,
                       SOURCE = 6, ENTROPY = 7, NUMBER = 8, Q_ROW = 9;
  static constexpr bool is_real(int column) {
    return column == LOG_Q || column == SCORE || column == ENTROPY;
  }
};

}  // namespace draftree
