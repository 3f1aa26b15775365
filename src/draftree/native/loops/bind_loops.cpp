// Binds the loops of each file to Python.
#define DRAFTREE_IMPORTS_NUMPY
#include "numpy_arrays.h"
#include "bind_loops.h"

namespace draftree {

void bind_tree_growth(nanobind::module_& m);
void bind_tree_layout(nanobind::module_& m);
void bind_tree_verification(nanobind::module_& m);
void bind_candidate_fusion(nanobind::module_& m);
void bind_vocabulary_loops(nanobind::module_& m);

void bind_loops(nanobind::module_& m) {
  if (PyArray_ImportNumPyAPI() < 0) throw nanobind::python_error();
  bind_tree_growth(m);
  bind_tree_layout(m);
  bind_tree_verification(m);
  bind_candidate_fusion(m);
  bind_vocabulary_loops(m);
}

}  // namespace draftree
