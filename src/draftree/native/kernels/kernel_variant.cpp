// The kernels for one instruction set: this file is compiled once for each, with DRAFTREE_VARIANT
// its name.
#include <new>
#include <type_traits>
#include <utility>

#include "kernels.h"
#include "thread_team.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace draftree {
namespace {  // no function may be shared between instruction sets

#include "simd.h"
#include "gemm.h"
#include "amx_gemm.h"
#include "row_ops.h"
#include "integer_gemm.h"
#include "attention_products.h"
#include "attention.h"
#include "amx_attention.h"
#include "pass_sequences.h"
#include "layer_pass.h"

// Call use(D) for a dtype.
template <class Use>
void with_dtype(int32_t dtype, Use&& use) {
  switch (dtype) {
    case BFLOAT16:
      return use(BFloat16{});
    case FLOAT16:
      return use(Float16{});
    default:
      return use(Float32{});
  }
}

template <class G, class Pack>
void pack_panels(int64_t outputs, int64_t inputs, void* packed, int threads, Pack&& pack) {
  struct Context {
    int64_t outputs, inputs;
    void* packed;
    Pack& pack;
  } context{outputs, inputs, packed, pack};
  run_team(
      threads,
      [](void* data, int thread, int count) {
        auto* c = static_cast<Context*>(data);
        const Range mine = share(panels_of<G>(c->outputs), thread, count);
        for (int64_t p = mine.begin; p < mine.end; p++)
          c->pack(p, static_cast<char*>(c->packed) + p * panel_bytes<G>(c->inputs));
      },
      &context);
}

int64_t packed_bytes(int32_t type, int64_t outputs, int64_t inputs) {
  switch (type) {
    case INT4:
      return panels_of<Int4>(outputs) * panel_bytes<Int4>(inputs);
    case INT8:
      return panels_of<Int8>(outputs) * panel_bytes<Int8>(inputs);
    case BFLOAT16:
      return panels_of<Native<BFloat16>::G>(outputs) * panel_bytes<Native<BFloat16>::G>(inputs);
    case FLOAT16:
      return panels_of<Singles<Float16>>(outputs) * panel_bytes<Singles<Float16>>(inputs);
    default:
      return panels_of<Singles<Float32>>(outputs) * panel_bytes<Singles<Float32>>(inputs);
  }
}

void pack(int32_t type, const void* weight, int64_t outputs, int64_t inputs, void* packed,
          int threads) {
  with_dtype(type, [&](auto d) {
    using G = typename Native<decltype(d)>::G;
    pack_panels<G>(outputs, inputs, packed, threads,
                   [&](int64_t panel, char* to) { G::pack(weight, outputs, inputs, panel, to); });
  });
}

void pack_int4(const uint8_t* numbers, const uint16_t* scales, int64_t outputs, int64_t inputs,
               void* packed, int threads) {
  pack_panels<Int4>(outputs, inputs, packed, threads, [&](int64_t panel, char* to) {
    Int4::pack(numbers, scales, outputs, inputs, panel, to);
  });
}

void pack_int8(int32_t type, const void* weight, int64_t outputs, int64_t inputs, void* packed,
               int threads) {
  with_dtype(type, [&](auto d) {
    using D = decltype(d);
    pack_panels<Int8>(outputs, inputs, packed, threads, [&](int64_t panel, char* to) {
      Int8::pack<D>(static_cast<const typename D::T*>(weight), outputs, inputs, panel, to);
    });
  });
}

template <class D, class G>
void run_linear(const Linear& layer, const void* input, int64_t tokens, void* output, int threads) {
  const int64_t stride = G::row_bytes(layer.inputs),
                own = round_up(4 * layer.inputs, 64) + 4 * G::TOKENS * 128;
  struct Context {
    const Linear& layer;
    const typename D::T* input;
    int64_t tokens;
    typename D::T* output;
    Rows rows;
    char* own;
    int64_t own_bytes;
    Barrier barrier;
  } context{layer,
            static_cast<const typename D::T*>(input),
            tokens,
            static_cast<typename D::T*>(output),
            {scratch(tokens * stride + 128 + own * threads), stride},
            nullptr,
            own,
            {}};
  context.own = context.rows.data + round_up(tokens * stride, 128);
  run_team(
      threads,
      [](void* data, int thread, int count) {
        auto* c = static_cast<Context*>(data);
        const int64_t width = c->layer.inputs;
        auto* const row = reinterpret_cast<float*>(c->own + thread * c->own_bytes);
        const Range mine = share(c->tokens, thread, count);
        for (int64_t i = mine.begin; i < mine.end; i++) {
          widen_row<D>(c->input + i * width, width, row);
          G::put(c->rows.at(i), 0, row, width, width);
        }
        c->barrier.wait(count);
        float* const sums = row + round_up(4 * width, 64) / 4;
        linear_part<D, G>(c->layer, c->rows, c->tokens, c->output, sums, thread, count);
      },
      &context);
}

void linear(const Linear& layer, int32_t dtype, const void* input, int64_t tokens, void* output,
            int threads) {
  if (tokens == 0) return;
  with_dtype(dtype, [&](auto d) {
    using D = decltype(d);
    if (layer.type == INT4) return run_linear<D, Int4>(layer, input, tokens, output, threads);
    if (layer.type == INT8) return run_linear<D, Int8>(layer, input, tokens, output, threads);
    run_linear<D, typename Native<D>::G>(layer, input, tokens, output, threads);
  });
}

void forward_pass(const Pass& pass, int threads) {
  with_dtype(pass.shape.dtype, [&](auto d) {
    using D = decltype(d);
    const int32_t type = pass.count > 0 ? pass.layers[0]->qkv.type : D::TYPE;
    if (type == INT4) return forward<D, Int4>(pass, threads);
    if (type == INT8) return forward<D, Int8>(pass, threads);
    forward<D, typename Native<D>::G>(pass, threads);
  });
}

template <class D>
void run_attention(const Attention& a, int threads) {
  using QG = typename QueryRows<D>::G;
  using T = typename D::T;
  const int64_t rows = a.sequences * a.groups * a.tokens * a.heads;
  AttentionScratch sizes(nullptr, a.slots, a.key_dim, a.value_dim);
  Rows queries{nullptr, QG::row_bytes(a.key_dim)};
  const int64_t row_bytes = round_up(4 * a.key_dim, 64),
                own_bytes = round_up(row_bytes + sizes.bytes, 128);
  queries.data = scratch(round_up(rows * queries.stride, 128) + own_bytes * threads);
  struct Context {
    const Attention& a;
    Rows queries;
    char* own;
    int64_t own_bytes, row_bytes, rows;
    Barrier barrier;
  } context{a,         queries,   queries.data + round_up(rows * queries.stride, 128),
            own_bytes, row_bytes, rows,
            {}};
  run_team(
      threads,
      [](void* data, int thread, int count) {
        auto* c = static_cast<Context*>(data);
        const Attention& it = c->a;
        char* const mine = c->own + thread * c->own_bytes;
        auto* const row = reinterpret_cast<float*>(mine);
        const Range range = share(c->rows, thread, count);
        for (int64_t i = range.begin; i < range.end; i++) {  // [R, G, n, H]
          const int64_t head = i % it.heads, at = i / it.heads % it.tokens,
                        group = i / it.heads / it.tokens % it.groups;
          const int64_t sequence = i / it.heads / it.tokens / it.groups;
          const T* const query =
              static_cast<const T*>(it.queries) + sequence * it.query_strides[0] +
              (group * it.heads + head) * it.query_strides[1] + at * it.query_strides[2];
          widen_row<D>(query, it.key_dim, row);
          QG::put(c->queries.at(i), 0, row, it.key_dim, it.key_dim);
        }
        c->barrier.wait(count);
        const AttentionScratch own(mine + c->row_bytes, it.slots, it.key_dim, it.value_dim);
        share_rows(it, own.rows, thread, count,
                   [&](int64_t sequence, int64_t group, int64_t begin, int64_t end) {
                     const int64_t first =
                         (sequence * it.groups + group) * it.tokens * it.heads + begin;
                     attend_rows<D>(
                         it, sequence, group, begin, end, {c->queries.at(first), c->queries.stride},
                         own, [&](int64_t r, float* values) {
                           const int64_t token = sequence * it.tokens + r / it.heads,
                                         head = group * it.heads + r % it.heads;
                           narrow_row<D>(values, it.value_dim,
                                         static_cast<T*>(it.outputs) +
                                             (token * it.groups * it.heads + head) * it.value_dim);
                         });
                   });
      },
      &context);
}

void attend(const Attention& attention, int threads) {
  with_dtype(attention.dtype, [&](auto d) { run_attention<decltype(d)>(attention, threads); });
}

void rms_norm(int32_t dtype, const void* input, const void* weight, void* output, int64_t rows,
              int64_t width, float epsilon) {
  with_dtype(dtype, [&](auto d) {
    using D = decltype(d);
    using T = typename D::T;
    auto* const row = reinterpret_cast<float*>(scratch(4 * width));
    for (int64_t i = 0; i < rows; i++) {
      norm_row<D>(static_cast<const T*>(input) + i * width, static_cast<const T*>(weight), epsilon,
                  width, row);
      narrow_row<D>(row, width, static_cast<T*>(output) + i * width);
    }
  });
}

void rotate(int32_t dtype, const void* input, const void* cosines, const void* sines, void* output,
            int64_t rows, int64_t heads, int64_t width) {
  with_dtype(dtype, [&](auto d) {
    using D = decltype(d);
    using T = typename D::T;
    auto* const row = reinterpret_cast<float*>(scratch(4 * width));
    for (int64_t i = 0; i < rows * heads; i++) {
      widen_row<D>(static_cast<const T*>(input) + i * width, width, row);
      rotate_row<D>(row, static_cast<const T*>(cosines) + i / heads * width,
                    static_cast<const T*>(sines) + i / heads * width, width, row);
      narrow_row<D>(row, width, static_cast<T*>(output) + i * width);
    }
  });
}

void swiglu(int32_t dtype, const void* gate, const void* up, void* output, int64_t count) {
  with_dtype(dtype, [&](auto d) {
    using D = decltype(d);
    using T = typename D::T;
    for (int64_t i = 0; i < count; i += LANES) {
      const V x = get_some<D>(static_cast<const T*>(gate) + i, count - i),
              other = get_some<D>(static_cast<const T*>(up) + i, count - i);
      put_some<D>(static_cast<T*>(output) + i, gated<D>(x, other), count - i);
    }
  });
}

}  // namespace

#define DRAFTREE_JOIN(a, b) a##b
#define DRAFTREE_NAMED(name) DRAFTREE_JOIN(kernels_, name)
#define DRAFTREE_TEXT_(name) #name
#define DRAFTREE_TEXT(name) DRAFTREE_TEXT_(name)

extern const Kernels DRAFTREE_NAMED(DRAFTREE_VARIANT);
const Kernels DRAFTREE_NAMED(DRAFTREE_VARIANT) = {
    DRAFTREE_TEXT(DRAFTREE_VARIANT),
    packed_bytes,
    pack,
    pack_int4,
    pack_int8,
    linear,
    forward_pass,
    attend,
    rms_norm,
    rotate,
    swiglu,
};

}  // namespace draftree
