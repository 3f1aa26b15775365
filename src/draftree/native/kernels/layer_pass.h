// A pass through decoder layers of the Llama kind. The threads wait for each other between matrix
// products. Included inside an anonymous namespace after pass_sequences.h.

// The weight of a linear layer in a model's own dtype.
template <class D>
struct Native {
  using G = Singles<D>;
};
template <>
struct Native<BFloat16> {
#if defined(DRAFTREE_AMX)
  using G = MatrixPairs;
#else
  using G = Pairs;
#endif
};

// Cut memory into aligned parts.
class Arena {
 public:
  explicit Arena(char* data) : data_(data) {}
  char* take(int64_t bytes) {
    char* const here = data_ == nullptr ? nullptr : data_ + used_;
    used_ += round_up(bytes, 128);
    return here;
  }
  int64_t used() const { return used_; }

 private:
  char* data_;
  int64_t used_ = 0;
};

// Return aligned memory of the calling thread. It keeps its content until the next call that writes
// to it: a pass with FINISH alone reads the queries of the pass before.
inline char* scratch(int64_t bytes) {
  struct Held {
    char* data = nullptr;
    int64_t size = 0;
    ~Held() { __builtin_free(data); }
    char* aligned() const { return data + (128 - reinterpret_cast<uintptr_t>(data) % 128); }
  };
  static thread_local Held held;
  if (held.size < bytes + 128) {
    Held grown;
    grown.size = bytes + bytes / 4 + 128;
    grown.data = static_cast<char*>(__builtin_malloc(static_cast<size_t>(grown.size)));
    if (grown.data == nullptr) throw std::bad_alloc();
    if (held.size > 0)
      __builtin_memcpy(grown.aligned(), held.aligned(), static_cast<size_t>(held.size - 128));
    std::swap(held.data, grown.data);
    held.size = grown.size;
  }
  return held.aligned();
}

// A thread's share of a linear layer, as rounded numbers.
template <class D, class G>
void linear_part(const Linear& layer, Rows x, int64_t tokens, typename D::T* output, float* sums,
                 int thread, int threads, bool stream = false) {
  constexpr int64_t UNIT = G::panels(1);
  multiply<G>(
      x, tokens, layer.inputs, layer.weight, stream, UNIT,
      share(panels_of<G>(layer.outputs), thread, threads), sums,
      [&](int64_t first, int m, int64_t panel, int64_t panels, const float* tile_sums, int64_t ld) {
        const int64_t at = panel * G::COLUMNS, end = at + panels * G::COLUMNS,
                      last = end < layer.outputs ? end : layer.outputs;
        for (int i = 0; i < m; i++)
          for (int64_t e = at; e < last; e += LANES)
            put_some<D>(output + (first + i) * layer.outputs + e,
                        biased<D>(tile_sums + i * ld + e - at, layer.bias, e, last - e), last - e);
      });
}

// Weights of a pass that are more bytes than this are streamed: they do not stay in the caches
// until the next pass, and would drive everything else out of them. On Intel's processors, such
// reads reach half of the memory's bandwidth.
constexpr int64_t STREAMED = 64 << 20;

template <class G>
int64_t weight_bytes(const Linear& layer) {
  return panels_of<G>(layer.outputs) * panel_bytes<G>(layer.inputs);
}

// Up to this many tokens, each thread normalises all rows itself, which is faster than a barrier.
constexpr int64_t OWN_TOKENS = 4;

// Memory of a pass: a part that the threads share, and a private part of each.
template <class D, class G>
struct Buffers {
  using T = typename D::T;
  using QG = typename QueryRows<D>::G;
  Rows ready;                 // [N] normalised input of a product
  Rows queries;               // [R, G, n * H]
  Rows attended;              // [N, G * H * D]
  Rows activated;             // [N, intermediate]
  T* hidden = nullptr;        // [N, hidden] after attention
  T* between[2] = {};         // [N, hidden] outputs of layers that are not requested
  Rows head_ready;            // [N] input of the head
  Sequence* table = nullptr;  // [R + 1]
  int32_t* owner = nullptr;   // [N] the sequence of each token
  int32_t* place = nullptr;   // [N] the row of each token among the selected ones
  char* own = nullptr;        // private memory of all threads
  int64_t own_bytes = 0;      // size of each thread's private memory
  // Sizes of its parts: sums of a tile, a row, private rows; the rest is for attention.
  int64_t sums_bytes = 0, row_bytes = 0;
  int64_t own_rows_bytes = 0;
  int64_t bytes = 0;
  bool stream = false;  // whether the weights are streamed

