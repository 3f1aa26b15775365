// The binding of the retrieval loops.
#include "retrieval_common.h"

#include "bind_retrieval.h"

namespace draftree {

void bind_retrieval(nb::module_& m) {
  bind_suffix_match_drafts(m);
  bind_suffix_node_expansion(m);
  bind_suffix_array(m);
  bind_continuation_trie(m);
  bind_ngrams(m);
  bind_mcts(m);
  bind_chains(m);
}

}  // namespace draftree
