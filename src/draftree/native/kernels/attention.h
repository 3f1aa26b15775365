// Attention of a tree, a step, a prompt or a batch. Included inside an anonymous namespace after
// gemm.h.
//
// The result of a query depends on itself and on the keys and values that it sees, in their order:
// sums run over the slots one by one, and a hidden slot has a weight of exactly 0. It does not
// depend on the slots that keys are in, on hidden slots between them, or on other queries.
//
// A row is a query of one head. Rows are computed together with all others that share keys, `head`
// fastest.

constexpr int KEYS = 2 * LANES;   // number of slots in a block
constexpr float UNSEEN = -3e38f;  // below every score

template <class D>
struct KeyPanels {
  using G = Singles<Float32>;
};
template <>
struct KeyPanels<BFloat16> {
  using G = Pairs;
};

// Write up to KEYS keys as a packed weight whose outputs are the keys.
template <class D>
void pack_keys(const typename D::T* keys, int64_t stride, int64_t count, int64_t dim, char* to) {
  using G = typename KeyPanels<D>::G;
  const int64_t steps = steps_of<G>(dim);
  for (int side = 0; side < 2; side++)
    for (int64_t first = 0; first < steps; first += LANES) {
      U words[LANES];
      for (int j = 0; j < LANES; j++) {
        const int64_t key = side * LANES + j, at = first * G::STEP, left = dim - at;
        if (key >= count) {
          words[j] = U{};
        } else if constexpr (D::TYPE == FLOAT16) {
          words[j] = (U)get_some<D>(keys + key * stride + at, left);
        } else if (left >= LANES * G::STEP) {
          words[j] = load_words(keys + key * stride + at);
        } else {
          words[j] = U{};
          __builtin_memcpy(&words[j], keys + key * stride + at,
                           static_cast<size_t>(left) * sizeof(typename D::T));
        }
      }
      transpose(words);
      for (int64_t i = 0; i < LANES && first + i < steps; i++)
        store_words(to + ((first + i) * KEYS + side * LANES) * 4, words[i]);
    }
}

// Add the values of some slots, each times its weight, to the sums of M rows, for `left` columns,
// at most 2 * LANES.
template <class D, int M>
void add_values(const float* weights, int64_t ld_weights, const typename D::T* values,
                int64_t stride, int64_t slots, int64_t left, float* sums, int64_t ld) {
  V total[M][2];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) {
    total[m][0] = load(sums + m * ld);
    total[m][1] = load(sums + m * ld + LANES);
  }
  if (left >= 2 * LANES) {
    for (int64_t j = 0; j < slots; j++) {
      const V a = D::get(values + j * stride), b = D::get(values + j * stride + LANES);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        const V f = splat(weights[m * ld_weights + j]);
        total[m][0] = fused(a, f, total[m][0]);
        total[m][1] = fused(b, f, total[m][1]);
      }
    }
  } else {
    for (int64_t j = 0; j < slots; j++) {
      const V a = get_some<D>(values + j * stride, left),
              b = left > LANES ? get_some<D>(values + j * stride + LANES, left - LANES) : V{};
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        const V f = splat(weights[m * ld_weights + j]);
        total[m][0] = fused(a, f, total[m][0]);
        total[m][1] = fused(b, f, total[m][1]);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) {
    store(sums + m * ld, total[m][0]);
    store(sums + m * ld + LANES, total[m][1]);
  }
}

template <class D>
void add_values(int m, const float* weights, int64_t ld_weights, const typename D::T* values,
                int64_t stride, int64_t slots, int64_t left, float* sums, int64_t ld) {
  switch (m) {
    case 1:
      return add_values<D, 1>(weights, ld_weights, values, stride, slots, left, sums, ld);
    case 2:
      return add_values<D, 2>(weights, ld_weights, values, stride, slots, left, sums, ld);
    case 3:
      return add_values<D, 3>(weights, ld_weights, values, stride, slots, left, sums, ld);
    case 4:
      return add_values<D, 4>(weights, ld_weights, values, stride, slots, left, sums, ld);
#if defined(DRAFTREE_AVX512) || defined(__aarch64__)
    case 5:
      return add_values<D, 5>(weights, ld_weights, values, stride, slots, left, sums, ld);
    case 6:
      return add_values<D, 6>(weights, ld_weights, values, stride, slots, left, sums, ld);
    case 7:
      return add_values<D, 7>(weights, ld_weights, values, stride, slots, left, sums, ld);
    case 8:
      return add_values<D, 8>(weights, ld_weights, values, stride, slots, left, sums, ld);
#endif
    default:
      __builtin_unreachable();
  }
}

