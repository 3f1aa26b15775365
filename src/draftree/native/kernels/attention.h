// Attention of a tree, a step, a prompt or a batch. Included inside an anonymous namespace after
// attention_products.h.
//
// The result of a query depends on itself and on the keys and values that it sees, in their order:
// sums run over the slots one by one, and a hidden slot has a weight of exactly 0. It does not
// depend on the slots that keys are in, on hidden slots between them, or on other queries.
//
// A row is a query of one head. Rows are computed together with all others that share keys, `head`
// fastest. The lanes of a vector hold rows, or slots where there are few rows. Both layouts give
// the same bits.

// Rows that are computed at a time: all rows of a tree share one reading of the keys and values, as
// long as their scores take some megabytes at most.
inline int64_t rows_at_a_time(int64_t slots) {
  const int64_t rows = (int64_t{1} << 19) / (slots + 1) / LANES * LANES;
  return rows < 16 ? 16 : rows > 64 ? 64 : rows;
}

// A thread's memory for attention. Scores and weights have the rows or the slots of a lane next to
// each other.
struct AttentionScratch {
  int64_t blocks, rows, ld_sums;
  uint8_t* seen;   // [blocks] a `Visibility`
  float* tops;     // [rows] running maxima of the scores; with lanes of slots, [FEW_ROWS, LANES]
  float* totals;   // [rows]
  char* queries;   // [words, rows]
  char* keys;      // a block of keys in another layout
  float* scores;   // [blocks * KEYS, rows]
  float* weights;  // [RUN, rows] of some slots
  float* sums;     // [rows, ld_sums]

  int64_t bytes = 0;  // of all

  AttentionScratch(char* own, int64_t slots, int64_t key_dim, int64_t value_dim) {
    blocks = (slots + KEYS - 1) / KEYS;
    rows = rows_at_a_time(slots);
    ld_sums = round_up(value_dim, 2 * LANES);
    const int64_t wide = round_up(key_dim, LANES);
    auto take = [&](int64_t size) {
      char* const here = own == nullptr ? nullptr : own + bytes;
      bytes += round_up(size, 64);
      return here;
    };
    seen = reinterpret_cast<uint8_t*>(take(blocks));
    tops = reinterpret_cast<float*>(take(4 * (rows > FEW_ROWS * LANES ? rows : FEW_ROWS * LANES)));
    totals = reinterpret_cast<float*>(take(4 * rows));
    queries = take(4 * wide * rows);
    keys = take(4 * KEYS * wide);
    scores = reinterpret_cast<float*>(take(4 * blocks * KEYS * rows));
    weights = reinterpret_cast<float*>(take(4 * RUN * rows));
    sums = reinterpret_cast<float*>(take(4 * rows * ld_sums));
  }
};

// Fetch the first `count` rows of keys or values of `left` into the level-2 cache, before they are
// used.
inline void fetch_rows(const void* rows, int64_t stride, int64_t left, int64_t count,
                       int64_t bytes) {
  for (int64_t j = 0; j < count && j < left; j++)
    for (int64_t i = 0; i < bytes; i += 64)
      __builtin_prefetch(static_cast<const char*>(rows) + j * stride + i, 0, 2);
}

// What rows see of a block: nothing, all of it with a mask of 0, or what the mask says.
enum Visibility : uint8_t { NOTHING, ALL, MASKED };

// Rows [begin, begin + count) of a group, and what they attend to.
template <class D>
struct AttentionRows {
  using T = typename D::T;
  const Attention& a;
  const AttentionScratch& own;
  Rows queries;  // in the layout of `QueryRows`
  int64_t sequence, group, begin, count;

  const T* keys_at(int64_t slot) const {
    return static_cast<const T*>(a.keys) + sequence * a.key_strides[0] + group * a.key_strides[1] +
           slot * a.key_strides[2];
  }
  const T* values_at(int64_t slot) const {
    return static_cast<const T*>(a.values) + sequence * a.value_strides[0] +
           group * a.value_strides[1] + slot * a.value_strides[2];
  }
  int64_t mask_of(int64_t row) const {
    return sequence * a.mask_strides[0] +
           (group * a.heads + (begin + row) % a.heads) * a.mask_strides[1] +
           (begin + row) / a.heads * a.mask_strides[2];
  }
  // The masks of LANES slots, of which `left` exist.
  V mask_at(int64_t at, int64_t left) const {
    if (left >= LANES && a.mask_dtype == D::TYPE) return D::get(static_cast<const T*>(a.mask) + at);
    return left > 0 ? get_typed(a.mask_dtype, a.mask, at, left) : V{};
  }

