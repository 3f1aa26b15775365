// The extension module draftree.native._core.
#include "bind_kernels.h"
#include "bind_loops.h"
#include "bind_retrieval.h"

NB_MODULE(_core, m) {
  m.attr("sources_digest") = DRAFTREE_SOURCES;  // of the sources it was built from: CMakeLists.txt
  draftree::bind_kernels(m);
  nanobind::module_ loops = m.def_submodule("loops", "Loops over nodes, tokens and candidates.");
  draftree::bind_loops(loops);
  draftree::bind_retrieval(loops);
}
