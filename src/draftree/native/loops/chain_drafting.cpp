// The loops of `drafters/retrieval/chain_drafting.py`.
#include <algorithm>
#include <cmath>
#include <vector>

#include "reproducible_log_exp.h"
#include "logistic_regression.h"
#include "suffix_array_search.h"
#include "suffix_match_drafts.h"

namespace draftree {
namespace {

constexpr int64_t FEATURES = 7, KINDS = 3, BOTH = 2, SAMPLE = 32;
constexpr double MIN_SHARE_MARGIN = 1e-3, NEUTRAL_MATCH = 1.0, PRIOR_HITS = 0.3, PRIOR_COUNT = 1.0,
                 MIN_VALUE = 0.02;

// A corpus and the contexts that are searched for: `IndexedCorpus`.
struct Corpus {
  explicit Corpus(nb::handle tuple)
      : tokens(whole_numbers_field(tuple, 0)),
        suffixes(whole_numbers_field(tuple, 1)),
        longest(whole_field(tuple, 2)),
        shortest(whole_field(tuple, 3)) {}
  WholeNumbers tokens, suffixes;
  int64_t longest, shortest;
};

struct Guess {
  int64_t token = -1;  // -1 for none
  double share = 0.0;
  int64_t length = 0;  // of the context
};

// A candidate after a token of a chain.
struct Candidate {
  int64_t kind = -1, token = 0;  // kind -1 for none
  double x[FEATURES] = {};
  double value = 0.0;
};

double odds(double share) {
  const double p = smaller(larger(share, MIN_SHARE_MARGIN), 1 - MIN_SHARE_MARGIN);
  return log_of(p) - log_of(1 - p);
}

double acceptance(const double* x, const Reals2& weights, int64_t kind) {
  double logit = 0.0;
  for (int64_t i = 0; i < FEATURES; i++) logit += x[i] * weights(kind, i);
  return 1 / (1 + exp_of(-logit));
}

// Chains of one text, in which candidates are written after its last token.
class Chain {
 public:
  Chain(const Ints& text, int64_t longest, double recent)
      : end_(text.shape[0]), longest_(longest), recent_(recent) {
    text_.resize(static_cast<size_t>(end_ + longest));
    for (int64_t i = 0; i < end_; i++) text_[i] = static_cast<int32_t>(text(i));
  }

  // Grow the chain until its value is small or nothing is found.
  void grow(const Reals2& weights, const Outputs& memory, const Limits& limits,
            const Corpus& corpus) {
    double value = 1.0;
    for (int64_t depth = 0; depth < longest_ && value >= MIN_VALUE; depth++) {
      const Guess matched = match(depth, memory, limits), counted = count(depth, corpus);
      weigh(matched, counted, depth, weights);
      const Candidate *own = &listed[2 * depth], *best = own;
      if (own[1].kind >= 0 && (own[0].kind < 0 || own[1].value > own[0].value)) best = own + 1;
      if (best->kind < 0) return;
      value *= best->value;
      tokens.push_back(best->token);
      values.push_back(value);
      text_[end_ + depth] = static_cast<int32_t>(best->token);
      at_ = best->token == matched.token ? found_ : LOST;
    }
  }

  std::vector<Candidate> listed;  // two after each token
  std::vector<int64_t> tokens;
  std::vector<double> values;  // along the path

 private:
  static constexpr int64_t LOST = -2;  // the chain has left the draft

  // The likeliest token of the suffix matches.
  Guess match(int64_t depth, const Outputs& memory, const Limits& limits) {
    found_ = at_ == LOST ? -1 : first_child(draft_of(grown_), at_);
    if (found_ < 0) {
      grown_ = draft_after(text_.data(), end_ + depth, memory, limits);
      found_ = first_child(draft_of(grown_), -1);
    }
    if (found_ < 0) return {};
    return {grown_.nodes[2 * found_], grown_.shares[found_]};
  }

  static int64_t first_child(const Draft& draft, int64_t node) {
    for (int64_t i = node + 1; i < draft.count; i++)
      if (draft.parent(i) == node) return i;
    return -1;
  }