  // What the rows see of a block, of which `here` slots exist.
  Visibility visibility(int64_t start, int64_t here) const {
    const V below = splat(a.hidden_below);
    bool seen = false, plain = here == KEYS && a.cap <= 0;
    int64_t before = -1;
    for (int64_t row = 0; row < count && (plain || !seen); row++) {
      const int64_t at = mask_of(row);
      if (at == before) continue;
      before = at;
      for (int64_t i = 0; i < here; i += LANES) {
        const V mask = mask_at(at + start + i, here - i);
        seen |= any((mask > below) & first_lanes(here - i));
        plain &= !any(mask != V{});
      }
    }
    return !seen ? NOTHING : plain ? ALL : MASKED;
  }

  // Return scores, which are scaled and capped products plus the mask; UNSEEN for hidden slots.
  V masked(V products, V mask, I exists) const {
    V score = products * splat(a.scale);
    if (a.cap > 0)
      for (int k = 0; k < LANES; k++) score[k] = a.cap * __builtin_tanhf(score[k] / a.cap);
    return (mask > splat(a.hidden_below)) & exists ? score + mask : splat(UNSEEN);
  }
};

// Lanes of rows: scores are [slots, ld].
template <class D>
struct LanesOfRows : AttentionRows<D> {
  static constexpr bool OF_ROWS = true;
  int64_t ld, words;

  explicit LanesOfRows(const AttentionRows<D>& rows)
      : AttentionRows<D>(rows),
        ld(round_up(rows.count, LANES)),
        words(PAIRED<D> ? (rows.a.key_dim + 1) / 2 : rows.a.key_dim) {
    transpose_queries(rows.queries, rows.count, words, ld, rows.own.queries);
    for (int64_t i = 0; i < ld; i += LANES) store(rows.own.tops + i, splat(UNSEEN));
  }

  void score(int64_t start, int64_t here, bool plain) const {
    const auto& a = this->a;
    const auto& own = this->own;
    const Rows block =
        key_rows<D>(this->keys_at(start), a.key_strides[2], here, a.key_dim, own.keys);
    float* const scores = own.scores + start * ld;
    score_keys<D>(block, own.queries, words, ld, scores);
    for (int64_t i = 0; i < ld; i += LANES) {
      V top = load(own.tops + i);
      for (int64_t first = 0; first < KEYS; first += LANES) {
        U masks[LANES];
        if (!plain) {
          for (int j = 0; j < LANES; j++)
            masks[j] = i + j < this->count
                           ? (U)this->mask_at(this->mask_of(i + j) + start + first, here - first)
                           : U{};
          transpose(masks);
        }
        for (int64_t j = 0; j < LANES; j++) {
          float* const at = scores + (first + j) * ld + i;
          const V score = plain ? load(at) * splat(a.scale)
                                : this->masked(load(at), (V)masks[j], I{} - (first + j < here));
          top = larger(top, score);
          store(at, score);
        }
      }
      store(own.tops + i, top);
    }
  }

  float top(int64_t row) const { return this->own.tops[row]; }

  // Write the weights of a run, as words, and add them to the totals, slot by slot.
  void weigh_run(int64_t start, int64_t slots) const {
    for (int64_t i = 0; i < ld; i += LANES) {
      const V top = load(this->own.tops + i);
      V total = load(this->own.totals + i);
      const float* const scores = this->own.scores + start * ld + i;
      float* const weights = this->own.weights + i;
      for (int64_t j = 0; j < slots; j += 2) {
        const V x = weigh(load(scores + j * ld), top), y = weigh(load(scores + (j + 1) * ld), top);
        total = (total + x) + y;
        if constexpr (PAIRED<D>) {
          store_words(weights + j / 2 * ld, (U)round_bfloat16(x) | (U)round_bfloat16(y) >> 16);
        } else {
          store(weights + j * ld, x);
          store(weights + (j + 1) * ld, y);
        }
      }
      store(this->own.totals + i, total);
    }
  }
};

