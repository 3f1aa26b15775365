// Drafts of suffix matches: see `drafters/retrieval/suffix_match_drafts.py`.
#include <algorithm>
#include <utility>

#include "suffix_match_drafts.h"

namespace draftree {
namespace {

constexpr int32_t END = -1;

// Places where a match ends, and how many tokens match there; longest first.
struct Occurrences {
  std::vector<int32_t> places, lengths;

  void add(int64_t place, int64_t length) {
    places.push_back(static_cast<int32_t>(place));
    lengths.push_back(static_cast<int32_t>(length));
  }
  int64_t longest() const { return lengths.empty() ? 0 : lengths[0]; }
};

// The first `limits.places` by falling length; equals stay in their order.
Occurrences longest_first(const Occurrences& found, const Limits& limits) {
  std::vector<int64_t> begin(static_cast<size_t>(limits.longest + 2));
  for (int32_t n : found.lengths) begin[limits.longest - n + 1]++;
  for (int64_t n = 0; n <= limits.longest; n++) begin[n + 1] += begin[n];
  const int64_t count = static_cast<int64_t>(found.places.size()),
                kept = std::min(count, limits.places);
  Occurrences sorted;
  sorted.places.resize(kept);
  sorted.lengths.resize(kept);
  for (int64_t i = 0; i < count; i++) {
    int64_t& at = begin[limits.longest - found.lengths[i]];
    if (at < kept) sorted.places[at] = found.places[i], sorted.lengths[at] = found.lengths[i];
    at++;
  }
  return sorted;
}

// The last place before `end` of a token, -1 for none.
int64_t last_place(const int32_t* text, int64_t end, int32_t token) {
  constexpr int64_t STEP = 16;
  for (; end >= STEP; end -= STEP) {
    int32_t any = 0;
    for (int64_t i = 0; i < STEP; i++) any |= text[end - STEP + i] == token;
    if (any) break;
  }
  while (--end >= 0 && text[end] != token) {
  }
  return end;
}

Occurrences in_text(const int32_t* text, int64_t end, const Limits& limits) {
  Occurrences found;
  if (end == 0) return found;
  int64_t whole = 0;
  const int32_t* last = text + end - 1;
  for (int64_t place = last_place(text, end - 1, *last); place >= 0;
       place = last_place(text, place, *last)) {
    int64_t n = 1;
    while (n < limits.longest && n <= place && text[place - n] == last[-n]) n++;
    found.add(place, n);
    whole += n == limits.longest;
    if (whole == limits.places) break;  // nothing before can match better
  }
  return longest_first(found, limits);
}

struct Comparison {
  int64_t equal;  // tokens backwards from a place that are the text's end
  int sign;       // of the next, 0 where there is none
};

Comparison compare(const int32_t* tokens, int64_t start, int64_t place, const int32_t* text,
                   int64_t end, int64_t most) {
  const int64_t count = std::min(most, end);
  for (int64_t n = 0; n < count; n++) {
    const int32_t here = place - n >= start ? tokens[place - n] : END - 1,
                  wanted = text[end - 1 - n];
    if (here != wanted) return {n, here < wanted ? -1 : 1};
  }
  return {count, 0};
}

Occurrences in_memory(const Outputs& memory, const int32_t* text, int64_t end,
                      const Limits& limits) {
  const int32_t *tokens = memory.tokens.data, *order = memory.order.data;
  const int64_t most = limits.longest;
  Occurrences found;
  std::vector<int64_t> of_length(static_cast<size_t>(most + 1));  // how many were found
  // The longest match length that occurs often enough.
  int64_t enough = 0;
  for (int64_t block = memory.blocks.shape[0] - 2; block >= 0; block--) {
    const int64_t start = memory.blocks(block), first = memory.sorted_blocks(block),
                  last = memory.sorted_blocks(block + 1);
    const auto equal = [&](int64_t at, int64_t bound) {
      return at >= first && at < last ? compare(tokens, start, order[at], text, end, bound).equal
                                      : 0;
    };
    int64_t right = first, high = last;
    while (right < high) {
      const int64_t middle = (right + high) / 2;
      if (compare(tokens, start, order[middle], text, end, most).sign < 0)
        right = middle + 1;
      else
        high = middle;
    }
    int64_t left = right - 1, taken = 0, above = equal(left, most), below = equal(right, most);
    // Matches get shorter with the distance from the place.
    for (; taken < limits.places && std::max(above, below) > enough; taken++) {
      of_length[std::max(above, below)]++;
      if (below >= above) {
        found.add(order[right], below);
        below = equal(++right, below);
      } else {
        found.add(order[left], above);
        above = equal(--left, above);
      }
    }
    int64_t longer = 0;
    for (int64_t n = most; n > enough; n--) {
      longer += of_length[n];
      if (longer >= limits.places) {
        enough = n;
        break;
      }
    }
  }
  return longest_first(found, limits);
}

// A continuation that may be drafted next.
struct Candidate {
  int32_t token, parent;
  int64_t begin, end, depth, number;
  double value, share;  // the probability along the path, and that given its parent
};

// Grow the tree of the likeliest continuations of some places, which are sorted by what is found.
struct Growth {
  std::vector<int64_t> keys;
  std::vector<int32_t> places;
  std::vector<Candidate> waiting;

