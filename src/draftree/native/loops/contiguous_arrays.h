// NumPy arrays as arguments and results of all loops but those of retrieval, by NumPy's C API.
//
// The retrieval loops use strided_arrays.h, which copies no argument. Here an argument that is not
// C-contiguous is copied, and every loop may rely on contiguous memory.
//
// NumPy's own C API is used because a call of a loop takes a few microseconds: nanobind's ndarray
// takes a quarter of one for each argument and more than one for each result.
#pragma once
#include <nanobind/nanobind.h>

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL draftree_numpy
#ifndef DRAFTREE_IMPORTS_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <type_traits>
#include <utility>
#include <vector>

namespace draftree {

template <class T>
constexpr int numpy_type() {
  using U = std::remove_const_t<T>;
  if constexpr (std::is_same_v<U, bool>) return NPY_BOOL;
  if constexpr (std::is_same_v<U, double>) return NPY_FLOAT64;
  if constexpr (std::is_same_v<U, float>) return NPY_FLOAT32;
  if constexpr (std::is_same_v<U, int8_t>) return NPY_INT8;
  if constexpr (std::is_same_v<U, uint8_t>) return NPY_UINT8;
  if constexpr (std::is_same_v<U, int16_t>) return NPY_INT16;
  if constexpr (std::is_same_v<U, int32_t>) return NPY_INT32;
  if constexpr (std::is_same_v<U, uint32_t>) return NPY_UINT32;
  if constexpr (std::is_same_v<U, int64_t>) return NPY_INT64;
  if constexpr (std::is_same_v<U, uint64_t>) return NPY_UINT64;
}

// A C-contiguous array with N dimensions. An argument of a const type may have other strides: it is
// copied then.
template <class T, int N>
class NumpyArray {
 public:
  NumpyArray() = default;

  // Make an array whose entries are not set.
  static NumpyArray empty(std::initializer_list<int64_t> shape) {
    npy_intp sizes[N];
    std::copy(shape.begin(), shape.end(), sizes);
    PyObject* made = PyArray_SimpleNew(N, sizes, numpy_type<T>());
    if (!made) throw nanobind::python_error();
    NumpyArray array;
    array.hold(nanobind::steal(made));
    return array;
  }

  static NumpyArray full(std::initializer_list<int64_t> shape, T value) {
    NumpyArray array = empty(shape);
    std::fill_n(array.data_, array.size(), value);
    return array;
  }

  // Take an argument; return whether it has the right type and number of dimensions.
  bool from(PyObject* given) noexcept {
    if (!PyArray_Check(given)) return false;
    auto* array = reinterpret_cast<PyArrayObject*>(given);
    if (PyArray_NDIM(array) != N || !PyArray_EquivTypenums(PyArray_TYPE(array), numpy_type<T>()))
      return false;
    if (PyArray_FLAGS(array) & NPY_ARRAY_C_CONTIGUOUS && PyArray_ISBEHAVED_RO(array)) {
      if (!std::is_const_v<T> && !PyArray_ISWRITEABLE(array)) return false;
      hold(nanobind::borrow(given));
      return true;
    }
    if (!std::is_const_v<T>) return false;
    PyObject* copy = PyArray_FromAny(given, PyArray_DescrFromType(numpy_type<T>()), N, N,
                                     NPY_ARRAY_CARRAY_RO, nullptr);
    if (!copy) {
      PyErr_Clear();
      return false;
    }
    hold(nanobind::steal(copy));
    return true;
  }

  int64_t size(int axis) const { return shape_[axis]; }
  int64_t size() const {
    int64_t all = 1;
    for (int64_t each : shape_) all *= each;
    return all;
  }
  T* data() const { return data_; }
  T& operator[](int64_t i) const { return data_[i]; }
  T& operator()(int64_t i, int64_t j) const { return data_[i * shape_[1] + j]; }
  T& operator()(int64_t i, int64_t j, int64_t k) const {
    return data_[(i * shape_[1] + j) * shape_[2] + k];
  }
  T* row(int64_t i) const { return data_ + i * (size() / std::max<int64_t>(shape_[0], 1)); }
  T* begin() const { return data_; }
  T* end() const { return data_ + size(); }
  const nanobind::object& object() const { return object_; }

  // Return the first `count` rows, a view.
  NumpyArray first(int64_t count) const {
    if (count == shape_[0]) return *this;
    nanobind::object view =
        object_[nanobind::slice(nanobind::int_(0), nanobind::int_(count), nanobind::none())];
    NumpyArray array;
    array.hold(std::move(view));
    return array;
  }

 private:
  void hold(nanobind::object object) {
    auto* array = reinterpret_cast<PyArrayObject*>(object.ptr());
    data_ = static_cast<T*>(PyArray_DATA(array));
    std::copy_n(PyArray_DIMS(array), N, shape_);
    object_ = std::move(object);
  }

  T* data_ = nullptr;
  int64_t shape_[N] = {};
  nanobind::object object_;
};

template <class T, int N = 1>
using In = NumpyArray<const T, N>;
template <class T, int N = 1>
using Out = NumpyArray<T, N>;

// Return the larger or smaller number as Python does: the first one where they do not compare.
inline double larger_of(double a, double b) { return b > a ? b : a; }
inline double smaller_of(double a, double b) { return b < a ? b : a; }

using Numbers = std::vector<int64_t>;

// Return an array with the same numbers.
inline Out<int64_t> array_of(const Numbers& numbers) {
  auto array = Out<int64_t>::empty({static_cast<int64_t>(numbers.size())});
  std::copy(numbers.begin(), numbers.end(), array.begin());
  return array;
}

}  // namespace draftree

namespace nanobind::detail {

template <class T, int N>
struct type_caster<draftree::NumpyArray<T, N>> {
  using NumpyArray = draftree::NumpyArray<T, N>;
  NB_TYPE_CASTER(NumpyArray, const_name("numpy.ndarray"))
  bool from_python(handle source, uint8_t, cleanup_list*) noexcept {
    return value.from(source.ptr());
  }
  static handle from_cpp(const NumpyArray& array, rv_policy, cleanup_list*) noexcept {
    handle result = array.object();
    result.inc_ref();
    return result;
  }
};

}  // namespace nanobind::detail