// Lanes of slots, for at most FEW_ROWS rows: scores are [rows, ld].
template <class D>
struct LanesOfSlots : AttentionRows<D> {
  static constexpr bool OF_ROWS = false;
  int64_t ld;

  explicit LanesOfSlots(const AttentionRows<D>& rows)
      : AttentionRows<D>(rows), ld(rows.own.blocks * KEYS) {
    for (int64_t r = 0; r < rows.count; r++) store(rows.own.tops + r * LANES, splat(UNSEEN));
  }

  void score(int64_t start, int64_t here, bool plain) const {
    using G = typename QueryRows<D>::G;
    const auto& a = this->a;
    const auto& own = this->own;
    pack_keys<D>(this->keys_at(start), a.key_strides[2], here, a.key_dim, own.keys);
    for (int64_t first = 0; first < this->count; first += MAX_TOKENS) {
      const int64_t left = this->count - first;
      tiles<G>(static_cast<int>(left < MAX_TOKENS ? left : MAX_TOKENS), own.keys,
               panel_bytes<G>(a.key_dim), 1, this->queries.at(first), this->queries.stride,
               a.key_dim, own.scores + first * ld + start, ld, {own.keys, false, false});
    }
    for (int64_t r = 0; r < this->count; r++) {
      V top = load(own.tops + r * LANES);
      for (int64_t i = 0; i < KEYS; i += LANES) {
        float* const at = own.scores + r * ld + start + i;
        const V score =
            plain ? load(at) * splat(a.scale)
                  : this->masked(load(at), this->mask_at(this->mask_of(r) + start + i, here - i),
                                 first_lanes(here - i));
        top = larger(top, score);
        store(at, score);
      }
      store(own.tops + r * LANES, top);
    }
  }

  float top(int64_t row) const { return largest_of(load(this->own.tops + row * LANES)); }

  void weigh_run(int64_t start, int64_t slots) const {
    const auto& own = this->own;
    for (int64_t r = 0; r < this->count; r++)
      for (int64_t i = 0; i < slots; i += LANES)
        store(own.weights + r * RUN + i,
              weigh(load(own.scores + r * ld + start + i), splat(own.tops[r])));
    V total = get_some<Float32>(own.totals, this->count);
    for (int64_t i = 0; i < slots; i += LANES) {
      U words[LANES];
      for (int j = 0; j < LANES; j++)
        words[j] = j < this->count ? load_words(own.weights + j * RUN + i) : U{};
      transpose(words);
      for (int j = 0; j < LANES; j++) total = total + (V)words[j];
    }
    put_some<Float32>(own.totals, total, this->count);
#if defined(DRAFTREE_AVX512) && defined(__AVX512BF16__)
    if constexpr (PAIRED<D>)
      for (int64_t r = 0; r < this->count; r++)
        for (int64_t i = 0; i < slots; i += LANES) {
          const V exact = load(own.weights + r * RUN + i);
          const auto pairs = _mm256_rol_epi32((__m256i)narrow_bfloat16(round_bfloat16(exact)), 16);
          __builtin_memcpy(own.weights + r * RUN + i / 2, &pairs, sizeof pairs);
        }
#endif
  }
};

