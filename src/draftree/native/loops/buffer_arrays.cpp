// Allocation of NumPy arrays for results; see buffer_arrays.h.
#include "buffer_arrays.h"

namespace draftree {

nb::object empty_array(const char* dtype, int dimensions, const int64_t* shape) {
  static PyObject* const empty =
      nb::object(nb::module_::import_("numpy").attr("empty")).release().ptr();
  PyObject* extents = PyTuple_New(dimensions);
  for (int d = 0; d < dimensions; d++) PyTuple_SetItem(extents, d, PyLong_FromLongLong(shape[d]));
  PyObject* made = PyObject_CallFunction(empty, "(Ns)", extents, dtype);
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

}  // namespace draftree
