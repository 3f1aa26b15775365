// The binding of the kernels to Python.
#pragma once
#include <nanobind/nanobind.h>

namespace draftree {
void bind_kernels(nanobind::module_& m);

// Return the name of the variant in use.
const char* variant_in_use();
}  // namespace draftree