// Rows that are computed at a time: as many as keep their scores in a level-2 cache.
inline int64_t rows_at_a_time(int64_t slots) {
  const int64_t rows = (int64_t{1} << 17) / (slots + 1) / MAX_TOKENS * MAX_TOKENS;
  return rows < MAX_TOKENS ? MAX_TOKENS : rows > 64 ? 64 : rows;
}

// A thread's memory for attention.
struct AttentionScratch {
  int64_t blocks, rows, ld_sums;
  uint8_t* seen;  // [blocks]
  float* tops;    // [rows, LANES] running maxima of each row's scores, by lane
  float* totals;  // [rows]
  float* scores;  // [rows, blocks * KEYS]
  float* sums;    // [rows, ld_sums]
  char* panel;    // a block of keys

  int64_t bytes = 0;  // of all

  AttentionScratch(char* own, int64_t slots, int64_t key_dim, int64_t value_dim) {
    blocks = (slots + KEYS - 1) / KEYS;
    rows = rows_at_a_time(slots);
    ld_sums = round_up(value_dim, 2 * LANES);
    const int64_t padded = round_up(rows, LANES);
    auto take = [&](int64_t size) {
      char* const here = own == nullptr ? nullptr : own + bytes;
      bytes += round_up(size, 64);
      return here;
    };
    seen = reinterpret_cast<uint8_t*>(take(blocks));
    tops = reinterpret_cast<float*>(take(4 * rows * LANES));
    totals = reinterpret_cast<float*>(take(4 * padded));
    scores = reinterpret_cast<float*>(take(4 * rows * blocks * KEYS));
    sums = reinterpret_cast<float*>(take(4 * rows * ld_sums));
    panel = take(4 * KEYS * round_up(key_dim, 2));
  }
};

