// The binding of the kernels to Python.
#pragma once
#include <nanobind/nanobind.h>

namespace draftree {
void bind_kernels(nanobind::module_& m);
}
