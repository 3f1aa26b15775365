// Attention in bfloat16 by the matrix unit (AMX). Included inside an anonymous namespace after
// attention.h.
//
// The matrix unit adds the products of 32 slots before it adds them to a sum, so the result of a
// query depends on the place of each slot in its block of 32. A slot's place is its index, but
// among the slots that a pass itself writes, a query's visible slots are moved to the places that
// they have in plain text: behind the older slots, in their order, and behind an empty place for
// each ancestor that a sliding window hides. So a node of a tree has the bits that it has in plain
// text. Slots that are hidden have a weight of exactly 0.
#if !defined(DRAFTREE_AMX)
template <class D>
constexpr bool BY_MATRIX_UNIT = false;
#else
template <class D>
constexpr bool BY_MATRIX_UNIT = D::TYPE == BFLOAT16;

// Slots whose weights are computed before values are added.
constexpr int64_t MATRIX_RUN = 4 * KEYS;
constexpr int64_t TILE = 16;  // rows of a tile
static_assert(KEYS == 32 && LANES == TILE);

// A thread's memory for attention; `dim` entries of a head.
struct MatrixScratch {
  int64_t blocks, rows, dim;
  uint8_t* visible;   // [blocks] a `Visibility`
  uint32_t* seen;     // [rows, blocks] for each token a bit for each slot
  bool* gaps;         // [rows] whether a token's slots are moved
  int64_t* empty;     // [rows] empty places of each token before the first slot of this pass
  uint16_t* queries;  // [rows, dim]
  char* keys;         // a block, packed as a weight
  float* scores;      // [blocks, rows, KEYS]
  float* tops;        // [rows, LANES]
  float* totals;      // [rows, LANES]
  uint16_t* weights;  // [rows, MATRIX_RUN]
  uint32_t* values;   // [MATRIX_RUN / 2, dim] pairs of slots
  float* sums;        // [rows, dim], in the order of `values`
  int32_t* slots;     // [blocks * KEYS] the slot of each place, -1 for an empty one
  float* kept;        // [blocks * KEYS] their scores

  int64_t bytes = 0;  // of all

  MatrixScratch(char* own, int64_t slot_count, int64_t entries)
      : blocks((slot_count + KEYS - 1) / KEYS), rows(rows_at_a_time(slot_count)), dim(entries) {
    auto take = [&](auto*& to, int64_t count) {
      if (own != nullptr)
        to = reinterpret_cast<std::remove_reference_t<decltype(to)> >(own + bytes);
      bytes += round_up(count * static_cast<int64_t>(sizeof *to), 64);
    };
    take(visible, blocks);
    take(seen, rows * blocks);
    take(gaps, rows);
    take(empty, rows);
    take(queries, rows * dim);
    take(keys, 2 * KEYS * dim);
    take(scores, blocks * rows * KEYS);
    take(tops, rows * LANES);
    take(totals, rows * LANES);
    take(weights, rows * MATRIX_RUN);
    take(values, MATRIX_RUN / 2 * dim);
    take(sums, rows * dim);
    take(slots, blocks * KEYS + KEYS);
    take(kept, blocks * KEYS + KEYS);
  }
};

// Rows [begin, begin + count) of a group, and what they attend to.
class MatrixRows {
 public:
  // `start` is the slot of the sequence's first token in this pass, `depths` as in `Pass`, from
  // that token on; `queries` are rows in bfloat16.
  MatrixRows(const Attention& attention, int64_t group, int64_t begin, int64_t count, int64_t start,
             const int64_t* depths, Rows queries, const MatrixScratch& own)
      : a_(attention),
        own_(own),
        begin_(begin),
        count_(count),
        padded_(round_up(count, TILE)),
        start_(start),
        depths_(depths),
        keys_(static_cast<const uint16_t*>(a_.keys) + group * a_.key_strides[1]),
        values_(static_cast<const uint16_t*>(a_.values) + group * a_.value_strides[1]),
        first_token_(begin / a_.heads),
        tokens_((begin + count - 1) / a_.heads - first_token_ + 1) {
    const auto bytes = static_cast<size_t>(2 * own.dim);
    for (int64_t r = 0; r < padded_; r++) {
      uint16_t* const to = own.queries + r * own.dim;
      if (r < count) {
        __builtin_memcpy(to, queries.at(r), bytes);
      } else {
        __builtin_memset(to, 0, bytes);
      }
    }
    for (int64_t r = 0; r < padded_; r++) {
      store(own.tops + r * LANES, splat(UNSEEN));
      store(own.totals + r * LANES, V{});
    }
    for (int64_t i = 0; i < padded_ * own.dim; i += LANES) store(own.sums + i, V{});
  }