// Compute rows [begin, end) of a group, at most `rows_at_a_time`; rows of queries are given in the
// layout of `KeyPanels`.
//
// emit(row, values) is given the unrounded result of each.
template <class D, class Emit>
void attend_rows(const Attention& a, int64_t sequence, int64_t group, int64_t begin, int64_t end,
                 Rows queries, const AttentionScratch& own, Emit&& emit) {
  using T = typename D::T;
  using G = typename KeyPanels<D>::G;
  const int64_t count = end - begin, ld = own.blocks * KEYS;
  const T* keys =
      static_cast<const T*>(a.keys) + sequence * a.key_strides[0] + group * a.key_strides[1];
  const T* values =
      static_cast<const T*>(a.values) + sequence * a.value_strides[0] + group * a.value_strides[1];
  auto mask_of = [&](int64_t row) {
    return sequence * a.mask_strides[0] + (group * a.heads + row % a.heads) * a.mask_strides[1] +
           row / a.heads * a.mask_strides[2];
  };
  const V below = splat(a.hidden_below);
  for (int64_t r = 0; r < count; r++) store(own.tops + r * LANES, splat(UNSEEN));
  for (int64_t b = 0; b < own.blocks; b++) {
    const int64_t start = b * KEYS, here = a.slots - start < KEYS ? a.slots - start : KEYS;
    bool seen = false;
    int64_t before = -1;
    for (int64_t row = begin; row < end && !seen; row++) {
      const int64_t at = mask_of(row);
      if (at == before) continue;
      before = at;
      for (int64_t i = 0; i < here; i += LANES)
        seen |= any((get_typed(a.mask_dtype, a.mask, at + start + i, here - i) > below) &
                    first_lanes(here - i));
    }
    own.seen[b] = seen;
    if (!seen) continue;
    pack_keys<D>(keys + start * a.key_strides[2], a.key_strides[2], here, a.key_dim, own.panel);
    for (int64_t first = 0; first < count; first += MAX_TOKENS) {
      const int m = static_cast<int>(count - first < MAX_TOKENS ? count - first : MAX_TOKENS);
      tiles<G>(m, own.panel, panel_bytes<G>(a.key_dim), 1, queries.at(first), queries.stride,
               a.key_dim, own.scores + first * ld + start, ld, {own.panel, false, false});
    }
    if (here == KEYS && a.cap <= 0 && a.mask_dtype == D::TYPE) {
      for (int64_t r = 0; r < count; r++) {
        float* const scores = own.scores + r * ld + start;
        const T* const mask = static_cast<const T*>(a.mask) + mask_of(begin + r) + start;
        V top = load(own.tops + r * LANES);
        for (int64_t i = 0; i < KEYS; i += LANES) {
          const V added = D::get(mask + i),
                  score = added > below ? load(scores + i) * splat(a.scale) + added : splat(UNSEEN);
          top = larger(top, score);
          store(scores + i, score);
        }
        store(own.tops + r * LANES, top);
      }
      continue;
    }
    for (int64_t r = 0; r < count; r++) {
      float* const scores = own.scores + r * ld + start;
      const int64_t at = mask_of(begin + r) + start;
      V top = load(own.tops + r * LANES);
      for (int64_t i = 0; i < KEYS; i += LANES) {
        V score = load(scores + i) * splat(a.scale);
        if (a.cap > 0)
          for (int j = 0; j < LANES; j++) score[j] = a.cap * __builtin_tanhf(score[j] / a.cap);
        const V added = i < here ? get_typed(a.mask_dtype, a.mask, at + i, here - i) : below;
        const I visible = (added > below) & first_lanes(here - i);
        score = visible ? score + added : splat(UNSEEN);
        top = larger(top, score);
        store(scores + i, score);
      }
      store(own.tops + r * LANES, top);
    }
  }
  const float* const sinks = a.sinks == nullptr ? nullptr : a.sinks + group * a.heads;
  for (int64_t r = 0; r < count; r++) {
    float top = largest_of(load(own.tops + r * LANES)), total = 0;
    if (top > UNSEEN) {
      if (sinks != nullptr) {
        const float sink = sinks[(begin + r) % a.heads];
        top = top < sink ? sink : top;
        total = weigh(splat(sink), top)[0];
      }
    } else {
      top = 0;  // a row that sees no slot has weights of 0
    }
    own.totals[r] = total;
    for (int64_t b = 0; b < own.blocks; b++)
      if (own.seen[b])
        for (int64_t i = b * KEYS; i < (b + 1) * KEYS; i += LANES)
          store(own.scores + r * ld + i, weigh(load(own.scores + r * ld + i), top));
    for (int64_t i = 0; i < own.ld_sums; i++) own.sums[r * own.ld_sums + i] = 0;
  }
  // Weights are added slot by slot, LANES rows at a time.
  for (int64_t first = 0; first < count; first += LANES) {
    const int64_t m = count - first < LANES ? count - first : LANES;
    V total = get_some<Float32>(own.totals + first, m);
    for (int64_t b = 0; b < own.blocks; b++)
      if (own.seen[b])
        for (int64_t i = b * KEYS; i < (b + 1) * KEYS; i += LANES) {
          U words[LANES];
          for (int j = 0; j < LANES; j++)
            words[j] = j < m ? load_words(own.scores + (first + j) * ld + i) : U{};
          transpose(words);
          for (int j = 0; j < LANES; j++) total = total + (V)words[j];
        }
    put_some<Float32>(own.totals + first, total, m);
  }
  for (int64_t b = 0; b < own.blocks;) {
    int64_t run = 0;  // visible blocks that fit into a level-1 cache
    while (b + run < own.blocks && own.seen[b + run] && run * KEYS < 256) run++;
    const int64_t start = b * KEYS,
                  here = a.slots - start < run * KEYS ? a.slots - start : run * KEYS;
    for (int64_t e = 0; run > 0 && e < a.value_dim; e += 2 * LANES)
      for (int64_t first = 0; first < count; first += MAX_TOKENS) {
        const int m = static_cast<int>(count - first < MAX_TOKENS ? count - first : MAX_TOKENS);
        add_values<D>(m, own.scores + first * ld + start, ld,
                      values + start * a.value_strides[2] + e, a.value_strides[2], here,
                      a.value_dim - e, own.sums + first * own.ld_sums + e, own.ld_sums);
      }
    b += run > 0 ? run : 1;
  }
  for (int64_t r = 0; r < count; r++) {
    float* const sums = own.sums + r * own.ld_sums;
    const V total = splat(own.totals[r] > 0 ? own.totals[r] : 1.0f);
    for (int64_t i = 0; i < own.ld_sums; i += LANES) store(sums + i, load(sums + i) / total);
    emit(begin + r, sums);
  }
}

// Call compute(sequence, group, begin, end) for this thread's rows.
template <class Compute>
void share_rows(const Attention& a, int64_t most, int thread, int threads, Compute&& compute) {
  const int64_t rows = a.tokens * a.heads, units = a.sequences * a.groups,
                chunks = (rows + most - 1) / most;
  // Later queries of a prompt see more slots, so the threads take turns.
  if (units * chunks >= 4 * threads) {
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
