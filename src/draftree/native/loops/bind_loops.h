#pragma once
#include <nanobind/nanobind.h>

namespace draftree {
void bind_loops(nanobind::module_& m);
}