  // The likeliest token after the longest context that the corpus holds.
  Guess count(int64_t depth, const Corpus& corpus) {
    const int64_t last = end_ + depth, longest = std::min(corpus.longest, last);
    context_.assign(text_.begin() + last - longest, text_.begin() + last);
    const FoundSuffix found = find_suffix(corpus.tokens, corpus.suffixes, context_.data() + longest,
                                          longest, corpus.shortest);
    const int64_t whole = found.high - found.low, read = std::min(whole, SAMPLE);
    Guess best;
    int64_t most = 0, run = 0, before = -1;  // equal tokens stand side by side
    for (int64_t i = 0; i < read; i++) {
      const uint64_t place =
          static_cast<uint64_t>(corpus.suffixes(found.low + i * whole / read) + found.length);
      if (place >= static_cast<uint64_t>(corpus.tokens.count)) continue;  // in a broken file
      const int64_t token = corpus.tokens(static_cast<int64_t>(place));
      run = token == before ? run + 1 : 1;
      before = token;
      if (token != SEPARATOR && run > most) most = run, best.token = token;
    }
    if (best.token < 0) return best;
    const double seen = static_cast<double>(whole);
    best.share = (seen * (static_cast<double>(most) / static_cast<double>(read)) + PRIOR_HITS) /
                 (seen + PRIOR_COUNT);
    best.length = found.length;
    return best;
  }

  // List the candidates after a token with their features and values.
  void weigh(const Guess& matched, const Guess& counted, int64_t depth, const Reals2& weights) {
    const double here = log_of(static_cast<double>(grown_.matched_here + 1)) - NEUTRAL_MATCH,
                 earlier = log_of(static_cast<double>(grown_.matched_earlier + 1)) - NEUTRAL_MATCH,
                 deep = log_of(static_cast<double>(depth + 1));
    const bool both = matched.token >= 0 && matched.token == counted.token;
    Candidate found[2];
    if (matched.token >= 0) {
      const double other = both                 ? odds(counted.share)
                           : counted.token >= 0 ? counted.share - 0.5
                                                : 0.0;
      found[0] = {both ? BOTH : 0,
                  matched.token,
                  {1, odds(matched.share), other, recent_, here, deep, earlier}};
    }
    if (counted.token >= 0 && !both) {
      const double other = matched.token >= 0 ? 1.0 : 0.0;
      const double length = log_of(static_cast<double>(counted.length));
      found[1] = {
          1, counted.token, {1, odds(counted.share), other, recent_, other * here, deep, length}};
    }
    for (Candidate& each : found) {
      if (each.kind >= 0) each.value = acceptance(each.x, weights, each.kind);
      listed.push_back(each);
    }
  }

