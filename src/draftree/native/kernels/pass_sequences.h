// The sequences of a packed pass: which tokens are theirs, and how threads share their attention.
// Included inside an anonymous namespace after amx_attention.h.

// Return N, the tokens of all sequences.
inline int64_t tokens_of(const Pass& pass) {
  return pass.table == nullptr ? pass.sequences * pass.tokens : pass.table[pass.sequences].first;
}

// Write where each sequence is, [R + 1], and the sequence of each token, [N].
inline void write_sequences(const Pass& pass, Sequence* table, int32_t* owner) {
  for (int64_t r = 0; r <= pass.sequences; r++) {
    if (pass.table != nullptr) {
      table[r] = pass.table[r];
    } else {
      const int64_t start = pass.starts == nullptr || r == pass.sequences ? 0 : pass.starts[r];
      table[r] = {r * pass.tokens, start, pass.slots, r * pass.mask_strides[0],
                  pass.mask_strides[1]};
    }
  }
  for (int64_t r = 0; r < pass.sequences; r++)
    for (int64_t token = table[r].first; token < table[r + 1].first; token++)
      owner[token] = static_cast<int32_t>(r);
}

// Write the row of each token [N] among the selected tokens, -1 for tokens that are not selected.
inline void write_places(const Pass& pass, int32_t* place) {
  if (pass.selected == nullptr) return;
  for (int64_t token = 0; token < tokens_of(pass); token++) place[token] = -1;
  for (int64_t i = 0; i < pass.selected_count; i++)
    place[pass.selected[i]] = static_cast<int32_t>(i);
}

// Return the memory that attention over any of the sequences takes.
template <class D>
int64_t attention_bytes(const Pass& pass) {
  const int64_t dim = pass.shape.head_dim;
  auto bytes_of = [&](int64_t slots) {
#if defined(DRAFTREE_AMX)
    if (BY_MATRIX_UNIT<D>) return MatrixScratch(nullptr, slots, dim).bytes;
#endif
    return AttentionScratch(nullptr, slots, dim, dim).bytes;
  };
  if (pass.table == nullptr) return bytes_of(pass.slots);
  int64_t most = 0;
  for (int64_t r = 0; r < pass.sequences; r++) {
    const int64_t bytes = bytes_of(pass.table[r].slots);
    most = most < bytes ? bytes : most;
  }
  return most;
}

// Call compute(sequence, group, begin, end) for this thread's rows of queries.
template <class Compute>
void share_sequences(const Sequence* table, int64_t sequences, int64_t groups, int64_t heads,
                     int thread, int threads, Compute&& compute) {
  int64_t work = 0, chunks = 0;
  bool prompts = false;
  for (int64_t r = 0; r < sequences; r++) {
    const int64_t rows = (table[r + 1].first - table[r].first) * heads,
                  most = rows_at_a_time(table[r].slots);
    work += groups * rows * table[r].slots;
    chunks += groups * ((rows + most - 1) / most);
    prompts |= rows > most;
  }
  // Later queries of a prompt see more slots, so the threads take turns.
  if (prompts && chunks >= 8 * threads) {
    int64_t turn = 0;
    for (int64_t r = 0; r < sequences; r++) {
      const int64_t rows = (table[r + 1].first - table[r].first) * heads,
                    most = rows_at_a_time(table[r].slots);
      for (int64_t group = 0; group < groups; group++)
        for (int64_t begin = 0; begin < rows; begin += most)
          if (turn++ % threads == thread)
            compute(r, group, begin, begin + most < rows ? begin + most : rows);
    }
    return;
  }
  const int64_t begins = work * thread / threads, ends = work * (thread + 1) / threads;
  int64_t done = 0;  // the work of a row is the number of slots that it sees
  for (int64_t r = 0; r < sequences; r++) {
    const int64_t rows = (table[r + 1].first - table[r].first) * heads, slots = table[r].slots,
                  most = rows_at_a_time(slots);
    auto row_at = [&](int64_t at) {
      const int64_t row = at <= done ? 0 : (at - done + slots - 1) / slots;
      return row < rows ? row : rows;
    };
    for (int64_t group = 0; rows > 0 && group < groups; group++) {
      const int64_t last = row_at(ends);
      for (int64_t begin = row_at(begins); begin < last; begin += most)
        compute(r, group, begin, begin + most < last ? begin + most : last);
      done += rows * slots;
    }
  }
}
