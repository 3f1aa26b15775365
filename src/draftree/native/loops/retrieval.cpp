#include "bind_retrieval.h"

namespace draftree {

void bind_retrieval(nanobind::module_&) {}

}  // namespace draftree