  Buffers(char* memory, const Pass& pass, int threads) {
    const Shape& s = pass.shape;
    const int64_t tokens = tokens_of(pass), wide = s.groups * s.heads * s.head_dim;
    int64_t widest = s.hidden, weights = weight_bytes<typename Native<D>::G>(pass.head);
    for (int64_t i = 0; i < pass.count; i++) {
      const Layer& layer = *pass.layers[i];
      widest = widest < layer.qkv.inputs ? layer.qkv.inputs : widest;
      weights += weight_bytes<G>(layer.qkv) + weight_bytes<G>(layer.o_proj) +
                 weight_bytes<G>(layer.gate_up) + weight_bytes<G>(layer.down);
    }
    stream = weights > STREAMED && made_by_amd;
    Arena arena(memory);
    auto rows = [&](int64_t count, int64_t stride) {
      return Rows{arena.take(count * stride), stride};
    };
    ready = rows(tokens, G::row_bytes(widest));
    queries = rows(tokens * s.groups * s.heads, QG::row_bytes(s.head_dim));
    attended = rows(tokens, G::row_bytes(wide));
    activated = rows(tokens, G::row_bytes(s.intermediate));
    hidden = reinterpret_cast<T*>(arena.take(tokens * s.hidden * static_cast<int64_t>(sizeof(T))));
    for (T*& each : between)
      each = reinterpret_cast<T*>(arena.take(tokens * s.hidden * static_cast<int64_t>(sizeof(T))));
    head_ready = rows(tokens, pass.head.type == INT8 ? Int8::row_bytes(s.hidden)
                                                     : Native<D>::G::row_bytes(s.hidden));
    constexpr int TOKENS = G::TOKENS > Native<D>::G::TOKENS ? G::TOKENS : Native<D>::G::TOKENS;
    sums_bytes = 4 * TOKENS * (s.head_dim > 4 * 32 ? s.head_dim : 4 * 32);
    row_bytes = round_up(4 * (widest > wide ? widest : wide), 64);
    const int64_t stride = ready.stride > head_ready.stride ? ready.stride : head_ready.stride;
    own_rows_bytes = round_up((tokens < OWN_TOKENS ? tokens : OWN_TOKENS) * stride, 64);
    own_bytes = round_up(sums_bytes + row_bytes + own_rows_bytes + attention_bytes<D>(pass), 128);
    table = reinterpret_cast<Sequence*>(
        arena.take((pass.sequences + 1) * static_cast<int64_t>(sizeof(Sequence))));
    owner = reinterpret_cast<int32_t*>(arena.take(tokens * 4));
    place = reinterpret_cast<int32_t*>(arena.take(tokens * 4));
    own = arena.take(own_bytes * threads);
    bytes = arena.used();
  }
};

// One thread's share of a pass.
template <class D, class G>
class Member {
  using T = typename D::T;
  using QG = typename QueryRows<D>::G;

 public:
  Member(const Pass& pass, const Buffers<D, G>& buffers, Barrier& barrier, int thread, int threads)
      : pass_(pass),
        shape_(pass.shape),
        buffers_(buffers),
        barrier_(barrier),
        thread_(thread),
        threads_(threads) {
    tokens_ = tokens_of(pass);
    char* const own = buffers.own + thread * buffers.own_bytes;
    sums_ = reinterpret_cast<float*>(own);
    row_ = reinterpret_cast<float*>(own + buffers.sums_bytes);
    own_rows_ = own + buffers.sums_bytes + buffers.row_bytes;
    attention_ = own_rows_ + buffers.own_rows_bytes;
  }

