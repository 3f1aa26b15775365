// The binding of the loops over trees, distributions and texts to Python.
#pragma once
#include <nanobind/nanobind.h>

namespace draftree {
void bind_loops(nanobind::module_& m);
}
