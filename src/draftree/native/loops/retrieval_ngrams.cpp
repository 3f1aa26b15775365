// The loops of `drafters/retrieval/ngram_table.py` and `adaptive_ngrams.py`.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "retrieval_common.h"

namespace draftree {
namespace {

// Stored n-grams: `Table`.
struct Table {
  explicit Table(nb::handle tuple)
      : first(field<Ints>(tuple, 0)),
        context_low(whole_numbers_field(tuple, 1)),
        context_high(whole_numbers_field(tuple, 2)),
        size(whole_numbers_field(tuple, 3)),
        sums(field<Ints>(tuple, 4)),
        token_low(whole_numbers_field(tuple, 5)),
        token_high(whole_numbers_field(tuple, 6)),
        share(whole_numbers_field(tuple, 7)) {}
  Ints first;
  WholeNumbers context_low, context_high, size;
  Ints sums;
  WholeNumbers token_low, token_high, share;

  int64_t vocab() const { return first.shape[0] - 1; }
};

// A value of two planes.
uint64_t planes(const WholeNumbers& low, const WholeNumbers& high, int64_t at) {
  const uint64_t value = static_cast<uint64_t>(low(at));
  return high.count ? value | static_cast<uint64_t>(high(at)) << 16 : value;
}

// A context as a number.
uint64_t number_of(const int64_t* context, int64_t length, int64_t width) {
  uint64_t wanted = 0;
  for (int64_t i = 0; i < length; i++) wanted = wanted << width | static_cast<uint64_t>(context[i]);
  return wanted;
}

// The number of a context in the table, -1 for none.
int64_t placed_at(const Table& table, const int64_t* context, int64_t length, int64_t width) {
  if (context[0] >= table.vocab()) return -1;
  int64_t low = table.first(context[0]);
  const int64_t end = table.first(context[0] + 1);
  const uint64_t wanted = number_of(context + 1, length - 1, width);
  int64_t high = end;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (planes(table.context_low, table.context_high, middle) < wanted)
      low = middle + 1;
    else
      high = middle;
  }
  return low < end && planes(table.context_low, table.context_high, low) == wanted ? low : -1;
}

// Tokens after one context, with the increments of each and, of those in the table, their weights.
struct Successors {
  std::vector<int64_t> tokens, times;
  std::vector<double> weights;

  // Read the likeliest `top` successors of a context from the table.
  void read(const Table& table, const int64_t* context, int64_t length, int64_t width,
            int64_t top) {
    const int64_t place = placed_at(table, context, length, width);
    if (place < 0) return;
    int64_t start = table.sums(place / 64);
    for (int64_t i = place / 64 * 64; i < place; i++) start += table.size(i);
    const int64_t found = std::min(table.size(place), top);
    for (int64_t i = 0; i < found; i++) {
      const int64_t token =
          start + i < table.share.count
              ? static_cast<int64_t>(planes(table.token_low, table.token_high, start + i))
              : -1;
      if (token < 0 || token >= table.vocab()) return;  // of a broken file
      tokens.push_back(token);
      times.push_back(0);
      weights.push_back(static_cast<double>(table.share(start + i)) / 65535);
    }
  }

  // Add increments to a token, found before or new.
  void add(int64_t token, int64_t more) {
    for (size_t i = 0; i < tokens.size(); i++) {
      if (tokens[i] == token) {
        times[i] += more;
        return;
      }
    }
    tokens.push_back(token);
    times.push_back(more);
    weights.push_back(0.0);
  }

  double sum() const {
    double whole = 0.0;
    for (double weight : weights) whole += weight;
    return whole;
  }

  void clear() {
    tokens.clear();
    times.clear();
    weights.clear();
  }
};

// Increments of earlier texts: `Increments`.
struct Memory {
  explicit Memory(nb::handle tuple)
      : context(field<Array<const uint64_t, 1>>(tuple, 0)),
        start(field<Ints>(tuple, 1)),
        token(field<Ints>(tuple, 2)),
        times(field<Ints>(tuple, 3)) {}
  Array<const uint64_t, 1> context;
  Ints start, token, times;

  void add_to(Successors& found, uint64_t wanted) const {
    int64_t low = 0, high = context.shape[0];
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (context(middle) < wanted)
        low = middle + 1;
      else
        high = middle;
    }
    if (low == context.shape[0] || context(low) != wanted) return;
    for (int64_t i = start(low); i < start(low + 1); i++) found.add(token(i), times(i));
  }
};