  // Compute all rows; emit(row, values) is given the unrounded result of each.
  template <class Emit>
  void compute(Emit&& emit) {
    TileState<MatrixPairs> state;
    state.prepare(static_cast<int>(count_ < TILE ? count_ : TILE));
    score();
    for (int64_t t = 0; t < tokens_; t++) {
      own_.empty[t] = empty_places(t);
      own_.gaps[t] = has_gaps(t);
    }
    for (int64_t r = 0; r < count_; r++) {
      const float top = largest_of(load(own_.tops + r * LANES));
      own_.tops[r * LANES] = top <= UNSEEN ? 0 : top;  // a row that sees no slot has weights of 0
    }
    add_blocks();
    for (int64_t t = 0; t < tokens_; t++)
      if (own_.gaps[t]) add_moved(t);
    for (int64_t r = 0; r < count_; r++) {
      float* const sums = own_.sums + r * own_.dim;
      float total = 0;
      for (int i = 0; i < LANES; i++) total += own_.totals[r * LANES + i];
      const V by = splat(total > 0 ? total : 1.0f);
      for (int64_t e = 0; e < own_.dim; e += 2 * LANES)
        store_columns(sums + e, load(sums + e) / by, load(sums + e + LANES) / by);
      emit(begin_ + r, sums);
    }
  }

 private:
  int64_t token_of(int64_t row) const { return (begin_ + row) / a_.heads - first_token_; }
  const uint16_t* mask_of(int64_t token) const {
    return static_cast<const uint16_t*>(a_.mask) + (first_token_ + token) * a_.mask_strides[2];
  }
  float* scores_of(int64_t block, int64_t row) const {
    return own_.scores + (block * own_.rows + row) * KEYS;
  }
  int64_t slots_in(int64_t block) const {
    const int64_t left = a_.slots - block * KEYS;
    return left < KEYS ? left : KEYS;
  }

  // Note which slots of a block the tokens see.
  Visibility look(int64_t block) const {
    const int64_t here = slots_in(block);
    const __mmask32 exist = here < KEYS ? (__mmask32{1} << here) - 1 : ~__mmask32{0};
    bool plain = here == KEYS;
    uint32_t any_seen = 0;
    for (int64_t t = 0; t < tokens_; t++) {
      const auto mask = (__m512i)_mm512_maskz_loadu_epi16(exist, mask_of(t) + block * KEYS);
      uint32_t bits = exist;
      if (_mm512_test_epi16_mask(mask, _mm512_set1_epi16(0x7FFF)) != 0) {
        plain = false;
        const V below = splat(a_.hidden_below);
        const V low = widen_bfloat16((H)_mm512_castsi512_si256(mask)),
                high = widen_bfloat16((H)_mm512_extracti64x4_epi64(mask, 1));
        const uint32_t lower = _mm512_cmp_ps_mask(low, below, _CMP_GT_OQ),
                       upper = _mm512_cmp_ps_mask(high, below, _CMP_GT_OQ);
        bits = exist & (lower | upper << LANES);
      }
      own_.seen[t * own_.blocks + block] = bits;
      any_seen |= bits;
    }
    return any_seen == 0 ? NOTHING : plain ? ALL : MASKED;
  }

