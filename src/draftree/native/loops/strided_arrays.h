// NumPy arrays as arguments and results of the retrieval loops, by Python's buffer protocol.
//
// All other loops use contiguous_arrays.h, which copies an argument that is not C-contiguous. The
// retrieval loops read and write whole texts and their indices, which are long, so that here no
// argument is ever copied.
//
// `Array<T, N>` reads an argument through the buffer protocol: no allocation, half the time of
// nanobind::ndarray for each of the up to twenty arguments. Strides are free, the dtype and the
// number of dimensions are checked (not the dtype of an empty array, which stands for "none"). T is
// const for what is only read. An argument stays alive during the call, so that its data does, too.
#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>
#include <type_traits>
#include <utility>

namespace draftree {

namespace nb = nanobind;

template <class T, int N>
struct Array {
  T* data = nullptr;
  int64_t shape[N] = {};
  int64_t stride[N] = {};  // in elements

  int64_t size() const {
    int64_t n = 1;
    for (int64_t extent : shape) n *= extent;
    return n;
  }
  T& operator()(int64_t i) const { return data[i * stride[0]]; }
  T& operator()(int64_t i, int64_t j) const { return data[i * stride[0] + j * stride[1]]; }
  T& operator()(int64_t i, int64_t j, int64_t k) const {
    return data[i * stride[0] + j * stride[1] + k * stride[2]];
  }
};

using Ints = Array<const int64_t, 1>;
using Ints2 = Array<const int64_t, 2>;
using Reals = Array<const double, 1>;
using Reals2 = Array<const double, 2>;
using Shorts = Array<const int32_t, 1>;

// Return whether a format of the buffer protocol stands for numbers like T; their size is compared
// apart.
template <class T>
bool is_format(const char* format) {
  const char c = format == nullptr                                            ? 'B'
                 : (format[0] == '<' || format[0] == '=' || format[0] == '@') ? format[1]
                                                                              : format[0];
  if (std::is_same_v<T, bool>) return c == '?';
  if (std::is_floating_point_v<T>) return c == 'f' || c == 'd';
  if (std::is_signed_v<T>) return c == 'b' || c == 'h' || c == 'i' || c == 'l' || c == 'q';
  return c == 'B' || c == 'H' || c == 'I' || c == 'L' || c == 'Q';
}

// Fill in an array; return whether the object is one of this kind.
template <class T, int N>
bool read_array(PyObject* object, Array<T, N>& into) noexcept {
  Py_buffer view;
  const int flags = PyBUF_STRIDES | PyBUF_FORMAT | (std::is_const_v<T> ? 0 : PyBUF_WRITABLE);
  if (!PyObject_CheckBuffer(object) || PyObject_GetBuffer(object, &view, flags) != 0) {
    PyErr_Clear();
    return false;
  }
  bool fits = view.ndim == N;
  int64_t count = 1;
  for (int d = 0; fits && d < N; d++) {
    into.shape[d] = view.shape[d];
    into.stride[d] = view.strides[d] / static_cast<int64_t>(sizeof(T));
    count *= view.shape[d];
    fits =
        count == 0 || view.strides[d] % static_cast<int64_t>(sizeof(T)) == 0 || view.shape[d] == 1;
  }
  fits = fits && (count == 0 ||
                  (view.itemsize == sizeof(T) && is_format<std::remove_const_t<T>>(view.format)));
  into.data = static_cast<T*>(view.buf);
  PyBuffer_Release(&view);
  return fits;
}

// Read a field of a named tuple.
template <class A>
A field(nb::handle tuple, Py_ssize_t i) {
  A found;
  if (!PyTuple_Check(tuple.ptr()) || i >= PyTuple_Size(tuple.ptr()) ||
      !read_array(PyTuple_GetItem(tuple.ptr(), i), found))
    throw nb::type_error(
        "a field of a tuple is not an array of the expected dtype and number of dimensions");
  return found;
}
inline int64_t whole_field(nb::handle tuple, Py_ssize_t i) {
  return nb::cast<int64_t>(nb::handle(PyTuple_GetItem(tuple.ptr(), i)));
}
inline double real_field(nb::handle tuple, Py_ssize_t i) {
  return nb::cast<double>(nb::handle(PyTuple_GetItem(tuple.ptr(), i)));
}

// A new array, and the Python object that owns it.
template <class T, int N>
struct Result : Array<T, N> {
  nb::object object;
};

inline nb::object empty_array(const char* dtype, int dimensions, const int64_t* shape) {
  static PyObject* const empty =
      nb::object(nb::module_::import_("numpy").attr("empty")).release().ptr();
  PyObject* extents = PyTuple_New(dimensions);
  for (int d = 0; d < dimensions; d++) PyTuple_SetItem(extents, d, PyLong_FromLongLong(shape[d]));
  PyObject* made = PyObject_CallFunction(empty, "(Ns)", extents, dtype);
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

template <class T>
constexpr const char* dtype_name() {
  if constexpr (std::is_same_v<T, bool>)
    return "?";
  else if constexpr (std::is_same_v<T, double>)
    return "d";
  else if constexpr (std::is_same_v<T, float>)
    return "f";
  else if constexpr (std::is_same_v<T, int32_t>)
    return "i4";
  else
    return "i8";
}

template <class T, class... Extents>
Result<T, sizeof...(Extents)> make_array(Extents... extents) {
  constexpr int N = sizeof...(Extents);
  const int64_t shape[N] = {static_cast<int64_t>(extents)...};
  Result<T, N> made;
  made.object = empty_array(dtype_name<T>(), N, shape);
  if (!read_array(made.object.ptr(), static_cast<Array<T, N>&>(made)))
    throw nb::type_error("numpy.empty returned another array");
  return made;
}

// Copy numbers into a new array.
template <class T, class From>
nb::object copy_array(const From* from, int64_t count) {
  auto made = make_array<T>(count);
  for (int64_t i = 0; i < count; i++) made.data[i] = static_cast<T>(from[i]);
  return std::move(made.object);
}

// Python's max and min, which keep the first where the two do not compare.
inline double larger(double a, double b) { return b > a ? b : a; }
inline double smaller(double a, double b) { return b < a ? b : a; }

}  // namespace draftree

NAMESPACE_BEGIN(NB_NAMESPACE)
NAMESPACE_BEGIN(detail)
// Reads an argument by the overload of `read_array` for its type.
template <class Type>
struct array_caster {
  using Value = Type;
  static constexpr auto Name = const_name("numpy.ndarray");
  template <class>
  using Cast = Value;
  template <class>
  static constexpr bool can_cast() {
    return true;
  }
  explicit operator Value() { return value; }
  Value value;

  bool from_python(handle source, uint32_t, cleanup_list*) noexcept {
    return read_array(source.ptr(), value);
  }
};
template <class T, int N>
struct type_caster<draftree::Array<T, N>> : array_caster<draftree::Array<T, N>> {};
NAMESPACE_END(detail)
NAMESPACE_END(NB_NAMESPACE)