// The bucket of a context of n - 1 tokens; `size` is a power of 2.
template <class Token>
int64_t bucket(Token token, int64_t n, int64_t size) {
  uint64_t mixed = 0;
  for (int64_t i = 0; i < n - 1; i++) {
    mixed = (mixed ^ static_cast<uint64_t>(token(i))) * 0x9E3779B97F4A7C15u;
    mixed ^= mixed >> 29;
  }
  return static_cast<int64_t>(mixed & static_cast<uint64_t>(size - 1));
}

// A row's text with the increments of its n-grams: `Adapted`.
struct Text {
  explicit Text(nb::handle tuple)
      : tokens(field<Ints>(tuple, 0)),
        times(field<Shorts>(tuple, 1)),
        heads(field<Shorts>(tuple, 2)),
        before(field<Shorts>(tuple, 3)) {}
  Ints tokens;
  Shorts times, heads, before;

  void add_to(Successors& found, const int64_t* context, int64_t n) const {
    int64_t at = heads(bucket([context](int64_t i) { return context[i]; }, n, heads.shape[0]));
    for (; at >= 0; at = before(at)) {
      bool same = times(at) > 0;
      for (int64_t i = 0; same && i < n - 1; i++) same = tokens(at - n + 1 + i) == context[i];
      if (same) found.add(tokens(at), times(at));
    }
  }
};

void index_contexts(const Ints& text, const Array<int32_t, 1>& heads,
                    const Array<int32_t, 1>& before, int64_t start, int64_t n) {
  for (int64_t at = std::max(start, n - 1); at < text.shape[0]; at++) {
    const int64_t slot = bucket([&](int64_t i) { return text(at - n + 1 + i); }, n, heads.shape[0]);
    before(at) = heads(slot);
    heads(slot) = static_cast<int32_t>(at);
  }
}

nb::tuple ngram_successors(nb::handle given_table, nb::handle given_memory, nb::handle given_text,
                           const Ints& frontier, const Ints& tokens, const Ints& parents, int64_t k,
                           nb::handle weighting) {
  const Table table(given_table);
  const Memory memory(given_memory);
  const Text text(given_text);
  const int64_t n = whole_field(weighting, 0), width = whole_field(weighting, 1),
                top = whole_field(weighting, 2);
  const double increment = real_field(weighting, 3), cap = real_field(weighting, 4);
  const int64_t nodes = frontier.shape[0], length = n - 1;
  auto found_tokens = make_array<int64_t>(nodes, k);
  auto log_q = make_array<double>(nodes, k);
  {
    nb::gil_scoped_release without_lock;
    std::fill_n(found_tokens.data, nodes * k, 0);
    std::fill_n(log_q.data, nodes * k, -std::numeric_limits<double>::infinity());
    std::vector<int64_t> context(static_cast<size_t>(length));
    Successors found;
    for (int64_t row = 0; row < nodes; row++) {
      if (write_context(text.tokens, std::max<int64_t>(text.tokens.shape[0] - 1, 0), tokens,
                        parents, frontier(row), length, context.data()) < length)
        continue;
      found.clear();
      found.read(table, context.data(), length, width, top);
      const double pruned = found.tokens.empty() ? 0.0 : larger(0.0, 1 - found.sum());
      memory.add_to(found, number_of(context.data(), length, width));
      text.add_to(found, context.data(), n);
      const int64_t count = static_cast<int64_t>(found.tokens.size());
      std::vector<double>& weights = found.weights;
      std::vector<int64_t>& ids = found.tokens;
      for (int64_t i = 0; i < count; i++)
        if (found.times[i])
          weights[i] = smaller(weights[i] + increment * static_cast<double>(found.times[i]), cap);
      const double whole = pruned + found.sum();
      for (int64_t j = 0; j < std::min(k, count); j++) {
        int64_t best = j;
        for (int64_t i = j + 1; i < count; i++)
          if (weights[i] > weights[best] || (weights[i] == weights[best] && ids[i] < ids[best]))
            best = i;
        found_tokens(row, j) = ids[best];
        log_q(row, j) = std::log(weights[best] / whole);
        ids[best] = ids[j], weights[best] = weights[j];
      }
    }
  }
  return nb::make_tuple(std::move(found_tokens.object), std::move(log_q.object));
}

}  // namespace

void bind_ngrams(nb::module_& m) {
  m.def("index_contexts", &index_contexts);
  m.def("ngram_successors", &ngram_successors);
}

}  // namespace draftree
