// Binds the loops of each file to Python.
#define DRAFTREE_IMPORTS_NUMPY
#include "contiguous_arrays.h"
#include "bind_loops.h"

namespace draftree {

void bind_tree_growth(nanobind::module_& m);
void bind_tree_layout(nanobind::module_& m);
void bind_tree_verification(nanobind::module_& m);
void bind_node_table(nanobind::module_& m);
void bind_merge_candidates(nanobind::module_& m);
void bind_logistic(nanobind::module_& m);
void bind_vocabulary_loops(nanobind::module_& m);

void bind_loops(nanobind::module_& m) {
  if (PyArray_ImportNumPyAPI() < 0) throw nanobind::python_error();
  bind_tree_growth(m);
  bind_tree_layout(m);
  bind_tree_verification(m);
  bind_node_table(m);
  bind_merge_candidates(m);
  bind_logistic(m);
  bind_vocabulary_loops(m);
}

}  // namespace draftree