// Compute rows whose lanes are given; see `attend_rows`.
template <class D, class Lanes, class Emit>
void attend_lanes(const Lanes& rows, Emit&& emit) {
  constexpr auto SIZE = static_cast<int64_t>(sizeof(typename D::T));
  const Attention& a = rows.a;
  const AttentionScratch& own = rows.own;
  for (int64_t b = 0; b < own.blocks; b++) {
    const int64_t start = b * KEYS, left = a.slots - start, here = left < KEYS ? left : KEYS;
    own.seen[b] = rows.visibility(start, here);
    if (own.seen[b] == NOTHING) continue;
    fetch_rows(rows.keys_at(start + AHEAD), a.key_strides[2] * SIZE, left - AHEAD, KEYS,
               a.key_dim * SIZE);
    rows.score(start, here, own.seen[b] == ALL);
  }
  const float* const sinks = a.sinks == nullptr ? nullptr : a.sinks + rows.group * a.heads;
  for (int64_t r = 0; r < rows.count; r++) {
    float top = rows.top(r), total = 0;
    if (top <= UNSEEN) {
      top = 0;  // a row that sees no slot has weights of 0
    } else if (sinks != nullptr) {
      const float sink = sinks[(rows.begin + r) % a.heads];
      top = top < sink ? sink : top;
      total = weigh(splat(sink), splat(top))[0];
    }
    own.tops[r] = top;
    own.totals[r] = total;
  }
  for (int64_t r = rows.count; r < round_up(rows.count, LANES); r++) own.totals[r] = 0;
  for (int64_t i = 0; i < rows.count * own.ld_sums; i++) own.sums[i] = 0;
  for (int64_t b = 0; b < own.blocks;) {
    int64_t run = 0;  // visible blocks
    while (b + run < own.blocks && own.seen[b + run] != NOTHING && run * KEYS < RUN) run++;
    const int64_t start = b * KEYS, wide = run * KEYS, left = a.slots - start,
                  here = left < wide ? left : wide;
    b += run > 0 ? run : 1;
    if (run == 0) continue;
    rows.weigh_run(start, wide);
    // The next values are fetched in parts: many requests at once would stall the processor.
    const int64_t calls =
        (a.value_dim + 2 * LANES - 1) / (2 * LANES) * ((rows.count + VALUE_ROWS - 1) / VALUE_ROWS);
    int64_t call = 0, fetched = wide;
    for (int64_t e = 0; e < a.value_dim; e += 2 * LANES)
      for (int64_t first = 0; first < rows.count; first += VALUE_ROWS) {
        const int64_t m = rows.count - first, until = wide + RUN * ++call / calls;
        fetch_rows(rows.values_at(start + fetched), a.value_strides[2] * SIZE, left - fetched,
                   until - fetched, a.value_dim * SIZE);
        fetched = until;
        add_values<D, Lanes::OF_ROWS>(static_cast<int>(m < VALUE_ROWS ? m : VALUE_ROWS),
                                      own.weights + weight_at<Lanes::OF_ROWS>(0, first, rows.ld),
                                      rows.ld, rows.values_at(start) + e, a.value_strides[2], here,
                                      a.value_dim - e, own.sums + first * own.ld_sums + e,
                                      own.ld_sums);
      }
  }
  for (int64_t r = 0; r < rows.count; r++) {
    float* const sums = own.sums + r * own.ld_sums;
    const V total = splat(own.totals[r] > 0 ? own.totals[r] : 1.0f);
    for (int64_t i = 0; i < own.ld_sums; i += LANES) store(sums + i, load(sums + i) / total);
    emit(rows.begin + r, sums);
  }
}

// Compute rows [begin, end) of a group, at most `rows_at_a_time`; rows of queries are given in the
// layout of `QueryRows`.
//
// emit(row, values) is given the unrounded result of each.
template <class D, class Emit>
void attend_rows(const Attention& a, int64_t sequence, int64_t group, int64_t begin, int64_t end,
                 Rows queries, const AttentionScratch& own, Emit&& emit) {
  const AttentionRows<D> rows{a, own, queries, sequence, group, begin, end - begin};
  if (rows.count <= FEW_ROWS) {
    attend_lanes<D>(LanesOfSlots<D>(rows), emit);
  } else {
    attend_lanes<D>(LanesOfRows<D>(rows), emit);
  }
}

// Call compute(sequence, group, begin, end) for this thread's rows.
template <class Compute>
void share_rows(const Attention& a, int64_t most, int thread, int threads, Compute&& compute) {
  const int64_t rows = a.tokens * a.heads, units = a.sequences * a.groups,
                chunks = (rows + most - 1) / most;
  // Later queries of a prompt see more slots, so the threads take turns.
  if (units * chunks >= 8 * threads) {
    for (int64_t i = thread; i < units * chunks; i += threads) {
      const int64_t unit = i / chunks, begin = i % chunks * most;
      compute(unit / a.groups, unit % a.groups, begin, begin + most < rows ? begin + most : rows);
    }
    return;
  }
  Range range = share(units * rows, thread, threads);
  while (range.begin < range.end) {
    const int64_t unit = range.begin / rows, begin = range.begin % rows;
    int64_t end = begin + (range.end - range.begin);
    end = end < rows ? end : rows;
    end = end < begin + most ? end : begin + most;
    compute(unit / a.groups, unit % a.groups, begin, end);
    range.begin += end - begin;
  }
}