  void run() {
    const T* input = static_cast<const T*>(pass_.input);
    const T* residual = static_cast<const T*>(pass_.residual);
    for (int64_t i = 0; i < pass_.count; i++) {
      const Layer& layer = *pass_.layers[i];
      T* output = static_cast<T*>(pass_.outputs[i]);
      if (output == nullptr) output = buffers_.between[i % 2];
      if (pass_.parts & PROJECT) project(layer, input, i);
      if (pass_.parts == (PROJECT | FINISH)) meet();
      if (pass_.parts & FINISH) finish(layer, residual, output, i);
      input = residual = output;
      if (i + 1 < pass_.count || pass_.final_norm.weight != nullptr) meet();
    }
    if (pass_.final_norm.weight == nullptr) return;
    if (pass_.head.type == INT8) return head<Int8>(input);
    head<typename Native<D>::G>(input);
  }

 private:
  void meet() { barrier_.wait(threads_); }

  // Norm, projection to queries, keys and values, rotation.
  void project(const Layer& layer, const T* input, int64_t index) {
    const int64_t dim = shape_.head_dim, width = layer.qkv.inputs,
                  queries = shape_.groups * shape_.heads, groups = shape_.groups;
    const Rows ready =
        prepare<G>(layer.input_norm, input, width, buffers_.ready, nullptr, layer.feature_norm);
    T* const keys = static_cast<T*>(pass_.keys) + index * pass_.key_layer;
    T* const values = static_cast<T*>(pass_.values) + index * pass_.value_layer;
    const int64_t unit = dim / G::COLUMNS;
    Range range = share(queries + 2 * groups, thread_, threads_);
    range = {range.begin * unit, range.end * unit};
    multiply<G>(ready, tokens_, width, layer.qkv.weight, buffers_.stream, unit, range, sums_,
                [&](int64_t first, int m, int64_t panel, int64_t, const float* sums, int64_t ld) {
                  const int64_t head = panel / unit;
                  for (int i = 0; i < m; i++) {
                    const int64_t token = first + i, sequence = buffers_.owner[token];
                    const Sequence& its = buffers_.table[sequence];
                    const int64_t at = token - its.first, slot = its.start + at;
                    float* const mine = row_;
                    for (int64_t e = 0; e < dim; e += LANES)
                      store(mine + e,
                            biased<D>(sums + i * ld + e, layer.qkv.bias, head * dim + e, LANES));
                    if (head < queries) {
                      turn(layer.q_norm, token, mine);
                      const int64_t many = buffers_.table[sequence + 1].first - its.first;
                      const int64_t row =
                          (its.first * groups + head / shape_.heads * many + at) * shape_.heads +
                          head % shape_.heads;
                      QG::put(buffers_.queries.at(row), 0, mine, dim, dim);
                    } else if (head < queries + groups) {
                      turn(layer.k_norm, token, mine);
                      narrow_row<D>(mine, dim,
                                    keys + sequence * pass_.key_strides[0] +
                                        (head - queries) * pass_.key_strides[1] +
                                        slot * pass_.key_strides[2]);
                    } else {
                      narrow_row<D>(mine, dim,
                                    values + sequence * pass_.value_strides[0] +
                                        (head - queries - groups) * pass_.value_strides[1] +
                                        slot * pass_.value_strides[2]);
                    }
                  }
                });
  }

  // Normalise a head, if the model does so, and rotate it.
  void turn(const Norm& norm, int64_t token, float* head) {
    const int64_t dim = shape_.head_dim;
    if (norm.weight != nullptr) {
      T held[MAX_HEAD];
      narrow_row<D>(head, dim, held);
      norm_row<D>(held, static_cast<const T*>(norm.weight), norm.epsilon, dim, head);
    }
    const int64_t angle = pass_.positions[token] * dim;
    rotate_row<D>(head, static_cast<const T*>(pass_.cosines) + angle,
                  static_cast<const T*>(pass_.sines) + angle, dim, head);
  }

