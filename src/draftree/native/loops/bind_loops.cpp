#include "bind_loops.h"

namespace draftree {

void bind_loops(nanobind::module_&) {}

}  // namespace draftree
