// What the retrieval loops share: see retrieval_common.h.
#include "retrieval_common.h"

#include <algorithm>

namespace draftree {

bool read_array(PyObject* object, WholeNumbers& into) noexcept {
  Py_buffer view;
  if (!PyObject_CheckBuffer(object) ||
      PyObject_GetBuffer(object, &view, PyBUF_FORMAT | PyBUF_ND) != 0) {
    PyErr_Clear();
    return false;
  }
  const bool is_signed = is_format<int64_t>(view.format),
             fits = view.ndim == 1 && (is_signed || is_format<uint64_t>(view.format));
  into.data = static_cast<const unsigned char*>(view.buf);
  into.count = fits ? view.shape[0] : 0;
  into.width = static_cast<int>(is_signed ? -view.itemsize : view.itemsize);
  PyBuffer_Release(&view);
  return fits;
}

WholeNumbers whole_numbers_field(nb::handle tuple, Py_ssize_t i) {
  WholeNumbers found;
  if (!PyTuple_Check(tuple.ptr()) || i >= PyTuple_Size(tuple.ptr()) ||
      !read_array(PyTuple_GetItem(tuple.ptr(), i), found))
    throw nb::type_error("a field of a tuple is not a contiguous array of whole numbers");
  return found;
}

int64_t write_context(const Ints& text, int64_t text_length, const Ints& tokens,
                      const Ints& parents, int64_t node, int64_t longest, int64_t* found) {
  int64_t at = longest;
  while (node >= 0 && at > 0) {
    found[--at] = tokens(node);
    node = parents(node);
  }
  const int64_t before = std::min(at, text_length);
  for (int64_t i = 0; i < before; i++) found[at - before + i] = text(text_length - before + i);
  return longest - at + before;
}

}  // namespace draftree