  // Attention, the residual sum, and the feed-forward layer. What follows the attention of the last
  // layer is computed for the selected tokens alone.
  void finish(const Layer& layer, const T* residual, T* output, int64_t index) {
    const bool selects = pass_.selected != nullptr && index + 1 == pass_.count;
    const int64_t hidden = shape_.hidden, dim = shape_.head_dim,
                  wide = shape_.groups * shape_.heads * dim;
    Attention a;
    const T* const keys = static_cast<const T*>(pass_.keys) + index * pass_.key_layer;
    const T* const values = static_cast<const T*>(pass_.values) + index * pass_.value_layer;
    a.sequences = 1, a.groups = shape_.groups, a.heads = shape_.heads;
    a.key_dim = a.value_dim = dim;
    a.dtype = a.mask_dtype = D::TYPE;
    for (int i = 0; i < 3; i++)
      a.key_strides[i] = pass_.key_strides[i], a.value_strides[i] = pass_.value_strides[i];
    a.scale = shape_.scale, a.hidden_below = pass_.hidden_below;
    share_sequences(
        buffers_.table, pass_.sequences, a.groups, a.heads, thread_, threads_,
        [&](int64_t r, int64_t group, int64_t begin, int64_t end) {
          const Sequence& its = buffers_.table[r];
          a.tokens = buffers_.table[r + 1].first - its.first, a.slots = its.slots;
          a.keys = keys + r * pass_.key_strides[0], a.values = values + r * pass_.value_strides[0];
          a.mask = static_cast<const T*>(pass_.mask) + its.mask,
          a.mask_strides[2] = its.mask_stride;
          const int64_t first = (its.first * a.groups + group * a.tokens) * a.heads + begin;
          const Rows queries{buffers_.queries.at(first), buffers_.queries.stride};
          auto emit = [&](int64_t row, float* out) {
            const int64_t token = its.first + row / a.heads, head = group * a.heads + row % a.heads,
                          at = selects ? buffers_.place[token] : token;
            if (at < 0) return;
            for (int64_t e = 0; e < dim; e += LANES) store(out + e, D::round(load(out + e)));
            G::put(buffers_.attended.at(at), head * dim, out, dim, wide);
          };
#if defined(DRAFTREE_AMX)
          if constexpr (BY_MATRIX_UNIT<D>) {
            const MatrixScratch own(attention_, a.slots, dim);
            const int64_t* const depths =
                pass_.depths == nullptr ? nullptr : pass_.depths + its.first;
            MatrixRows(a, group, begin, end - begin, its.start, depths, queries, own).compute(emit);
            return;
          }
#endif
          const AttentionScratch own(attention_, a.slots, dim, dim);
          attend_rows<D>(a, 0, group, begin, end, queries, own, emit);
        });
    if (selects) tokens_ = pass_.selected_count;
    meet();
    add_product(layer.o_proj, buffers_.attended, residual, buffers_.hidden,
                selects ? pass_.selected : nullptr);
    meet();
    const Rows ready = prepare<G>(layer.post_norm, buffers_.hidden, hidden, buffers_.ready);
    constexpr int64_t UNIT = 64 / G::COLUMNS;
    Range range = share(shape_.intermediate / 32, thread_, threads_);
    range = {range.begin * UNIT, range.end * UNIT};
    multiply<G>(ready, tokens_, hidden, layer.gate_up.weight, buffers_.stream, UNIT, range, sums_,
                [&](int64_t first, int m, int64_t panel, int64_t, const float* sums, int64_t ld) {
                  const int64_t at = panel * G::COLUMNS;
                  for (int i = 0; i < m; i++) {
                    float both[32];
                    for (int e = 0; e < 32; e += LANES) {
                      const V gate =
                          biased<D>(sums + i * ld + e, layer.gate_up.bias, at + e, LANES);
                      const V up =
                          biased<D>(sums + i * ld + 32 + e, layer.gate_up.bias, at + 32 + e, LANES);
                      store(both + e, D::round(gated<D>(gate, up)));
                    }
                    G::put(buffers_.activated.at(first + i), at / 2, both, 32, shape_.intermediate);
                  }
                });
    meet();
    add_product(layer.down, buffers_.activated, buffers_.hidden, output);
  }