  std::vector<int32_t> text_;
  int64_t end_, longest_;
  double recent_;
  Grown grown_;
  int64_t at_ = LOST, found_ = -1;
  std::vector<int64_t> context_;
};

// The number of tokens of each chain for which the sum of all values pays most, by the seconds of a
// pass with each number of drafted tokens.
std::vector<int64_t> choose_lengths(const std::vector<Chain>& chains, const Reals& seconds,
                                    double rate) {
  struct Node {
    double value;
    int64_t row, length;
  };
  std::vector<Node> nodes;
  for (size_t row = 0; row < chains.size(); row++)
    for (size_t i = 0; i < chains[row].values.size(); i++)
      nodes.push_back(
          {chains[row].values[i], static_cast<int64_t>(row), static_cast<int64_t>(i) + 1});
  std::stable_sort(nodes.begin(), nodes.end(),
                   [](const Node& a, const Node& b) { return a.value > b.value; });
  const size_t most = std::min<size_t>(nodes.size(), seconds.shape[0] - 1);
  double gained = 0.0, best = -rate * seconds(0);
  size_t kept = 0;
  for (size_t i = 0; i < most; i++) {
    gained += nodes[i].value;
    const double worth = gained - rate * seconds(static_cast<int64_t>(i) + 1);
    if (worth > best) best = worth, kept = i + 1;
  }
  std::vector<int64_t> lengths(chains.size());
  for (size_t i = 0; i < kept; i++)
    lengths[nodes[i].row] = std::max(lengths[nodes[i].row], nodes[i].length);
  return lengths;
}

nb::list draft_chains(nb::list texts, const Reals& recent, const Reals2& weights,
                      nb::handle outputs, nb::handle given_limits, nb::handle given_corpus,
                      nb::handle prices) {
  const Outputs memory(outputs);
  const Limits limits(given_limits);
  const Corpus corpus(given_corpus);
  const Reals seconds = field<Reals>(prices, 0);
  const double rate = real_field(prices, 1);
  const Ints longest = field<Ints>(prices, 2);
  std::vector<Chain> chains;
  for (size_t row = 0; row < texts.size(); row++)
    chains.emplace_back(nb::cast<Ints>(texts[row]), longest(row), recent(row));
  std::vector<int64_t> lengths;
  {
    nb::gil_scoped_release without_lock;
    for (Chain& chain : chains) chain.grow(weights, memory, limits, corpus);
    lengths = choose_lengths(chains, seconds, rate);
  }
  nb::list found;
  for (size_t row = 0; row < chains.size(); row++) {
    const Chain& chain = chains[row];
    const int64_t depth = static_cast<int64_t>(chain.listed.size()) / 2;
    auto kinds = make_array<int64_t>(depth, 2);
    auto tokens = make_array<int64_t>(depth, 2);
    auto x = make_array<double>(depth, 2, FEATURES);
    for (int64_t i = 0; i < 2 * depth; i++) {
      const Candidate& each = chain.listed[i];
      kinds.data[i] = each.kind;
      tokens.data[i] = each.token;
      std::copy_n(each.x, FEATURES, x.data + i * FEATURES);
    }
    found.append(nb::make_tuple(copy_array<int64_t>(chain.tokens.data(), lengths[row]),
                                std::move(kinds.object), std::move(tokens.object),
                                std::move(x.object)));
  }
  return found;
}

nb::tuple learn_chains(nb::list drafts, nb::list continuations, const Reals& recent,
                       const Reals2& weights, const Array<const double, 3>& information,
                       nb::handle rates) {
  const double share = real_field(rates, 0), prior = real_field(rates, 1),
               forgetting = real_field(rates, 2), least = real_field(rates, 3);
  std::vector<double> examples[KINDS];
  std::vector<unsigned char> right[KINDS];
  auto hits = make_array<double>(recent.shape[0]);
  for (size_t row = 0; row < drafts.size(); row++) {
    const nb::handle draft = drafts[row];
    const Ints chain = field<Ints>(draft, 0), text = nb::cast<Ints>(continuations[row]);
    const auto kinds = field<Ints2>(draft, 1), tokens = field<Ints2>(draft, 2);
    const auto x = contiguous(field<Array<const double, 3>>(draft, 3));
    hits(row) = recent(row);
    for (int64_t depth = 0; depth < std::min(kinds.shape[0], text.shape[0]); depth++) {
      bool any = false, hit = false;
      for (int64_t i = 0; i < 2; i++) {
        const int64_t kind = kinds(depth, i);
        if (kind < 0) continue;
        const bool same = tokens(depth, i) == text(depth);
        const double* from = x.data + (2 * depth + i) * FEATURES;
        examples[kind].insert(examples[kind].end(), from, from + FEATURES);
        right[kind].push_back(same);
        any = true;
        hit |= same;
      }
      if (any) hits(row) += share * (static_cast<double>(hit) - hits(row));
      if (depth >= chain.shape[0] || chain(depth) != text(depth)) break;
    }
  }
  auto moved = make_array<double>(KINDS, FEATURES);
  auto known = make_array<double>(KINDS, FEATURES, FEATURES);
  std::copy_n(contiguous(weights).data, KINDS * FEATURES, moved.data);
  std::copy_n(contiguous(information).data, KINDS * FEATURES * FEATURES, known.data);
  for (int64_t kind = 0; kind < KINDS; kind++) {
    if (right[kind].empty()) continue;
    step_newton(moved.data + kind * FEATURES, known.data + kind * FEATURES * FEATURES, FEATURES,
                prior, static_cast<int64_t>(right[kind].size()), examples[kind].data(),
                right[kind].data(), forgetting, least);
  }
  return nb::make_tuple(std::move(moved.object), std::move(known.object), std::move(hits.object));
}

}  // namespace

void bind_chains(nb::module_& m) {
  m.def("draft_chains", &draft_chains);
  m.def("learn_chains", &learn_chains);
}

}  // namespace draftree
