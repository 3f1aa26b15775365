// The loops of `drafters/retrieval/suffix_array.py`.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "suffix_array_search.h"

namespace draftree {

constexpr int64_t END = -1, UNKNOWN = -1;

bool read_array(PyObject* object, WholeNumbers& into) noexcept {
  Py_buffer view;
  if (!PyObject_CheckBuffer(object) ||
      PyObject_GetBuffer(object, &view, PyBUF_FORMAT | PyBUF_ND) != 0) {
    PyErr_Clear();
    return false;
  }
  const bool is_signed = is_format<int64_t>(view.format),
             fits = view.ndim == 1 && (is_signed || is_format<uint64_t>(view.format));
  into.data = static_cast<const unsigned char*>(view.buf);
  into.count = fits ? view.shape[0] : 0;
  into.width = static_cast<int>(is_signed ? -view.itemsize : view.itemsize);
  PyBuffer_Release(&view);
  return fits;
}

WholeNumbers whole_numbers_field(nb::handle tuple, Py_ssize_t i) {
  WholeNumbers found;
  if (!PyTuple_Check(tuple.ptr()) || i >= PyTuple_Size(tuple.ptr()) ||
      !read_array(PyTuple_GetItem(tuple.ptr(), i), found))
    throw nb::type_error("a field of a tuple is not a contiguous array of whole numbers");
  return found;
}

int64_t write_context(const Ints& text, int64_t text_length, const Ints& tokens,
                      const Ints& parents, int64_t node, int64_t longest, int64_t* found) {
  int64_t at = longest;
  while (node >= 0 && at > 0) {
    found[--at] = tokens(node);
    node = parents(node);
  }
  const int64_t before = std::min(at, text_length);
  for (int64_t i = 0; i < before; i++) found[at - before + i] = text(text_length - before + i);
  return longest - at + before;
}

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

// A node of a trie before it is pruned: its token, its matches and its parent.
struct Run {
  int64_t begin, end, parent, token;
  int64_t count() const { return end - begin; }
};

// Keep the k most frequent, in their own order; of equals the first.
void keep_most_frequent(std::vector<Run>& runs, size_t k, std::vector<int64_t>* kept = nullptr) {
  std::vector<int64_t> order(runs.size());
  std::iota(order.begin(), order.end(), 0);
  if (runs.size() > k) {
    const auto is_before = [&](int64_t a, int64_t b) {
      return runs[a].count() != runs[b].count() ? runs[a].count() > runs[b].count() : a < b;
    };
    std::nth_element(order.begin(), order.begin() + k, order.end(), is_before);
    order.resize(k);
    std::sort(order.begin(), order.end());
    for (size_t i = 0; i < k; i++) runs[i] = runs[order[i]];
    runs.resize(k);
  }
  if (kept) *kept = std::move(order);
}

nb::tuple grow_trie(const Array<const int64_t, 2>& rows, int64_t nodes) {
  const int64_t matches = rows.shape[0], length = rows.shape[1];
  std::vector<Run> trie = {{0, matches, 0, END}};
  std::vector<int64_t> kept;
  {
    nb::gil_scoped_release without_lock;
    std::vector<Run> runs;
    size_t layer = 0;
    for (int64_t depth = 0; depth < length; depth++) {
      runs.clear();
      for (size_t node = layer; node < trie.size(); node++) {
        for (int64_t at = trie[node].begin, end = trie[node].end; at < end;) {
          const int64_t token = rows(at, depth), begin = at;
          while (++at < end && rows(at, depth) == token) {
          }
          if (token != END) runs.push_back({begin, at, static_cast<int64_t>(node), token});
        }
      }
      keep_most_frequent(runs, static_cast<size_t>(nodes));
      // Side by side below each parent, the most frequent first.
      std::stable_sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) {
        return a.parent != b.parent ? a.parent < b.parent : a.count() > b.count();
      });
      layer = trie.size();
      trie.insert(trie.end(), runs.begin(), runs.end());
    }
    runs = trie;
    // The root is the most frequent run, or the first of equally frequent ones.
    keep_most_frequent(runs, static_cast<size_t>(nodes + 1), &kept);
  }
  const int64_t size = static_cast<int64_t>(kept.size());
  auto tokens = make_array<int64_t>(size);
  auto log_q = make_array<double>(size);
  auto first = make_array<int64_t>(size), children = make_array<int64_t>(size);
  std::vector<int64_t> number(trie.size());
  for (int64_t i = 0; i < size; i++) {
    const Run& run = trie[kept[i]];
    tokens.data[i] = run.token;
    log_q.data[i] = 0.0;
    first.data[i] = children.data[i] = 0;
    if (i == 0) continue;
    number[kept[i]] = i;
    const int64_t above = number[run.parent];
    log_q.data[i] =
        std::log(static_cast<double>(run.count()) / static_cast<double>(trie[run.parent].count()));
    if (children.data[above] == 0) first.data[above] = i;
    children.data[above]++;
  }
  return nb::make_tuple(std::move(tokens.object), std::move(log_q.object), std::move(first.object),
                        std::move(children.object));
}

