// The binding of the retrieval loops to Python.
#pragma once
#include <nanobind/nanobind.h>

namespace draftree {
void bind_retrieval(nanobind::module_& m);
}