  // Compute the scores of all visible blocks, and the largest of each row.
  void score() const {
    const int64_t row_bytes = 2 * own_.dim;
    for (int64_t b = 0; b < own_.blocks; b++) {
      const int64_t start = b * KEYS, here = slots_in(b);
      own_.visible[b] = look(b);
      if (own_.visible[b] == NOTHING) continue;
      fetch_rows(keys_ + (start + AHEAD) * a_.key_strides[2], 2 * a_.key_strides[2],
                 a_.slots - start - AHEAD, KEYS, row_bytes);
      pack_keys<BFloat16>(keys_ + start * a_.key_strides[2], a_.key_strides[2], here, own_.dim,
                          own_.keys);
      finish_stores();
      for (int64_t first = 0; first < count_; first += TILE) {
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t k = 0; k < own_.dim / 32; k++) {
          _tile_loadd(5, own_.queries + first * own_.dim + 32 * k, row_bytes);
          _tile_loadd(6, own_.keys + k * TILE * 4 * KEYS, 4 * KEYS);
          _tile_dpbf16ps(0, 5, 6);
          _tile_loadd(7, own_.keys + k * TILE * 4 * KEYS + 64, 4 * KEYS);
          _tile_dpbf16ps(1, 5, 7);
        }
        _tile_stored(0, scores_of(b, first), 4 * KEYS);
        _tile_stored(1, scores_of(b, first) + LANES, 4 * KEYS);
      }
      for (int64_t r = 0; r < count_; r++) {
        float* const at = scores_of(b, r);
        V low = load(at) * splat(a_.scale), high = load(at + LANES) * splat(a_.scale);
        if (own_.visible[b] == MASKED) {
          const int64_t t = token_of(r);
          const uint32_t bits = own_.seen[t * own_.blocks + b];
          const uint16_t* const mask = mask_of(t) + start;
          low = _mm512_mask_mov_ps(splat(UNSEEN), static_cast<__mmask16>(bits),
                                   low + get_some<BFloat16>(mask, here));
          high = _mm512_mask_mov_ps(
              splat(UNSEEN), static_cast<__mmask16>(bits >> LANES),
              here > LANES ? high + get_some<BFloat16>(mask + LANES, here - LANES) : high);
        }
        store(at, low);
        store(at + LANES, high);
        float* const top = own_.tops + r * LANES;
        store(top, larger(load(top), larger(low, high)));
      }
    }
  }

  // Return a bit for each slot of a block that is before slot `end`.
  static uint32_t before(int64_t end, int64_t block) {
    const int64_t count = end - block * KEYS;
    return count >= KEYS ? ~uint32_t{0} : count > 0 ? (uint32_t{1} << count) - 1 : 0;
  }

  // Return which slots of this pass a token sees in a block, from the block of `start_` on.
  uint32_t seen_of_pass(int64_t token, int64_t block) const {
    return own_.seen[token * own_.blocks + block] & ~before(start_, block);
  }

  // Return the number of a token's ancestors in this pass that a window hides.
  int64_t empty_places(int64_t token) const {
    if (depths_ == nullptr) return 0;
    int64_t count = 0;
    for (int64_t b = start_ / KEYS; b < own_.blocks; b++)
      count += __builtin_popcount(seen_of_pass(token, b));
    const int64_t hidden = depths_[first_token_ + token] + 1 - count,
                  most = a_.slots - start_ - count;
    return hidden < 0 ? 0 : hidden < most ? hidden : most;
  }

  // Return whether a slot of this pass that a token sees is not in the place of its index.
  bool has_gaps(int64_t token) const {
    const int64_t first = start_ + own_.empty[token];
    bool ended = false;
    for (int64_t b = start_ / KEYS; b < own_.blocks; b++) {
      const uint32_t places = before(first, b), seen = seen_of_pass(token, b), bits = seen | places;
      if ((seen & places) != 0) return true;
      if (ended ? seen != 0 : (bits & (bits + 1)) != 0) return true;
      ended = ended || ~bits != 0;
    }
    return false;
  }

  // Write a row's weights of a block, and add them to its total.
  void weigh_block(const float* scores, int64_t row, uint16_t* to) const {
    const V top = splat(own_.tops[row * LANES]);
    float* const total = own_.totals + row * LANES;
    const V low = weigh(load(scores), top), high = weigh(load(scores + LANES), top);
    store(total, (load(total) + low) + high);
    const auto both = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    __builtin_memcpy(to, &both, sizeof both);
  }

  // Write the values of a block's slots as pairs; row_at(j) is null for slots that do not exist.
  template <class RowAt>
  void pair_values(int64_t at, RowAt&& row_at) const {
    for (int64_t j = 0; j < KEYS; j += 2) {
      const uint16_t *const even = row_at(j), *const odd = row_at(j + 1);
      uint32_t* const to = own_.values + (at + j) / 2 * own_.dim;
      for (int64_t e = 0; e < own_.dim; e += 2 * LANES) {
        const auto a = even == nullptr ? __m512i{} : _mm512_loadu_si512(even + e),
                   b = odd == nullptr ? __m512i{} : _mm512_loadu_si512(odd + e);
        _mm512_storeu_si512(to + e, _mm512_unpacklo_epi16(a, b));
        _mm512_storeu_si512(to + e + LANES, _mm512_unpackhi_epi16(a, b));
      }
    }
  }

  // Add the values of some blocks, times their weights, to the sums of a tile of rows.
  void add_values(int64_t first, int64_t blocks) const {
    const int64_t wide = 4 * own_.dim;
    finish_stores();
    for (int64_t e = 0; e < own_.dim; e += 2 * TILE) {
      float* const sums = own_.sums + first * own_.dim + e;
      _tile_loadd(0, sums, wide);
      _tile_loadd(1, sums + TILE, wide);
      for (int64_t b = 0; b < blocks; b++) {
        const uint32_t* const values = own_.values + b * TILE * own_.dim + e;
        _tile_loadd(5, own_.weights + first * MATRIX_RUN + b * KEYS, 2 * MATRIX_RUN);
        _tile_loadd(6, values, wide);
        _tile_dpbf16ps(0, 5, 6);
        _tile_loadd(7, values + TILE, wide);
        _tile_dpbf16ps(1, 5, 7);
      }
      _tile_stored(0, sums, wide);
      _tile_stored(1, sums + TILE, wide);
    }
  }

  // Add the values of all slots that stay in their places.
  void add_blocks() const {
    const int64_t moved = start_ / KEYS;  // the first block from which slots are moved
    for (int64_t b = 0; b < own_.blocks;) {
      int64_t run = 0;
      while (b + run < own_.blocks && own_.visible[b + run] != NOTHING && run * KEYS < MATRIX_RUN)
        run++;
      for (int64_t i = 0; i < run; i++) {
        const int64_t start = (b + i) * KEYS, left = a_.slots - start;
        fetch_rows(values_ + (start + MATRIX_RUN) * a_.value_strides[2], 2 * a_.value_strides[2],
                   left - MATRIX_RUN, KEYS, 2 * own_.dim);
        pair_values(i * KEYS, [&](int64_t j) {
          return j < left ? values_ + (start + j) * a_.value_strides[2] : nullptr;
        });
      }
      for (int64_t r = 0; run > 0 && r < count_; r++) {
        const bool gaps = b + run > moved && own_.gaps[token_of(r)];
        for (int64_t i = 0; i < run; i++) {
          uint16_t* const to = own_.weights + r * MATRIX_RUN + i * KEYS;
          if (gaps && b + i >= moved) {
            __builtin_memset(to, 0, 2 * KEYS);
          } else {
            weigh_block(scores_of(b + i, r), r, to);
          }
        }
      }
      for (int64_t first = 0; run > 0 && first < count_; first += TILE) add_values(first, run);
      b += run > 0 ? run : 1;
    }
  }

  // Add the values of slots that are moved together, for the rows of one token.
  void add_moved(int64_t token) const {
    const int64_t from = start_ / KEYS;
    int64_t count = 0;  // places so far
    auto use_bits = [&](int64_t b, uint32_t keep, auto&& use) {
      for (int half = 0; half < 2; half++) {
        const auto bits = static_cast<__mmask16>(keep >> (half * LANES));
        use(b, half, bits);
        count += __builtin_popcount(bits);
      }
    };
    auto each_kept = [&](auto&& use, auto&& use_empty) {
      count = 0;
      use_bits(from, before(start_, from), use);
      use_empty(own_.empty[token]);
      count += own_.empty[token];
      for (int64_t b = from; b < own_.blocks; b++) use_bits(b, seen_of_pass(token, b), use);
    };
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    each_kept(
        [&](int64_t b, int half, __mmask16 bits) {
          const auto slots =
              _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(b * KEYS + half * LANES)));
          _mm512_mask_compressstoreu_epi32(own_.slots + count, bits, slots);
        },
        [&](int64_t empty) {
          for (int64_t i = 0; i < empty; i++) own_.slots[count + i] = -1;
        });
    const int64_t kept = count, heads = a_.heads;
    const int64_t first_row = (first_token_ + token) * heads - begin_, end_row = first_row + heads;
    const int64_t top = first_row < 0 ? 0 : first_row, bottom = end_row < count_ ? end_row : count_;
    for (int64_t at = 0; at < kept; at += MATRIX_RUN) {
      const int64_t left = kept - at,
                    run = ((left < MATRIX_RUN ? left : MATRIX_RUN) + KEYS - 1) / KEYS;
      for (int64_t i = 0; i < run; i++)
        pair_values(i * KEYS, [&](int64_t j) {
          const int64_t index = at + i * KEYS + j;
          const int64_t slot = index < kept ? own_.slots[index] : -1;
          return slot >= 0 ? values_ + slot * a_.value_strides[2] : nullptr;
        });
      for (int64_t first = top / TILE * TILE; first < bottom; first += TILE) {
        __builtin_memset(own_.weights + first * MATRIX_RUN, 0,
                         static_cast<size_t>(2 * TILE * MATRIX_RUN));
        for (int64_t r = first < top ? top : first; r < first + TILE && r < bottom; r++) {
          each_kept(
              [&](int64_t b, int half, __mmask16 bits) {
                const V scores = own_.visible[b] == NOTHING ? splat(UNSEEN)
                                                            : load(scores_of(b, r) + half * LANES);
                _mm512_mask_compressstoreu_ps(own_.kept + count, bits, scores);
              },
              [&](int64_t empty) {
                for (int64_t i = 0; i < empty; i++) own_.kept[count + i] = UNSEEN;
              });
          store(own_.kept + kept, splat(UNSEEN));
          store(own_.kept + kept + LANES, splat(UNSEEN));
          for (int64_t i = 0; i < run; i++)
            weigh_block(own_.kept + at + i * KEYS, r, own_.weights + r * MATRIX_RUN + i * KEYS);
        }
        add_values(first, run);
      }
    }
  }

  const Attention& a_;
  const MatrixScratch& own_;
  const int64_t begin_, count_, padded_, start_;
  const int64_t* const depths_;
  const uint16_t *const keys_, *const values_;
  const int64_t first_token_, tokens_;
};
#endif
