// The binding of simd_loops.h to Python: see topk.py, log_probs.py, entropy.py, node_classifier.py
// and philox.py.
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cstring>

#include "contiguous_arrays.h"
#include "variant_choice.h"
#include "bind_loops.h"
#include "kernels.h"
#include "thread_team.h"
#include "simd_loops.h"

namespace nb = nanobind;

namespace draftree {

extern const SimdLoops loops_generic;
#if defined(__x86_64__)
extern const SimdLoops loops_avx2, loops_avx512, loops_avx512_vnni, loops_avx512_bf16;
#if defined(DRAFTREE_HAS_AMX)
extern const SimdLoops loops_amx;
#endif
#endif

namespace {

const SimdLoops& simd_loops() {
#if defined(DRAFTREE_HAS_AMX)
  if (!std::strcmp(loops_amx.name, variant_in_use().name)) return loops_amx;
#endif
#if defined(__x86_64__)
  for (const SimdLoops* each : {&loops_avx512_bf16, &loops_avx512_vnni, &loops_avx512, &loops_avx2})
    if (!std::strcmp(each->name, variant_in_use().name)) return *each;
#endif
  return loops_generic;
}

Out<double> entropies(const In<float, 2>& log_q, int64_t top) {
  auto found = Out<double>::empty({log_q.size(0)});
  {
    nb::gil_scoped_release release;
    simd_loops().entropies(log_q.data(), log_q.size(0), log_q.size(1), top, found.data());
  }
  return found;
}

Out<int64_t> largest(const In<int16_t, 2>& bits) {
  auto found = Out<int64_t>::empty({bits.size(0)});
  {
    nb::gil_scoped_release release;
    simd_loops().largest(bits.data(), bits.size(0), bits.size(1), found.data());
  }
  return found;
}

Out<double> confidences(const In<double, 2>& x, const In<double, 2>& hidden,
                        const In<double>& hidden_bias, const In<double>& output,
                        double output_bias) {
  auto found = Out<double>::empty({x.size(1)});
  simd_loops().confidences(x.data(), x.size(0), x.size(1), hidden.data(), hidden_bias.data(),
                           hidden.size(0), output.data(), output_bias, found.data());
  return found;
}

Out<double> gumbel(const In<uint32_t>& place, int64_t count) {
  if (place.size(0) != 5) throw nb::value_error("a place has five words");
  auto noise = Out<double>::empty({count});
  {
    nb::gil_scoped_release release;
    simd_loops().gumbel(place.data(), count, noise.data());
  }
  return noise;
}

// Logits in bfloat16 are given as int16.
template <class T>
std::tuple<Out<int64_t, 2>, Out<double, 2>, Out<float>> top_log_probs(const In<T, 2>& logits,
                                                                      int64_t k, int threads) {
  const int64_t rows = logits.size(0), width = logits.size(1);
  k = std::clamp<int64_t>(k, 0, width);
  auto tokens = Out<int64_t, 2>::empty({rows, k});
  auto log_q = Out<double, 2>::empty({rows, k});
  auto log_sums = Out<float>::empty({rows});
  struct Context {
    const SimdLoops& loops;
    const T* logits;
    int64_t rows, width, k;
    int64_t* tokens;
    double* log_q;
    float* log_sums;
  } context{simd_loops(),  logits.data(), rows,           width, k,
            tokens.data(), log_q.data(),  log_sums.data()};
  {
    nb::gil_scoped_release release;
    run_team(
        static_cast<int>(std::min<int64_t>(threads, rows)),
        [](void* data, int thread, int count) {
          const auto* c = static_cast<const Context*>(data);
          const int64_t begin = c->rows * thread / count, end = c->rows * (thread + 1) / count;
          c->loops.top_log_probs(c->logits + begin * c->width, sizeof(T) == 4 ? FLOAT32 : BFLOAT16,
                                 end - begin, c->width, c->k, c->tokens + begin * c->k,
                                 c->log_q + begin * c->k, c->log_sums + begin);
        },
        &context);
  }
  return {tokens, log_q, log_sums};
}

}  // namespace

void bind_simd_loops(nb::module_& m) {
  m.def("simd_variant", [] { return simd_loops().name; });
  m.def("entropies", &entropies);
  m.def("largest", &largest);
  m.def("confidences", &confidences);
  m.def("gumbel", &gumbel);
  m.def("top_log_probs", &top_log_probs<float>);
  m.def("top_log_probs", &top_log_probs<int16_t>);
}

}  // namespace draftree
