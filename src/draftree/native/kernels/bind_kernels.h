#pragma once
#include <nanobind/nanobind.h>

namespace draftree {
void bind_kernels(nanobind::module_& m);
}
