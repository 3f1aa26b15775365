// The k largest entries of each row: see topk.py.
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <limits>

#include "bind_loops.h"
#include "contiguous_arrays.h"

namespace nb = nanobind;

namespace draftree {
namespace {

template <class T>
void find_likeliest(const T* row, int64_t width, int64_t k, int64_t* place, double* best) {
  int64_t count = 0;
  T least = -std::numeric_limits<T>::infinity();
  for (int64_t i = 0; i < width && k; i++) {
    const T value = row[i];
    if (count == k && (value <= least || least != least)) continue;
    const bool nothing = value != value;
    count = std::min(count + 1, k);
    int64_t at = count - 1;
    for (; at && (value > best[at - 1] || (nothing && best[at - 1] == best[at - 1])); at--) {
      best[at] = best[at - 1];
      place[at] = place[at - 1];
    }
    best[at] = value;
    place[at] = i;
    if (count == k) least = static_cast<T>(best[k - 1]);
  }
}

template <class T>
std::tuple<Out<int64_t, 2>, Out<double, 2>> likeliest(const In<T, 2>& values, int64_t k) {
  const int64_t rows = values.size(0), width = values.size(1);
  k = std::clamp<int64_t>(k, 0, width);
  auto places = Out<int64_t, 2>::empty({rows, k});
  auto found = Out<double, 2>::empty({rows, k});
  {
    nb::gil_scoped_release release;
    for (int64_t f = 0; f < rows; f++)
      find_likeliest(values.data() + f * width, width, k, places.data() + f * k,
                     found.data() + f * k);
  }
  return {places, found};
}

}  // namespace

void bind_topk(nb::module_& m) {
  m.def("likeliest", &likeliest<float>);
  m.def("likeliest", &likeliest<double>);
}

}  // namespace draftree
