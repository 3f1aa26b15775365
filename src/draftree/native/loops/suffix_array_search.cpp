// Search in a corpus by its suffix array: see `drafters/retrieval/suffix_array.py`.
#include <algorithm>
#include <utility>
#include <vector>

#include "suffix_array_search.h"

namespace draftree {

constexpr int64_t END = -1;

namespace {

// Return whether the suffix at a place comes before a query; of those that begin with it do, if
// `whole`, all that go on.
template <class Reader>
bool is_before(Reader tokens, int64_t count, int64_t place, const int64_t* query, int64_t length,
               bool whole) {
  const uint64_t start = static_cast<uint64_t>(place), size = static_cast<uint64_t>(count);
  for (int64_t j = 0; j < length; j++) {
    if (start + j >= size) return true;  // beyond the end, or in a broken file
    const int64_t token = tokens(static_cast<int64_t>(start + j));
    if (token != query[j]) return token < query[j];
  }
  const int64_t after = static_cast<int64_t>(start + length);
  return whole && (after >= count || tokens(after) != SEPARATOR);
}

template <class Reader>
int64_t first_suffix(Reader tokens, int64_t count, const WholeNumbers& suffixes,
                     const int64_t* query, int64_t length, bool whole) {
  int64_t low = 0, high = suffixes.count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (is_before(tokens, count, suffixes(middle), query, length, whole))
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

}  // namespace

FoundSuffix find_suffix(const WholeNumbers& tokens, const WholeNumbers& suffixes,
                        const int64_t* end, int64_t longest, int64_t shortest) {
  FoundSuffix found;
  int64_t fewest = shortest, most = longest;
  tokens.visit([&](auto reader) {
    while (fewest <= most) {
      const int64_t n = (fewest + most) / 2;
      int64_t at = first_suffix(reader, tokens.count, suffixes, end - n, n, false);
      // The end of a corpus without separators.
      if (at < suffixes.count && suffixes(at) + n == tokens.count) at++;
      if (at < suffixes.count && is_before(reader, tokens.count, suffixes(at), end - n, n, true)) {
        found.length = n, found.low = at, fewest = n + 1;
      } else {
        most = n - 1;
      }
    }
    if (const int64_t n = found.length)
      found.high =
          std::max(found.low + 1, first_suffix(reader, tokens.count, suffixes, end - n, n, true));
  });
  return found;
}

namespace {

nb::tuple search_corpus(const WholeNumbers& tokens, const WholeNumbers& suffixes,
                        const Ints& context, int64_t longest, int64_t shortest) {
  FoundSuffix found;
  {
    nb::gil_scoped_release without_lock;
    std::vector<int64_t> copy(static_cast<size_t>(context.shape[0]));
    for (int64_t i = 0; i < context.shape[0]; i++) copy[i] = context(i);
    found = find_suffix(tokens, suffixes, copy.data() + copy.size(),
                        std::min(longest, context.shape[0]), shortest);
  }
  return nb::make_tuple(found.length, found.low, found.high);
}

nb::object continuations(const WholeNumbers& tokens, const WholeNumbers& suffixes, int64_t low,
                         int64_t high, int64_t skip, int64_t length, int64_t most) {
  const int64_t count = std::max<int64_t>(0, std::min(high - low, most));
  auto rows = make_array<int64_t>(count, length);
  nb::gil_scoped_release without_lock;
  tokens.visit([&](auto reader) {
    for (int64_t i = 0; i < count; i++) {
      const uint64_t place = static_cast<uint64_t>(suffixes(low + i * (high - low) / count)) +
                             static_cast<uint64_t>(skip);
      int64_t *row = rows.data + i * length, j = 0;
      for (; j < length; j++) {
        const uint64_t at = place + static_cast<uint64_t>(j);
        if (at >= static_cast<uint64_t>(tokens.count)) break;
        const int64_t token = reader(static_cast<int64_t>(at));
        if (token == SEPARATOR) break;
        row[j] = token;
      }
      for (; j < length; j++) row[j] = END;
    }
  });
  return std::move(rows.object);
}

}  // namespace

void bind_suffix_array(nb::module_& m) {
  m.def("search_corpus", &search_corpus);
  m.def("continuations", &continuations);
}

}  // namespace draftree