  // Sort places by the token `ahead` of them; return how many have none, which come first.
  int64_t split(const int32_t* tokens, int64_t size, int64_t begin, int64_t end, int64_t ahead) {
    int64_t none = 0;
    keys.resize(static_cast<size_t>(end - begin));
    for (int64_t i = begin; i < end; i++) {
      const int32_t token = places[i] + ahead < size ? tokens[places[i] + ahead] : END;
      none += token == END;
      keys[i - begin] = static_cast<int64_t>(token) * (int64_t{1} << 32) + places[i];
    }
    std::sort(keys.begin(), keys.end());
    for (int64_t i = begin; i < end; i++)
      places[i] = static_cast<int32_t>(keys[i - begin] & 0x7FFFFFFF);
    return none;
  }

  void grow(const int32_t* tokens, int64_t size, int64_t budget, int64_t depth, double least,
            Grown& grown) {
    grown.nodes.clear();
    grown.shares.clear();
    grown.score = 0.0;
    waiting.clear();
    int64_t begin = 0, stop = static_cast<int64_t>(places.size()), ahead = 1, pushed = 0;
    int32_t node = -1;
    double value = 1.0;
    while (node + 1 < budget) {
      int64_t at = ahead <= depth ? begin + split(tokens, size, begin, stop, ahead) : stop;
      const double total = static_cast<double>(stop - at);
      while (at < stop) {
        const int32_t token = tokens[places[at] + ahead];
        const int64_t first = at;
        while (at < stop && tokens[places[at] + ahead] == token) at++;
        const double share = static_cast<double>(at - first) / total;
        if (value * share >= least)
          waiting.push_back({token, node, first, at, ahead, pushed++, value * share, share});
      }
      if (waiting.empty()) break;
      size_t best = 0;
      for (size_t i = 1; i < waiting.size(); i++)
        if (waiting[i].value > waiting[best].value ||
            (waiting[i].value == waiting[best].value && waiting[i].number < waiting[best].number))
          best = i;
      const Candidate& chosen = waiting[best];
      node++;
      grown.nodes.push_back(chosen.token);
      grown.nodes.push_back(chosen.parent);
      grown.shares.push_back(chosen.share);
      begin = chosen.begin, stop = chosen.end, ahead = chosen.depth + 1, value = chosen.value;
      grown.score += value;
      waiting[best] = waiting.back();
      waiting.pop_back();
    }
  }
};

// Replace a draft by that of the largest score among those of all lengths of the pattern; it wins
// ties itself.
void improve(Grown& best, const int32_t* tokens, int64_t size, const Occurrences& found,
             const Limits& limits) {
  Growth growth;
  Grown other;
  const std::vector<int32_t>& lengths = found.lengths;
  for (size_t i = 0; i < lengths.size(); i++) {
    if (i + 1 < lengths.size() && lengths[i + 1] == lengths[i]) continue;
    // The length of the longest pattern with exactly these occurrences.
    const double allowed = limits.factor * lengths[i] + 1e-6;
    const int64_t budget = allowed < MAX_NODES ? static_cast<int64_t>(allowed) : MAX_NODES;
    if (static_cast<double>(budget) <= best.score) break;
    growth.places.assign(found.places.begin(), found.places.begin() + static_cast<int64_t>(i) + 1);
    growth.grow(tokens, size, budget, limits.length, limits.least, other);
    if (other.score > best.score) std::swap(best, other);
  }
}

}  // namespace

Grown draft_after(const int32_t* text, int64_t end, const Outputs& memory, const Limits& limits) {
  Grown best;
  const Occurrences here = in_text(text, end, limits),
                    earlier = in_memory(memory, text, end, limits);
  improve(best, text, end, here, limits);
  improve(best, memory.tokens.data, memory.tokens.shape[0], earlier, limits);
  best.matched_here = here.longest();
  best.matched_earlier = earlier.longest();
  return best;
}

nb::tuple draft_tuple(const Grown& grown) {
  const int64_t count = static_cast<int64_t>(grown.shares.size());
  auto nodes = make_array<int32_t>(count, 2);
  std::copy(grown.nodes.begin(), grown.nodes.end(), nodes.data);
  return nb::make_tuple(std::move(nodes.object), copy_array<double>(grown.shares.data(), count));
}

namespace {

nb::tuple suffix_draft(const Array<int32_t, 1>& text, int64_t end, nb::handle outputs,
                       nb::handle given_limits) {
  const Outputs memory(outputs);
  const Limits limits(given_limits);
  Grown grown;
  {
    nb::gil_scoped_release without_lock;
    grown = draft_after(contiguous(text).data, end, memory, limits);
  }
  return draft_tuple(grown);
}

}  // namespace

void bind_suffix_match_drafts(nb::module_& m) {
  m.attr("MAX_NODES") = MAX_NODES;
  m.def("suffix_draft", &suffix_draft);
}

}  // namespace draftree