  // Return rows in the layout of a product's input, normalised if there is a norm.
  //
  // Up to OWN_TOKENS tokens, each thread prepares all rows in its private memory. Above, the
  // threads share the rows and wait for each other. With a norm of features, the features of a
  // token follow its input, and `width` counts both.
  template <class To>
  Rows prepare(const Norm& norm, const T* input, int64_t width, Rows shared, T* states = nullptr,
               const Norm& feature_norm = {}) {
    const T* const features = static_cast<const T*>(pass_.features);
    const int64_t size = feature_norm.weight == nullptr ? width : width / 2;
    const bool own = tokens_ <= OWN_TOKENS;
    const Rows to{own ? own_rows_ : shared.data, shared.stride};
    const Range mine = own ? Range{0, tokens_} : share(tokens_, thread_, threads_);
    for (int64_t token = mine.begin; token < mine.end; token++) {
      const T* const x = input + token * size;
      if (norm.weight != nullptr) {
        norm_row<D>(x, static_cast<const T*>(norm.weight), norm.epsilon, size, row_);
      } else {
        widen_row<D>(x, size, row_);
      }
      if (feature_norm.weight != nullptr)
        norm_row<D>(features + token * size, static_cast<const T*>(feature_norm.weight),
                    feature_norm.epsilon, size, row_ + size);
      To::put(to.at(token), 0, row_, width, width);
      if (states != nullptr && (!own || thread_ == 0))
        narrow_row<D>(row_, width, states + token * width);
    }
    if (!own) meet();
    return to;
  }

  // Add the output of a linear layer to other rows; output and sum are rounded, as in torch.
  // `rows` are the indices of the other rows; null stands for 0, 1, 2, …
  void add_product(const Linear& layer, Rows x, const T* before, T* output,
                   const int64_t* rows = nullptr) {
    constexpr int64_t UNIT = G::panels(1);
    multiply<G>(
        x, tokens_, layer.inputs, layer.weight, buffers_.stream, UNIT,
        share(panels_of<G>(layer.outputs), thread_, threads_), sums_,
        [&](int64_t first, int m, int64_t panel, int64_t panels, const float* sums, int64_t ld) {
          const int64_t at = panel * G::COLUMNS;
          for (int i = 0; i < m; i++) {
            const int64_t row = rows == nullptr ? first + i : rows[first + i];
            const T* const old = before + row * layer.outputs + at;
            T* const to = output + (first + i) * layer.outputs + at;
            for (int64_t e = 0; e < panels * G::COLUMNS; e += LANES)
              D::put(to + e,
                     D::get(old + e) + biased<D>(sums + i * ld + e, layer.bias, at + e, LANES));
          }
        });
  }

  // The final norm and the LM head.
  template <class HG>
  void head(const T* input) {
    const Rows ready = prepare<HG>(pass_.final_norm, input, shape_.hidden, buffers_.head_ready,
                                   static_cast<T*>(pass_.final_states));
    linear_part<D, HG>(pass_.head, ready, tokens_, static_cast<T*>(pass_.logits), sums_, thread_,
                       threads_, buffers_.stream);
  }

 public:
  static constexpr int64_t MAX_HEAD = 1024;

 private:
  const Pass& pass_;
  const Shape& shape_;
  const Buffers<D, G>& buffers_;
  Barrier& barrier_;
  const int thread_, threads_;
  int64_t tokens_;
  float *sums_, *row_;
  char *own_rows_, *attention_;
};

template <class D, class G>
void forward(const Pass& pass, int threads) {
  char* const memory = scratch(Buffers<D, G>(nullptr, pass, threads).bytes);
  const Buffers<D, G> buffers(memory, pass, threads);
  write_sequences(pass, buffers.table, buffers.owner);
  write_places(pass, buffers.place);
  struct Context {
    const Pass& pass;
    const Buffers<D, G>& buffers;
    Barrier barrier;
  } context{pass, buffers, {}};
  run_team(
      threads,
      [](void* data, int thread, int count) {
        auto* c = static_cast<Context*>(data);
        Member<D, G>(c->pass, c->buffers, c->barrier, thread, count).run();
      },
      &context);
}