nb::object context_of(const Ints& text, const Ints& tokens, const Ints& parents, int64_t node,
                      int64_t longest) {
  std::vector<int64_t> found(static_cast<size_t>(longest));
  const int64_t count =
      write_context(text, text.shape[0], tokens, parents, node, longest, found.data());
  return copy_array<int64_t>(found.data() + longest - count, count);
}

// A trie as it is given: `PrefixTree`.
struct Trie {
  explicit Trie(nb::handle tuple)
      : tokens(field<Ints>(tuple, 0)),
        log_q(field<Reals>(tuple, 1)),
        first(field<Ints>(tuple, 2)),
        children(field<Ints>(tuple, 3)) {}
  Ints tokens;
  Reals log_q;
  Ints first, children;
};

nb::object follow(const Ints& known, const Ints& tokens, const Ints& parents,
                  nb::handle prefix_tree) {
  const Trie trie(prefix_tree);
  const int64_t nodes = tokens.shape[0];
  auto found = make_array<int64_t>(nodes);
  for (int64_t node = 0; node < known.shape[0]; node++) found.data[node] = known(node);
  for (int64_t node = known.shape[0]; node < nodes; node++) {
    const int64_t above = parents(node) >= 0 ? found.data[parents(node)] : UNKNOWN;
    found.data[node] = UNKNOWN;
    if (above < 0) continue;
    const int64_t first = trie.first(above), end = first + trie.children(above);
    for (int64_t child = first; child < end; child++)
      if (trie.tokens(child) == tokens(node)) found.data[node] = child;
  }
  return std::move(found.object);
}

nb::tuple best_children(nb::handle prefix_tree, const Ints& at, int64_t k) {
  const Trie trie(prefix_tree);
  const int64_t rows = at.shape[0];
  int64_t widest = 1;
  for (int64_t i = 0; i < rows; i++) widest = std::max(widest, std::min(k, trie.children(at(i))));
  auto found = make_array<int64_t>(rows, widest);
  auto value = make_array<double>(rows, widest);
  for (int64_t i = 0; i < rows; i++) {
    const int64_t first = trie.first(at(i)), count = std::min(widest, trie.children(at(i)));
    for (int64_t j = 0; j < widest; j++) {
      found(i, j) = j < count ? trie.tokens(first + j) : 0;
      value(i, j) = j < count ? trie.log_q(first + j) : -std::numeric_limits<double>::infinity();
    }
  }
  return nb::make_tuple(std::move(found.object), std::move(value.object));
}

}  // namespace

void bind_suffix_array(nb::module_& m) {
  m.def("search_corpus", &search_corpus);
  m.def("continuations", &continuations);
  m.def("grow_trie", &grow_trie);
  m.def("context_of", &context_of);
  m.def("follow", &follow);
  m.def("best_children", &best_children);
}

}  // namespace draftree
