// Binds the loops of each file to Python.
#define DRAFTREE_IMPORTS_NUMPY
#include "contiguous_arrays.h"
#include "bind_loops.h"

namespace draftree {

void bind_loops(nanobind::module_& m) {
  if (PyArray_ImportNumPyAPI() < 0) throw nanobind::python_error();
  bind_score_ranking(m);
  bind_tree_growth(m);
  bind_cost_curve(m);
  bind_node_selection(m);
  bind_acceptance_calibration(m);
  bind_pass_layout(m);
  bind_tree_verification(m);
  bind_cache_slots(m);
  bind_node_table(m);
  bind_merge_candidates(m);
  bind_hit_acceptance(m);
  bind_logistic_regression(m);
  bind_topk(m);
  bind_simd_loops(m);
}

}  // namespace draftree
